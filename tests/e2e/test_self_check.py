"""A real daemon checks itself, unasked and asked, while it goes on answering."""

from __future__ import annotations

from real_daemon import eventually
from scene import Scene

from kvstore.rpc import messages as m


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
    check = raw.send(m.Check())
    ids = [raw.send(m.Heartbeat()) for _ in range(3)]
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
