"""Timings of clients on their way into a group's meters and curves: all is checked before anything counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.callers import Caller
from kvstore.errors import BadRequest
from kvstore.meters import Meters
from kvstore.policy.prefill import Step
from kvstore.pricing import Pricing, Source, Transfer
from kvstore.rpc.messages import TIMINGS_MAX, Timings
from kvstore.types import Tier

__all__ = ["record"]

# What a client can have measured; beyond it a clock or a counter of it is broken.
SECONDS_MAX = 7 * 86_400.0
TOKENS_MAX = 1 << 31
BYTES_MAX = 1 << 50
PLANS_MAX = 1 << 62
CLIENT_KINDS = frozenset({"load", "store", "demote"})
# Steps learnt from in one slice: each of the first few renews the fit, at 0.5 ms.
STEPS_SLICE = 8
# A copy within one machine: beyond it that was stopped.
LOAD_S_MAX = 1e6


def record(caller: Caller, said: Timings) -> None:
    """Add a client's timings to the meters of its group, and its steps to the curve of its namespace.

    All of them or none.

    Raises:
        BadRequest: names the field; nothing was counted.
    """
    steps = _check(caller, said)
    meters: Meters = caller.group.meters
    for tenant, ttft_s, _, reused in said.requests:
        meters.observe_ttft(ttft_s, reused > 0, tenant)
        meters.observe_saved(reused, tenant)
    for step in steps:
        if step.prefill_tokens and step.prefill_tokens >= step.decodes:  # mostly prefill
            meters.observe_prefill(step.prefill_tokens, step.seconds)
    if steps:
        caller.group.later(_learn(caller.group.pricing, caller.engine.namespace.digest.hex(), steps))
    for kind, copies, size_bytes, seconds in said.transfers:
        meters.observe_transfer(kind, copies, size_bytes, seconds)
        # A limited HOST is timed where it is limited: kvstore/fetching.py.
        if kind == "load" and copies and size_bytes >= copies and not caller.group.fetches.pace.limited:
            each = Transfer(size_bytes // copies, 0, min(seconds / copies, LOAD_S_MAX))
            caller.group.pricing.observe_transfer(Source(Tier.HOST), each)
    for plan, seconds in said.plans:
        caller.group.decisions.carried_out(plan, caller.engine.id, seconds)
    meters.lost_timings += said.lost


def _learn(pricing: Pricing, namespace: str, steps: Sequence[Step]) -> Iterator[None]:
    for number, step in enumerate(steps, 1):
        pricing.observe_step(namespace, step)
        if number % STEPS_SLICE == 0:
            yield


def _check(caller: Caller, said: Timings) -> list[Step]:
    for field, entries in (("requests", said.requests), ("steps", said.steps), ("plans", said.plans)):
        if len(entries) > TIMINGS_MAX:
            raise BadRequest(f"timings.{field}: at most {TIMINGS_MAX} at once, got {len(entries)}")
    if len(said.transfers) > len(CLIENT_KINDS):
        raise BadRequest(f"timings.transfers: one entry for each of {', '.join(sorted(CLIENT_KINDS))}")
    for tenant, ttft_s, prompt, reused in said.requests:
        if tenant not in caller.tenants:
            raise BadRequest(f"timings.requests: {tenant!r:.80} is not a tenant of this session")
        _seconds("requests", ttft_s)
        if not 0 <= reused <= prompt <= TOKENS_MAX:
            raise BadRequest(f"timings.requests: {reused} of {prompt} prompt tokens cannot be reused")
    for kind, copies, size_bytes, seconds in said.transfers:
        if kind not in CLIENT_KINDS:
            raise BadRequest(
                f"timings.transfers: kind {kind!r:.20} is none of {', '.join(sorted(CLIENT_KINDS))}"
            )
        _seconds("transfers", seconds)
        _count("transfers", copies, TOKENS_MAX)
        _count("transfers", size_bytes, BYTES_MAX)
    for plan, seconds in said.plans:
        _count("plans", plan, PLANS_MAX)
        _seconds("plans", seconds)
    _count("lost", said.lost, TOKENS_MAX)
    try:
        return [Step(*row) for row in said.steps]
    except ValueError as error:
        raise BadRequest(f"timings.steps: {error}") from None


def _seconds(field: str, value: float) -> None:
    if not 0.0 <= value <= SECONDS_MAX:  # false for NaN too
        raise BadRequest(f"timings.{field}: {value} is not a duration of 0 to {SECONDS_MAX:g} seconds")


def _count(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise BadRequest(f"timings.{field}: need counts of 0 to {most}, got {value}")
