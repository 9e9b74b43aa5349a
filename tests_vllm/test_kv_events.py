"""KV events as vLLM itself makes, sends and reads them: what its classes encode we decode, and vice versa."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from engines import Engine
from fake_vllm import TruthSink
from models import prompt_of

from kvstore.clock import MonotonicClock
from kvstore.events import EventKind, KVEvent
from kvstore.router.chain_names import TokenNames
from kvstore.router.feeding import FeedTimes
from kvstore.router.kv_schema import Cleared, Removed, Stored, decode_batch, extra_of
from kvstore.router.placing import RouteRequest
from kvstore.router.prefixes import Prefixes
from kvstore.router.vllm_feed import VllmFeed
from kvstore.router.vllm_wire import VllmSource
from kvstore.rpc.zmq_wire import Schema
from kvstore.types import Tier

WAIT_S = 60.0
_times_s = itertools.count(1.5)
# Long: vLLM looks at its replay socket ten times a second.
TIMES = FeedTimes(probe_s=0.5, answer_s=5.0, pause_s=0.05, pause_max_s=0.5)


def stored(hashes: list[Any], tokens: list[int], **more: Any) -> Any:
    """vLLM's own event of blocks of two tokens."""
    from vllm.distributed.kv_events import BlockStored

    fields = {"parent_block_hash": None, "lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return BlockStored(block_hashes=hashes, token_ids=tokens, block_size=2, **fields)


def batch(*events: Any) -> Any:
    """With a time of its own, as an engine's scheduler gives it: that is how two processes are told apart."""
    from vllm.distributed.kv_events import KVEventBatch

    return KVEventBatch(ts=next(_times_s), events=list(events))


# ---- its classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hashes", [[1, 2**64 - 1], [b"a" * 32, b"b" * 32]], ids=["integers", "bytes"])
def test_what_its_classes_encode_is_decoded(hashes: list[Any]) -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    salted = [("mm1", 3), "salt"], None
    made = batch(
        stored(hashes, [5, 6, 7, 8], parent_block_hash=hashes[0], extra_keys=list(salted), group_idx=1),
        stored(hashes, [5, 6, 7, 8], lora_name="sql", lora_id=3, kv_cache_spec_kind="full_attention"),
        BlockRemoved(block_hashes=hashes, medium="CPU"),
        AllBlocksCleared(),
    )
    made.data_parallel_rank = 2
    packed = b"".join(hashes) if isinstance(hashes[0], bytes) else np.array(hashes, np.uint64).tobytes()
    width = len(packed) // 2
    found = decode_batch(msgspec.msgpack.encode(made))
    assert (found.ts_s, found.rank, found.skipped) == (made.ts, 2, 0)
    first, second, third, removed, cleared = found.events
    assert isinstance(first, Stored) and isinstance(second, Stored) and isinstance(third, Stored)
    assert (first.hashes, first.parent, first.group) == (packed[:width], packed[:width], 1)
    assert first.extra == extra_of(None, (("mm1", 3), "salt"))
    assert (second.hashes, second.parent, second.extra) == (packed[width:], packed[:width], b"")
    assert second.tokens is not None and second.tokens.tolist() == [7, 8]
    assert (third.hashes, third.extra, third.kind) == (packed, extra_of("sql", ()), "full_attention")
    assert removed == Removed(packed, width, Tier.HOST)
    assert cleared == Cleared(None)


def test_its_classes_read_what_a_daemon_publishes_as_maps() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
    hashes = [key.tobytes() for key in keys]

    def read(kind: EventKind, tier: Tier, told: np.ndarray, engine: bytes = b"", parent: bytes = b"") -> Any:
        payload = Schema(as_map=True).event(KVEvent(1, kind, tier, engine, parent, told), 2.5, 16)
        (event,) = decode(payload).events
        return event

    event = read(EventKind.STORED, Tier.HOST, keys, parent=b"p" * 32)
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == (hashes, b"p" * 32, [])
    assert (event.block_size, event.medium, event.ownership) == (16, "CPU", None)
    event = read(EventKind.REMOVED, Tier.GPU, keys, engine=b"e" * 16)
    assert isinstance(event, BlockRemoved)
    assert (event.block_hashes, event.medium, event.ownership) == (hashes, "GPU", (b"e" * 16).hex())
    assert isinstance(read(EventKind.CLEARED, Tier.GPU, keys[:0], engine=b"e" * 16), AllBlocksCleared)


# ---- its publisher ----------------------------------------------------------------------------------------


@pytest.fixture
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes vLLM's publisher on the same two endpoints each time; the one before must be shut down."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    folder, made = tmp_path_factory.mktemp("p"), []

    def make(buffer_steps: int = 10_000) -> Any:
        made.append(
            ZmqEventPublisher(0, f"ipc://{folder}/pub", f"ipc://{folder}/rep", buffer_steps, topic="kv")
        )
        return made[-1]

    yield make
    for each in made:
        if each._running:
            each.shutdown()


def source_of(publisher: Any) -> VllmSource:
    return VllmSource(publisher._endpoint, publisher._replay_endpoint, b"kv")


@contextlib.asynccontextmanager
async def following(source: VllmSource) -> Any:
    """A feed that runs, with its sink."""
    feed = VllmFeed(source, TruthSink(), TIMES)
    task = asyncio.get_running_loop().create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def knows(feed: VllmFeed, blocks: set[int]) -> None:
    """Until it knows exactly these."""
    sink: Any = feed._sink
    async with asyncio.timeout(WAIT_S):
        while sink.doubt or sink.known != blocks:  # noqa: ASYNC110  (a sink has no event)
            await asyncio.sleep(0.01)


def test_its_publisher_is_followed_through_late_joining_and_a_restart(
    publisher: Callable[..., Any],
) -> None:
    async def follow() -> None:
        first = publisher()
        for block in range(1, 301):
            first.publish(batch(stored([block], [1, 2])))
        async with following(source_of(first)) as feed:
            await knows(feed, set(range(1, 301)))
            first.publish(batch(stored([1000, 1001], [1, 2, 3, 4])))
            await knows(feed, {*range(1, 301), 1000, 1001})
            assert (feed.counts.resets, feed.counts.lost) == (1, 0)
            await asyncio.to_thread(first.shutdown)
            second = publisher()
            for block in range(2000, 2302):  # as many batches as the other had sent, and one more
                second.publish(batch(stored([block], [1, 2])))
            await knows(feed, set(range(2000, 2302)))
            assert feed.counts.resets == 2

    asyncio.run(follow())


def test_its_buffer_may_not_reach_back(publisher: Callable[..., Any]) -> None:
    async def follow() -> None:
        first = publisher(buffer_steps=10)
        for block in range(50):
            first.publish(batch(stored([block + 1], [1, 2])))
        async with asyncio.timeout(WAIT_S):  # a thread of its own sends them; who comes earlier hears more
            while not first._buffer or first._buffer[-1][0] != 49:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with following(source_of(first)) as feed:
            await knows(feed, set(range(41, 51)))
            assert feed.counts.lost == 40

    asyncio.run(follow())


# ---- a real engine ----------------------------------------------------------------------------------------


def test_a_real_engine_tells_which_tokens_its_blocks_hold(
    tiny: Path, new_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from vllm.config.kv_events import KVEventsConfig

    folder, block_tokens = tmp_path_factory.mktemp("e"), 128
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/pub",
        replay_endpoint=f"ipc://{folder}/rep",
    )
    engine = new_engine(tiny, block_tokens=block_tokens, extra={"kv_events_config": events})
    prompt = prompt_of(3 * block_tokens + 20)
    told: list[Stored] = []

    class Listening(TruthSink):
        def stored(self, event: Stored) -> None:
            told.append(event)
            super().stored(event)

    async def follow(sink: TruthSink, reached: Callable[[], bool]) -> None:
        source = VllmSource(f"ipc://{folder}/pub", f"ipc://{folder}/rep")
        task = asyncio.get_running_loop().create_task(VllmFeed(source, sink, TIMES).run())
        async with asyncio.timeout(WAIT_S):
            while sink.doubt or not reached():  # noqa: ASYNC110  (a sink has no event)
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    engine.generate(prompt, 2)
    sink = Listening()
    asyncio.run(follow(sink, lambda: len(sink.known) == 3))
    tokens = [token for event in told if event.tokens is not None for token in event.tokens.tolist()]
    assert tokens == prompt[: 3 * block_tokens]
    assert [(event.block_tokens, event.tier, event.extra) for event in told] == [
        (block_tokens, Tier.GPU, b"")
    ] * len(told)
    assert told[0].parent is None
    before = told[0]
    for event in told[1:]:
        assert event.parent == before.hashes[-before.width :]
        before = event
    assert engine.llm.reset_prefix_cache()
    engine.generate(prompt_of(block_tokens + 5, seed=1), 1)  # events leave with a step
    cleared = TruthSink()
    asyncio.run(follow(cleared, lambda: "cleared" in cleared.diary and len(cleared.known) == 1))
    assert not cleared.known & sink.known


def test_a_real_engines_blocks_are_found_by_the_prompt_and_its_salt_alone(
    tiny: Path, new_engine: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The router's index fed by vLLM itself: it never sees how vLLM hashes."""
    from vllm.config.kv_events import KVEventsConfig

    folder, block_tokens = tmp_path_factory.mktemp("e"), 128
    source = VllmSource(f"ipc://{folder}/pub", f"ipc://{folder}/rep")
    events = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=source.publish, replay_endpoint=source.replay
    )
    engine = new_engine(tiny, block_tokens=block_tokens, extra={"kv_events_config": events})
    prompt = prompt_of(3 * block_tokens + 20)
    prefixes = Prefixes(TokenNames(0, (), Random(1)), 10_000, 1, MonotonicClock())
    holdings = prefixes.join(100, told=True)

    def matched(salt: str) -> int:
        request = RouteRequest("", np.array(prompt, np.uint32), True, "", salt=salt)
        return int(prefixes.matched_blocks(prefixes.names.of_prompt(request), [holdings])[0, 0])

    async def follow(blocks: int) -> None:
        task = asyncio.get_running_loop().create_task(VllmFeed(source, holdings, TIMES).run())
        async with asyncio.timeout(WAIT_S):
            while holdings.doubt or holdings.blocks()[0] != blocks:  # noqa: ASYNC110  (a sink has no event)
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    engine.generate(prompt, 1, salt="alice")
    asyncio.run(follow(3))
    assert prefixes.names.block_tokens == block_tokens, "as the events say"
    assert (matched("alice"), matched("bob"), matched("")) == (3, 0, 0)
    engine.generate(prompt, 1)
    asyncio.run(follow(6))
    assert (matched("alice"), matched("bob"), matched("")) == (3, 0, 3)
