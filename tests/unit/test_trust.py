"""Trust: lost by one disappointment, regained by three probes that cost little, never by anything else."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.trust import PROBES_GOOD, Trust, TrustState


def probe(trust: Trust, predicted_s: float | None, seconds: float, now_s: float) -> None:
    assert trust.probe_due(now_s)
    trust.begin_probe(now_s)
    trust.probed(predicted_s, seconds, now_s + min(seconds, 1.0))


def test_trust_is_lost_at_once_and_regained_by_three_probes() -> None:
    trust = Trust(0.0)
    assert trust.loaded(0.1, 0.15, 1.0)
    assert trust.trusted
    assert not trust.loaded(0.1, 0.5, 2.0)
    assert (trust.state, trust.losses) == (TrustState.DOUBTED, 1)
    assert "0.5 s" in trust.doubt
    for number in range(PROBES_GOOD):
        assert not trust.trusted
        probe(trust, 0.1, 0.1, 2.0 + number * 0.2)
    assert trust.trusted
    assert trust.doubt == ""


def test_loads_of_those_who_still_waited_count_as_probes() -> None:
    trust = Trust(0.0)
    trust.abandoned("it lagged", 0.0)
    for number in range(PROBES_GOOD - 1):
        assert trust.loaded(0.1, 0.1, float(number))
    assert not trust.loaded(0.1, 0.5, 3.0)  # the count starts again
    for number in range(PROBES_GOOD):
        assert not trust.trusted
        assert trust.loaded(0.1, 0.1, 4.0 + number)
    assert trust.trusted and trust.losses == 1


@pytest.mark.parametrize("bad", [0.5, math.inf])
def test_one_bad_probe_starts_the_count_again(bad: float) -> None:
    trust = Trust(0.0)
    trust.abandoned("it lagged", 0.0)
    probe(trust, 0.1, 0.1, 0.0)
    probe(trust, 0.1, 0.1, 1.0)
    probe(trust, 0.1, bad, 2.0)
    assert not trust.probe_due(2.0 + min(bad, 1.0) + 0.2)  # a quarter of a second after the probe's end
    for number in range(PROBES_GOOD):
        assert not trust.trusted
        probe(trust, 0.1, 0.1, 4.0 + number)
    assert trust.trusted


def test_a_source_that_stays_bad_is_probed_ever_more_rarely() -> None:
    trust, now_s, begun = Trust(0.0), 0.0, []
    trust.abandoned("it lagged", now_s)
    while now_s < 60.0:
        if trust.probe_due(now_s):
            trust.begin_probe(now_s)
            trust.probed(0.1, 0.5, now_s)
            begun.append(now_s)
        now_s += 0.05
    gaps = [round(b - a, 6) for a, b in itertools.pairwise(begun)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 0.5
    assert 7.9 < gaps[-1] < 8.2
    assert len(begun) < 15


def test_a_probe_that_never_ends_has_failed() -> None:
    trust = Trust(0.0)
    trust.abandoned("it lagged", 0.0)
    trust.begin_probe(0.0)
    assert trust.probing
    assert not trust.probe_due(3.9)
    assert not trust.probe_due(4.0)  # counted as failed here, and the wait begins
    assert not trust.probing
    assert trust.probe_due(4.3)
    assert trust.doubt == "a probe did not end"
    trust.probed(0.1, 0.1, 4.3)  # the late one is no news
    trust.begin_probe(4.3)
    with pytest.raises(RuntimeError, match="under way"):
        trust.begin_probe(4.4)


def test_a_trusted_source_that_is_passed_by_is_probed_now_and_then() -> None:
    """Slow and known to be: rarely. Once it is faster than known: at once, until the rates have heard it."""
    trust, now_s, begun = Trust(0.0), 0.0, []
    while now_s < 60.0:
        if trust.probe_due(now_s):
            probe(trust, 0.8, 0.8 if now_s < 30.0 else 0.001, now_s)
            begun.append(now_s)
        now_s += 0.25
    assert trust.trusted
    calm = [at for at in begun if at < 30.0]
    assert len(calm) < 8
    news = [at for at in begun if at >= 30.0]
    assert news[0] < 39.0
    assert news[2] - news[0] < 1.0


def test_nothing_was_promised_of_what_is_not_known() -> None:
    trust = Trust(0.0)
    assert trust.loaded(None, 100.0, 1.0)
    assert not trust.loaded(None, math.inf, 2.0)  # but it may not fail


def test_a_busy_moment_is_no_disappointment() -> None:
    trust = Trust(0.0)
    assert trust.loaded(1e-4, 0.015, 1.0)
    assert not trust.loaded(1e-4, 0.03, 1.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["loaded", "abandoned", "ask", "probed"]),
            st.floats(0, 10) | st.just(math.inf),
            st.floats(-1e9, 1e9),
        ),
        max_size=40,
    )
)
def test_doubt_ends_only_by_probes(steps: list[tuple[str, float, float]]) -> None:
    """Any order of events, a clock that jumps: one probe at a time, and no trust without three good ones."""
    trust, good = Trust(0.0), 0
    for what, seconds, now_s in steps:
        before, probing = trust.trusted, trust.probing
        if what == "loaded":
            trust.loaded(1.0, seconds, now_s)
        elif what == "abandoned":
            trust.abandoned("it lagged", now_s)
        elif what == "ask":
            if trust.probe_due(now_s):
                trust.begin_probe(now_s)
        else:
            trust.probed(1.0, seconds, now_s)
            good = (good + 1 if seconds <= 2.02 else 0) if probing else good
        if not before and trust.trusted:
            assert what == "probed"
            assert good >= PROBES_GOOD
        if trust.losses == 0:
            assert trust.trusted
        assert (trust.doubt == "") == trust.trusted
        if not trust.trusted and what in ("loaded", "abandoned"):
            good = 0 if what == "abandoned" or seconds > 2.02 else good


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_times_that_cannot_be_are_refused(value: float) -> None:
    trust = Trust(0.0)
    with pytest.raises(ValueError, match=r"^seconds:"):
        trust.loaded(0.1, value, 0.0)
    with pytest.raises(ValueError, match=r"^predicted_s:"):
        trust.loaded(value, 0.1, 0.0)
    with pytest.raises(ValueError, match=r"^now_s:"):
        trust.probe_due(math.nan)
    assert trust.trusted
    assert trust.report() == {"state": "trusted", "reason": "", "losses": 0, "probes": 0}


def test_a_source_that_is_used_needs_no_probe() -> None:
    trust = Trust(0.0)
    assert trust.probe_due(10.0)
    trust.loaded(0.1, 0.1, 10.0)
    assert not trust.probe_due(10.1)
    assert trust.probe_due(10.3)


def test_a_clock_that_goes_back_stands_still() -> None:
    trust = Trust(100.0)
    trust.abandoned("it lagged", 100.0)
    assert trust.probe_due(0.0)
