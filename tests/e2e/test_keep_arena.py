"""Daemons that die and come back with their arena: what is there again, and who may still write to it."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict

import grpc
import numpy as np
from fake_engine import BIG
from keep_rounds import Rounds
from kept import (
    IMPATIENT,
    KEEP,
    attached_again,
    cli,
    events,
    hit_of,
    holders,
    memfds_held,
)
from real_daemon import WAIT_S, eventually
from scene import Scene

from kvstore.testing.driver import namespace_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

SLOTS = 56  # BIG ones in 16 MiB


# ---- what stays --------------------------------------------------------------------------------------------


def test_killed_under_load_again_and_again(stage: Scene) -> None:
    rounds = stage.keep(Rounds(stage.folder))
    for _ in range(5):
        rounds.run()
    assert asdict(rounds.report) == {
        "rounds": 5,
        "host_hits": 10,
        "wrong_bytes": 0,
        "slots_lost": 0,
        "generations_back": 0,
    }


def test_a_stop_that_keeps(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    engine.saved(1, 20)
    done = cli("stop", "--keep-arena", "--json", "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"stopped": True, "pid": daemon.pid, "kept": True}
    assert daemon.process.wait(WAIT_S) == 0
    assert not daemon.socket.exists()
    (holder,) = holders(daemon)
    assert any("kvstore-arena:default" in name for name in memfds_held(holder))
    daemon.start()
    attached_again(engine, 2)
    assert hit_of(engine, 1, 20) == 20
    assert events(daemon, "kept arena adopted")[-1]["blocks"] == 20
    assert holders(daemon) == [holder]
    engine.close()
    daemon.assert_quiet()


def test_new_engines_find_it_too_and_eviction_goes_on(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    first = stage.engine(layout=BIG)
    first.saved(1, 20)
    first.saved(2, 20)
    assert first.matched(first.chain(1, 20)) == 20  # used after it: it leaves later
    first.close()
    daemon.end(signal.SIGKILL)
    daemon.start()
    second = stage.engine(layout=BIG)
    assert hit_of(second, 2, 20) == hit_of(second, 1, 20) == 20
    second.saved(3, SLOTS - 40)
    second.saved(4, 10)
    assert second.matched(second.chain(1, 20)) == 20
    assert second.matched(second.chain(2, 20)) == 10
    second.close()
    daemon.assert_quiet()


def test_rot_and_what_hangs_on_it_are_not_served(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    chain = engine.saved(1, 10)
    hit = engine.hit(chain)
    engine.flip(int(hit.slots[4]), 1000)
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 2)
    adopted = events(daemon, "kept arena adopted")[-1]
    assert (adopted["blocks"], adopted["rotten"], adopted["orphaned"]) == (4, 1, 5)
    assert hit_of(engine, 1, 10) == 4
    engine.saved(2, SLOTS)  # no slot was lost by it
    engine.close()
    daemon.assert_quiet()


def test_a_grpc_caller_finds_it_before_any_engine_does(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    blocks = 6
    content = np.random.default_rng(1).bytes(blocks * BIG.block_bytes)
    fields = namespace_of(BIG, stage.name)
    fields.pop("block_tokens")
    chain = pb.Chain(
        tenant="default",
        namespace=pb.Namespace(**fields),
        layout=pb.Layout(
            layers=BIG.layers,
            kv_heads=BIG.kv_heads,
            head_dim=BIG.head_dim,
            dtype=BIG.dtype,
            block_tokens=BIG.block_tokens,
        ),
        tokens=pb.Tokens(ids=range(blocks * BIG.block_tokens)),
    )
    whole = pb.Namespace(**fields, block_tokens=BIG.block_tokens)
    address = f"unix:{daemon.socket.with_name('kv-grpc.sock')}"
    with grpc.insecure_channel(address) as channel:
        header = pb.SaveRequest(header=pb.SaveHeader(chain=chain))
        pieces = [content[at : at + (1 << 18)] for at in range(0, len(content), 1 << 18)]
        data = [pb.SaveRequest(data=pb.SaveData(data=piece)) for piece in pieces]
        assert rpc.StoreStub(channel).Save(iter([header, *data])).ready == blocks
    daemon.end(signal.SIGKILL)
    daemon.start()
    with grpc.insecure_channel(address) as channel:
        store, admin = rpc.StoreStub(channel), rpc.AdminStub(channel)
        assert store.Plan(pb.PlanRequest(chain=chain)).blocks == blocks
        found = store.Lookup(pb.LookupRequest(chain=chain))
        assert found.plan.spans == [pb.Span(tier=pb.TIER_HOST, start=0, stop=blocks)]
        stream = store.Fetch(pb.FetchRequest(lease=found.lease))
        assert b"".join(message.data.data for message in stream) == content
        store.Release(pb.ReleaseRequest(lease=found.lease))
    daemon.end(signal.SIGKILL)
    daemon.start()
    with grpc.insecure_channel(address) as channel:  # the very first who asks may be who drops it
        store, admin = rpc.StoreStub(channel), rpc.AdminStub(channel)
        assert admin.DropNamespace(pb.DropNamespaceRequest(namespace=whole)).dropped_blocks == blocks
        assert store.Plan(pb.PlanRequest(chain=chain)).blocks == 0
    daemon.assert_quiet()


# ---- who may still write -----------------------------------------------------------------------------------


def test_a_stopped_writer_keeps_its_own_slots_and_no_others(stage: Scene) -> None:
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    stopped, dying = stage.child(raw=True, big=True), stage.child(raw=True, big=True)
    mine = stopped.ask("reserve", seed=5, blocks=3)["slots"]
    dying.ask("reserve", seed=6, blocks=4)
    stopped.ask("write", blocks=2, half=True)
    stopped.stop()
    daemon.end(signal.SIGKILL)
    dying.kill()
    daemon.start()
    attached_again(engine, 2)
    eventually(lambda: daemon.group()["host"]["filling"] == 3, "slots of the dead one are free")
    assert daemon.group()["quarantined"] == 3
    daemon.assert_sound()
    # Everything else may be used (one slot is left for layout proofs), and lies where nobody else writes.
    chain = engine.saved(7, SLOTS - 4)
    assert not set(engine.hit(chain).slots.tolist()) & set(mine)
    stopped.resume()
    stopped.ask("scribble")
    assert hit_of(engine, 7, SLOTS - 4) == SLOTS - 4
    # A second crash: the quarantine goes on.
    daemon.end(signal.SIGKILL)
    daemon.start()
    attached_again(engine, 3)
    assert daemon.group()["quarantined"] == 3
    stopped.kill()
    eventually(lambda: daemon.group()["quarantined"] == 0, "they come back")
    assert hit_of(engine, 7, SLOTS - 4) == SLOTS - 4
    engine.saved(8, 3)
    engine.close()
    daemon.assert_quiet()


def test_an_engine_that_attaches_again_gets_its_slots_back_at_once(stage: Scene) -> None:
    """It says `quiesced`, and is recognised as the process that was there before."""
    daemon = stage.start_daemon(**KEEP)
    engine = stage.engine(layout=BIG, limits=IMPATIENT)
    other = stage.engine(layout=BIG, limits=IMPATIENT, model="another")
    assert len(engine.client.reserve(engine.chain(1, 5), 0, 5).slots) == 5
    assert len(other.client.reserve(other.chain(1, 4), 0, 4).slots) == 4
    assert daemon.group()["host"]["filling"] == 9
    daemon.end(signal.SIGKILL)
    daemon.start()
    assert events(daemon, "kept arena adopted")[-1]["being_filled"] == 9
    attached_again(engine, 2)
    attached_again(other, 2)
    eventually(lambda: daemon.group()["host"]["filling"] == 0, "both have quiesced")
    engine.close()
    other.close()
    daemon.assert_quiet()


def test_a_tenant_that_came_by_a_reload_finds_its_blocks_after_a_restart(stage: Scene) -> None:
    """Its random salt is kept like those of the first hour."""
    one = '[[tenants]]\nname = "a"\n'
    daemon = stage.start_daemon(tenants=one, **KEEP)
    with daemon.config.open("a") as file:
        file.write('[[tenants]]\nname = "b"\n')
    daemon.send(signal.SIGHUP)
    eventually(lambda: events(daemon, "configuration reloaded"), "reloaded")
    for tenant, blocks in (("a", 5), ("b", 7)):
        engine = stage.engine(layout=BIG, tenant=tenant)
        engine.saved(1, blocks)
        engine.close()
    daemon.end(signal.SIGKILL)
    daemon.start()
    for tenant, blocks in (("b", 7), ("a", 5)):
        engine = stage.engine(layout=BIG, tenant=tenant)
        assert hit_of(engine, 1, blocks) == blocks, tenant
        engine.close()
    daemon.assert_quiet()
