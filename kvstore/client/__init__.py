"""The engine's side of a session: `Client` for threads, `AsyncClient` for event loops.

effects    what an operation may ask of the world        values     arguments and results
core       shared state: attachment, leases, copies      face       what both clients show without I/O
reading, fetching, loading, tails, writing, pooling, asking    the operations, each once, as generators
attach, upkeep                       attach with proof, and the life in the background
timings                              what was measured here and goes in place of a heartbeat
wire, sockets                        frames and file descriptors
link, threads, sync                  driven by threads
alink, tasks, aio                    driven by an event loop
"""

from __future__ import annotations

from kvstore._native import PagedLayout
from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from kvstore.client.tasks import AsyncFetch, AsyncLoad, AsyncSave, AsyncTailLoad
from kvstore.client.threads import Fetch, Load, Save, TailLoad
from kvstore.client.values import (
    Counters,
    FetchResult,
    KVMemory,
    Limits,
    LoadResult,
    PoolSpec,
    Reservation,
    Role,
    Table,
)
from kvstore.config.tables import default_socket

__all__ = [
    "AsyncClient",
    "AsyncFetch",
    "AsyncLoad",
    "AsyncSave",
    "AsyncTailLoad",
    "Client",
    "Counters",
    "Fetch",
    "FetchResult",
    "KVMemory",
    "Limits",
    "Load",
    "LoadResult",
    "PagedLayout",
    "PoolSpec",
    "Reservation",
    "Role",
    "Save",
    "Table",
    "TailLoad",
    "default_socket",
]
