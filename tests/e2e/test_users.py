"""Who may attach as whom: users of the machine, tools, and what each of them hears."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import SMALL
from raw_session import RawSession, hello
from real_daemon import RealDaemon
from scene import Scene

from kvstore.rpc import messages as m
from kvstore.v1 import store_pb2 as pb
from kvstore.v1.store_pb2_grpc import AdminStub, StoreStub

NOBODY, OTHER = 65_534, 65_533
TENANTS = (
    f'[[tenants]]\nname = "alice"\nusers = [{NOBODY}]\n'
    f'[[tenants]]\nname = "bob"\nusers = [{OTHER}, "nobody"]\n'
    '[[tenants]]\nname = "open"'
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")


def as_user(user: int, folder: Path, act: Callable[[Path], Any]) -> Any:
    """What `act` returns (JSON-ready) in a process of that user, whose folder holds the socket."""
    folder.chmod(0o711)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing may escape from here: the test would run twice
        try:
            os.chdir(folder)  # the folders above it belong to somebody else
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            answer = act(Path("kv.sock"))
        except BaseException as error:  # noqa: BLE001 whatever it was, the parent shows it
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def attaches(*names: str) -> Callable[[Path], list[str]]:
    """Attach as these tenants: the tenants of the welcome, or the refusal."""

    def act(path: Path) -> list[str]:
        with RawSession(path) as raw:
            answer = raw.ask(hello(SMALL, tenants=list(names)))
            return [answer.status, answer.message] if isinstance(answer, m.Failed) else sorted(answer.roots)

    return act


@needs_root
def test_a_tenant_is_for_the_users_it_names(stage: Scene) -> None:
    daemon = stage.start_daemon(TENANTS, daemon__socket_mode='"0666"')
    folder = daemon.folder
    assert as_user(NOBODY, folder, attaches("alice")) == ["alice"]
    assert as_user(NOBODY, folder, attaches("alice", "bob", "open")) == ["alice", "bob", "open"]
    assert as_user(OTHER, folder, attaches("bob")) == ["bob"]
    assert as_user(OTHER, folder, attaches("open")) == ["open"]
    hidden = as_user(OTHER, folder, attaches("alice"))
    absent = as_user(OTHER, folder, attaches("mallory"))
    assert hidden[0] == absent[0] == "PERMISSION_DENIED"
    assert (
        hidden[1]
        == f"tenants: 'alice' is not configured on this daemon, or not for user {OTHER} (tenants.users)"
    )
    assert hidden[1].replace("alice", "mallory") == absent[1], "nor does it tell which tenants there are"
    assert as_user(OTHER, folder, attaches("bob", "alice"))[0] == "PERMISSION_DENIED"
    assert attaches("alice", "bob")(daemon.socket) == ["alice", "bob"], "the daemon's own user may"
    daemon.assert_quiet()


@needs_root
def test_tools_are_for_those_who_administer(stage: Scene) -> None:
    daemon = stage.start_daemon(daemon__admins=f'"{NOBODY}"', daemon__socket_mode='"0666"')

    def status(path: Path) -> Any:
        with RawSession(path) as raw:
            answer = raw.ask(hello(SMALL, role="tool", tenants=[]))
            return answer.message if isinstance(answer, m.Failed) else raw.ask(m.Status()).json[:1]

    assert as_user(NOBODY, daemon.folder, status) == "{"
    said = as_user(OTHER, daemon.folder, status)
    assert said == f"role: user {OTHER} is none of daemon.admins; ask one of them, or root"
    assert as_user(OTHER, daemon.folder, attaches("default")) == ["default"], "engines are no tools"
    assert daemon.status()["version"]


def test_users_that_are_not_there_are_refused_at_the_start(stage: Scene) -> None:
    for settings, tenants, named in (
        ({"daemon.admins": '"no-such-user"'}, "", "daemon.admins: this machine has no user 'no-such-user'"),
        (
            {},
            '[[tenants]]\nname = "a"\nusers = ["no-such-user"]',
            "tenants.a.users: this machine has no user",
        ),
        ({}, '[[tenants]]\nname = "a"\nusers = [-1]', "tenants.a.users: -1 is no user id"),
    ):
        folder = stage.folder / f"bad{len(named)}"
        folder.mkdir()
        daemon = stage.keep(RealDaemon(folder, settings, tenants)).start(wait=False)
        assert daemon.process.wait(60) == 2
        assert named in daemon.said()


def test_an_engine_hears_of_its_own_tenant_only(stage: Scene) -> None:
    daemon = stage.start_daemon(
        '[[tenants]]\nname = "vermilion"\n[[tenants]]\nname = "cobalt"\nhost_bytes = "4MiB"'
    )
    for name in ("vermilion", "cobalt"):
        engine = stage.engine(tenant=name)
        engine.saved(1, 3)
        assert engine.restored(engine.chain(1, 3)) == 3
    with RawSession(daemon.socket) as raw:
        raw.attach(SMALL, tenants=["vermilion"])
        told = raw.ask(m.Status()).json
        group = json.loads(told)["groups"]["default"]
        assert "cobalt" not in told
        assert group["tokens"]["vermilion"]["lookup"]
        assert group["quotas"]["vermilion"]["host_bytes"]
    everything = daemon.group()
    assert set(everything["tokens"]) == {"vermilion", "cobalt"}
    assert everything["quotas"]["cobalt"]["limits"] == {"host_bytes": 4 << 20}


# ---- gRPC: it cannot tell who is at the other end of a Unix socket -----------------------------------------


def test_over_grpc_a_tenant_of_some_users_needs_a_token(stage: Scene) -> None:
    daemon = stage.start_daemon(TENANTS, daemon__admins=f'"{NOBODY}"')
    with grpc.insecure_channel(f"unix:{daemon.socket.with_name('kv-grpc.sock')}") as channel:
        store, admin = StoreStub(channel), AdminStub(channel)
        store.Observe(pb.ObserveRequest(tenant="open"))
        for call, said in (
            (lambda: store.Observe(pb.ObserveRequest(tenant="alice")), "users of tenant 'alice'"),
            (lambda: admin.Status(pb.StatusRequest()), "daemon.admins"),
            # A trust group's events tell of every tenant in it.
            (lambda: next(iter(store.Subscribe(pb.SubscribeRequest(tenant="open")))), "whole trust group"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert said in refused.value.details()


# ---- misses that all take the same time -------------------------------------------------------------------


def test_every_lookup_takes_the_same_time(stage: Scene) -> None:
    """A hit, nobody's blocks, and another tenant's."""
    miss_s = 0.2
    daemon = stage.start_daemon(
        '[[tenants]]\nname = "a"\n[[tenants]]\nname = "b"',
        daemon__lookup_time_s=str(miss_s),
    )
    a, b = (stage.engine(tenant=name) for name in "ab")
    chain = a.saved(1, 20)

    def timed(act: Callable[[], int]) -> tuple[int, float]:
        began_s = time.monotonic()
        found = act()
        return found, time.monotonic() - began_s

    found, hit_s = timed(lambda: a.matched(chain))
    assert found == 20
    assert hit_s >= miss_s
    for act in (lambda: a.matched(a.chain(2, 20)), lambda: b.matched(b.chain(1, 20))):
        found, took_s = timed(act)
        assert found == 0
        assert miss_s <= took_s < miss_s + 5.0
    with RawSession(daemon.socket) as raw:  # the keys of another tenant, under one's own root
        raw.attach(SMALL, tenants=["b"])
        raw.prove()
        assert raw.welcome is not None
        keys, positions = chain.keys, np.arange(20, dtype=np.uint32)
        lookup = m.Lookup(raw.welcome.roots["b"]["own"], 20, positions.tobytes(), keys.tobytes())
        began_s = time.monotonic()
        answer = raw.ask(lookup)
        assert (answer.blocks, answer.known, answer.lease) == (0, 0, 0)
        assert time.monotonic() - began_s >= miss_s
    daemon.assert_sound()
