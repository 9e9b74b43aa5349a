"""What an audit makes of what it finds: verdicts, tenants, salts, pages, files, and keys in segment files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.audit.looks import Look, answered, judge_look, judge_refusals
from kvstore.audit.modes import judge_socket
from kvstore.audit.pages_door import metrics_door, secrets_in
from kvstore.audit.probe import BLOCKS, LAYOUT, Pair, Probe, Secret, fresh_tokens, namespace_of, pick
from kvstore.audit.running import no_room
from kvstore.audit.secret_file import read_salts
from kvstore.audit.session_door import judge_roots
from kvstore.audit.verdicts import Door, Report, Verdict
from kvstore.cli.audit_isolation import _lines, _tokens
from kvstore.config import Config, DaemonConfig, MetricsConfig, TenantConfig
from kvstore.config.doors import door_facts
from kvstore.errors import BadRequest
from kvstore.types import Reuse

A, B = TenantConfig(name="a"), TenantConfig(name="b")
EPOCH = "00" * 16


def probe(**tables: object) -> Probe:
    config = Config(tenants=(A, B), **tables)  # type: ignore[arg-type]
    return Probe(config, Pair(A, B), EPOCH, daemon_uid=os.geteuid())


def verdicts(door: Door) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in door.findings}


# ---- verdicts ----------------------------------------------------------------------------------------------


def door_of(*findings: str) -> Door:
    """One of findings: control, failed, closed, open, skipped."""
    door = Door("session", "")
    for number, what in enumerate(findings):
        check = f"{what}{number}"
        if what in ("control", "failed"):
            door.control(check, what == "control", "")
        elif what in ("closed", "open"):
            door.judge(check, what == "closed", "")
        else:
            door.skip(check, "")
    return door


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ((), "not_probed"),
        (("skipped",), "not_probed"),
        (("control",), "not_probed"),
        (("control", "skipped"), "not_probed"),
        (("control", "closed"), "closed"),
        (("closed",), "closed"),
        (("closed", "skipped"), "closed"),
        (("failed", "closed"), "not_probed"),
        (("control", "failed", "closed"), "not_probed"),
        (("closed", "open"), "open"),
        (("failed", "open"), "open"),
    ],
)
def test_what_findings_make_of_a_door(findings: tuple[str, ...], verdict: str) -> None:
    door = door_of(*findings)
    assert door.verdict.value == verdict
    assert [check["control"] for check in door.json()["checks"]] == [
        what in ("control", "failed") for what in findings
    ]


@pytest.mark.parametrize(
    ("core", "findings", "verdict"),
    [
        (("closed1",), ("control", "closed"), "closed"),
        (("closed1", "skipped2"), ("control", "closed", "skipped"), "not_probed"),
        (("skipped2",), ("control", "closed", "skipped"), "not_probed"),
        (("never",), ("control", "closed"), "not_probed"),
        (("never",), ("control", "open"), "open"),
    ],
)
def test_a_door_without_its_core_is_not_closed(
    core: tuple[str, ...], findings: tuple[str, ...], verdict: str
) -> None:
    door = door_of(*findings)
    door.core.update(core)
    assert door.verdict.value == verdict


def test_what_was_left_out_is_listed() -> None:
    doors = [door_of("closed", "skipped"), door_of("failed", "closed")]
    report = Report({"socket": "/s", "pid": 1}, {}, doors, "left")
    assert report.json()["skipped"] == ["session skipped1", "session failed0"]
    assert "not made: session skipped1, session failed0" in list(_lines(report))


@pytest.mark.parametrize(
    ("doors", "ok"),
    [
        (("closed", "closed"), True),
        (("closed", "skipped"), True),
        (("closed", "open"), False),
        (("open", "closed"), False),
        (("failed", "closed"), False),
        ((), False),
    ],
)
def test_what_doors_make_of_an_audit(doors: tuple[str, ...], ok: bool) -> None:
    report = Report(
        {"socket": "/s", "pid": 1}, {"a": "g", "b": "g"}, [door_of(what) for what in doors], "left"
    )
    assert report.ok is ok
    told = report.json()
    assert (told["ok"], told["open"] == ["session"]) == (ok, "open" in doors)
    text = "\n".join(_lines(report))
    assert ("OPEN" in text) == ("open" in doors)


def test_a_control_that_failed_says_so() -> None:
    door = door_of("failed")
    assert door.findings[0].detail == "control failed: "
    assert door.findings[0].verdict is Verdict.NOT_PROBED


# ---- questions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look", "verdict"),
    [
        (Look(), "closed"),
        (Look.failed("PERMISSION_DENIED", "no"), "closed"),
        (Look(2), "open"),
        (Look.failed("RESOURCE_EXHAUSTED", "tenants.lookups_per_s"), "not_probed"),
        (Look.failed("UNAVAILABLE", ""), "not_probed"),
    ],
)
def test_a_question_that_must_find_nothing(look: Look, verdict: str) -> None:
    door = Door("grpc", "")
    judge_look(door, "check", look, "b")
    assert verdicts(door) == {"check": verdict}


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        (("PERMISSION_DENIED", "NOT_FOUND"), "closed"),
        (("PERMISSION_DENIED", "OK"), "open"),
        (("PERMISSION_DENIED", ""), "open"),
        (("UNAVAILABLE", "OK"), "open"),
        (("DEADLINE_EXCEEDED", ""), "open"),
        (("PERMISSION_DENIED", "INTERNAL"), "not_probed"),
        (("PERMISSION_DENIED", "UNAVAILABLE"), "not_probed"),
        (("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"), "not_probed"),
        ((), "not_probed"),
    ],
)
def test_calls_that_must_be_refused(ends: tuple[str, ...], verdict: str) -> None:
    """One that is let in opens, whatever the others hide; a fault is no refusal."""
    door = Door("grpc", "")
    judge_refusals(door, "check", {str(number): end for number, end in enumerate(ends)}, "b, ")
    assert verdicts(door) == {"check": verdict}


def test_a_token_that_is_not_known_says_nothing_of_whom_it_would_open() -> None:
    door = Door("grpc", "")
    judge_refusals(door, "check", {"Plan": "UNAUTHENTICATED"}, "", ("PERMISSION_DENIED",))
    assert verdicts(door) == {"check": "not_probed"}


def test_a_question_that_a_rate_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.audit.looks._AGAIN_S", 0.001)
    answers = [Look(unanswered="tenants.lookups_per_s"), Look(unanswered="tenants.lookups_per_s"), Look(1)]
    assert answered(lambda: answers.pop(0)) == Look(1)
    assert answered(lambda: Look(unanswered="silence")).unanswered == "silence"


# ---- who asks ----------------------------------------------------------------------------------------------


def test_the_tenants_to_ask_as() -> None:
    quiet = TenantConfig(name="quiet", reuse=Reuse.NONE)
    config = Config(tenants=(quiet, A, B))
    assert pick(config, []).names == ("a", "b")
    assert pick(config, ["b", "a"]).names == ("b", "a")
    assert pick(config, []).together
    assert not pick(Config(tenants=(A, TenantConfig(name="c", group="other"))), []).together
    for named, words in (
        (["a"], "two different tenants"),
        (["a", "a"], "two different tenants"),
        (["a", "b", "quiet"], "two different tenants"),
        (["a", "c"], "has no tenant 'c'"),
        (["a", "quiet"], "its reuse is none"),
    ):
        with pytest.raises(BadRequest, match=words):
            pick(config, named)
    for tenants in ((A,), (A, quiet), (quiet,)):
        with pytest.raises(BadRequest, match=r"needs two that reuse blocks.*\[\[tenants\]\]"):
            pick(Config(tenants=tenants), [])


def test_tokens_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("secret-a\n")
    (tmp_path / "two").write_text("secret a")
    (tmp_path / "none").write_text("")
    assert _tokens([f"a={tmp_path}/a"], ("a", "b")) == {"a": "secret-a"}
    for word in ("a", "c=/x", f"a={tmp_path}/two", f"b={tmp_path}/none", "a=/nowhere"):
        with pytest.raises(BadRequest, match="--token-file") as caught:
            _tokens([word], ("a", "b"))
        assert "secret" not in str(caught.value)


def test_a_namespace_of_each_life_of_the_daemon() -> None:
    assert namespace_of(EPOCH) == namespace_of(EPOCH)
    assert namespace_of(EPOCH).digest != namespace_of("11" * 16).digest
    first, second = fresh_tokens(), fresh_tokens()
    assert len(first) == BLOCKS * LAYOUT.block_tokens
    assert first.min() >= 1 << 31 and not set(first.tolist()) & set(second.tolist())


# ---- salts -------------------------------------------------------------------------------------------------


def salts_at(path: Path, text: str) -> Config:
    path.write_text(text)
    return Config(tenants=(A, B), daemon=DaemonConfig(secrets_file=str(path)))


def test_salts_are_read_and_never_shown(tmp_path: Path) -> None:
    one, two = "11" * 32, "22" * 32
    path = tmp_path / "s.toml"
    found = read_salts(salts_at(path, f'[tenants]\na = "{one}"\nb = "{two}"\n[groups]\ndefault = "33"\n'))
    assert found.unread == ""
    assert found.salts == {"a": b"\x11" * 32, "b": b"\x22" * 32, "group:default": b"3"}
    assert one not in repr(found)
    for text in (f'a = "{one}', f'tenants = "{one}"', f"[tenants]\na = {one[:9]}", '[tenants]\na = "zz"'):
        found = read_salts(salts_at(path, text))
        assert found.salts == {} and str(path) in found.unread and one[:9] not in found.unread
    path.unlink()
    assert "no such file" in read_salts(Config(daemon=DaemonConfig(secrets_file=str(path)))).unread
    assert "in no file" in read_salts(Config()).unread


def test_roots_that_anybody_could_compute() -> None:
    of = probe()
    of.salts, of.salts_place = {"a": b"a" * 32, "b": b"b" * 32}, "secrets.toml"
    right = {f"{name} (own)": of.namespace.root(salt) for name, salt in of.salts.items()}
    door = Door("session", "")
    judge_roots(door, of, right)
    assert set(verdicts(door).values()) == {"closed"}
    for wrong, check in (
        ({"b (own)": right["a (own)"]}, "roots_differ"),
        ({"a (own)": of.unsalted}, "roots_are_salted"),
        ({"a (group)": of.unsalted}, "roots_are_salted"),
        ({"a (own)": of.namespace.root(b"a")}, "roots_are_of_the_salts"),
    ):
        door = Door("session", "")
        judge_roots(door, of, right | wrong)
        assert verdicts(door)[check] == "open"
    of.salts, of.salts_unread = {}, "no permission"
    door = Door("session", "")
    judge_roots(door, of, right)
    assert verdicts(door)["roots_are_of_the_salts"] == "not_probed"


# ---- pages -------------------------------------------------------------------------------------------------


def test_secrets_in_a_page() -> None:
    salt, token = Secret.of("the salt of a", bytes(range(32))), Secret("a token id of a", (b"3000000001",))
    for form in salt.forms:
        assert secrets_in(b"x" + form + b"y", [salt, token]) == ["the salt of a"]
    assert secrets_in(b'{"n": 3000000001}', [salt, token]) == ["a token id of a"]
    for page in (b"", b"13000000001", b"30000000010", b"0.3000000001", bytes(range(31))):
        assert secrets_in(page, [salt, token]) == []
    assert bytes(range(32)).hex() not in repr(salt)


def test_a_page_that_nobody_serves(tmp_path: Path) -> None:
    for listen in ("", f"unix:{tmp_path}/none.sock", "127.0.0.1:0"):
        door = metrics_door(probe(metrics=MetricsConfig(listen=listen)))
        assert door.verdict is Verdict.NOT_PROBED, listen


def test_a_page_that_tells_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    of = probe(metrics=MetricsConfig(listen="127.0.0.1:9464"))
    of.salts, of.tokens = {"a": b"s" * 32}, {"a": fresh_tokens()}
    of.bearers, of.listens = {"a": "bearer-of-a"}, door_facts(of.config)
    of.roots = {"a": of.namespace.root(b"s" * 32)}
    key = of.chain(of.roots["a"], of.tokens["a"]).keys[-1].tobytes()
    honest = b'kvstore_lookups_total{tenant="a"} 3\n'

    def found(more: bytes) -> dict[str, str]:
        monkeypatch.setattr("kvstore.audit.pages_door._page", lambda _: honest + more)
        return verdicts(metrics_door(of))

    checks = ("as_configured", "reached", "no_salts", "no_roots_or_keys", "no_tokens", "no_bearer_tokens")
    closed = dict.fromkeys(checks, "closed")
    assert found(b"") == closed | {"tenants_are_not_named": "not_probed"}
    for more, check in (
        (b"73" * 32, "no_salts"),
        (of.roots["a"].hex().encode(), "no_roots_or_keys"),
        (key, "no_roots_or_keys"),
        (str(of.tokens["a"][0]).encode(), "no_tokens"),
        (b"bearer-of-a", "no_bearer_tokens"),
        (b"bearer-of-a".hex().encode(), "no_bearer_tokens"),
    ):
        assert [name for name, verdict in found(more).items() if verdict == "open"] == [check]
    of.bearers = {}
    assert found(b"")["no_bearer_tokens"] == "not_probed"


def test_what_was_not_saved_cannot_be_found_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    of = probe(metrics=MetricsConfig(listen="127.0.0.1:9464"))
    of.listens, of.no_room = door_facts(of.config), "the arena is full"
    monkeypatch.setattr("kvstore.audit.pages_door._page", lambda _: b"kvstore_up 1\n")
    door = metrics_door(of)
    assert (door.verdict, verdicts(door)["no_tokens"]) == (Verdict.NOT_PROBED, "not_probed")


# ---- what the daemon says it listens on --------------------------------------------------------------------


def test_doors_that_the_audit_was_not_told_of() -> None:
    of = probe()
    theirs = Config(tenants=(A, B), metrics=MetricsConfig(listen="127.0.0.1:9464"))
    for listens, verdict in (
        (door_facts(of.config), "closed"),
        (door_facts(theirs), "not_probed"),
        (None, "not_probed"),
    ):
        of.listens = listens
        door = metrics_door(of)
        assert verdicts(door)["as_configured"] == verdict
        report = Report({}, {}, [door_of("closed"), door], "left")
        assert (report.ok, report.open, report.strange) == (verdict == "closed", False, verdict != "closed")


def test_a_full_arena_is_left_alone() -> None:
    pair = Pair(TenantConfig(name="a", group="blue"), TenantConfig(name="b", group="red"))

    def daemon(blue: int, red: int) -> dict[str, object]:
        slabs = {"blue": blue, "red": red}
        return {"groups": {name: {"host": {"free_slabs": free}} for name, free in slabs.items()}}

    assert no_room(pair, daemon(1, 2)) == ""
    assert "arena of red" in no_room(pair, daemon(1, 0))
    assert "blue and red" in no_room(pair, daemon(0, 0))


# ---- files -------------------------------------------------------------------------------------------------


def test_sockets_and_who_may_open_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.sock"
    path.touch()
    for mode, reachable, bound, verdict in (
        (0o600, True, "", "closed"),
        (0o660, True, "", "closed"),
        (0o666, True, "", "open"),
        (0o666, False, "", "closed"),
        (0o666, True, "a token", "closed"),
    ):
        path.chmod(mode)
        monkeypatch.setattr("kvstore.audit.modes._reachable", lambda _, reachable=reachable: reachable)
        door = Door("session", "")
        judge_socket(door, "socket_mode", path, bound)
        assert verdicts(door) == {"socket_mode": verdict}, (mode, reachable, bound)
    path.unlink()
    door = Door("session", "")
    judge_socket(door, "socket_mode", path, "")
    assert verdicts(door) == {"socket_mode": "not_probed"}
