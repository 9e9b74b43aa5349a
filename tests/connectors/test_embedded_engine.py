"""The engine over LocalTables: same tokens however work is cut, batched or preempted; no block is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore.connectors.embedded.engine import Engine, EngineLimits
from kvstore.connectors.embedded.kv_memory import KVMemory
from kvstore.connectors.embedded.model import Model
from kvstore.connectors.embedded.request import InvalidRequest, Report, Request
from kvstore.connectors.embedded.tables import LocalTables, Table
from kvstore.connectors.embedded.tiny import TINY, tiny_weights

POOL = 48
SPEC = replace(TINY, layers=2)
WEIGHTS = tiny_weights(SPEC)
MODELS = {size: Model(SPEC, WEIGHTS, KVMemory(SPEC, POOL, size)) for size in (16, 32)}


class Clock:
    """Seconds that pass by `tick` at every look."""

    def __init__(self, tick: float = 0.001) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def prompt(size: int, seed: int) -> tuple[int, ...]:
    return tuple(
        torch.randint(3, SPEC.vocab, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def request(name: str, size: int, new: int = 8, seed: int = 0, **options: object) -> Request:
    return Request(name, prompt(size, seed or size), new, ignore_eos=True, **options)  # type: ignore[arg-type]


def build(blocks: int = POOL, block_tokens: int = 16, **limits: float) -> tuple[Engine, LocalTables]:
    tables = LocalTables(blocks, block_tokens)
    return Engine(MODELS[block_tokens], tables, EngineLimits(**limits), clock=Clock()), tables  # type: ignore[arg-type]


def alone(asked: Sequence[Request], block_tokens: int = 16) -> list[tuple[int, ...]]:
    """The oracle: one at a time, the whole prompt in one chunk, all the blocks there are."""
    engine, _ = build(block_tokens=block_tokens, batched_tokens_max=2_048, batch_max=1)
    return [engine.generate([one])[0].tokens for one in asked]


def check(asked: Sequence[Request], reports: Sequence[Report]) -> None:
    for one, report in zip(asked, reports, strict=True):
        assert report.request_id == one.id
        assert report.prompt_tokens == len(one.prompt) == report.fresh_tokens + sum(report.reused.values())
        assert len(report.tokens) == one.max_new_tokens
        assert report.finish_reason == "length"
        assert report.ttft_s is not None
        assert 0 < report.ttft_s <= report.total_s
        if not report.preemptions:
            assert report.recomputed_tokens == 0


@pytest.mark.parametrize("chunk", [1, 5, 16, 33, 100])
def test_chunked_prefill_gives_the_same_tokens(chunk: int) -> None:
    asked = [request("a", 77, 12)]
    engine, tables = build(batched_tokens_max=chunk, batch_max=1)
    reports = engine.generate(asked)
    check(asked, reports)
    assert [report.tokens for report in reports] == alone(asked)
    assert engine.steps == -(-77 // chunk) + 11
    assert sum(step.prefill_tokens for step in engine.step_times) == (77 if chunk > 1 else 0)
    assert tables.free_blocks == POOL


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_every_prompt_length_modulo_the_block(block_tokens: int) -> None:
    asked = [request(f"r{size}", size, 3) for size in range(1, 2 * block_tokens + 2)]
    engine, tables = build(block_tokens=block_tokens, batch_max=8)
    reports = engine.generate(asked)
    check(asked, reports)
    assert [report.tokens for report in reports] == alone(asked, block_tokens)
    assert tables.free_blocks == POOL


def test_batched_gives_the_same_tokens_as_alone() -> None:
    asked = [request(f"r{size}", size, 20) for size in (1, 15, 16, 40, 64, 90)]
    engine, _ = build(batched_tokens_max=48, batch_max=6)
    reports = engine.generate(asked)
    check(asked, reports)
    assert [report.tokens for report in reports] == alone(asked)
    assert max(step.decodes for step in engine.step_times) == 6
    assert any(step.decodes and step.prefill_tokens for step in engine.step_times)  # mixed steps happened


def test_preemption_gives_the_same_tokens() -> None:
    """Six requests that fit at first and grow beyond the pool."""
    asked = [request(f"r{i}", 30 + i, 40, seed=i + 1) for i in range(6)]
    engine, tables = build(blocks=15, batch_max=6, batched_tokens_max=64)
    reports = engine.generate(asked)
    check(asked, reports)
    assert [report.tokens for report in reports] == alone(asked)
    assert reports[0].preemptions == 0  # the oldest never is
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.recomputed_tokens for report in reports) > 0
    assert tables.free_blocks == 15


def test_step_times_account_for_every_token() -> None:
    engine, _ = build(batched_tokens_max=32)
    engine.generate([request("a", 70, 5)])
    steps = list(engine.step_times)
    assert [(s.prefill_tokens, s.prefill_area) for s in steps[:3]] == [(32, 512.0), (32, 1536.0), (6, 402.0)]
    assert [(s.decodes, s.decode_context) for s in steps[3:]] == [(1, 71), (1, 72), (1, 73), (1, 74)]
    assert all(step.seconds > 0 for step in steps)


def test_temperature_is_deterministic_by_seed_alone_and_batched() -> None:
    asked = [
        Request(f"r{i}", prompt(20 + i, 7), 16, temperature=0.9, top_p=0.95, seed=i % 2, ignore_eos=True)
        for i in (0, 1, 2)
    ]
    engine, _ = build(batch_max=3)
    tokens = [report.tokens for report in engine.generate(asked)]
    assert tokens == alone(asked)
    other = alone([replace(one, seed=99) for one in asked])
    greedy = alone([replace(one, temperature=0.0) for one in asked])
    assert all(len({a, b, c}) == 3 for a, b, c in zip(tokens, other, greedy, strict=True))


def test_the_random_state_survives_preemption() -> None:
    asked = [
        Request(f"r{i}", prompt(30 + i, i + 1), 40, temperature=0.7, seed=i, ignore_eos=True)
        for i in range(6)
    ]
    engine, _ = build(blocks=15, batch_max=6, batched_tokens_max=64)
    reports = engine.generate(asked)
    assert sum(report.preemptions for report in reports) > 0
    assert [report.tokens for report in reports] == alone(asked)


def test_end_tokens_stop_the_output() -> None:
    (free,) = alone([request("a", 40, 12)])
    stop = free[5]
    engine, tables = build()
    (report,) = engine.generate([replace(request("a", 40, 12), stop_ids=(stop,))])
    assert report.tokens == free[: free.index(stop) + 1]
    assert report.finish_reason == "stop"
    eos = Engine(Model(replace(SPEC, eos_ids=(stop,)), WEIGHTS, MODELS[16].memory), tables)
    (by_eos,) = eos.generate([replace(request("a", 40, 12), ignore_eos=False)])
    assert (by_eos.tokens, by_eos.finish_reason) == (report.tokens, "stop")
    (ignored,) = eos.generate([request("a", 40, 12)])
    assert (ignored.tokens, ignored.finish_reason) == (free, "length")
    assert tables.free_blocks == POOL


def test_outputs_stream_the_tokens_of_the_report() -> None:
    engine, _ = build()
    asked = [request("a", 40, 5), request("b", 3, 9)]
    assert all(engine.add(one) for one in asked)
    streams: dict[str, list[int]] = {"a": [], "b": []}
    reports: dict[str, Report] = {}
    while engine.unfinished:
        for out in engine.step():
            assert out.request_id not in reports
            assert out.token is not None
            streams[out.request_id].append(out.token)
            if out.report is not None:
                reports[out.request_id] = out.report
    assert {name: tuple(tokens) for name, tokens in streams.items()} == {
        n: r.tokens for n, r in reports.items()
    }


@pytest.mark.parametrize(("phase", "steps"), [("waiting", 0), ("prompt", 3), ("decoding", 6)])
def test_abort_in_any_phase_frees_everything(phase: str, steps: int) -> None:
    asked = [request("a", 30, 20), request("b", 60, 20)]
    engine, tables = build(batched_tokens_max=20, batch_max=2)
    for one in asked:
        engine.add(one)
    for _ in range(steps):
        engine.step()
    report = engine.abort("b")
    assert report is not None
    assert report.finish_reason == "abort"
    assert {
        "waiting": report.fresh_tokens == 0,
        "prompt": 0 < report.fresh_tokens < 60,
        "decoding": report.fresh_tokens == 60 and report.tokens,
    }[phase]
    assert engine.abort("b") is None
    while engine.unfinished:
        for out in engine.step():
            assert out.request_id == "a"
            last = out.report
    assert last is not None
    assert [last.tokens] == alone(asked[:1])
    assert tables.free_blocks == POOL


def test_close_gives_all_blocks_back() -> None:
    engine, tables = build(batched_tokens_max=20)
    for size in (30, 40, 50):
        engine.add(request(f"r{size}", size))
    engine.step()
    assert tables.free_blocks < POOL
    engine.close()
    engine.close()
    assert tables.free_blocks == POOL
    with pytest.raises(RuntimeError, match="closed"):
        engine.add(request("late", 5))


def test_the_queue_is_bounded() -> None:
    engine, _ = build(queue_max=2)
    assert engine.add(request("a", 5, 2))
    assert engine.add(request("b", 6, 2))
    assert not engine.add(request("c", 7, 2))
    while engine.unfinished == 2:
        engine.step()
    assert engine.add(request("c", 7, 2))
    engine.close()
    engine, _ = build(queue_max=2)
    asked = [request(f"r{i}", 5 + i, 3) for i in range(7)]
    check(asked, engine.generate(asked))


GOOD = Request("good", (5, 6, 7), 4)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(GOOD, id=""), "id"),
        (replace(GOOD, prompt=()), "prompt"),
        (replace(GOOD, prompt=(5, SPEC.vocab)), "prompt"),
        (replace(GOOD, prompt=(-1,)), "prompt"),
        (replace(GOOD, prompt=(5,) * SPEC.positions_max), "prompt"),
        (replace(GOOD, prompt=(5,) * (POOL * 16 + 1)), "prompt"),
        (replace(GOOD, max_new_tokens=0), "max_new_tokens"),
        (replace(GOOD, max_new_tokens=SPEC.positions_max), "max_new_tokens"),
        (replace(GOOD, max_new_tokens=POOL * 16 - 1), "max_new_tokens"),
        (replace(GOOD, temperature=-0.1), "temperature"),
        (replace(GOOD, temperature=float("nan")), "temperature"),
        (replace(GOOD, temperature=1.0, top_p=0.0), "top_p"),
        (replace(GOOD, temperature=1.0, seed=-1), "seed"),
        (replace(GOOD, stop_ids=(SPEC.vocab,)), "stop_ids"),
        (replace(GOOD, reuse="all"), "reuse"),  # type: ignore[arg-type]
    ],
)
def test_what_can_never_be_served_is_refused_at_once(bad: Request, field: str) -> None:
    engine, tables = build()
    with pytest.raises(InvalidRequest, match=field) as caught:
        engine.add(bad)
    assert caught.value.field == field
    with pytest.raises(InvalidRequest):
        engine.generate([GOOD, bad])
    assert engine.unfinished == 0
    assert tables.free_blocks == POOL


def test_the_largest_request_that_fits_is_served() -> None:
    """The last token has no KV: prompt + new tokens − 1 fill the pool exactly."""
    asked = [request("a", 40, 4 * 16 - 40 + 1)]
    engine, tables = build(blocks=4)
    check(asked, engine.generate(asked))
    assert tables.free_blocks == 4


def test_ids_are_unique_while_unfinished() -> None:
    engine, _ = build()
    engine.add(GOOD)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(GOOD)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.generate([])
    engine.abort("good")
    with pytest.raises(InvalidRequest, match="same id"):
        engine.generate([GOOD, GOOD])


def test_limits_and_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="batched_tokens_max"):
        EngineLimits(batch_max=9, batched_tokens_max=8)
    with pytest.raises(ValueError, match="queue_max"):
        EngineLimits(queue_max=0)
    with pytest.raises(ValueError, match="load_s_max"):
        EngineLimits(load_s_max=-1)
    with pytest.raises(ValueError, match="32 tokens"):
        Engine(MODELS[16], LocalTables(4, 32))
    with pytest.raises(ValueError, match="memory has"):
        Engine(MODELS[16], LocalTables(POOL + 1, 16))


def test_local_tables_notice_a_second_finish() -> None:
    tables = LocalTables(4, 16)
    table = tables.begin("a", range(20), "none")
    assert table is not None
    copy = Table(list(table.blocks))
    tables.finish(table)
    with pytest.raises(RuntimeError, match="twice"):
        tables.finish(copy)


@dataclass(frozen=True)
class Arrival:
    """A request of a random mix: it comes before step `at`, and may be aborted before step `abort_at`."""

    size: int
    new: int
    heat: int
    at: int
    abort_at: int | None


ARRIVALS = st.builds(
    Arrival,
    size=st.integers(1, 90),
    new=st.integers(1, 24),
    heat=st.integers(0, 3),
    at=st.integers(0, 12),
    abort_at=st.none() | st.integers(0, 40),
)


@settings(max_examples=30, deadline=None)
@given(
    mix=st.lists(ARRIVALS, min_size=1, max_size=8),
    blocks=st.integers(8, 20),
    batch_max=st.integers(1, 6),
    chunk=st.integers(6, 80),
)
def test_any_mix_equals_the_oracle(mix: list[Arrival], blocks: int, batch_max: int, chunk: int) -> None:
    asked = [
        Request(
            f"r{i}", prompt(one.size, one.size), one.new, temperature=one.heat / 3, seed=i, ignore_eos=True
        )
        for i, one in enumerate(mix)
    ]
    engine, tables = build(blocks=blocks, batch_max=batch_max, batched_tokens_max=chunk)
    reports: dict[str, Report] = {}
    turns = 0
    while turns <= 12 or engine.unfinished:
        for one, arrival in zip(asked, mix, strict=True):
            if arrival.at == turns:
                engine.add(one)
            if arrival.abort_at == turns and (report := engine.abort(one.id)) is not None:
                reports[one.id] = report
        reports.update({out.request_id: out.report for out in engine.step() if out.report is not None})
        turns += 1
        assert turns < 2_000  # 8 · (90 + 24) tokens, one each, with room for preemptions: never near
    assert reports.keys() == {one.id for one in asked}
    assert tables.free_blocks == blocks
    finished = [one for one in asked if reports[one.id].finish_reason != "abort"]
    check(finished, [reports[one.id] for one in finished])
    expected = dict(zip([one.id for one in asked], alone(asked), strict=True))
    for one in asked:
        tokens = reports[one.id].tokens
        assert tokens == expected[one.id][: len(tokens)]
