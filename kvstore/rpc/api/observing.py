"""Observe: what connectors measured goes into the metrics of their trust group."""

from __future__ import annotations

import math

from kvstore.errors import BadRequest, LimitExceeded
from kvstore.group import Group
from kvstore.v1 import store_pb2 as pb

__all__ = ["record"]

# Of each kind in one request; a connector reports every second or so.
MEASUREMENTS_MAX = 1024
SECONDS_MAX = 86_400.0


def record(group: Group, request: pb.ObserveRequest) -> int:
    """Check an ObserveRequest and record it, all or nothing.

    Returns:
        Measurements that were recorded.

    Raises:
        BadRequest, LimitExceeded: the message names the field; nothing was recorded.
    """
    firsts, steps = request.first_tokens, request.prefill_steps
    for field, count in (("first_tokens", len(firsts)), ("prefill_steps", len(steps))):
        if count > MEASUREMENTS_MAX:
            raise LimitExceeded(f"{field}: {count} are more than measurements_max = {MEASUREMENTS_MAX}")
    for number, first in enumerate(firsts):
        _check_seconds(f"first_tokens[{number}].seconds", first.seconds)
    for number, step in enumerate(steps):
        _check_seconds(f"prefill_steps[{number}].seconds", step.seconds)
        if not step.tokens:
            raise BadRequest(f"prefill_steps[{number}].tokens: need at least 1")
    for first in firsts:
        group.meters.observe_ttft(first.seconds, first.warm, request.tenant)
    for step in steps:
        group.meters.observe_prefill(step.tokens, step.seconds)
    return len(firsts) + len(steps)


def _check_seconds(field: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 <= seconds <= SECONDS_MAX):
        raise BadRequest(f"{field}: need 0 to {SECONDS_MAX:g}, got {seconds}")
