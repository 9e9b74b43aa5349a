"""The exact bytes of a session, sent again by somebody else: nothing of that session changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_engine import BIG, SMALL, FakeEngine
from raw_session import RawSession, frame, hello
from real_daemon import RealDaemon, eventually
from replays import Conversation, Tap, frames_of, message_of, sent_again, sent_again_elsewhere
from scene import Scene

from kvstore.client import PoolSpec
from kvstore.client.values import Reservation
from kvstore.keys import KeyChain
from kvstore.rpc import messages as m
from kvstore.testing import write_slot
from kvstore.types import Hit, SaveResult

SAVED, OPEN = 6, 5
# What an engine of one process says in its life, but for what only a disk, a borrowed pool, a restart, a loss
# or an operator brings.
SPOKEN = {m.Attach, m.Prove, m.ProvedStore, m.Proved, m.Pool, m.Reserve, m.Publish, m.Lookup, m.Report}
SPOKEN |= {m.Fetch, m.Release, m.Acquire, m.Commit, m.Timings, m.Heartbeat, m.Status, m.Check, m.Explain}


@dataclass
class Victim:
    """An engine in the middle of its work, and all that it has sent.

    Attributes:
        hit: a lease that it holds.
        reservation: slots that it has not written yet.
    """

    engine: FakeEngine
    tap: Tap
    saved: KeyChain
    hit: Hit
    chain: KeyChain
    reservation: Reservation

    @property
    def sent(self) -> list[bytes]:
        """Every frame so far."""
        assert len(self.tap.sent) == 1, "it has attached once"
        return frames_of(bytes(self.tap.sent[0]))

    @property
    def ends(self) -> list[m.Publish | m.Release]:
        """What it has yet to say to end the reservation and the lease."""
        lease = self.engine.client._core.leases[self.hit.lease].daemon_id
        return [m.Publish(self.reservation.token, OPEN, True), m.Release(lease)]


@pytest.fixture
def victim(scene: Scene) -> Victim:
    tap: Tap = scene.keep(Tap(scene.folder / "tap.sock", scene.daemon.socket))
    pool = PoolSpec("owned", 64, 64)
    engine: FakeEngine = scene.keep(FakeEngine(tap.path, model=scene.name, pool=pool)).attached()
    client = engine.client
    saved = engine.saved(1, SAVED)
    assert engine.restored(saved) == SAVED
    hit = engine.hit(saved)
    client.report(hit.lease, [1])  # the daemon looks, and finds nothing wrong with it
    assert client.fetch(hit, 0, SAVED).wait()
    client.acquire(hit.lease, SAVED + 1)
    client.commit(hit.lease, saved, 0, SAVED)
    client.note_request("default", 0.1, 100, 50)
    client.heartbeat()
    client.status()
    client.check()
    client.explain()
    chain = engine.chain(2, OPEN)
    reservation = client.reserve(chain, 0, OPEN)
    assert len(reservation.generations) == OPEN
    return Victim(engine, tap, saved, hit, chain, reservation)


def kinds(tap: Tap) -> set[type]:
    return {type(message_of(each)) for each in frames_of(bytes(tap.sent[0]))}


def state(daemon: RealDaemon) -> dict[str, Any]:
    """What clients hold and what is readable."""
    group = daemon.group()
    names = ("leases", "pins", "fillings", "quarantined", "sessions", "alarm")
    engines = {
        name: {key: value for key, value in engine.items() if key != "silent_s"}
        for name, engine in group["engines"].items()
    }
    counters = {name: group["counters"][name] for name in ("saved_blocks", "revoked_leases")}
    return {name: group[name] for name in names} | counters | {"host": group["host"], "engines": engines}


def unharmed(scene: Scene, victim: Victim, before: dict[str, Any]) -> None:
    """All is as it was, and the victim ends what it has begun as if nothing had happened."""
    daemon, engine, client = scene.daemon, victim.engine, victim.engine.client
    eventually(lambda: state(daemon) == before, f"all is as before: {state(daemon)}, {before}", 20.0)
    daemon.assert_sound()
    other = scene.engine()
    assert (other.matched(victim.saved), other.matched(victim.chain)) == (SAVED, 0)
    assert client.heartbeat()
    assert engine.load(victim.hit, victim.saved).good == SAVED
    promised = victim.ends
    blocks = np.arange(OPEN, dtype=np.uint32)
    engine.memory.fill(blocks.tolist(), victim.chain.keys)
    assert client.write(victim.reservation, blocks).wait() == SaveResult(OPEN, 0, 0, 0)
    client.release(victim.hit.lease)
    said = [message_of(each) for each in victim.sent]
    assert all(end in said for end in promised), "the ends that were tried are those that work"
    assert (other.restored(victim.saved), other.restored(victim.chain)) == (SAVED, OPEN)
    assert client.attached
    assert len(victim.tap.sent) == 1, "its connection has lived through all of it"


def ends(victim: Victim) -> list[bytes]:
    """Frames that would end what the victim holds, and others that name it."""
    publish, release = victim.ends
    assert isinstance(release, m.Release) and isinstance(publish, m.Publish)
    lease, keys = release.lease, victim.saved.keys.tobytes()
    bodies = [
        publish,
        m.Abort(publish.token),
        m.Report(lease, b"\0" * 4),
        m.Extend(lease, np.arange(SAVED, dtype="<u4").tobytes(), keys),
        m.Fetch(lease, 0, SAVED),
        m.Enough(lease, 1),
        m.Commit(lease, victim.saved.root, 0, victim.saved.root, keys),
        release,
    ]
    return [frame(number, body) for number, body in enumerate(bodies, 1)]


Plans = dict[str, Callable[[Victim], list[Conversation]]]


def attaching(sent: list[bytes]) -> bytes:
    (found,) = [each for each in sent if isinstance(message_of(each), m.Attach)]
    return found


# Without a proof: no slot is handed out, so that they may come from this very process, too.
ANYWHERE: Plans = {
    "whole": lambda victim: [Conversation(victim.sent)],
    "whole, and the ends": lambda victim: [Conversation(victim.sent + ends(victim))],
    "each alone": lambda victim: [Conversation([each]) for each in victim.sent + ends(victim)],
    "backwards": lambda victim: [Conversation((victim.sent + ends(victim))[::-1])],
    "without its attach": lambda victim: [Conversation(victim.sent[1:] + ends(victim))],
}
# These leave what only the end of their process frees.
ELSEWHERE: Plans = {
    "each after its attach": lambda victim: [
        Conversation([attaching(victim.sent), each]) for each in victim.sent + ends(victim)
    ],
    "backwards after its attach": lambda victim: [
        Conversation([attaching(victim.sent), *(victim.sent + ends(victim))[::-1]])
    ],
    "by an honest engine": lambda victim: [Conversation(victim.sent[1:] + ends(victim), honest=True)],
    "backwards by an honest engine": lambda victim: [
        Conversation([*(victim.sent[1:] + ends(victim))[::-1]], honest=True)
    ],
    "each by an honest engine": lambda victim: [
        Conversation([each], honest=True) for each in victim.sent + ends(victim)
    ],
}


def test_the_record_is_a_whole_session(victim: Victim) -> None:
    eventually(lambda: m.Timings in kinds(victim.tap), "timings are told in place of a heartbeat")
    assert kinds(victim.tap) >= SPOKEN
    assert isinstance(message_of(victim.sent[0]), m.Attach)


@pytest.mark.parametrize("plan", ANYWHERE)
def test_a_replay_on_another_connection_changes_nothing(scene: Scene, victim: Victim, plan: str) -> None:
    before = state(scene.daemon)
    answers = sent_again(scene.daemon.socket, scene.name, ANYWHERE[plan](victim))
    assert all(answers), "nothing is left without an answer"
    for said in answers:
        assert not {name for name, _ in said} & {"Published", "Released", "Reserved", "Found"}, said
    unharmed(scene, victim, before)


@pytest.mark.parametrize("plan", ANYWHERE | ELSEWHERE)
def test_a_replay_by_another_process_changes_nothing(scene: Scene, victim: Victim, plan: str) -> None:
    before = state(scene.daemon)
    plans = ANYWHERE | ELSEWHERE
    answers = sent_again_elsewhere(scene.daemon.socket, scene.name, plans[plan](victim))
    assert all(answers), "nothing is left without an answer"
    for said in answers:
        assert not {name for name, _ in said} & {"Published", "Released"}, said
    unharmed(scene, victim, before)


def test_ids_of_another_session_are_unknown(scene: Scene, victim: Victim) -> None:
    """Also to an engine of the same tenant and model that has attached and proven as it should."""
    named, pool = ends(victim), frame(99, m.Pool("owned", 8, 8))
    (answers,) = sent_again_elsewhere(scene.daemon.socket, scene.name, [Conversation([pool, *named], True)])
    assert answers == [("Done", ""), *[("Failed", "NOT_FOUND")] * len(named)]


def test_a_session_that_is_over_is_not_continued(scene: Scene, victim: Victim) -> None:
    ended = [Conversation(victim.sent + ends(victim)), Conversation(victim.sent[1:] + ends(victim), True)]
    other = scene.engine()
    victim.engine.close()
    eventually(lambda: state(scene.daemon)["sessions"] == 1, "its session has ended")
    before = state(scene.daemon)
    sent_again_elsewhere(scene.daemon.socket, scene.name, ended)
    # What it had reserved and never written anybody may reserve: the replay did, and did not write it either.
    eventually(lambda: state(scene.daemon) == before, "all is as before", 20.0)
    assert (other.restored(victim.saved), other.matched(victim.chain)) == (SAVED, 0)


# ---- an engine of several processes ------------------------------------------------------------------------


def test_a_worker_whose_attach_is_replayed_loses_nothing(scene: Scene) -> None:
    """It names the engine, which only the engine's own processes know: the replay joins them, and no more."""
    scheduler = scene.session().attach(SMALL, model=scene.name, role="scheduler")
    assert scheduler.welcome is not None
    engine = scheduler.welcome.engine
    worker = scene.session().engine(SMALL, model=scene.name, role="worker", engine=engine)
    chain, open_one = worker.chain(1, SAVED), worker.chain(2, OPEN)
    saved = scheduler.reserve(chain)
    write(worker, chain, saved)
    assert worker.ask(m.Publish(saved.token, SAVED, True)) == m.Published(SAVED, 0, False)
    lease, reserved = scheduler.lookup(chain), scheduler.reserve(open_one)
    a=[scene.daemon.group()['sessions'] for _ in range(3)]; import time; print(a, scene.daemon.said()); assert 0
    before = state(scene.daemon)
    attach = frame(1, hello(SMALL, model=scene.name, role="worker", engine=engine))
    later = [m.Prove(), m.ProvedStore(), m.Proved(True), m.Publish(saved.token, SAVED, True), m.Quiesced()]
    later += [m.Publish(reserved.token, OPEN, True), m.Abort(reserved.token), m.Release(lease.lease)]
    later += [m.Pool("owned", 8, 8), m.Heartbeat()]
    sent = [frame(number, body) for number, body in enumerate(later, 2)]
    again = [Conversation([attach, *sent]), *(Conversation([attach, each]) for each in sent)]
    again.append(Conversation([attach, *sent[::-1]]))
    for said in sent_again_elsewhere(scene.daemon.socket, scene.name, again):
        assert not {name for name, _ in said} & {"Published", "Released"}, said
    eventually(lambda: state(scene.daemon) == before, f"as before: {state(scene.daemon)}, {before}", 20.0)
    write(worker, open_one, reserved)
    assert worker.ask(m.Publish(reserved.token, OPEN, True)) == m.Published(OPEN, 0, False)
    assert isinstance(scheduler.ask(m.Release(lease.lease)), m.Released)
    assert scene.engine().restored(open_one) == OPEN


def write(worker: RawSession, chain: KeyChain, reserved: m.Reserved) -> None:
    """A worker's part of a reservation."""
    arena, shape = worker.mapped()
    for key, slot in zip(chain.keys, np.frombuffer(reserved.slots, "<u4").tolist(), strict=True):
        write_slot(arena, shape, slot, key.tobytes())


TWO = '[[tenants]]\nname = "a"\ngroup = "team"\n\n[[tenants]]\nname = "b"\ngroup = "team"\n'


@pytest.mark.parametrize("role", ["scheduler", "worker", "both"])
def test_another_tenant_does_not_join_an_engine(stage: Scene, role: str) -> None:
    """Every status names engines, and tokens are numbered: neither opens another tenant's reservations."""
    daemon = stage.start_daemon(TWO)
    owner = stage.session().engine(SMALL, model=stage.name, tenants=["a"])
    chain = owner.chain(1, OPEN, "a")
    reserved = owner.reserve(chain)
    (name,) = daemon.group("team")["engines"]
    with stage.session() as stranger:
        joining = hello(SMALL, model=stage.name, tenants=["b"], role=role, engine=bytes.fromhex(name))
        assert stranger.refused(joining).status == "PERMISSION_DENIED"
    write(owner, chain, reserved)
    assert owner.ask(m.Publish(reserved.token, OPEN, True)) == m.Published(OPEN, 0, False)
    assert owner.lookup(chain).blocks == OPEN
    daemon.assert_sound()


# ---- time --------------------------------------------------------------------------------------------------


def test_a_replayed_heartbeat_keeps_nobody_alive(stage: Scene) -> None:
    """Pins of a silent session can be taken, however often others repeat what it said (LAWS B8)."""
    stale_s, slots = 0.3, 14
    daemon = stage.start_daemon(
        host__capacity_bytes='"4MiB"', daemon__heartbeat_s="0.1", daemon__stale_after_s=str(stale_s)
    )
    saver = stage.engine(layout=BIG, blocks=slots)
    stranger = stage.session().engine(BIG, model=stage.name)
    silent = stage.session().engine(BIG, model=stage.name)
    chain = saver.saved(1, slots)
    found = silent.lookup(chain)
    assert found.blocks == slots
    said = [m.Heartbeat(), m.Fetch(found.lease, 0, slots), m.Timings([], [], [])]
    said += [m.Extend(found.lease, np.arange(slots, dtype="<u4").tobytes(), chain.keys.tobytes())]
    until = time.monotonic() + 2 * stale_s

    def repeated() -> bool:
        for body in said:
            stranger.ask(body)
        with RawSession(daemon.socket) as fresh:
            fresh.sock.sendall(b"".join(frame(number, body) for number, body in enumerate(said, 1)))
            fresh.last_words()
        return time.monotonic() > until

    eventually(repeated, "the session has been silent for long enough")
    assert saver.save(saver.chain(2, slots)) == SaveResult(slots, 0, 0, 0)
    assert daemon.group()["counters"]["revoked_leases"] == 1
    assert silent.failure(m.Release(found.lease)).status == "NOT_FOUND"
    daemon.assert_sound()
