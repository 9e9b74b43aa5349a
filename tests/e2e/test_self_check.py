"""What a real daemon does in slices: checks of itself, unasked and asked, and layout proofs of many cells."""

from __future__ import annotations

from real_daemon import eventually
from scene import Scene

from kvstore.rpc import messages as m
from kvstore.types import BlockLayout

MANY_CELLS = BlockLayout(layers=64, kv_heads=8, head_dim=64, dtype="float32", block_tokens=1)


def test_a_daemon_checks_itself_and_says_when(stage: Scene) -> None:
    daemon = stage.start_daemon(daemon__self_check_s="0.05")
    engine = stage.engine()
    engine.saved(1, 100)

    def complete() -> bool:
        checked = daemon.group()["checked"]
        return checked is not None and bool(checked["complete"])

    eventually(complete, "a self-check that nothing disturbed")
    checked = daemon.group()["checked"]
    assert checked["ok"] is True
    assert checked["broken"] == ""
    assert 0 <= checked["age_s"] < 60


def test_a_daemon_told_not_to_check_itself_does_not(stage: Scene) -> None:
    daemon = stage.start_daemon(daemon__self_check_s="0")
    assert daemon.group()["checked"] is None
    assert daemon.check() == {"ok": True}
    assert daemon.group()["checked"]["ok"] is True


def test_other_questions_are_answered_while_a_check_runs(stage: Scene) -> None:
    stage.start_daemon(index__nodes_max="200_000", host__capacity_bytes='"64MiB"')
    raw = stage.session().engine(model=stage.name)
    raw.ask(m.Pool("owned", 65_536, 65_536))  # 65,536 blocks: sixteen slices and more
    check, *ids = raw.send_together(m.Check(), *[m.Heartbeat()] * 3)
    got = [raw.receive() for _ in range(4)]
    order = [reply.id for reply in got if reply is not None]
    assert sorted(order) == [check, *ids]
    assert order[-1] == check, "the check came last, although it was asked first"


def test_a_session_that_closes_before_its_check_ends_disturbs_nobody(stage: Scene) -> None:
    daemon = stage.start_daemon()
    engine = stage.engine()
    chain = engine.saved(1, 50)
    for _ in range(20):
        session = stage.session().tool()
        session.send(m.Check())
        session.close()
    assert engine.restored(chain) == 50
    daemon.assert_sound()


def test_other_questions_are_answered_while_a_layout_is_proven(stage: Scene) -> None:
    stage.start_daemon()
    raw = stage.session().attach(MANY_CELLS, model=stage.name)
    raw.write_proof()
    proved, *ids = raw.send_together(m.ProvedStore(), *[m.Heartbeat()] * 3)
    got = {reply.id: reply.body for reply in (raw.receive() for _ in range(4)) if reply is not None}
    assert list(got)[-1] == proved, "the proof was answered last, although it was asked first"
    assert sorted(got) == [proved, *ids]
    assert isinstance(got[proved], m.ProveLoad)
    assert raw.ask(m.Proved(True)) == m.Done()


def test_a_session_that_closes_in_the_middle_of_its_proof_leaves_no_slot(stage: Scene) -> None:
    daemon = stage.start_daemon()
    for _ in range(20):
        raw = stage.session().attach(MANY_CELLS, model=stage.name)
        raw.write_proof()
        raw.send(m.ProvedStore())
        raw.close()
    daemon.assert_quiet()
    counts = daemon.group()["host"]
    assert counts["filling"] == counts["ready"] == counts["draining"] == 0


def test_a_proof_that_is_given_up_meanwhile_says_so(stage: Scene) -> None:
    stage.start_daemon()
    raw = stage.session().attach(MANY_CELLS, model=stage.name)
    raw.write_proof()
    proved, quiesced = raw.send_together(m.ProvedStore(), m.Quiesced())
    got = {reply.id: reply.body for reply in (raw.receive() for _ in range(2)) if reply is not None}
    assert isinstance(got[quiesced], m.Quieted)
    assert isinstance(got[proved], m.Failed)
    assert "given up" in got[proved].message
    raw.prove()  # again, from the start
