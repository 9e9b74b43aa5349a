"""The feed of a kvstore daemon: a snapshot, events, and what follows when daemon or connection are gone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_vllm import TruthSink
from scene import Scene

from kvstore.config import Config, DaemonConfig, EventsConfig, GrpcConfig
from kvstore.errors import BadRequest
from kvstore.events import EventKind
from kvstore.router.feeding import FeedTimes
from kvstore.router.kvstore_feed import KvstoreFeed, KvstoreSource
from kvstore.rpc.api.server import GrpcServer
from kvstore.testing import StoreDriver, small_config
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb

WAIT_S = 30.0
TIMES = FeedTimes(answer_s=10.0, pause_s=0.01, pause_max_s=0.1)
TOKEN = "t" * 43


class Follower:
    """A feed that runs, and the sink that it tells."""

    def __init__(self, source: KvstoreSource) -> None:
        self.sink = TruthSink()
        self.feed = KvstoreFeed(source, self.sink, TIMES)
        self.start()

    def start(self) -> None:
        """Again, with what the feed remembers."""
        self.task = asyncio.get_running_loop().create_task(self.feed.run())

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.001)

    async def knows(self, keys: set[bytes]) -> None:
        """Until that is what it knows, and is sure of."""
        await self.until(lambda: not self.sink.doubt and self.sink.known == keys)

    async def close(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def keys_of(*chains: Any) -> set[bytes]:
    return {key.tobytes() for chain in chains for key in chain.keys}


# ---- a real daemon ----------------------------------------------------------------------------------------


async def test_a_daemon_that_is_killed_and_started_anew_is_told_anew(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine()
    first = engine.saved(1, 4)
    follower = Follower(KvstoreSource(f"unix:{daemon.socket.with_name('kv-grpc.sock')}"))
    await follower.knows(keys_of(first))
    second = engine.saved(2, 4)
    await follower.knows(keys_of(first, second))
    epoch = follower.feed.epoch
    assert epoch.hex() == daemon.status()["epoch"]
    daemon.end(signal.SIGKILL)
    await follower.until(lambda: bool(follower.sink.doubt))
    assert follower.sink.known == keys_of(first, second)
    await asyncio.to_thread(daemon.start)
    await follower.knows(set())
    assert (follower.feed.epoch == epoch, follower.feed.counts.resets) == (False, 2)
    third = await asyncio.to_thread(lambda: engine.attached().saved(3, 4))
    await follower.knows(keys_of(third))
    await follower.close()


# ---- its parts, on the test's own loop --------------------------------------------------------------------


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("f")
    tokens = folder / "tokens.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    entry = f'[[tokens]]\nname = "router"\nsha256 = "{digest}"\ntenants = ["default"]\nverbs = ["read"]\n'
    tokens.write_text(entry)
    tokens.chmod(0o600)
    return msgspec.structs.replace(
        small_config(),
        daemon=DaemonConfig(socket=str(folder / "kv.sock")),
        grpc=GrpcConfig(tokens_file=str(tokens), tokens_on_unix=True, stop_s=0.0),
        events=EventsConfig(log_max=50),
    )


@pytest.fixture
async def store(config: Config) -> AsyncIterator[StoreDriver]:
    """A store whose API wants a token."""
    with StoreDriver(config) as driver:
        server = GrpcServer(driver.store)
        await server.open()
        yield driver
        await server.close()


@pytest.fixture
def source(config: Config) -> KvstoreSource:
    """Where it is, and the token."""
    return KvstoreSource(f"unix:{config.daemon.socket.removesuffix('.sock')}-grpc.sock", token=TOKEN)


def random_keys(seed: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def as_set(keys: np.ndarray) -> set[bytes]:
    return {key.tobytes() for key in keys}


async def test_without_the_token_it_says_why_it_knows_nothing(
    store: StoreDriver, source: KvstoreSource
) -> None:
    follower = Follower(replace(source, token="wrong"))
    await follower.until(lambda: follower.sink.doubt.startswith("UNAUTHENTICATED"))
    assert not follower.sink.known
    await follower.close()


async def test_a_feed_that_was_away_goes_on_where_it_was(store: StoreDriver, source: KvstoreSource) -> None:
    log = store.group().events
    log.append(EventKind.STORED, Tier.HOST, random_keys(1))
    follower = Follower(source)
    await follower.knows(set())  # made-up events: the snapshot knows better
    log.append(EventKind.STORED, Tier.HOST, random_keys(2))
    await follower.knows(as_set(random_keys(2)))
    await follower.close()
    log.append(EventKind.STORED, Tier.NVME, random_keys(3), parent=b"p" * 32)
    log.append(EventKind.REMOVED, Tier.HOST, random_keys(2))
    follower.start()
    await follower.until(lambda: follower.feed.sequence == log.sequence)
    assert (follower.feed.counts.resets, follower.sink.known) == (1, as_set(random_keys(3)))
    await follower.close()


async def test_one_that_was_away_too_long_is_told_anew(store: StoreDriver, source: KvstoreSource) -> None:
    log = store.group().events
    follower = Follower(source)
    await follower.knows(set())
    await follower.close()
    for number in range(60):
        log.append(EventKind.STORED, Tier.HOST, random_keys(number))
    follower.start()
    await follower.until(lambda: follower.feed.sequence == log.sequence)
    assert follower.feed.counts.resets == 2
    await follower.close()


async def test_a_block_is_on_gpu_while_any_engine_has_it(store: StoreDriver, source: KvstoreSource) -> None:
    log, (a, b) = store.group().events, (b"a" * 16, b"b" * 16)
    nothing = np.empty((0, 32), np.uint8)
    mine = Follower(replace(source, engine=b))
    follower = Follower(source)
    await follower.knows(set())
    await mine.knows(set())
    shared, own = random_keys(1), random_keys(2)
    log.append(EventKind.STORED, Tier.GPU, shared, engine=a)
    log.append(EventKind.STORED, Tier.GPU, shared, engine=b)
    log.append(EventKind.STORED, Tier.GPU, own, engine=b)
    log.append(EventKind.REMOVED, Tier.GPU, shared, engine=b)
    await follower.until(lambda: follower.feed.sequence == 4)
    assert follower.sink.known == as_set(shared) | as_set(own)
    await mine.until(lambda: mine.feed.sequence == 4)
    assert mine.sink.known == as_set(own)
    log.append(EventKind.CLEARED, Tier.GPU, nothing, engine=b)
    await follower.knows(as_set(shared))
    await mine.knows(set())
    log.append(EventKind.CLEARED, Tier.GPU, nothing, engine=a)
    await follower.knows(set())
    await follower.close()
    await mine.close()


# ---- streams that make no sense ---------------------------------------------------------------------------

EPOCH = b"e" * 16


def event(sequence: int, **changes: Any) -> pb.SubscribeResponse:
    fields = {"kind": pb.EVENT_KIND_STORED, "tier": pb.TIER_HOST, "keys": bytes(32), **changes}
    return pb.SubscribeResponse(epoch=EPOCH, sequence=sequence, last=True, event=pb.Event(**fields))


def snapshot(sequence: int, *, first: bool = True, keys: bytes = b"") -> pb.SubscribeResponse:
    part = pb.Snapshot(first=first, tier=pb.TIER_HOST, keys=keys)
    return pb.SubscribeResponse(epoch=EPOCH, sequence=sequence, last=True, snapshot=part)


@pytest.mark.parametrize(
    "message",
    [
        pb.SubscribeResponse(epoch=EPOCH, sequence=6, last=True),
        event(7),
        event(5),
        event(6, keys=bytes(31)),
        snapshot(6, first=False),
    ],
    ids=["nothing", "a gap", "the past", "half a key", "no beginning"],
)
def test_a_message_that_does_not_follow_is_bad(message: pb.SubscribeResponse) -> None:
    feed = KvstoreFeed(KvstoreSource("unix:/nowhere"), TruthSink())
    feed._apply(snapshot(5))
    with pytest.raises(BadRequest, match="subscribe: "):
        feed._apply(message)
    assert (feed.epoch, feed.sequence) == (EPOCH, 5)
    feed._apply(event(6))
    assert feed.sequence == 6


def test_kinds_and_tiers_of_later_versions() -> None:
    sink = TruthSink()
    feed = KvstoreFeed(KvstoreSource("unix:/nowhere"), sink)
    feed._apply(snapshot(1, keys=b"k" * 32))
    feed._apply(event(2, kind=9))
    feed._apply(event(3, kind=pb.EVENT_KIND_CLEARED, keys=b""))
    assert (feed.counts.skipped, sink.known) == (1, set())
