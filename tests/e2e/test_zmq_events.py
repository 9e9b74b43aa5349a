"""KV events over ZMQ: what a daemon publishes, replays and tells at once, and what peers cannot do to it."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from fake_engine import FakeEngine
from real_daemon import WAIT_S, RealDaemon, eventually
from scene import Scene
from zmq_ends import Message, Subscriber

from kvstore.config import Config, DaemonConfig, EventsConfig
from kvstore.errors import ConfigError
from kvstore.events import EventKind
from kvstore.router.kv_schema import Cleared, Removed, Stored, decode_batch
from kvstore.rpc import zmq_events
from kvstore.rpc.endpoints import free_endpoints
from kvstore.rpc.zmq_events import ZmqEvents
from kvstore.testing import StoreDriver, small_config
from kvstore.types import Tier


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    """A daemon that publishes; tests leave blocks behind in it, and nothing else."""
    folder = tmp_path_factory.mktemp("z")
    settings = {
        "events.zmq": f'"ipc://{folder}/pub"',
        "events.zmq_replay": f'"ipc://{folder}/rep"',
        "events.zmq_topic": '"kv@a"',
        "daemon.socket_mode": '"0660"',
    }
    daemon = RealDaemon(folder, settings)
    try:
        yield daemon.start()
        daemon.assert_quiet()
        assert daemon.end() == 0, daemon.said()
        assert not [*folder.glob("pub"), *folder.glob("rep")]
    finally:
        daemon.close()


@pytest.fixture
def subscriber(published: RealDaemon) -> Iterator[Subscriber]:
    """At both of its sockets."""
    folder = published.folder
    with Subscriber(f"ipc://{folder}/pub", f"ipc://{folder}/rep", b"kv@a") as subscriber:
        yield subscriber


@pytest.fixture
def engine(request: pytest.FixtureRequest, published: RealDaemon) -> Iterator[FakeEngine]:
    """Attached to it, with a model of this test's own."""
    engine = FakeEngine(published.socket, model=request.node.name).attached()
    yield engine
    engine.close()


def keys_of(messages: list[Message]) -> set[bytes]:
    """What is readable after these."""
    held: set[bytes] = set()
    for message in messages:
        for event in message.batch.events:
            if isinstance(event, Cleared):
                held.clear()
                continue
            keys = {event.hashes[at : at + 32] for at in range(0, len(event.hashes), 32)}
            held = held | keys if isinstance(event, Stored) else held - keys
    return held


def truth(chains: list[Any]) -> set[bytes]:
    return {key.tobytes() for chain in chains for key in chain.keys}


# ---- a real daemon ----------------------------------------------------------------------------------------


def test_saved_blocks_arrive_and_what_was_missed_is_replayed(
    published: RealDaemon, subscriber: Subscriber, engine: FakeEngine
) -> None:
    before, chains = published.group(), [engine.saved(seed, 4) for seed in range(3)]
    first = subscriber.joined(lambda: chains.append(engine.saved(len(chains), 4)))
    chains.append(engine.saved(1000, 4))
    after = published.group()
    heard = [first]
    while heard[-1].sequence < after["events"] - 1:
        heard.append(subscriber.heard())
    assert {message.topic for message in heard} == {b"kv@a"}
    assert [m.sequence for m in heard] == list(range(first.sequence, after["events"]))
    (event,) = heard[-1].batch.events
    keys, size = chains[-1].keys.tobytes(), engine.memory.layout.block_tokens
    assert event == Stored(keys, 32, None, None, size, b"", Tier.HOST)
    every = subscriber.replay(before["events"])
    assert [m.sequence for m in every] == list(range(before["events"], after["events"]))
    new = [message for message in heard if message.sequence >= before["events"]]
    assert every[-len(new) :] == new  # to the byte, dates included
    assert keys_of(every) == truth(chains)
    assert [m.sequence for m in subscriber.replay(after["events"] - 1)] == [after["events"] - 1]
    assert subscriber.replay(after["events"]) == []
    counted = published.group()["published"]
    assert counted["batches"] == after["events"]
    assert counted["replays"] == before["published"]["replays"] + 3


def test_a_chain_that_goes_on_names_its_parent(
    published: RealDaemon, subscriber: Subscriber, engine: FakeEngine
) -> None:
    before, chain = published.group()["events"], engine.chain(1, 6)
    engine.save(chain, 0, 4)
    engine.save(chain, 4, 6)
    every = [event for message in subscriber.replay(before) for event in message.batch.events]
    told = [(event.parent, event.hashes) for event in every if isinstance(event, Stored)]
    assert told == [(None, chain.keys[:4].tobytes()), (chain.keys[3].tobytes(), chain.keys[4:].tobytes())]


def test_a_snapshot_tells_everything_and_where_events_go_on(
    published: RealDaemon, subscriber: Subscriber, engine: FakeEngine
) -> None:
    chains = [engine.saved(seed, 4) for seed in range(5)]
    group = published.group()
    parts, upcoming, epoch = subscriber.snapshot()
    held = keys_of(parts)
    assert truth(chains) <= held
    assert (len(held), upcoming) == (group["host"]["ready"], group["events"])
    assert epoch.hex() == published.status()["epoch"]
    chains.append(engine.saved(9, 4))
    (message,) = subscriber.replay(upcoming)
    assert (message.sequence, keys_of([message])) == (upcoming, truth(chains[-1:]))


def test_garbage_is_counted_and_heard_no_more_of(
    published: RealDaemon, subscriber: Subscriber, engine: FakeEngine
) -> None:
    before, chain = published.group(), engine.saved(1, 4)
    garbage = [(b"", b""), (b"", b"1234567"), (b"", b"123456789"), (b"x" * 8,), (b"", b"x" * 8, b"y"), (b"",)]
    garbage += [(b"y", b"x" * 8)]
    with Subscriber(replay=f"ipc://{published.folder}/rep") as vandal:
        for frames in garbage:
            vandal.dealer.send_multipart(frames)
        counted = before["published"]["bad_requests"] + len(garbage)
        eventually(lambda: published.group()["published"]["bad_requests"] == counted, "it is counted")
        vandal.dealer.send_multipart((b"", b"z" * 5000))  # longer than anybody may speak: disconnected
        vandal.ask((2**64 - 1).to_bytes(8, "big"))
        assert keys_of(subscriber.replay(before["events"])) == truth([chain])
        assert subscriber.replay(2**64 - 1) == []
    published.assert_sound()


def test_who_may_open_the_paths_is_the_mode_of_the_socket(published: RealDaemon) -> None:
    for name in ("pub", "rep"):
        assert stat.S_IMODE((published.folder / name).stat().st_mode) == 0o660


def test_a_path_that_a_daemon_has_is_not_taken_from_it(published: RealDaemon, subscriber: Subscriber) -> None:
    endpoint = f"ipc://{published.folder}/pub"
    other = DaemonConfig(socket=f"{published.folder}/other.sock")
    with pytest.raises(ConfigError, match=r"^events\.zmq: another daemon listens on"):
        free_endpoints(Config(daemon=other, events=EventsConfig(zmq=endpoint)))
    assert subscriber.snapshot()[2].hex() == published.status()["epoch"]


def test_each_trust_group_has_ports_of_its_own(stage: Scene) -> None:
    daemon = stage.start_daemon(
        tenants="[[tenants]]\nname = 'a'\ngroup = 'red'\n[[tenants]]\nname = 'b'\ngroup = 'blue'\n",
        events__zmq='"blue=tcp://127.0.0.1:0,red=tcp://127.0.0.1:0"',
        events__zmq_replay='"red=tcp://127.0.0.1:0,blue=tcp://127.0.0.1:0"',
    )

    def serves() -> list[str]:
        return [line for line in daemon.log.read_text().splitlines() if '"kvstore serves"' in line]

    (said,) = eventually(serves, "it says where it publishes")
    ports = json.loads(said)["events"]
    assert {port.rpartition(":")[0] for port in ports} == {"tcp://127.0.0.1"}
    chain = stage.engine(tenant="a").saved(1, 4)
    with Subscriber(ports[0], ports[1]) as red, Subscriber(ports[2], ports[3]) as blue:
        assert keys_of(red.replay(0)) == truth([chain])
        assert (blue.replay(0), blue.snapshot()[:2]) == ([], ([], 0))


def test_an_endpoint_that_others_reach_is_refused_with_the_words_to_type(stage: Scene) -> None:
    daemon = stage.keep(RealDaemon(stage.folder, {"events.zmq": '"tcp://0.0.0.0:0"'}))
    daemon.start(wait=False)
    assert daemon.process.wait(WAIT_S) == 2
    said = " ".join(daemon.said().split())
    assert "events.zmq: tcp://0.0.0.0:0 is plaintext" in said
    assert "--set events.zmq_insecure=true" in said


def test_without_pyzmq_it_says_what_to_install(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"^events\.zmq: .*pip install 'kvstored\[router\]'"):
        free_endpoints(config)


# ---- its parts, on the test's own loop --------------------------------------------------------------------


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("z")
    events = EventsConfig(log_max=2000, zmq=f"ipc://{folder}/pub", zmq_replay=f"ipc://{folder}/rep")
    daemon = DaemonConfig(socket=f"{folder}/kv.sock")
    return msgspec.structs.replace(small_config(), events=events, daemon=daemon)


@pytest.fixture
async def store(config: Config) -> AsyncIterator[StoreDriver]:
    """A store whose events are published."""
    with StoreDriver(config) as driver:
        events = ZmqEvents(driver.store)
        events.open()
        yield driver
        await events.close()
        await events.close()


async def replayed(config: Config, start: int = 0) -> list[Any]:
    """Events from a sequence on."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(config.events.zmq_replay)
        await dealer.send_multipart((b"", start.to_bytes(8, "big")))
        found: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while (frames := await dealer.recv_multipart())[2] != b"\xff" * 8:
                found += decode_batch(frames[3]).events
        return found


async def test_all_blocks_cleared_is_told_of_the_device_that_is_empty(
    store: StoreDriver, config: Config
) -> None:
    session = store.attach()
    session.own_pool(16, 16)
    chain = session.chain(range(16))
    table = session.acquire(0, 4)
    session.commit(table.lease, chain, 0, 4)
    session.disconnect()
    stored, cleared = await replayed(config)
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.tier) == (chain.keys.tobytes(), Tier.GPU)
    assert cleared == Cleared(Tier.GPU)


async def test_a_replay_begins_where_the_log_does(store: StoreDriver, config: Config) -> None:
    log = store.group().events
    for number in range(2005):
        log.append(EventKind.STORED, Tier.HOST, np.full((1, 32), number % 256, np.uint8))
    found = await replayed(config)
    assert len(found) == 2000
    assert found[0].hashes == bytes([5]) * 32
    assert len(await replayed(config, start=2003)) == 2


async def test_an_event_of_many_keys_comes_in_parts_that_go_on(store: StoreDriver, config: Config) -> None:
    keys = np.random.default_rng(1).integers(0, 256, (70_000, 32), np.uint8)
    store.group().events.append(EventKind.STORED, Tier.NVME, keys, parent=b"p" * 32)
    store.group().events.append(EventKind.REMOVED, Tier.NVME, keys)
    parts = await replayed(config)
    assert [len(part) for part in parts] == [32_768, 32_768, 4_464] * 2
    assert b"".join(part.hashes for part in parts[:3]) == keys.tobytes()
    assert [part.parent for part in parts[:3]] == [b"p" * 32, *(part.hashes[-32:] for part in parts[:2])]
    assert {type(part) for part in parts[3:]} == {Removed}


async def test_a_peer_that_does_not_read_is_given_up_and_holds_nobody_up(
    store: StoreDriver, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_events, "STALL_S", 0.05)
    log = store.group().events
    keys = np.random.default_rng(1).integers(0, 256, (1000, 32), np.uint8)
    for _ in range(100):
        log.append(EventKind.STORED, Tier.HOST, keys)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.set(zmq.RCVHWM, 1)
        deaf.connect(config.events.zmq_replay)
        for _ in range(20):
            await deaf.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(WAIT_S):
            while not log.published.abandoned:
                assert len(await replayed(config, start=98)) == 2  # others are answered meanwhile
        assert log.published.refused + log.published.replays > 1


async def test_a_log_that_outran_the_publisher_leaves_a_gap_and_not_silence(
    store: StoreDriver, config: Config
) -> None:
    log = store.group().events
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.SUBSCRIBE, b"")
        sub.connect(config.events.zmq)
        key = np.zeros((1, 32), np.uint8)
        async with asyncio.timeout(WAIT_S):
            while not await sub.poll(10):
                log.append(EventKind.STORED, Tier.HOST, key)
            for _ in range(3000):  # in one turn of the loop: three times what the log keeps
                log.append(EventKind.STORED, Tier.HOST, key)
            sequences = [int.from_bytes((await sub.recv_multipart())[1], "big")]
            while sequences[-1] < log.sequence - 1:
                sequences.append(int.from_bytes((await sub.recv_multipart())[1], "big"))
    steps = np.diff(sequences)
    assert (steps > 0).all()
    assert (steps > 1).sum() == 1


async def test_a_port_in_use_is_named(config: Config) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind("tcp://127.0.0.1:0")
        endpoint = taken.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        events = msgspec.structs.replace(config.events, zmq=endpoint)
        with StoreDriver(msgspec.structs.replace(config, events=events)) as driver:
            opened = ZmqEvents(driver.store)
            with pytest.raises(ConfigError, match=rf"^events\.zmq: cannot bind {endpoint}: address"):
                opened.open()
            await opened.close()
