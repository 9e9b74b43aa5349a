"""Timings: what only the engine's side can measure."""

from __future__ import annotations

import msgspec

from kvstore.rpc.messages.base import Message

__all__ = ["TIMINGS_MAX", "StepRow", "Timings"]

# Most requests, and most steps, of one message: 1,024 of each are 80 KiB and 5 ms of the loop; what is learnt
# from steps comes in slices after that.
TIMINGS_MAX = 1024

StepRow = tuple[int, float, int, int, float]
"""prefill_tokens, prefill_area, decodes, decode_context, seconds: the fields of `policy.prefill.Step`."""


class Timings(Message, tag="timings", frozen=True):
    """What happened in this process since its last Timings. Reply: Done. Goes in place of a heartbeat.

    Attributes:
        requests: [tenant, seconds to the first token, prompt tokens, of those reused] each.
        steps: of the engine, a row each; those that only decode tell what load costs.
        transfers: [kind, copies, bytes, seconds] summed by kind: load, store or demote.
        lost: timings that this process had to throw away.
        plans: [id, seconds] of plans that were carried out, until the prompt's KV was complete.
    """

    requests: list[tuple[str, float, int, int]]
    steps: list[StepRow]
    transfers: list[tuple[str, int, int, float]]
    lost: int = 0
    plans: list[tuple[int, float]] = msgspec.field(default_factory=list)
