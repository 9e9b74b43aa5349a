"""Published numbers of prefix reuse and routing, each computed here again by running what it is about.

Ties go to the first replica, so every number is exact. What is expected stands in this file and nowhere else;
nothing that is compared is read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.policy.routing.base import first_tie
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.simulate.conversation import converse, isolation_probes
from kvstore.simulate.families import FamilyRun, FamilySettings, run_families

__all__ = ["BASE_TRACE", "HOT_TRACE", "LENGTHS", "Check", "check_golden"]

BASE_TRACE = tuple("AABACABDAACBADABCABA")
HOT_TRACE = BASE_TRACE + ("E",) * 8
LENGTHS = {"A": 1000, "B": 800, "C": 600, "D": 400, "E": 1200}
_REPLICAS = 3

# (policy, max_skew) → by capacity (reused tokens, skew, evictions), and the assignments at capacity 2.
_Expected = dict[tuple[str, int], tuple[dict[int, tuple[int, int, int]], list[int] | None]]
_BASE: _Expected = {
    ("round_robin", 0): ({2: (10_000, 1, 2), 1: (4_800, 1, 12)}, [7, 7, 6]),
    ("affinity", 0): ({2: (13_800, 5, 0), 1: (11_400, 5, 5)}, [10, 5, 5]),
    ("hybrid", 0): ({2: (11_400, 1, 1), 1: (6_800, 1, 10)}, [7, 6, 7]),
    ("hybrid", 1): ({2: (12_000, 1, 0), 1: (9_600, 2, 7)}, [7, 7, 6]),
    ("hybrid", 2): ({2: (12_800, 3, 0), 1: (9_400, 2, 7)}, [8, 7, 5]),
}
_HOT: _Expected = {
    ("round_robin", 0): ({2: (16_000, 1, 5), 1: (10_800, 1, 15)}, None),
    ("affinity", 0): ({2: (22_200, 8, 0), 1: (19_800, 8, 6)}, [10, 13, 5]),
    ("hybrid", 0): ({2: (17_400, 1, 4), 1: (12_800, 1, 13)}, None),
    ("hybrid", 1): ({2: (18_000, 1, 3), 1: (16_800, 2, 9)}, None),
    ("hybrid", 2): ({2: (20_000, 2, 2), 1: (16_600, 2, 9)}, None),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One number.

    Attributes:
        what: it is.
        expected: as published.
        found: as computed now.
    """

    what: str
    expected: Any
    found: Any

    @property
    def ok(self) -> bool:
        """Whether they are the same."""
        return bool(self.expected == self.found)

    def json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"what": self.what, "expected": self.expected, "found": self.found, "ok": self.ok}


def check_golden() -> list[Check]:
    """Every number, in the order in which it was published. Some 50 ms."""
    return [*_conversation(), *_universal(), *_tables(), *_isolation()]


def _conversation() -> Iterator[Check]:
    inputs = [400, 700, 1000, 1400, 1700]
    turns = converse(inputs, [0, 100, 100, 150, 100])
    total, reused = sum(inputs), sum(turns.reused)
    of = "five-turn conversation"
    yield Check(f"{of}: input tokens", 5200, total)
    yield Check(f"{of}: ideal reuse", 3950, turns.ideal)
    yield Check(f"{of}: ideal reuse, percent", 75.96, round(100 * turns.ideal / total, 2))
    yield Check(f"{of}: reuse in full blocks, by turn", [0, 496, 784, 1136, 1488], list(turns.reused))
    yield Check(f"{of}: reuse in full blocks", 3904, reused)
    yield Check(f"{of}: reuse in full blocks, percent", 75.08, round(100 * reused / total, 2))
    yield Check(f"{of}: fresh tokens, by turn", [400, 204, 216, 264, 212], list(turns.fresh))
    yield Check(f"{of}: fresh tokens", 1296, sum(turns.fresh))


def _universal() -> Iterator[Check]:
    requests, settings = ("shared",) * 50, FamilySettings({"shared": 200}, 5, 1)
    spread = run_families(requests, make_policy("round_robin"), settings, first_tie)
    together = run_families(requests, make_policy("affinity"), settings, first_tie)
    of = "universal prefix"
    yield Check(f"{of}: hits, round-robin", 45, spread.hits)
    yield Check(f"{of}: hits, concentrated", 49, together.hits)
    yield Check(f"{of}: difference in tokens", 800, together.reused_tokens - spread.reused_tokens)
    yield Check(f"{of}: of which warm-up", 800, spread.warm_up_tokens - together.warm_up_tokens)
    yield Check(f"{of}: lost in steady state", [0, 0], [spread.lost_tokens, together.lost_tokens])


def _tables() -> Iterator[Check]:
    for trace, requests, table in (("base trace", BASE_TRACE, _BASE), ("with hot prefix", HOT_TRACE, _HOT)):
        for (policy, max_skew), (by_capacity, assigned) in table.items():
            label = f"{policy} {max_skew}" if policy == "hybrid" else policy
            for capacity, expected in by_capacity.items():
                run = _run(requests, policy, max_skew, capacity)
                of = f"{trace}, capacity {capacity}, {label}"
                for what, want, got in zip(
                    ("reused tokens", "skew", "evictions"),
                    expected,
                    (run.reused_tokens, run.skew, run.evictions),
                    strict=True,
                ):
                    yield Check(f"{of}: {what}", want, got)
                if capacity == 2 and assigned is not None:
                    yield Check(f"{of}: assignments", assigned, list(run.assigned))
    yield Check(
        "base trace, capacity 2, hybrid 1: skew in mid-run", 2, _run(BASE_TRACE, "hybrid", 1, 2).skew_max
    )


def _run(requests: tuple[str, ...], policy: str, max_skew: int, capacity: int) -> FamilyRun:
    made = make_policy(policy, PolicySettings(max_skew=max_skew))
    return run_families(requests, made, FamilySettings(LENGTHS, _REPLICAS, capacity), first_tie)


def _isolation() -> Iterator[Check]:
    expected = (True, False, True, False, False)
    for probe, hit in zip(isolation_probes(), expected, strict=True):
        yield Check(f"isolation: {probe.what} hits", hit, probe.hit)
