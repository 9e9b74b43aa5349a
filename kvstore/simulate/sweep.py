"""Many runs: every policy with every setting of it, at every capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvstore.policy.routing.base import first_tie, random_ties
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.simulate.families import FamilySettings, run_families
from kvstore.simulate.figures import over, run_figures
from kvstore.simulate.queueing import QueueSettings, prefill_rate, serve
from kvstore.simulate.views import View
from kvstore.simulate.workload import Workload

__all__ = ["Candidate", "candidates", "sweep_families", "sweep_trace"]

_BASELINE = "round_robin"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with its settings.

    Attributes:
        policy: name.
        settings: for `make_policy`.
        shown: the settings that were swept, for people.
    """

    policy: str
    settings: PolicySettings
    shown: dict[str, float]

    @property
    def label(self) -> str:
        """For tables: `hybrid max_skew=1`."""
        return " ".join([self.policy, *(f"{key}={value:g}" for key, value in self.shown.items())])


def candidates(
    policies: Sequence[str], base: PolicySettings, max_skews: Sequence[int], weights: Sequence[float]
) -> list[Candidate]:
    """Each policy once; hybrid once for each max_skew, scored once for each weight, which is then fixed.

    Args:
        weights: none = one scored whose weight follows the load.

    Raises:
        BadRequest: no such policy, or a setting is out of range.
    """
    found = []
    for name in policies:
        if name == "hybrid":
            found += [Candidate(name, replace(base, max_skew=k), {"max_skew": k}) for k in max_skews]
        elif name == "scored" and weights:
            found += [Candidate(name, replace(base, weight=w, weight_max=w), {"weight": w}) for w in weights]
        else:
            found.append(Candidate(name, base, {}))
    for each in found:
        make_policy(each.policy, each.settings)  # a wrong one is told before the first run, not after nine
    return found


def sweep_families(
    requests: Sequence[str],
    chosen: Sequence[Candidate],
    every: Sequence[FamilySettings],
    seed: int | None = None,
) -> list[dict[str, Any]]:
    """One row a policy and fleet, JSON-ready.

    Args:
        every: fleets, say of several capacities.
        seed: of ties; None = the first replica, so that every number is exact.

    Raises:
        BadRequest: a family without a length.
    """
    rows = []
    for settings in every:
        for each in chosen:
            ties = first_tie if seed is None else random_ties(Random(seed))
            run = run_families(requests, make_policy(each.policy, each.settings), settings, ties)
            rows.append(
                {
                    "policy": each.policy,
                    **each.shown,
                    "label": each.label,
                    "capacity": settings.capacity,
                    **run.json(),
                }
            )
    return rows


def sweep_trace(
    workload: Workload,
    chosen: Sequence[Candidate],
    every: Sequence[QueueSettings],
    view: Callable[[QueueSettings], View],
) -> list[dict[str, Any]]:
    """One row a policy and fleet, JSON-ready. Half a second to one second each for 12,000 requests.

    Where round-robin is among the policies, every row has `over_round_robin`: seconds to first token of the
    second half over its.

    Args:
        view: makes a fresh one.

    Raises:
        BadRequest: all requests come at the same moment.
    """
    rows = []
    for settings in every:
        rate = prefill_rate(workload, settings)
        warm_up = workload.filled_at(settings.replicas * settings.capacity_blocks)
        here = []
        for each in chosen:
            policy = make_policy(each.policy, each.settings)
            run = serve(workload, policy, view(settings), settings, rate)
            here.append(
                {
                    "policy": each.policy,
                    **each.shown,
                    "label": each.label,
                    "capacity": settings.capacity_blocks,
                    "prefill_tokens_per_s": rate,
                    **run_figures(run, workload, warm_up),
                }
            )
        base = next((row for row in here if row["policy"] == _BASELINE), None)
        for row in here:
            row["over_round_robin"] = None if base is None else over(row, base, "second_half")
        rows += here
    return rows
