"""Rates, trust, decision and lag rule together: a disk that slows down, dies and recovers in mid-load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reload_oracle import BYTES, TOKENS, Curve

from kvstore.policy.lag import arrived_share
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.policy.reload import Choice, Decision, ReloadQuestion, Way, decide
from kvstore.policy.trust import PROBE_BYTES, Trust
from kvstore.types import Span, Tier

BLOCKS = 64
CURVE = Curve()
RECOMPUTE_S = CURVE(0, BLOCKS * TOKENS + 16)  # 1.04 s
DISK = Source(Tier.NVME)
FAST, SLOW, DEAD = 1e9, 5e6, 0.0


@dataclass
class Disk:
    """Bytes/s from each of these moments on."""

    phases: list[tuple[float, float]]

    def ends_s(self, began_s: float, size_bytes: float) -> float:
        """When so many bytes have come."""
        for number, (since_s, rate) in enumerate(self.phases):
            until_s = self.phases[number + 1][0] if number + 1 < len(self.phases) else math.inf
            start_s = max(began_s, since_s)
            if start_s < until_s:
                if rate and size_bytes <= rate * (until_s - start_s):
                    return start_s + size_bytes / rate
                size_bytes -= rate * (until_s - start_s) if rate else 0.0
        return math.inf


@dataclass
class Node:
    """One engine that asks for the same 64 blocks again and again."""

    disk: Disk
    now_s: float = 0.0
    rates: Rates = field(default_factory=Rates)
    trust: Trust = field(default_factory=lambda: Trust(0.0))
    probe: tuple[float, float, float] | None = None  # began, predicted, ends
    choices: list[Choice] = field(default_factory=list)
    totals_s: list[float] = field(default_factory=list)

    def request(self) -> None:
        """Ask, do, learn."""
        self._end_probe()
        speed = self.rates.speed(DISK, BLOCKS * BYTES)
        way = Way(Span(Tier.NVME, 0, BLOCKS), speed.latency_s, speed.bytes_per_s, doubted=self.trust.doubt)
        decision = decide(ReloadQuestion(BLOCKS * TOKENS + 16, TOKENS, BYTES, 0, (way,), CURVE))
        self.choices.append(decision.choice)
        if decision.choice is Choice.LOAD:
            took_s = self._load(decision)
        else:
            took_s = RECOMPUTE_S
            if self.trust.probe_due(self.now_s):
                predicted_s = self.rates.seconds(DISK, PROBE_BYTES)
                self.probe = (self.now_s, predicted_s, self.disk.ends_s(self.now_s, PROBE_BYTES))
                self.trust.begin_probe(self.now_s)
        self.totals_s.append(took_s)
        self.now_s += took_s

    def _end_probe(self) -> None:
        if self.probe is not None and self.probe[2] <= self.now_s:
            began_s, predicted_s, ends_s = self.probe
            first_s = self.disk.ends_s(began_s, BYTES) - began_s
            self.probe = None
            self.trust.probed(predicted_s, ends_s - began_s, self.now_s)
            self.rates.observe(DISK, Transfer(PROBE_BYTES, 0, ends_s - began_s, first_s, BYTES), self.now_s)

    def _load(self, decision: Decision) -> float:
        rule, began_s, stop = decision.lag_rule(), self.now_s, decision.load_stop
        assert rule is not None
        tail_s = CURVE(stop * TOKENS, BLOCKS * TOKENS + 16)
        for there in range(stop):
            rest_s = CURVE(there * TOKENS, stop * TOKENS)
            due_s = rule.due_s(arrived_share(decision.recompute_s, rest_s))
            if self.disk.ends_s(began_s, (there + 1) * BYTES) - began_s > due_s:
                if there:
                    first_s = self.disk.ends_s(began_s, BYTES) - began_s
                    cut = Transfer.cut_short(stop * BYTES, there * BYTES, due_s, first_s, BYTES)
                    self.rates.observe(DISK, cut, began_s + due_s)
                self.trust.abandoned("a load lagged", began_s + due_s)
                return due_s + rest_s + tail_s
        took_s = self.disk.ends_s(began_s, stop * BYTES) - began_s
        self.trust.loaded(rule.load_s, took_s, began_s + took_s)
        first_s = self.disk.ends_s(began_s, BYTES) - began_s
        self.rates.observe(DISK, Transfer(stop * BYTES, 0, took_s, first_s, BYTES), began_s + took_s)
        return took_s + tail_s


def run(phases: list[tuple[float, float]], until_s: float) -> Node:
    node = Node(Disk(phases))
    while node.now_s < until_s:
        node.request()
    return node


@given(
    st.lists(st.tuples(st.floats(0.05, 20.0), st.sampled_from([FAST, 1e8, 5e7, SLOW, DEAD])), max_size=8),
    st.floats(0.0, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_no_request_takes_a_tenth_more_than_computing(steps: list[tuple[float, float]], first: float) -> None:
    """Whatever the disk does, and whenever: in mid-load, in a probe, before anything is known."""
    phases, since_s = [(0.0, FAST)], first
    for lasts_s, rate in steps:
        phases.append((since_s, rate))
        since_s += lasts_s
    node = run(phases, since_s + 10.0)
    assert max(node.totals_s) <= 1.1 * RECOMPUTE_S * (1 + 1e-9)


@pytest.mark.parametrize("broken", [SLOW, DEAD])
def test_unlimited_to_broken_and_back(broken: float) -> None:
    """In mid-load. One request pays for it, and 20 requests after each change the plan has adapted."""
    breaks_s, heals_s = 5.02, 65.0
    node = run([(0.0, FAST), (breaks_s, broken), (heals_s, FAST)], 90.0)
    starts_s = [sum(node.totals_s[:i]) for i in range(len(node.totals_s))]
    fine = [i for i, at in enumerate(starts_s) if at + node.totals_s[i] <= breaks_s]
    ill = [i for i, at in enumerate(starts_s) if breaks_s < at < heals_s]
    healed = [i for i, at in enumerate(starts_s) if at >= heals_s]
    assert {node.choices[i] for i in fine} == {Choice.LOAD}
    # Every load of the broken phase is one that lagged. The first, and no more than one by mistrust too late.
    assert sum(node.totals_s[i] > RECOMPUTE_S * 1.001 for i in ill) <= 2
    assert {node.choices[i] for i in ill[20:]} == {Choice.RECOMPUTE}
    assert {node.choices[i] for i in healed[20:]} == {Choice.LOAD}
    assert node.totals_s[healed[-1]] < 0.1
    assert node.trust.probes < 40


@pytest.mark.parametrize(("slower", "choice"), [(2e8, Choice.LOAD), (6e7, Choice.RECOMPUTE)])
def test_slower_for_good_is_learnt_from_one_load(slower: float, choice: Choice) -> None:
    """A fifth of the speed still pays, a sixteenth does not: either is known after one load that lagged."""
    node = run([(0.0, FAST), (5.02, slower)], 60.0)
    broken = next(i for i, total in enumerate(node.totals_s) if total > 0.1)
    assert set(node.choices[broken + 10 :]) == {choice}
    assert node.trust.losses == 1


def test_a_disk_that_is_slow_from_the_start_costs_one_request() -> None:
    """Nothing is known: it is tried on a guess, once."""
    node = run([(0.0, SLOW)], 60.0)
    assert node.choices[0] is Choice.LOAD
    assert 1.0 < node.totals_s[0] / RECOMPUTE_S <= 1.1
    assert sum(total > RECOMPUTE_S * 1.001 for total in node.totals_s) <= 2
