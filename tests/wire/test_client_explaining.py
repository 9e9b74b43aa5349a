"""What a client hears of the daemon's decisions, by both drivers."""

from __future__ import annotations

from client_daemon import ScriptedDaemon, failed
from client_kit import Maker
from client_running import Running

from kvstore.decisions import Asked, Outcome
from kvstore.errors import NotFound
from kvstore.policy.reload import ReloadQuestion, decide
from kvstore.rpc import messages as m
from kvstore.types import Tier


def remember(running: Running, request: str, tenant: str = "default") -> None:
    def plan() -> None:
        group = running.group()
        decision = decide(ReloadQuestion(40, 4, 256, 10, (), lambda start, stop: 0.01 * (stop - start)))
        asked = Asked(group.clock.now(), 3, tenant, "model", 40, ((Tier.GPU, 10),), request)
        group.decisions.ended(group.decisions.planned(asked, decision), Outcome(0.0))

    running.call(plan)


def test_a_client_is_told_the_story_of_its_requests(make: Maker, running: Running) -> None:
    client = make.attached()
    nothing = client.explain()
    assert nothing["known"] is False
    assert "no plan was recorded yet" in nothing["reason"]
    remember(running, "cmpl-1")
    remember(running, "cmpl-2")
    remember(running, "cmpl-3", tenant="another")
    assert client.explain()["request"] == "cmpl-2"
    told = client.explain("cmpl-1")
    assert (told["known"], told["choice"], told["prompt_tokens"]) == (True, "recompute", 40)
    assert told["words"][1] == "Known of its KV: 10 blocks on the device."
    assert client.explain("cmpl-3").keys() == {"known", "reason"}
    assert client.attached


def test_without_an_answer_there_is_a_reason(make: Maker, daemon: ScriptedDaemon) -> None:
    client = make.attached()
    daemon.handlers[m.Explain] = lambda *_: failed(NotFound("explain: no plan"))
    assert client.explain("x") == {"known": False, "reason": "explain: no plan"}
    assert daemon.seen(m.Explain) == [m.Explain("x")]
    daemon.handlers[m.Explain] = lambda *_: m.Explained("[1]")
    told = client.explain()
    assert told["known"] is False
    assert "explanation" in told["reason"]


def test_without_a_daemon_there_is_a_reason_too(make: Maker) -> None:
    told = make().explain()
    assert told["known"] is False
    assert told["reason"]
