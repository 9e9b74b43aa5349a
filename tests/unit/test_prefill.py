"""The prefill curve: what is learnt from steps, under noise, load and drift, and what it does not claim."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.policy.fits import fit, weighted_median
from kvstore.policy.prefill import CURVES_MAX, STEPS_MAX, Load, PrefillCurve, PrefillCurves, Step


@dataclass(frozen=True)
class Engine:
    """The truth: seconds of a step, and of a prompt."""

    c0: float = 5e-3
    a: float = 1e-3
    b: float = 1e-7
    d: float = 2e-3
    e: float = 1e-6
    chunk: int = 512

    def step(self, prefill: list[tuple[int, int]], contexts: list[int], factor: float = 1.0) -> Step:
        """`prefill`: (start, tokens) of each chunk."""
        tokens = sum(count for _, count in prefill)
        area = sum(count * (start + count / 2) for start, count in prefill)
        work = self.c0 + self.a * tokens + self.b * area + self.d * len(contexts) + self.e * sum(contexts)
        return Step(tokens, area, len(contexts), sum(contexts), work * factor)

    def prompt_s(self, start: int, stop: int, contexts: list[int] | None = None) -> float:
        """In chunks, each a step."""
        total = 0.0
        while start < stop:
            count = min(self.chunk, stop - start)
            total += self.step([(start, count)], contexts or []).seconds
            start += count
        return total


def work(engine: Engine, count: int, seed: int, noise: float = 0.03, deepest: int = 4096) -> Iterator[Step]:
    """What an engine does all day: prompts in chunks, some beside decodes, and decodes alone."""
    rng = random.Random(seed)
    while count > 0:
        contexts = [rng.randint(50, 4000) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.3:
            yield engine.step([], contexts, rng.gauss(1.0, noise))
            count -= 1
            continue
        start, stop = 0, rng.randint(64, deepest)
        beside = contexts if rng.random() < 0.4 else []
        while start < stop and count > 0:
            tokens = min(engine.chunk, stop - start)
            yield engine.step([(start, tokens)], beside, rng.gauss(1.0, noise))
            start, count = start + tokens, count - 1


def learnt(engine: Engine, count: int = 400, seed: int = 1, noise: float = 0.03) -> PrefillCurve:
    curve = PrefillCurve()
    for number, step in enumerate(work(engine, count, seed, noise)):
        curve.observe(step, number * 0.1)
    return curve


def seconds(curve: PrefillCurve, start: int, stop: int, load: Load | None = None) -> float:
    found = curve.seconds(start, stop, load)
    assert found is not None
    return found


# ---- what is learnt ---------------------------------------------------------------------------------------


@given(
    st.floats(1e-4, 1e-2), st.floats(1e-5, 2e-3), st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.integers(0, 99)
)
@settings(max_examples=30)
def test_any_engine_is_learnt(c0: float, a: float, attention: float, decode: float, seed: int) -> None:
    """3 % of noise: within 10 %, alone and beside decodes, wherever a prompt starts."""
    engine = Engine(c0, a, attention * a / 4096, decode * c0, decode * a / 4096)
    curve = learnt(engine, seed=seed)
    contexts = [1000, 2000, 500]
    for start, stop in ((0, 512), (0, 4096), (2048, 4096), (3000, 3100)):
        assert seconds(curve, start, stop) == pytest.approx(engine.prompt_s(start, stop), rel=0.1)
        load = Load(3, 3500, 512)
        expected = engine.prompt_s(start, stop, contexts)
        assert seconds(curve, start, stop, load) == pytest.approx(expected, rel=0.12)


def test_a_constant_tokens_per_second_is_worse() -> None:
    """What the curve is for: by position a token costs up to twice as much."""
    engine = Engine(b=5e-7)
    curve = learnt(engine)
    per_token = engine.prompt_s(0, 2048) / 2048
    truth = engine.prompt_s(3584, 4096)
    assert abs(512 * per_token / truth - 1) > 0.3
    assert abs(seconds(curve, 3584, 4096) / truth - 1) < 0.05


@given(st.integers(0, 1000), st.sampled_from([0.05, 5.0, 20.0]))
@settings(max_examples=20)
def test_every_seventh_step_may_be_off_by_far(seed: int, off: float) -> None:
    engine, curve = Engine(), PrefillCurve()
    for number, step in enumerate(work(engine, 300, seed)):
        factor = off if number % 7 == 6 else 1.0
        curve.observe(replace(step, seconds=step.seconds * factor), number * 0.1)
    for start, stop in ((0, 2048), (2048, 4096)):
        assert seconds(curve, start, stop) == pytest.approx(engine.prompt_s(start, stop), rel=0.15)


def test_steps_that_are_all_alike_are_enough_for_more_of_them() -> None:
    """One length at one depth: neither intercept nor attention can be told, and nothing breaks."""
    engine, curve = Engine(), PrefillCurve()
    for number in range(6):
        curve.observe(engine.step([(0, 512)], []), float(number))
    assert seconds(curve, 0, 512) == pytest.approx(engine.prompt_s(0, 512), rel=0.01)
    assert seconds(curve, 0, 1024) == pytest.approx(engine.prompt_s(0, 1024), rel=0.1)


def test_chunks_are_those_of_the_engine_that_asks() -> None:
    """More, smaller steps pay the intercept more often. Unsaid: the largest step seen."""
    engine = Engine(c0=0.05)
    curve = learnt(engine, noise=0.0)
    by_64 = replace(engine, chunk=64)
    assert seconds(curve, 0, 1024) == pytest.approx(engine.prompt_s(0, 1024), rel=0.02)
    small = seconds(curve, 0, 1024, Load(chunk_tokens=64))
    assert small == pytest.approx(by_64.prompt_s(0, 1024), rel=0.02)
    assert small > 1.4 * seconds(curve, 0, 1024)


def test_load_makes_it_dearer() -> None:
    curve = learnt(Engine())
    idle, busy = seconds(curve, 0, 2048), seconds(curve, 0, 2048, Load(8, 16_000, 512))
    assert busy > idle + 4 * 7 * 2e-3


def test_other_work_on_the_machine_shows_within_five_steps() -> None:
    """Three times slower at once: before any new fit, and back as fast."""
    engine = Engine()
    curve = learnt(engine)
    calm = seconds(curve, 0, 2048)
    for number in range(5):
        curve.observe(engine.step([(512 * number, 512)], [], 3.0), 100.0 + number)
    assert seconds(curve, 0, 2048) == pytest.approx(3 * calm, rel=0.1)
    for number in range(5):
        curve.observe(engine.step([(512 * number, 512)], []), 110.0 + number)
    assert seconds(curve, 0, 2048) == pytest.approx(calm, rel=0.1)


@pytest.mark.parametrize(("before", "after", "passed_s"), [(400, 150, 0.0), (60, 30, 86_400.0)])
def test_an_engine_that_changed_for_good_is_learnt_anew(before: int, after: int, passed_s: float) -> None:
    """By newer steps, and by fewer of them where the others are a day old: no drift is left to explain."""
    curve = learnt(Engine(), before)
    slower = Engine(c0=2e-2, a=4e-3, b=4e-7)
    for number, step in enumerate(work(slower, after, seed=5)):
        curve.observe(step, 100.0 + passed_s + number * 0.1)
    assert seconds(curve, 1024, 4096) == pytest.approx(slower.prompt_s(1024, 4096), rel=0.1)
    assert curve.drift == pytest.approx(1.0, abs=0.15)


# ---- what it does not claim -------------------------------------------------------------------------------


def test_nothing_is_known_before_the_second_usable_step() -> None:
    engine, curve = Engine(), PrefillCurve()
    assert curve.predict(0, 512) is None
    assert not curve.observe(engine.step([(0, 512)], []), 0.0)  # the first of its size
    assert curve.seconds(0, 512) is None
    assert curve.observe(engine.step([(0, 512)], []), 1.0)
    assert curve.seconds(0, 512) is None
    assert curve.observe(engine.step([(0, 512)], []), 2.0)
    assert seconds(curve, 0, 512) == pytest.approx(engine.prompt_s(0, 512))


def test_steps_of_no_use_are_left_out() -> None:
    engine, curve = Engine(), PrefillCurve()
    for number in range(5):
        assert not curve.observe(Step(0, 0.0, 0, 0, 1.0), float(number))  # idle
        assert not curve.observe(Step(512, 512.0 * 256, 0, 0, 0.0), float(number))  # no time
        assert not curve.observe(engine.step([(0, 2)], [100] * 3), float(number))  # mostly decodes
    assert curve.steps == 0
    assert curve.seconds(0, 512) is None


def test_decodes_alone_say_nothing_of_prompts() -> None:
    engine, curve = Engine(), PrefillCurve()
    for number in range(20):
        curve.observe(engine.step([], [100] * (1 + number % 8)), float(number))
    assert curve.seconds(0, 512) is None


def test_the_error_is_small_where_it_was_seen_and_grows_beyond() -> None:
    curve = learnt(Engine())
    errors = [found.error for stop in (2048, 4096, 8192, 32768) if (found := curve.predict(0, stop))]
    assert errors[0] == pytest.approx(errors[1], abs=0.01)  # it has seen almost as deep
    assert errors[0] < 0.15
    assert errors[1] + 0.1 < errors[2] < errors[3] <= 1.0
    shallow = PrefillCurve()
    for number in range(20):
        shallow.observe(Engine().step([(0, 512)], []), float(number))
    found = shallow.predict(0, 4096)
    assert found is not None
    assert found.error > 0.5  # no attention term at all


def test_no_tokens_take_no_time() -> None:
    found = learnt(Engine()).predict(77, 77, Load(5, 1000, 512))
    assert found is not None
    assert (found.seconds, found.error) == (0.0, 0.0)


STEPS = st.builds(
    lambda p, start, d, context, seconds: Step(p, p * (start + p / 2), d, d * context, seconds),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 12),
    st.integers(0, 1 << 20),
    st.one_of(st.floats(0, 600), st.floats(0, 1), st.just(5e-324)),
)


@given(st.lists(st.tuples(STEPS, st.floats(-1e12, 1e12)), max_size=40), st.integers(0, 1 << 30))
@settings(max_examples=100)
def test_whatever_is_seen_predictions_are_numbers(seen: list[tuple[Step, float]], stop: int) -> None:
    """Any steps, a clock that jumps: never negative, more tokens never less."""
    curve = PrefillCurve()
    for step, now_s in seen * 2:  # twice: the first of each size is dropped
        curve.observe(step, now_s)
    found, less = curve.predict(0, stop), curve.seconds(0, stop // 2)
    assert (found is None) == (less is None) == (curve.steps < 2)
    if found is not None and less is not None:
        assert 0.0 <= less <= found.seconds < math.inf
        assert 0.0 <= found.error <= 1.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((-1, 0.0, 0, 0, 1.0), "prefill_tokens"),
        ((1, -1.0, 0, 0, 1.0), "prefill_area"),
        ((1, math.nan, 0, 0, 1.0), "prefill_area"),
        ((0, 1.0, 0, 0, 1.0), "prefill_area"),
        ((2, 0.5, 0, 0, 1.0), "prefill_area"),
        ((1, 0.5, -1, 0, 1.0), "decodes"),
        ((1, 0.5, 0, -1, 1.0), "decode_context"),
        ((1, 0.5, 0, 0, -1.0), "seconds"),
        ((1, 0.5, 0, 0, math.nan), "seconds"),
        ((1, 0.5, 0, 0, 1e6), "seconds"),
        ((1 << 40, 0.5, 0, 0, 1.0), "prefill_tokens"),
    ],
)
def test_a_step_that_cannot_be_is_refused(values: tuple[int, float, int, int, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        Step(*values)


def test_questions_that_cannot_be_are_refused() -> None:
    curve = learnt(Engine())
    with pytest.raises(ValueError, match=r"^stop:"):
        curve.seconds(2, 1)
    with pytest.raises(ValueError, match=r"^start:"):
        curve.seconds(-1, 1)
    with pytest.raises(ValueError, match=r"^now_s:"):
        curve.observe(Engine().step([(0, 512)], []), math.nan)
    for name in ("decodes", "decode_context", "chunk_tokens"):
        with pytest.raises(ValueError, match=f"^{name}:"):
            replace(Load(), **{name: -1})


# ---- across restarts, and many ----------------------------------------------------------------------------


@given(st.integers(0, 50), st.floats(-1e6, 1e6))
@settings(max_examples=15, deadline=None)
def test_what_was_learnt_outlives_a_restart(seed: int, start_s: float) -> None:
    """Through JSON, onto a clock that starts elsewhere: what the same steps say."""
    curve = PrefillCurve()
    for number, step in enumerate(work(Engine(), 3 * STEPS_MAX, seed)):
        curve.observe(step, start_s + number)
    later = PrefillCurve()
    later.restore(json.loads(json.dumps(curve.report(start_s + 1e4))), 3.0)
    assert later.steps == curve.steps <= STEPS_MAX
    for start, stop in ((0, 512), (1024, 4096)):
        assert seconds(later, start, stop) == pytest.approx(seconds(curve, start, stop), rel=0.05)


def test_a_restart_in_between_forgets_nothing_newer() -> None:
    old, new = learnt(Engine()), PrefillCurve()
    slower = Engine(c0=2e-2, a=4e-3, b=4e-7)
    for number, step in enumerate(work(slower, 3 * STEPS_MAX, seed=5)):
        new.observe(step, float(number))
    new.restore(old.report(100.0), 1000.0)
    assert seconds(new, 0, 4096) == pytest.approx(slower.prompt_s(0, 4096), rel=0.1)


GOOD = {"format": "kvstore-prefill", "version": 1, "steps": [[0.0, 512, 131072.0, 0, 0, 0.5]] * 3}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"version": 2}, "version 1"),
        ({"format": "kvstore-rates"}, "kvstore-prefill"),
        ({"steps": None}, "steps"),
        ({"steps": [[0.0, 512, 131072.0, 0, 0]]}, "steps"),
        ({"steps": [[0.0, 512, 131072.0, 0, 0, -1.0]]}, "seconds"),
        ({"steps": [[0.0, 512, 131072.0, 0, 0, 0.0]]}, "steps"),
        ({"steps": [[-1.0, 512, 131072.0, 0, 0, 0.5]]}, "steps"),
        ({"steps": [[math.nan, 512, 131072.0, 0, 0, 0.5]]}, "steps"),
        ({"steps": [[0.0, 0, 0.0, 0, 0, 0.5]]}, "steps"),
        ({"steps": [[0.0, 512, 131072.0, 0, 0, 0.5]] * 1000}, "steps"),
    ],
)
def test_another_report_is_refused(changed: dict[str, object], named: str) -> None:
    curve = PrefillCurve()
    curve.restore(GOOD, 0.0)
    assert curve.steps == 3
    with pytest.raises(ValueError, match=re.escape(named)):
        curve.restore({**GOOD, **changed}, 0.0)
    assert curve.steps == 3
    with pytest.raises(ValueError, match="kvstore-prefill"):
        curve.restore([GOOD], 0.0)


def test_namespaces_have_curves_of_their_own() -> None:
    curves, slow = PrefillCurves(), Engine(a=1e-2)
    for number in range(20):
        curves.observe("fast", Engine().step([(0, 512)], []), float(number))
        curves.observe("slow", slow.step([(0, 512)], []), float(number))
    later = PrefillCurves()
    later.restore(json.loads(json.dumps(curves.report(20.0))), 0.0)
    for some in (curves, later):
        fast, other = some.of("fast"), some.of("slow")
        assert fast is not None
        assert other is not None
        assert seconds(other, 0, 512) > 5 * seconds(fast, 0, 512)
        assert some.of("another") is None


def test_namespaces_have_a_limit() -> None:
    curves = PrefillCurves()
    for number in range(CURVES_MAX + 3):
        curves.observe(str(number), Engine().step([(0, 512)], []), float(number))
        curves.observe("0", Engine().step([(0, 512)], []), float(number))  # in use all the time
    assert len(curves) == CURVES_MAX
    assert curves.of("0") is not None
    assert curves.of("1") is None
    with pytest.raises(ValueError, match="table"):
        curves.restore({str(number): GOOD for number in range(CURVES_MAX + 1)}, 0.0)
    fresh = PrefillCurves()
    with pytest.raises(ValueError, match="version"):
        fresh.restore({"a": GOOD, "b": {**GOOD, "version": 9}}, 0.0)
    assert len(fresh) == 0


# ---- the fit ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=2), st.integers(0, 1000))
@settings(max_examples=50)
def test_a_fit_finds_what_made_the_values(coefficients: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.uniform(0.1, 100, (40, 2))
    truth = columns @ np.array(coefficients)
    values = truth.copy()
    values[::5] *= 10.0 ** rng.uniform(-2, 2, 8)
    found = columns @ fit(columns, values, np.ones(40))
    assert np.median(np.abs(found / truth - 1.0)) < 0.02


def test_no_coefficient_is_negative() -> None:
    x = np.linspace(1, 10, 20)
    columns = np.stack([np.ones(20), x], axis=1)
    found = fit(columns, 20.0 - x, np.ones(20))
    assert found[1] == 0.0
    assert 10.0 <= found[0] <= 19.0
    assert fit(columns, x, np.array([1e-9] * 19 + [1.0])).min() >= 0.0


def test_a_weighted_median_is_where_half_the_weight_lies() -> None:
    values = np.array([5.0, 1.0, 3.0])
    assert weighted_median(values, np.ones(3)) == 3.0
    assert weighted_median(values, np.array([5.0, 1.0, 1.0])) == 5.0
    assert weighted_median(values, np.array([1.0, 5.0, 1.0])) == 1.0
