"""Small made-up workloads, and a deliberately naive second simulator to hold the real one against."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from kvstore.policy.routing.base import Ask, Fleet, Policy, random_ties
from kvstore.policy.routing.universal import UniversalPrefix
from kvstore.simulate.queueing import QueueSettings
from kvstore.simulate.workload import Workload

__all__ = ["BLOCK_TOKENS", "naive", "workload"]

BLOCK_TOKENS = 4


def workload(requests: Sequence[tuple[float, Sequence[int], int, int]]) -> Workload:
    """Of (seconds since the one before, branches of a tree, tokens missing in the last block, answer)."""
    ids: dict[tuple[int, ...], int] = {}
    chains = []
    for _, path, _, _ in requests:
        prefixes = [tuple(path[: end + 1]) for end in range(len(path))]
        chains.append(tuple(ids.setdefault(prefix, len(ids)) for prefix in prefixes))
    return Workload(
        arrivals_s=np.cumsum([0.0, *(gap for gap, _, _, _ in requests[1:])]),
        input_tokens=np.array([len(path) * BLOCK_TOKENS - less for _, path, less, _ in requests], np.int64),
        output_tokens=np.array([answer for _, _, _, answer in requests], np.int64),
        chains=tuple(chains),
        sessions=tuple(str(chain[0]) for chain in chains),
        block_tokens=BLOCK_TOKENS,
    )


def naive(work: Workload, policy: Policy, settings: QueueSettings, rate: float) -> dict[str, list[float]]:
    """Everything from the beginning for every request: lists of what happened, nothing kept beside them."""
    count = settings.replicas
    # By replica: ids, the oldest first; (done, leaves) of each request; (heard, id, there) of each change.
    held: list[list[int]] = [[] for _ in range(count)]
    jobs: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    news: list[list[tuple[float, int, bool]]] = [[] for _ in range(count)]
    out: dict[str, list[float]] = {"replica": [], "reused": [], "predicted": [], "ttft": [], "evicted": []}
    ties, universal = random_ties(Random(settings.seed)), UniversalPrefix()
    for number, ids in enumerate(work.chains):
        now, tokens = float(work.arrivals_s[number]), int(work.input_tokens[number])
        known = [known_ids(said, now) for said in news]
        matched = [min(tokens, leading(ids, there) * work.block_tokens) for there in known]
        fleet = Fleet(
            names=tuple(f"replica-{at}" for at in range(count)),
            matched_tokens=np.array([[each] * 4 for each in matched]),
            assigned=np.array([len(each) for each in jobs]),
            in_flight=np.array([sum(leaves > now for _, leaves in each) for each in jobs]),
            queue_s=np.array([max(0.0, max((done for done, _ in each), default=0.0) - now) for each in jobs]),
            blocks=np.array([len(each) for each in held]),
            free_blocks=np.full(count, settings.capacity_blocks),
            capacity_blocks=np.full(count, settings.capacity_blocks),
            prefill_tokens_per_s=np.full(count, rate),
            tier_s_per_token=np.zeros((count, 4)),
            block_tokens=work.block_tokens,
        )
        shared = min(tokens, universal.leading(ids) * work.block_tokens)
        head = b"".join(each.to_bytes(8, "little") for each in ids[:2])
        target = policy.pick(Ask(tokens, work.sessions[number], head, None, shared), fleet, ties).replica
        universal.observe(ids)
        reused = min(tokens, leading(ids, set(held[target])) * work.block_tokens)
        done = max([now, *(done for done, _ in jobs[target])]) + (tokens - reused) / rate
        jobs[target].append((done, done + int(work.output_tokens[number]) * settings.decode_s_per_token))
        before = set(held[target])
        held[target] = [each for each in held[target] if each not in ids] + list(reversed(ids))
        lost = held[target][: max(0, len(held[target]) - settings.capacity_blocks)]
        held[target] = held[target][len(lost) :]
        heard = now + settings.lag_s
        news[target] += [(heard, each, True) for each in ids if each not in before]
        news[target] += [(heard, each, False) for each in lost]
        for name, value in zip(out, (target, reused, matched[target], done - now, len(lost)), strict=True):
            out[name].append(value)
    return out


def known_ids(said: Sequence[tuple[float, int, bool]], now: float) -> set[int]:
    known: set[int] = set()
    for heard, each, there in said:
        if heard <= now:
            (known.add if there else known.discard)(each)
    return known


def leading(ids: Sequence[int], there: set[int]) -> int:
    return next((at for at, each in enumerate(ids) if each not in there), len(ids))
