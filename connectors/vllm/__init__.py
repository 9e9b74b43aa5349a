"""kvstore for vLLM: reload the KV of a prefix that any engine of this node has computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVStoreConnector",
      "kv_connector_module_path":"kvstore.connectors.vllm","kv_role":"kv_both",
      "kv_load_failure_policy":"recompute"}'

connector    the class that vLLM makes: hands every hook to one of the two sides
scheduler    decides: lookups, leases, which blocks to load and save (tracked: what it knows of a request)
saves        pins blocks until they are copied            courier    speaks to the daemon for the scheduler
mirror       vLLM's block pool as the daemon sees it       fetches   brings for it what is on the disk
worker       moves bytes between vLLM's KV memory and the arena
layout       where the cells of a block lie in that memory      identity   whose blocks these are
binding      what a block depends on beside its tokens          weights    fingerprints of model and adapters
messages     what the two sides tell each other                 metrics    what vLLM logs and exports
start        from vLLM's configuration to clients               options    what a user may set
steps        how long the engine's steps take, and its requests wait
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":  # not before it is asked for: it needs vLLM
        from .connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
