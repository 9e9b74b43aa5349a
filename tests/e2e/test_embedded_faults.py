"""A language model whose daemon dies, stops, comes late or refuses it: the same tokens in every case."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore.connectors.embedded import attach
from kvstore.connectors.embedded.processes import EngineProcess
from kvstore.connectors.embedded.request import Report
from real_daemon import RealDaemon, eventually
from scene import Scene
from tiny_engines import GPU, HOST, TinyEngine, TinyModel, prompt, tiny, written

from kvstore.client import Limits, PagedLayout
from kvstore.errors import LayoutRefused

__all__ = ["tiny", "written"]
# A dead daemon is noticed at once, a silent one after call_s.
IMPATIENT = Limits(call_s=0.5, attach_s=5.0, copy_s=10.0, retry_s=0.01, retry_max_s=0.05)


def run(engine: TinyEngine, wanted: list[Any], at: dict[int, Callable[[], object]]) -> list[Report]:
    """Requests to their end, with something done before the steps named."""
    reports: dict[str, Report] = {}
    for request in wanted:
        assert engine.engine.add(request)
    steps = 0

    def step() -> bool:
        nonlocal steps
        for number in [number for number in at if number <= engine.engine.steps]:
            at.pop(number)()
        steps += 1
        for output in engine.engine.step():
            if output.report is not None:
                reports[output.request_id] = output.report
        return not engine.engine.unfinished

    eventually(step, "every request ends")
    assert not at, "the requests ended too soon for the test"
    return [reports[request.id] for request in wanted]


def make(stage: Scene, tiny: TinyModel, **options: Any) -> TinyEngine:
    options.setdefault("limits", IMPATIENT)
    engine: TinyEngine = stage.keep(TinyEngine(tiny, stage.daemon.socket, **options))
    return engine


def attached_again(engine: TinyEngine, generation: int) -> None:
    def there() -> bool:
        engine.tables.poll()
        return bool(engine.client.generation >= generation and engine.tables.attached)

    eventually(there, "attached again")
    engine.tables.poll()


def test_a_daemon_killed_in_mid_answer_and_replaced(stage: Scene, tiny: TinyModel) -> None:
    """Not one token changes; the tables in use are adopted, and reuse works again."""
    daemon = stage.start_daemon()
    engine = make(stage, tiny).attached()
    asked = [prompt(100 + number, 50 + number) for number in range(3)]
    wanted = [engine.request(one) for one in asked]

    def replaced() -> None:
        daemon.start()
        attached_again(engine, 2)

    reports = run(engine, wanted, {10: lambda: daemon.end(signal.SIGKILL), 30: replaced})
    for one, report in zip(asked, reports, strict=True):
        assert report.tokens == tiny.uncached(one)
    engine.settle()
    daemon.assert_sound()
    # The new daemon has never seen these prompts computed: it knows them because it adopted the tables.
    for one, report in zip(asked, reports, strict=True):
        longer = [*one, *report.tokens]
        again = engine.ask(longer, 16)
        assert again.reused[GPU] == (len(longer) - 1) // 16 * 16
        assert again.tokens == tiny.uncached(longer, 16)
    group = daemon.group()
    assert group["counters"]["saved_blocks"] > 0, "and it saved their blocks"
    engine.close()
    daemon.assert_quiet()


def test_requests_without_a_daemon_run_uncached(stage: Scene, tiny: TinyModel) -> None:
    daemon = stage.start_daemon()
    engine = make(stage, tiny).attached()
    asked = prompt(90, 60)
    assert engine.ask(asked).tokens == tiny.uncached(asked)
    daemon.end(signal.SIGKILL)
    for _ in range(2):
        report = engine.ask(asked)
        assert (report.tokens, report.fresh_tokens) == (tiny.uncached(asked), 90)
    daemon.start()
    attached_again(engine, 2)
    assert engine.ask(asked).fresh_tokens == 90
    warm = engine.ask(asked)
    assert (warm.tokens, warm.reused[GPU]) == (tiny.uncached(asked), 80)
    engine.close()
    daemon.assert_quiet()


def test_a_daemon_that_comes_late(stage: Scene, tiny: TinyModel) -> None:
    daemon = RealDaemon(stage.folder)
    engine = TinyEngine(tiny, daemon.socket, limits=IMPATIENT)
    stage.keep(engine)
    asked = prompt(90, 61)
    assert engine.ask(asked).fresh_tokens == 90
    stage.keep(daemon).start()
    attached_again(engine, 1)
    assert engine.ask(asked).fresh_tokens == 90
    warm = engine.ask(asked)
    assert (warm.tokens, warm.fresh_tokens) == (tiny.uncached(asked), 10)
    engine.close()
    daemon.assert_quiet()


def test_a_daemon_stopped_while_the_engine_asks(stage: Scene, tiny: TinyModel) -> None:
    daemon = stage.start_daemon()
    engine = make(stage, tiny).attached()
    asked = prompt(90, 62)
    engine.ask(asked)
    engine.settle()
    daemon.stopped()
    report = engine.ask(asked)
    assert report.tokens == tiny.uncached(asked)
    assert report.fresh_tokens == 90
    daemon.send(signal.SIGCONT)
    attached_again(engine, 2)
    back = engine.ask(asked)
    assert back.tokens == tiny.uncached(asked)
    assert sum(back.reused.values()) == 80
    engine.close()
    daemon.assert_quiet()


def test_a_daemon_killed_while_an_engine_loads(stage: Scene, tiny: TinyModel) -> None:
    daemon = stage.start_daemon()
    first = make(stage, tiny).attached()
    asked = prompt(900, 63)
    first.ask(asked, 16)
    first.settle()
    first.close()
    engine = make(stage, tiny).attached()
    request = engine.request(asked, 16)
    engine.engine.add(request)
    table = engine.tables.begin("load", asked, "own")  # a load that is under way when the daemon goes
    assert table is not None
    daemon.end(signal.SIGKILL)
    eventually(lambda: engine.tables.ready(table), "the load has an end")
    engine.tables.finish(table)
    reports: list[Report] = []

    def step() -> bool:
        reports.extend(out.report for out in engine.engine.step() if out.report is not None)
        return bool(reports)

    eventually(step, "the request ends")
    assert reports[0].tokens == tiny.uncached(asked, 16)


def test_an_engine_killed_in_mid_answer(stage: Scene, tiny: TinyModel, tmp_path: Path) -> None:
    daemon = stage.start_daemon()
    config = {"model": str(tiny.path), "socket": str(daemon.socket), "blocks": 160}
    victim = EngineProcess(tmp_path, config)
    try:
        asked = prompt(200, 64)
        assert victim.ready["ready"] is True
        line = {"op": "generate", "prompt": asked, "max_new_tokens": 2000}
        assert victim.process.stdin is not None
        victim.process.stdin.write(json.dumps(line).encode() + b"\n")
        victim.process.stdin.flush()
        eventually(lambda: daemon.group()["counters"]["saved_blocks"] >= 14, "it is answering")
        assert daemon.group()["leases"] == 1
        victim.process.kill()
        victim.process.wait()
        daemon.assert_quiet()
    finally:
        victim.end()
    heir = make(stage, tiny).attached()
    report = heir.ask(asked)
    assert (report.tokens, report.reused[HOST]) == (tiny.uncached(asked), 192)


class ShiftedCells(attach.PagedCells):
    """Claims that each cell begins a few tokens later than it does."""

    def paged(self) -> PagedLayout:
        memory = self._memory
        return PagedLayout(
            np.array([[base + 256] for base in memory.bases], np.uint64),
            blocks=memory.blocks,
            heads=memory.kv_heads,
            block_stride=memory.block_stride_bytes,
            head_stride=memory.head_stride_bytes,
            piece_stride=memory.cell_bytes,
            piece_bytes=memory.cell_bytes,
            pieces=1,
        )


def test_wrong_strides_are_found_and_the_engine_runs_uncached(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = stage.start_daemon()
    monkeypatch.setattr(attach, "PagedCells", ShiftedCells)
    engine = make(stage, tiny)
    eventually(lambda: engine.client.refusal, "refused")
    assert isinstance(engine.client.refusal, LayoutRefused)
    asked = prompt(90, 65)
    for _ in range(2):
        report = engine.ask(asked)
        assert (report.tokens, report.fresh_tokens) == (tiny.uncached(asked), 90)
    assert daemon.group()["counters"]["saved_blocks"] == 0
    engine.close()
    daemon.assert_quiet()
