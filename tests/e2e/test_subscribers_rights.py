"""A subscription has no end of its own: it ends when its caller may not hear of the trust group any more."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from real_daemon import WAIT_S, RealDaemon, eventually
from scene import Scene

from kvstore.config.tokens import digest_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

CODE = grpc.StatusCode
TEAM = '[[tenants]]\nname = "{}"\ngroup = "team"\n'
ALICE, BOB = TEAM.format("alice"), TEAM.format("bob")
LIFE_S = 2.0


def entry(name: str, tenants: str, expires: datetime | None = None) -> str:
    """Of a file of tokens; the token is its name."""
    ends = f"expires = {expires.isoformat()}\n" if expires is not None else ""
    return (
        f'[[tokens]]\nname = "{name}"\nsha256 = "{digest_of(name)}"\ntenants = ["{tenants}"]\n'
        f'verbs = ["read"]\n{ends}'
    )


class Place:
    """A daemon of one trust group whose files change."""

    def __init__(self, stage: Scene, tokens: str) -> None:
        folder = stage.folder / "d"
        folder.mkdir()
        self._tokens = folder / "tokens.toml"
        self._tokens.touch(mode=0o600)
        self._tokens.write_text(tokens)
        settings = {"daemon.heartbeat_s": "1.0"}
        if tokens:
            settings |= {"grpc.tokens_file": f'"{self._tokens}"', "grpc.tokens_on_unix": "true"}
        self.daemon: RealDaemon = stage.keep(RealDaemon(folder, settings, ALICE)).start()
        self._stage = stage
        self._first = self.daemon.config.read_text()

    def reloaded(self, tenants: str = ALICE, tokens: str | None = None) -> None:
        """With these from now on."""
        self.daemon.config.write_text(self._first.replace(ALICE, tenants))
        if tokens is not None:
            self._tokens.write_text(tokens)
        before = self.daemon.log.read_text().count("configuration reloaded")
        self.daemon.send(signal.SIGHUP)
        said = self.daemon.log
        eventually(lambda: said.read_text().count("configuration reloaded") > before, "it is reloaded")

    def saves(self, tenant: str, seed: int) -> set[bytes]:
        """Keys of what one saves now."""
        with_chain = FakeEngine(self.daemon.socket, tenant=tenant, model="m").attached()
        try:
            return {key.tobytes() for key in with_chain.saved(seed, 3).keys}
        finally:
            with_chain.close()


@pytest.fixture
def place(stage: Scene) -> Callable[[str], Place]:
    return lambda tokens: Place(stage, tokens)


class Stream:
    """A subscription of alice's, and what it is told."""

    def __init__(self, place: Place, token: str) -> None:
        self.heard: set[bytes] = set()
        address = f"unix:{place.daemon.socket.with_name('kv-grpc.sock')}"
        self._channel = grpc.insecure_channel(address)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        request = pb.SubscribeRequest(tenant="alice")
        self._call: Any = rpc.StoreStub(self._channel).Subscribe(request, metadata=metadata, timeout=WAIT_S)
        self._replies: Iterator[pb.SubscribeResponse] = iter(self._call)
        while not next(self._replies).last:  # the snapshot
            pass

    def hears(self, keys: set[bytes]) -> bool:
        """Whether it is told of all of these before it ends."""
        while not keys <= self.heard:
            packed = next(self._replies).event.keys
            self.heard |= {packed[at : at + 32] for at in range(0, len(packed), 32)}
        return True

    def end(self) -> grpc.StatusCode:
        """How it ends; whatever it is told until then counts as heard."""
        try:
            self.hears({b"nothing"})
        except grpc.RpcError as error:
            found: grpc.StatusCode = error.code()
            assert found is not CODE.DEADLINE_EXCEEDED, "it goes on and on"
            return found
        finally:
            self._channel.close()
        raise AssertionError("a stream that ends with OK")


def test_a_tenant_that_comes_ends_who_may_not_hear_it(place: Callable[[str], Place]) -> None:
    """Bob joins the trust group: alice's token does not open him, the router's does."""
    here = place(entry("alices", "alice") + entry("routers", "*"))
    alices, routers = Stream(here, "alices"), Stream(here, "routers")
    first = here.saves("alice", 1)
    assert alices.hears(first) and routers.hears(first)
    here.reloaded(ALICE + BOB)
    second = here.saves("bob", 2)
    assert alices.end() is CODE.PERMISSION_DENIED
    assert not alices.heard & second, "not a key of bob"
    assert routers.hears(second)


def test_a_token_that_is_taken_away_ends_its_streams(place: Callable[[str], Place]) -> None:
    here = place(entry("alices", "alice") + entry("routers", "*"))
    alices, routers = Stream(here, "alices"), Stream(here, "routers")
    here.reloaded(tokens=entry("routers", "*"))
    saved = here.saves("alice", 1)
    assert routers.hears(saved)
    assert alices.end() is CODE.UNAUTHENTICATED
    assert not alices.heard & saved


def test_a_token_that_expires_ends_its_streams(place: Callable[[str], Place]) -> None:
    """Nobody reloads anything, and nothing is saved."""
    here = place(entry("routers", "*"))
    ends = datetime.now(UTC) + timedelta(seconds=LIFE_S)
    here.reloaded(tokens=entry("routers", "*") + entry("alices", "alice", ends))
    stream, other = Stream(here, "alices"), Stream(here, "routers")
    began_s = time.monotonic()
    assert stream.end() is CODE.UNAUTHENTICATED
    assert time.monotonic() - began_s < LIFE_S + 10.0
    assert datetime.now(UTC) >= ends
    assert other.hears(here.saves("alice", 1))


def test_a_tenant_with_users_ends_who_came_through_the_socket_alone(place: Callable[[str], Place]) -> None:
    """Where there are no tokens at all."""
    here = place("")
    stream = Stream(here, "")
    here.reloaded(ALICE + BOB + "users = [61000]\n")
    assert stream.end() is CODE.PERMISSION_DENIED
    here.reloaded()
    assert Stream(here, "").hears(here.saves("alice", 1))
