"""A daemon that dies under running requests which share blocks: each block has one owner before and after."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kvstore.connectors.embedded import store_tables
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.store_tables import StoreTables
from real_daemon import eventually
from scene import Scene
from test_embedded_faults import IMPATIENT, attached_again, make
from tiny_engines import GPU, HOST, TinyEngine, TinyModel, prompt, tiny, written

from kvstore.types import Busy

__all__ = ["tiny", "written"]


def live(tables: StoreTables) -> Iterator[tuple[list[int], Any]]:
    """(blocks, handle) of every table that is not given back."""
    for table, handle in tables._live.values():
        yield table.blocks, handle


def assert_one_owner_each(engine: TinyEngine) -> None:
    """A block lies in two tables only as the same full, committed block of the same tokens."""
    tables, size = engine.tables, engine.tables.block_tokens
    owners = Counter(block for blocks, _ in live(tables) for block in blocks)
    holds: dict[int, tuple[int, ...]] = {}
    for blocks, handle in live(tables):
        assert len(set(blocks)) == len(blocks)
        for place, block in enumerate(blocks):
            if owners[block] == 1:
                continue
            assert place < handle.committed, f"private block {block} lies in {owners[block]} tables"
            text = tuple(handle.tokens[: (place + 1) * size])
            assert holds.setdefault(block, text) == text


class Steps:
    """Drives requests step by step; after every step each block has its owner."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine = engine
        self.reports: dict[str, Report] = {}

    def add(self, tokens: list[int], new: int = 64) -> Request:
        request = self.engine.request(tokens, new)
        assert self.engine.engine.add(request)
        return request

    def step(self) -> None:
        for output in self.engine.engine.step():
            if output.report is not None:
                self.reports[output.request_id] = output.report
        assert_one_owner_each(self.engine)

    def until(self, computed: int) -> None:
        """Every live table holds that many full blocks."""

        def there() -> bool:
            self.step()
            return all(handle.full >= computed for _, handle in live(self.engine.tables))

        eventually(there, f"{computed} blocks are computed")

    def end(self) -> None:
        def over() -> bool:
            self.step()
            return not self.engine.engine.unfinished

        eventually(over, "every request ends")


@pytest.mark.parametrize("refuse_first", [False, True], ids=["at once", "one table at a time"])
def test_tables_that_share_a_prefix_survive_a_restart(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, refuse_first: bool
) -> None:
    """The third request begins after the restart and must get nobody's blocks."""
    daemon = stage.start_daemon()
    engine = make(stage, tiny, blocks=40).attached()
    head = prompt(64, 900)
    engine.ask(head, 1)
    steps = Steps(engine)
    asked = [prompt(90, 901, head), prompt(130, 902, head), prompt(100, 903)]
    wanted = [steps.add(one, 32) for one in asked[:2]]
    steps.until(5)
    first, second = (set(blocks) for blocks, _ in live(engine.tables))
    assert len(first & second) == 4, "they share the head"
    daemon.end(signal.SIGKILL)
    daemon.start()
    if refuse_first:
        adopt, refused = engine.client.adopt, [True, True, False]

        def sometimes(table: Any, chain: Any, stop: int) -> Any:
            # The second table is refused once, with its keys and without.
            return Busy("not now") if refused and refused.pop() else adopt(table, chain, stop)

        monkeypatch.setattr(engine.client, "adopt", sometimes)
    wanted.append(steps.add(asked[2], 32))
    eventually(lambda: engine.client.generation == 2, "attached again")
    steps.end()
    for one, request in zip(asked, wanted, strict=True):
        assert steps.reports[request.id].tokens == tiny.uncached(one, 32)
    engine.settle()
    daemon.assert_sound()
    for one, request in zip(asked, wanted, strict=True):
        longer = [*one, *steps.reports[request.id].tokens]
        again = engine.ask(longer, 8)
        assert again.reused[GPU] + again.reused.get(HOST, 0) == (len(longer) - 1) // 16 * 16
        assert again.tokens == tiny.uncached(longer, 8)
    engine.close()
    daemon.assert_quiet()


def test_the_pool_stays_closed_until_every_table_is_adopted(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = stage.start_daemon()
    engine = make(stage, tiny, blocks=40).attached()
    tables, client = engine.tables, engine.client
    head = prompt(32, 910)
    one = tables.begin("one", prompt(60, 911, head), "own")
    assert one is not None
    daemon.end(signal.SIGKILL)
    daemon.start()
    adopt = client.adopt
    monkeypatch.setattr(client, "adopt", lambda *_: Busy("not now"))
    attached_again(engine, 2)
    for _ in range(3):
        tables.poll()
        assert tables.begin("two", prompt(60, 912), "own") is None
        assert not tables.grow(one, 1)
    monkeypatch.setattr(client, "adopt", adopt)
    tables.poll()
    two = tables.begin("two", prompt(60, 912), "own")
    assert two is not None
    assert not set(one.blocks) & set(two.blocks)
    assert tables.grow(one, 1)
    for table in (one, two):
        tables.finish(table)
    engine.close()
    daemon.assert_quiet()


def test_a_table_knows_the_attach_that_it_came_from(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is replaced between its answer to `acquire` and the moment the engine has taken it up."""
    daemon = stage.start_daemon()
    engine = make(stage, tiny, blocks=40).attached()
    tables, client = engine.tables, engine.client
    acquire = client.acquire

    def replaced(lease: int, blocks: int) -> Any:
        got = acquire(lease, blocks)
        daemon.end(signal.SIGKILL)
        daemon.start()
        eventually(lambda: client.generation == 2 and client.attached, "attached again")
        return got

    monkeypatch.setattr(client, "acquire", replaced)
    one = tables.begin("one", prompt(60, 920), "own")
    monkeypatch.setattr(client, "acquire", acquire)
    assert one is not None
    tables.poll()
    two = tables.begin("two", prompt(60, 921), "own")
    assert two is not None
    assert not set(one.blocks) & set(two.blocks)
    for table in (one, two):
        tables.finish(table)
    engine.close()
    daemon.assert_quiet()


# ---- what is saved -----------------------------------------------------------------------------------------


def test_a_request_whose_load_came_short_saves_and_commits_nothing_more(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = stage.start_daemon()
    giver = make(stage, tiny).attached()
    asked = prompt(100, 930)
    giver.ask(asked, 1)
    giver.settle()
    giver.close()
    engine = make(stage, tiny).attached()
    saved = daemon.group()["counters"]["saved_blocks"]
    begin_load, tampered = engine.client.load, []

    def one_wrong(hit: Any, blocks: Any) -> Any:
        """The third slot is another block's: its fingerprint is not the key's."""
        slots = hit.slots.copy()
        slots[2] = slots[0]
        tampered.append(len(slots))
        return begin_load(replace(hit, slots=slots), blocks)

    monkeypatch.setattr(engine.client, "load", one_wrong)
    report = engine.ask(asked, 32)
    monkeypatch.setattr(engine.client, "load", begin_load)
    assert tampered == [6]
    assert (report.reused[HOST], report.tokens) == (32, tiny.uncached(asked, 32))
    engine.settle()
    assert daemon.group()["counters"]["saved_blocks"] == saved
    again = engine.ask(asked, 32)
    assert again.reused[GPU] == 32, "what was verified may be shared, what came after a bad load may not"
    assert again.tokens == report.tokens
    engine.settle()
    assert daemon.group()["counters"]["saved_blocks"] > saved, "the next request's own blocks are saved"
    engine.close()
    daemon.assert_quiet()


def test_what_was_put_off_is_saved_at_the_end(
    stage: Scene, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one save out at a time and none of them done before the end, the rest goes in `finish`."""
    daemon = stage.start_daemon()
    engine = make(stage, tiny, limits=replace(IMPATIENT, call_s=30.0)).attached()
    monkeypatch.setattr(store_tables, "SAVES_PER_TABLE_MAX", 1)
    tables, client = engine.tables, engine.client
    tokens = prompt(16 * 6, 940)
    table = tables.begin("slow", tokens, "own")
    assert table is not None
    begin_save, ranges = client.save, []

    class Waiting:
        """A save whose end is seen only once the request has ended."""

        def __init__(self, save: Any) -> None:
            self.save = save

        def poll(self) -> Any:
            return self.save.poll() if len(ranges) > 1 else None

        def wait(self, timeout_s: float) -> Any:
            return self.save.wait(timeout_s)

    def save(chain: Any, start: int, stop: int, blocks: np.ndarray) -> Any:
        ranges.append((start, stop))
        return Waiting(begin_save(chain, start, stop, blocks))

    monkeypatch.setattr(client, "save", save)
    for computed in range(16, len(tokens) + 1, 16):
        tables.filled(table, tokens, computed)
    assert ranges == [(0, 1)]
    tables.finish(table)
    assert ranges == [(0, 1), (1, 6)]
    engine.settle()
    assert daemon.group()["counters"]["saved_blocks"] == 6
    engine.close()
    daemon.assert_quiet()
