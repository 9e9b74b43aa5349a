"""Attach: proof, refusals, restarts, and leaving nothing behind."""

from __future__ import annotations

import dataclasses
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from client_daemon import HangUp, ScriptedDaemon, failed
from client_kit import Changes, Maker, chain_of, nothing_left
from client_memory import LAYOUT, LIMITS, NAMESPACE, ROOT, WAIT_S, Memory

from kvstore.client import Client, PoolSpec, Table
from kvstore.errors import BadRequest, KVStoreError, LayoutRefused, LimitExceeded, Refused
from kvstore.keys import test_vector as key_vector
from kvstore.rpc import messages as m
from kvstore.types import Busy, Miss, Part, Reuse

STEPS = [m.Attach, m.Prove, m.ProvedStore, m.Proved, m.Pool]
SHORT = dataclasses.replace(LIMITS, attach_s=0.05)
# A second try would wait so long that a test which sees one has seen a bug.
ONCE = dataclasses.replace(LIMITS, retry_s=3600.0, retry_max_s=3600.0)


def test_attach_says_who_we_are_and_proves_the_layout(daemon: ScriptedDaemon, make: Maker) -> None:
    client = make.attached(pool=PoolSpec("borrowed", 16), tenants=("default", "other"))
    hello, prove, stored, proved, pool = daemon.conn(0).requests
    assert hello.version == m.PROTOCOL_VERSION
    assert (hello.role, hello.engine, hello.tenants) == ("both", b"", ["default", "other"])
    assert hello.namespace == dataclasses.asdict(NAMESPACE)
    assert hello.part == (0, 2, 0, 2)
    assert hello.vector == key_vector()
    assert (prove, stored, proved) == (m.Prove(), m.ProvedStore(), m.Proved(True))
    assert pool == m.Pool("borrowed", 16, 0)
    assert (client.epoch, client.generation, client.engine) == (daemon.epoch, 1, b"e" * 16)
    assert client.roots("default", Reuse.OWN) == ROOT
    assert client.roots("default", Reuse.NONE) is None
    assert client.roots("default", Reuse.GROUP) is None
    assert client.roots("nobody", Reuse.OWN) is None
    assert client.chain([1, 2, 3, 4], "default", Reuse.NONE) is None
    assert client.counters.reattaches == 0


def test_a_rank_proves_its_own_part(daemon: ScriptedDaemon, make: Maker) -> None:
    daemon.handlers[m.ProvedStore] = lambda conn, body: _prove_part(daemon, conn, body)
    make.attached(Memory(part=Part(1, 1, 1, 1)), role="worker", engine=b"x" * 16)
    hello = daemon.conn(0).requests[0]
    assert (hello.part, hello.engine, hello.role) == ((1, 1, 1, 1), b"x" * 16, "worker")


def _prove_part(daemon: ScriptedDaemon, conn: Any, body: Any) -> Any:
    """Cells of other ranks are ours to fill: the honest handler then expects all of them."""
    view = daemon.arena.view(conn.slot, daemon.format.length)
    for number in range(3):
        cell = view[number * daemon.format.cell_stride :][: LAYOUT.cell_bytes]
        expected = m.pattern(conn.seed, number // 2, number % 2, LAYOUT.cell_bytes)
        assert cell.tobytes() != expected
        cell[:] = np.frombuffer(expected, np.uint8)
    return daemon.on_provedstore(conn, body)


@pytest.mark.parametrize("restore", [True, False])
def test_the_scratch_block_is_restored_on_request(daemon: ScriptedDaemon, make: Maker, restore: bool) -> None:
    memory = Memory()
    for block in range(memory.blocks):
        memory.fill(block, bytes([block]) * 16)
    before = [memory.block(block) for block in range(memory.blocks)]
    make.attached(memory, scratch_block=5, scratch_restore=restore)
    changed = [block for block in range(memory.blocks) if memory.block(block) != before[block]]
    assert changed == ([] if restore else [5])


def test_schedulers_and_tools_prove_nothing_and_map_nothing(daemon: ScriptedDaemon, make: Maker) -> None:
    with nothing_of_the_arena():
        scheduler = make.attached(role="scheduler", layout=LAYOUT, pool=PoolSpec("borrowed", 8))
        tool = make.attached(role="tool")
        assert [type(r) for r in daemon.conn(0).requests] == [m.Attach, m.Pool]
        assert daemon.conn(0).requests[0].part == (0, 2, 0, 2)
        assert [type(r) for r in daemon.conn(1).requests] == [m.Attach]
        assert len(chain_of(scheduler, 3)) == 3
        assert tool.status() == {"attached": True, "tiers": {}}
        assert tool.check() == {"attached": True, "ok": True}
        assert tool.heartbeat()


def nothing_of_the_arena() -> Any:
    return nothing_left(threads=False, descriptors_too=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["hang up", "silence"])
def test_a_daemon_that_fails_at_any_step_is_tried_again(
    daemon: ScriptedDaemon, make: Maker, step: type, fault: str
) -> None:
    faults = [HangUp() if fault == "hang up" else None] * 2
    honest = getattr(daemon, "on_" + step.__name__.lower())
    daemon.handlers[step] = lambda conn, body: faults.pop() if faults else honest(conn, body)
    limits = LIMITS if fault == "hang up" else SHORT
    client = make.attached(pool=PoolSpec("borrowed", 16), limits=limits)
    assert client.generation == 1
    assert client.refusal is None
    assert len(daemon.seen(m.Attach)) >= 3
    assert daemon.conn(0).closed.wait(WAIT_S)
    assert daemon.conn(1).closed.wait(WAIT_S)


def test_without_a_daemon_every_call_has_an_answer(make: Maker, path: Path) -> None:
    client = make()
    assert not client.attached
    assert (client.epoch, client.engine, client.generation) == (b"", b"", 0)
    assert client.chain([1] * 8, "default", Reuse.OWN) is None
    assert client.status()["attached"] is False
    assert client.check()["attached"] is False
    assert not client.heartbeat()
    assert client.quiesced()
    assert isinstance(client.acquire(0, 1), Busy)
    assert isinstance(client.adopt(np.array([1], np.uint32), None, 0), Busy)
    none = np.empty((0, 32), np.uint8)
    assert not client.observe(0, 0, 0, none, none)
    client.release(7)
    client.poll()
    assert not path.exists()


REFUSALS = [Refused("tenants: not yours"), BadRequest("namespace.layout: differs"), LayoutRefused("no")]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: type(e).__name__)
def test_a_refusal_is_remembered_and_not_retried(
    daemon: ScriptedDaemon, make: Maker, error: KVStoreError
) -> None:
    daemon.handlers[m.Attach] = lambda *_: failed(error)
    with structlog.testing.capture_logs() as logs:
        client = make()
        assert not client.wait_attached(WAIT_S)
        assert daemon.conn(0).closed.wait(WAIT_S)
        assert type(client.refusal) is type(error)
        assert str(client.refusal) == str(error)
        assert isinstance(client.acquire(0, 1), Busy)
        assert str(error) in client.status()["reason"]
        client.close()
    assert [entry["reason"] for entry in logs if entry["log_level"] == "warning"] == [str(error)]
    assert len(daemon.conns) == 1


def test_a_refusal_ends_when_another_daemon_takes_the_path(make: Maker, path: Path) -> None:
    strict = ScriptedDaemon(path)
    strict.handlers[m.Attach] = lambda *_: failed(Refused("version: too old"))
    client = make()
    assert not client.wait_attached(WAIT_S)
    changes = Changes(client)
    strict.stop()
    kind = ScriptedDaemon(path)
    changes.until(lambda: client.attached)
    assert client.refusal is None
    client.close()
    kind.stop()


def test_a_limit_is_not_a_refusal(daemon: ScriptedDaemon, make: Maker) -> None:
    answers = [failed(LimitExceeded("proof: the arena is full"))] * 3
    honest = daemon.on_prove
    daemon.handlers[m.Prove] = lambda conn, body: answers.pop() if answers else honest(conn, body)
    client = make.attached()
    assert client.refusal is None


def test_a_layout_that_lies_is_refused_by_the_daemon(daemon: ScriptedDaemon, make: Maker) -> None:
    memory = Memory()
    memory.lie_about_heads = True
    client = make(memory)
    assert not client.wait_attached(WAIT_S)
    assert isinstance(client.refusal, LayoutRefused)
    assert "cells" in str(client.refusal)


def test_a_wrong_load_is_refused_by_the_client(daemon: ScriptedDaemon, make: Maker) -> None:
    def another_seed(conn: Any, body: Any) -> Any:
        daemon.on_provedstore(conn, body)
        return m.ProveLoad(b"not what is there")

    daemon.handlers[m.ProvedStore] = another_seed
    client = make()
    assert not client.wait_attached(WAIT_S)
    assert isinstance(client.refusal, LayoutRefused)
    assert daemon.seen(m.Proved) == [m.Proved(False)]


def test_engine_memory_that_raises_is_refused(daemon: ScriptedDaemon, make: Maker) -> None:
    class Broken(Memory):
        def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
            raise IndexError("no such block")

    client = make(Broken())
    assert not client.wait_attached(WAIT_S)
    assert isinstance(client.refusal, LayoutRefused)
    assert "no such block" in str(client.refusal)


def test_welcomes_that_make_no_sense_are_not_accepted(daemon: ScriptedDaemon, make: Maker) -> None:
    def change(**fields: Any) -> Any:
        return lambda conn, body: dataclass_of(daemon.on_attach(conn, body), **fields)

    def dataclass_of(welcome: m.Attached, **fields: Any) -> m.Attached:
        values = {name: getattr(welcome, name) for name in welcome.__struct_fields__}
        return m.Attached(**{**values, **fields})

    wrong = [
        {"epoch": b"short"},
        {"engine": b""},
        {"keys_max": 0},
        {"heartbeat_s": 0.0},
        {"heartbeat_s": float("nan")},
        {"roots": {"default": {"own": b"short"}}},
        {"capacity_bytes": daemon.arena.capacity_bytes * 2},
        {"capacity_bytes": -1},
    ]
    left = list(wrong)
    honest = daemon.on_attach
    daemon.handlers[m.Attach] = lambda conn, body: (
        change(**left.pop())(conn, body) if left else honest(conn, body)
    )
    client = make.attached()
    assert client.generation == 1
    assert len(daemon.conns) == len(wrong) + 1


# ---- restarts --------------------------------------------------------------------------------------------


def test_a_restart_is_noticed_and_told_in_the_callers_thread(make: Maker, path: Path) -> None:
    first = ScriptedDaemon(path)
    client = make(pool=PoolSpec("owned", 15, 4))
    events: list[tuple[str, str]] = []
    client.on_attach = lambda: events.append(("attach", threading.current_thread().name))
    client.on_detach = lambda: events.append(("detach", threading.current_thread().name))
    assert client.wait_attached(WAIT_S)
    assert isinstance(client.acquire(0, 1), Busy)  # nobody has adopted yet
    assert events == []
    client.poll()
    changes = Changes(client)
    first.stop()
    changes.until(lambda: not client.attached)
    assert isinstance(client.chain([1] * 8, "default", Reuse.OWN), type(None))
    second = ScriptedDaemon(path)
    changes.until(lambda: client.attached)
    assert (client.epoch, client.generation, client.counters.reattaches) == (second.epoch, 2, 1)
    client.poll()
    client.poll()
    assert [what for what, _ in events] == ["attach", "detach", "attach"]
    assert {name.startswith("kvstore") for _, name in events} == {False}
    types = [type(request) for request in second.conn(0).requests]
    assert types.index(m.Quiesced) < types.index(m.Prove)  # nothing of the first life writes any more
    assert second.conn(0).requests[0].engine == b"e" * 16
    client.close()
    second.stop()


def test_the_pool_stays_closed_until_tables_are_adopted(make: Maker, daemon: ScriptedDaemon) -> None:
    given = m.Acquired(9, np.array([3], "<u4").tobytes(), 0, (0, 0), b"", [])
    daemon.handlers[m.Acquire] = lambda *_: given
    client = make(pool=PoolSpec("owned", 15, 4))
    assert client.wait_attached(WAIT_S)
    assert "poll" in client.acquire(0, 1).reason
    assert daemon.seen(m.Acquire) == []
    client.poll()
    table = client.acquire(0, 1)
    assert isinstance(table, Table)
    assert table.added.tolist() == [3]


def test_a_callback_that_raises_is_due_again(make: Maker, daemon: ScriptedDaemon) -> None:
    client = make()
    assert client.wait_attached(WAIT_S)
    calls: list[int] = []

    def fails_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("engine is not ready")

    client.on_attach = fails_once
    with pytest.raises(RuntimeError, match="not ready"):
        client.poll()
    client.poll()
    client.poll()
    assert len(calls) == 2


def test_heartbeats_are_sent(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, heartbeat_s=0.002)
    client = make.attached()
    daemon.await_requests(m.Heartbeat, 3)
    assert client.generation == 1
    client.close()
    daemon.stop()


def test_a_silent_daemon_is_given_up_by_its_heartbeat(make: Maker, path: Path) -> None:
    daemon = ScriptedDaemon(path, heartbeat_s=0.002)
    daemon.handlers[m.Heartbeat] = lambda *_: None
    client = make(limits=dataclasses.replace(LIMITS, call_s=0.01))
    daemon.await_requests(m.Attach, 3)
    client.close()
    daemon.stop()


# ---- leaving ---------------------------------------------------------------------------------------------


def test_close_leaves_no_thread_descriptor_or_mapping(make: Maker, daemon: ScriptedDaemon) -> None:
    make.attached(copy_threads=2).close()  # whatever Python and the loop keep for themselves, they have now
    client = make.attached()
    client.close()
    with nothing_left():
        client = make.attached(copy_threads=2)
        chain = chain_of(client, 3)
        assert client.save(chain, 0, 3, [1, 2, 3]).wait().ready == 3
        assert client.lookup(chain).blocks == 3
        client.close()
        client.close()
        assert daemon.conn(2).closed.wait(WAIT_S)
        daemon.join(2)
    assert isinstance(daemon.conn(2).requests[-1], m.Quiesced)
    assert isinstance(client.lookup(chain), Miss)


def test_close_while_nobody_is_there(make: Maker) -> None:
    with nothing_left():
        make().close()


@pytest.mark.parametrize("step", STEPS[:4])
def test_close_during_an_attach_that_hangs(make: Maker, daemon: ScriptedDaemon, step: type) -> None:
    daemon.handlers[step] = lambda *_: None
    with nothing_left(threads=False):
        client = make(limits=dataclasses.replace(LIMITS, attach_s=0.2))
        daemon.await_requests(step, 1)
        client.close()
        daemon.join(0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(daemon: ScriptedDaemon, path: Path) -> None:
    client = Client(path, NAMESPACE, Memory(), limits=LIMITS)
    assert client.wait_attached(WAIT_S)
    child = fork_quietly(lambda: child_of(client))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.heartbeat()  # the child's close did not end our connection
    assert client.generation == 1
    client.close()
    assert daemon.conn(0).closed.wait(WAIT_S)


def child_of(client: Client) -> None:
    for call in (client.heartbeat, client.poll, lambda: client.roots("default", Reuse.OWN)):
        with pytest.raises(BadRequest, match="after fork"):
            call()
    client.close()


def fork_quietly(body: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        body()
    except BaseException:  # noqa: BLE001  the child must never run the rest of the suite
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_arguments_that_contradict_each_other_are_named(path: Path) -> None:
    def wrong(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(BadRequest, match=match):
            Client(path, NAMESPACE, *args, **kwargs)

    wrong("memory")
    wrong("memory", Memory(), role="scheduler")
    wrong("layout", role="scheduler")
    wrong("role", role="driver")
    wrong("scratch_block", Memory(), scratch_block=16)
    wrong("scratch_block", Memory(), scratch_block=3, pool=PoolSpec("owned", 4))
    wrong("pool", Memory(), role="worker", pool=PoolSpec("owned", 4))
    wrong("engine", Memory(), engine=b"x")
    wrong("copy_threads", Memory(), copy_threads=0)
    other = dataclasses.replace(LAYOUT, head_dim=16)
    wrong("namespace.layout", Memory(layout=other))
    with pytest.raises(BadRequest, match="namespace"):
        Client(path, None, Memory())
    with pytest.raises(BadRequest, match=r"limits\.call_s"):
        dataclasses.replace(LIMITS, call_s=0)
