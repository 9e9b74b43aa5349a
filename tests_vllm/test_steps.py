"""Steps of the engine: timed without what they waited for, told to the daemon, which learns from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemon import Daemon, eventually
from engines import EngineProcess
from kvstore.connectors.vllm.messages import StepReport
from kvstore.connectors.vllm.steps import Steps
from kvstore.connectors.vllm.tracked import Tracked
from models import prompt_of

from kvstore.client import Client
from kvstore.errors import BadRequest
from kvstore.types import Reuse, Tier


class Noted:
    """In place of a client."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float, int, int]] = []
        self.firsts: list[tuple[str, float, int, int]] = []
        self.plans: list[tuple[int, float]] = []
        self.refuses = False

    def note_plan(self, plan: int, seconds: float) -> None:
        if self.refuses:
            raise BadRequest("no")
        self.plans.append((plan, seconds))

    def note_prefill(self, *step: Any) -> None:
        if self.refuses:
            raise BadRequest("no")
        self.steps.append(step)

    def note_request(self, *request: Any) -> None:
        if self.refuses:
            raise BadRequest("no")
        self.firsts.append(request)


class Stage:
    """Steps on a clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.steps = Steps("default", lambda: self.now_s)
        self.noted = Noted()
        self.steps.serve(cast(Client, self.noted))
        self.tracked: dict[str, Tracked] = {}

    def begin(self, at_s: float, step: Any) -> int:
        self.now_s = 100.0 + at_s
        return self.steps.begin(step, self.tracked)

    def end(self, at_s: float, number: int) -> None:
        self.now_s = 100.0 + at_s
        self.steps.end(number)

    def request(self, name: str, prompt: int, computed: int = 0) -> Tracked:
        request = SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed, num_preemptions=0)
        one = self.tracked[name] = Tracked(request, Reuse.OWN, arrived_s=100.0)
        return one


def step_of(
    new: Mapping[str, tuple[int, int]] | None = None,
    cached: Mapping[str, tuple[int, int]] | None = None,
    **other: object,
) -> Any:
    """As vLLM schedules one: name → (tokens that are there, tokens that are scheduled)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=at) for name, (at, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[at for at, _ in cached.values()]
        ),
        **{"scheduled_spec_decode_tokens": {}, "scheduled_encoder_inputs": {}, **other},
    )


def test_chunks_and_decodes_are_told_apart() -> None:
    stage = Stage()
    mixed = step_of({"a": (128, 64), "b": (0, 100)}, {"c": (500, 32), "d": (700, 1), "e": (9, 1)})
    stage.end(0.25, stage.begin(0.0, mixed))
    area = 64 * (128 + 32) + 100 * 50 + 32 * (500 + 16)
    assert stage.noted.steps == [(196, 0.25, area, 2, 701 + 10)]


def test_a_step_that_was_scheduled_early_begins_when_the_one_before_ends() -> None:
    stage, step = Stage(), step_of({"a": (0, 100)})
    first, second = stage.begin(0.0, step), stage.begin(0.125, step)
    stage.end(0.5, first)
    third = stage.begin(0.625, step)
    stage.end(1.5, second)
    stage.end(1.75, third)
    late = stage.begin(9.0, step)  # idle until then
    stage.end(9.125, late)
    assert [seconds for _, seconds, *_ in stage.noted.steps] == [0.5, 1.0, 0.25, 0.125]


def test_a_step_behind_one_that_computes_nothing_does_not_count_its_time() -> None:
    stage = Stage()
    idle, busy = stage.begin(0.0, step_of()), stage.begin(0.0, step_of({"a": (0, 100)}))
    stage.end(0.75, idle)
    stage.end(1.0, busy)
    assert stage.noted.steps == [(100, 0.25, 5000.0, 0, 0)]


def test_what_is_behind_a_step_that_never_answered_is_not_believed() -> None:
    stage, step = Stage(), step_of({"a": (0, 100)})
    stage.begin(0.0, step)
    second = stage.begin(0.0, step)
    stage.end(1.0, second)
    stage.end(1.0, second)  # told twice
    stage.end(1.0, 0)  # a rank without orders
    assert not stage.noted.steps
    stage.end(2.0, stage.begin(1.5, step))
    assert [seconds for _, seconds, *_ in stage.noted.steps] == [0.5]


@pytest.mark.parametrize(
    "other", [{"scheduled_spec_decode_tokens": {"a": [7]}}, {"scheduled_encoder_inputs": {"a": [0]}}]
)
def test_drafts_and_images_are_no_measure(other: dict[str, Any]) -> None:
    stage = Stage()
    stage.end(1.0, stage.begin(0.0, step_of({"a": (0, 100)}, **other)))
    assert not stage.noted.steps


def test_steps_that_overlap_are_not_timed() -> None:
    stage = Stage()
    stage.steps.timed = False
    stage.request("a", 100)
    stage.end(1.0, stage.begin(0.0, step_of({"a": (0, 100)})))
    assert not stage.noted.steps and len(stage.noted.firsts) == 1


def test_a_request_has_its_first_token_when_its_prompt_is_through() -> None:
    stage = Stage()
    one = stage.request("a", 100, computed=32)
    one.device, one.hits = 16, {Tier.HOST: 16}
    gone = stage.request("b", 20)
    number = stage.begin(0.0, step_of({"a": (32, 48), "b": (0, 20)}))
    gone.ended = True  # aborted meanwhile
    stage.end(0.25, number)
    assert not stage.noted.firsts
    one.request.num_computed_tokens = 80
    stage.end(0.75, stage.begin(0.5, step_of({}, {"a": (80, 20)})))
    assert stage.noted.firsts == [("default", 0.75, 100, 32)]
    one.request.num_computed_tokens = 100
    stage.end(1.0, stage.begin(0.75, step_of({}, {"a": (100, 1)})))
    assert len(stage.noted.firsts) == 1


def test_what_is_refused_costs_nothing() -> None:
    stage = Stage()
    stage.request("a", 100)
    stage.noted.refuses = True
    stage.end(1.0, stage.begin(0.0, step_of({"a": (0, 100)})))
    assert not stage.noted.steps
    stage.noted.refuses = False
    stage.end(2.0, stage.begin(1.0, step_of({}, {"a": (100, 1)})))
    assert stage.noted.steps == [(0, 1.0, 0.0, 1, 101)]


def test_ranks_report_one_step() -> None:
    assert StepReport(step=7).aggregate(StepReport(step=7)).step == 7


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_daemon_learns_from_a_real_engine(
    tiny: Path, daemon: Daemon, new_process: Callable[..., EngineProcess], ranks: int
) -> None:
    engine = new_process(tiny, daemon.socket, ranks=ranks)
    sizes = (200, 300, 400) * 4
    for number, size in enumerate(sizes):
        engine.generate(prompt_of(size, number), 4)
    engine.drain()
    assert engine.forget()
    engine.generate(prompt_of(400, 2), 2)
    engine.close()
    known = eventually(lambda: daemon.group()["pricing"]["curves"], "a curve")
    (curve,) = known.values()
    assert curve["steps"] >= len(sizes) - 3 and 0.0 < curve["seconds"]["1000"] < curve["seconds"]["8000"]
    assert daemon.group()["prefill_tokens_per_s"] > 0
    assert daemon.group()["tokens"]["default"]["saved"] == 384, "the last prompt was loaded"
