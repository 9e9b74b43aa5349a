"""The protocol between engine and tables, with tables that reuse, load late, refuse, and give back late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from kvstore.connectors.embedded.engine import Engine, EngineLimits
from kvstore.connectors.embedded.kv_memory import KVMemory
from kvstore.connectors.embedded.model import Model
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.tables import LocalTables, Reuse, Table
from kvstore.connectors.embedded.tiny import TINY, tiny_weights

POOL, SIZE = 40, 16
SPEC = replace(TINY, layers=2)
WEIGHTS = tiny_weights(SPEC)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Handle:
    """Cells to write into the table's first blocks when its load ends, and how many polls that takes."""

    saved: list[dict[tuple[int, int], bytes]]
    polls_left: int
    reuse: Reuse
    filled: int = 0


@dataclass
class SavingTables(LocalTables):
    """Tables that keep the cells of every full block by its tokens, and load them into fresh blocks later.

    Attributes:
        memory: where blocks lie.
        load_polls: polls until a load is ready; None = never.
        late_polls: polls until a finished table's blocks come back.
        loads_fail_from: loaded blocks from this one on are reported as not arrived.
    """

    memory: KVMemory
    blocks: int = POOL
    load_polls: int | None = 0
    late_polls: int = 0
    loads_fail_from: int | None = None
    refuse: bool = False
    store: dict[tuple[int, ...], dict[tuple[int, int], bytes]] = field(default_factory=dict)
    late: list[tuple[int, Table]] = field(default_factory=list)
    asked: list[Reuse] = field(default_factory=list)
    finished: int = 0
    begun: int = 0

    def __post_init__(self) -> None:
        LocalTables.__init__(self, self.blocks, SIZE)
        self.polls = 0

    def begin(
        self, request_id: str, tokens: Sequence[int], reuse: Reuse, ahead_tokens: int = 0
    ) -> Table | None:
        table = None if self.refuse else super().begin(request_id, tokens, reuse, ahead_tokens)
        if table is None:
            return None
        self.begun += 1
        self.asked.append(reuse)
        saved = []
        if reuse != "none":
            for stop in range(SIZE, len(tokens), SIZE):
                if (cells := self.store.get(tuple(tokens[:stop]))) is None:
                    break
                saved.append(cells)
        table.handle = Handle(saved, self.polls + (self.load_polls or 0), reuse)
        table.reused_tokens = {"GPU": 0, "HOST": len(saved) * SIZE}
        return table

    def ready(self, table: Table) -> bool:
        handle = self.handle(table)
        if handle.saved and (self.load_polls is None or self.polls < handle.polls_left):
            return False
        arrived = handle.saved[: self.loads_fail_from]
        for block, cells in zip(table.blocks, arrived, strict=False):
            for (layer, head), data in cells.items():
                self.memory.write_cell(block, layer, head, data)
        table.reused_tokens["HOST"] = len(arrived) * SIZE
        return True

    def filled(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        handle = self.handle(table)
        full = computed // SIZE
        assert full > handle.filled
        handle.filled = full
        if handle.reuse == "none":
            return
        for index in range(full):
            cells = {
                (layer, head): self.memory.read_cell(table.blocks[index], layer, head)
                for layer in range(SPEC.layers)
                for head in range(SPEC.kv_heads)
            }
            known = self.store.setdefault(tuple(tokens[: (index + 1) * SIZE]), cells)
            # Whoever computed it, however chunked: the same KV up to rounding.
            for where, data in cells.items():
                ours = torch.frombuffer(bytearray(data), dtype=torch.float32)
                theirs = torch.frombuffer(bytearray(known[where]), dtype=torch.float32)
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)

    def finish(self, table: Table) -> None:
        self.finished += 1
        if self.late_polls:
            self.late.append((self.polls + self.late_polls, table))
        else:
            super().finish(table)

    def poll(self) -> None:
        self.polls += 1
        for due, table in [late for late in self.late if late[0] <= self.polls]:
            self.late.remove((due, table))
            super().finish(table)

    @staticmethod
    def handle(table: Table) -> Handle:
        assert isinstance(table.handle, Handle)
        return table.handle


def build(limits: EngineLimits | None = None, **options: object) -> tuple[Engine, SavingTables, Clock]:
    memory = KVMemory(SPEC, POOL, SIZE)
    tables, clock = SavingTables(memory, **options), Clock()  # type: ignore[arg-type]

    def idle() -> None:
        clock.now += 0.01

    return Engine(Model(SPEC, WEIGHTS, memory), tables, limits, clock=clock, idle=idle), tables, clock


def prompt(size: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(
        torch.randint(3, SPEC.vocab, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def ask(name: str, tokens: tuple[int, ...], new: int = 64, reuse: Reuse = "group") -> Request:
    return Request(name, tokens, new, ignore_eos=True, reuse=reuse)


def oracle(asked: Request) -> tuple[int, ...]:
    engine, _, _ = build()
    return engine.generate([replace(asked, reuse="none")])[0].tokens


@pytest.mark.parametrize("size", [16, 17, 47, 48, 49, 100])
@pytest.mark.parametrize("load_polls", [0, 3])
def test_reused_blocks_give_the_same_tokens(size: int, load_polls: int) -> None:
    engine, tables, _ = build(load_polls=load_polls)
    cold, warm = [engine.generate([ask(name, prompt(size))])[0] for name in ("cold", "warm")]
    assert cold.tokens == warm.tokens == oracle(ask("x", prompt(size)))
    assert cold.fresh_tokens == size
    # Case: a hit may cover the whole prompt; the last token is computed all the same.
    assert warm.reused == {"GPU": 0, "HOST": (size - 1) // SIZE * SIZE}
    assert warm.fresh_tokens + sum(warm.reused.values()) == size
    assert tables.free_blocks == POOL


def test_the_answer_is_reused_in_the_next_turn() -> None:
    """Full blocks of prompt + output are filled, except for the last token, which has no KV."""
    engine, _, _ = build()
    first = engine.generate([ask("one", prompt(40), 25)])[0]
    assert len(first.tokens) == 25
    longer = prompt(40) + first.tokens + prompt(20, 5)
    (second,) = engine.generate([ask("two", longer)])
    assert second.reused["HOST"] == 64  # 40 + 25 − 1
    assert second.tokens == oracle(ask("x", longer))


def test_reuse_none_neither_takes_nor_gives() -> None:
    engine, tables, _ = build()
    engine.generate([ask("a", prompt(60), reuse="none")])
    assert not tables.store
    engine.generate([ask("b", prompt(60))])
    (report,) = engine.generate([ask("c", prompt(60), reuse="none")])
    assert report.fresh_tokens == 60


def test_one_flipped_restored_cell_changes_the_output() -> None:
    """Negative control: token equality is a proof only because a wrong block shows."""
    engine, tables, _ = build()
    (cold,) = engine.generate([ask("cold", prompt(100))])
    cells = tables.store[prompt(100)[:64]]
    right = cells[1, 0]
    cells[1, 0] = bytes(byte ^ 0x80 if at % 4 == 3 else byte for at, byte in enumerate(right))  # signs
    (wrong,) = engine.generate([ask("wrong", prompt(100))])
    assert wrong.reused["HOST"] == 96
    assert wrong.tokens != cold.tokens


def test_a_load_that_arrives_in_part_is_counted_and_completed() -> None:
    engine, tables, _ = build()
    (cold,) = engine.generate([ask("cold", prompt(100))])
    tables.loads_fail_from = 2
    (partly,) = engine.generate([ask("partly", prompt(100))])
    assert partly.reused["HOST"] == 32
    assert partly.fresh_tokens == 68
    assert partly.tokens == cold.tokens


def test_others_run_while_one_loads() -> None:
    engine, tables, _ = build()
    engine.generate([ask("cold", prompt(100))])
    tables.load_polls = 6
    engine.add(ask("loading", prompt(100), 4))
    engine.add(ask("other", prompt(30, 9), 4))
    order = [out.request_id for _ in range(20) for out in engine.step() if out.report is not None]
    assert order == ["other", "loading"]


def test_a_load_that_never_ends_is_recomputed() -> None:
    engine, tables, clock = build(EngineLimits(load_s_max=1.0))
    (cold,) = engine.generate([ask("cold", prompt(100))])
    tables.load_polls, tables.asked = None, []
    (report,) = engine.generate([ask("stuck", prompt(100))])
    assert tables.asked == ["group", "none"]
    assert report.tokens == cold.tokens
    assert report.fresh_tokens == 100
    assert report.preemptions == 0
    assert 1.0 < clock.now < 1.5
    assert tables.free_blocks == POOL


def test_one_that_comes_when_a_load_is_given_up_is_not_mistaken_for_it() -> None:
    engine, tables, clock = build(EngineLimits(load_s_max=1.0))
    (cold,) = engine.generate([ask("cold", prompt(100))])
    tables.load_polls = None
    engine.add(ask("stuck", prompt(100)))
    engine.step()
    clock.now += 2.0
    engine.add(ask("other", prompt(30, 9)))
    reports = {}
    for _ in range(400):
        for out in engine.step():
            if out.report is not None:
                reports[out.request_id] = out.report
    assert reports["stuck"].tokens == cold.tokens and reports["other"].fresh_tokens == 30
    assert tables.free_blocks == POOL and tables.begun == tables.finished


def test_abort_while_loading_finishes_the_table_once() -> None:
    engine, tables, _ = build()
    engine.generate([ask("cold", prompt(100))])
    tables.load_polls = None
    engine.add(ask("loading", prompt(100)))
    assert engine.step() == []
    assert tables.free_blocks < POOL
    report = engine.abort("loading")
    assert report is not None
    assert (report.finish_reason, report.tokens, report.ttft_s) == ("abort", (), None)
    assert tables.free_blocks == POOL
    assert tables.begun == tables.finished


def test_no_room_ends_after_a_bounded_wait() -> None:
    engine, tables, clock = build(EngineLimits(room_s_max=2.0))
    tables.refuse = True
    reports = engine.generate([ask("a", prompt(20)), ask("b", prompt(30))])
    assert [report.finish_reason for report in reports] == ["no_room", "no_room"]
    assert 2.0 < clock.now < 5.0
    tables.refuse = False
    assert engine.generate([ask("c", prompt(20))])[0].finish_reason == "length"


def test_preempted_requests_reuse_their_own_work_and_count_it_once() -> None:
    engine, tables, _ = build(EngineLimits(batch_max=4, batched_tokens_max=64), blocks=16)
    asked = [ask(f"r{i}", prompt(40 + i, i + 1)) for i in range(4)]
    reports = engine.generate(asked)
    preempted = [report for report in reports if report.preemptions]
    assert preempted
    for one, report in zip(asked, reports, strict=True):
        assert report.fresh_tokens == report.prompt_tokens == len(one.prompt)  # nothing came from anyone else
        assert sum(report.reused.values()) == 0
        assert report.tokens == oracle(one)
        # Full blocks came back from the store: only the tails were computed again.
        assert report.recomputed_tokens <= report.preemptions * SIZE
    assert tables.free_blocks == 16
    assert tables.begun == tables.finished


def test_blocks_that_come_back_late_do_not_empty_the_batch() -> None:
    """Blocks of a preempted table that are still being copied: others wait for them, and keep their own."""
    engine, tables, _ = build(EngineLimits(batch_max=4, batched_tokens_max=64), blocks=16, late_polls=3)
    asked = [ask(f"r{i}", prompt(40 + i, i + 1)) for i in range(4)]
    reports: list[Report] = engine.generate(asked)
    assert [report.tokens for report in reports] == [oracle(one) for one in asked]
    prompt_engine, _, _ = build(EngineLimits(batch_max=4, batched_tokens_max=64), blocks=16)
    at_once = prompt_engine.generate(asked)
    late, prompt_ones = (sum(report.preemptions for report in each) for each in (reports, at_once))
    assert 0 < late <= prompt_ones + 1
    assert [left for left in tables.late if left[0] <= tables.polls] == []


def test_a_table_that_claims_the_last_token_is_an_error() -> None:
    engine, tables, _ = build()
    engine.add(ask("a", prompt(32)))
    genuine = tables.ready
    tables.ready = lambda table: (genuine(table), table.reused_tokens.update(GPU=32))[0]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="never the last token"):
        engine.step()
