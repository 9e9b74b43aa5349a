"""Timings: what only the engine's side can measure."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = ["TIMINGS_MAX", "Timings"]

# Most requests, and most prefill steps, of one message: 1,024 of each are 40 KiB and 2 ms of the loop.
TIMINGS_MAX = 1024


class Timings(Message, tag="timings", frozen=True):
    """What happened in this process since its last Timings. Reply: Done. Goes in place of a heartbeat.

    Attributes:
        requests: [tenant, seconds to the first token, prompt tokens, of those reused] each.
        prefills: [tokens, seconds] of each step that mostly computed prompts.
        transfers: [kind, copies, bytes, seconds] summed by kind: load, store or demote.
        lost: timings that this process had to throw away.
    """

    requests: list[tuple[str, float, int, int]]
    prefills: list[tuple[int, float]]
    transfers: list[tuple[str, int, int, float]]
    lost: int = 0
