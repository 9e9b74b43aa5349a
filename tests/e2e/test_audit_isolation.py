"""`kvstore audit-isolation` on real daemons: all doors closed, and each that something forgot is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leaky_daemon
import pytest
import trustme
from command_line import kvstore
from nvme_kit import nvme_settings
from real_daemon import RealDaemon, eventually
from scene import Scene

TWO = '[[tenants]]\nname = "a"\ngroup = "team"\n\n[[tenants]]\nname = "b"\ngroup = "team"\n'
APART = TWO.replace("team", "blue", 1).replace("team", "red")
BOUND = TWO.replace('"team"', '"team"\nusers = [61000]')


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def street(stage: Scene) -> Iterator[Scene]:
    """A stage that every user of this machine can get to; for root only."""
    if os.geteuid() != 0:
        pytest.skip("only root can ask as another user")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        stage.folder = Path(folder)
        stage.folder.chmod(0o755)
        yield stage


@dataclass
class Audited:
    """A daemon with every door there is, and what the command needs to go through them."""

    daemon: RealDaemon
    words: tuple[str, ...]

    def run(self, *more: str) -> tuple[int, dict[str, Any]]:
        """Exit status and report."""
        done = kvstore("audit-isolation", *self.words, *more, "--json")
        assert done.stderr == "", done.stderr
        return done.returncode, json.loads(done.stdout)

    def opened(self, *more: str) -> set[tuple[str, str]]:
        """(door, check) of what was found open; the command says so, too."""
        status, report = self.run(*more)
        found = {
            (check["door"], check["check"])
            for door in report["doors"]
            for check in door["checks"]
            if check["verdict"] == "open"
        }
        assert (status, report["ok"]) == ((1, False) if found else (0, True)), report
        assert set(report["open"]) == {door for door, _ in found}
        return found


def tokens(folder: Path) -> tuple[str, tuple[str, ...]]:
    """A file of tokens for a and b, and the options that show them."""
    entries, words = [], []
    for name in ("a", "b"):
        made = json.loads(kvstore("token", name, "-t", name, "--json").stdout)
        entries.append(made["entry"])
        (folder / name).write_text(made["token"] + "\n")
        words += ["--token-file", f"{name}={folder / name}"]
    path = folder / "tokens.toml"
    path.touch(mode=0o600)
    path.write_text("\n".join(entries))
    return str(path), tuple(words)


def audited(stage: Scene, leaks: str = "", tenants: str = TWO, **settings: str) -> Audited:
    """A daemon with two tenants, a disk, metrics, and gRPC on a socket and on TCP with TLS and tokens."""
    folder = stage.folder / "d"
    folder.mkdir(mode=0o755)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made = authority.issue_cert("localhost", "127.0.0.1")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    (folder / "key.pem").touch(mode=0o600)
    made.private_key_pem.write_to_path(folder / "key.pem")
    path, words = tokens(folder)
    values = {
        **nvme_settings(folder / "nvme"),
        "metrics.listen": f'"127.0.0.1:{free_port()}"',
        "grpc.listen": f'"auto,127.0.0.1:{free_port()}"',
        "grpc.tls_certificate": f'"{folder / "cert.pem"}"',
        "grpc.tls_key": f'"{folder / "key.pem"}"',
        "grpc.tokens_file": f'"{path}"',
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    program = (leaky_daemon.__file__, leaks) if leaks else ("-m", "kvstore")
    daemon = stage.keep(RealDaemon(folder, values, tenants, program=program)).start()
    return Audited(daemon, ("--config", str(daemon.config), *words))


# ---- closed ------------------------------------------------------------------------------------------------


def test_all_doors_of_a_sound_daemon_are_closed(stage: Scene) -> None:
    """And nothing of the audit stays, nor a secret in what it says."""
    place = audited(stage)
    status, report = place.run()
    assert (status, report["ok"], report["open"]) == (0, True, []), report
    assert report["not_probed"] == []
    assert [(door["door"], door["verdict"]) for door in report["doors"]] == [
        (name, "closed") for name in ("session", "grpc", "grpc", "nvme", "status", "metrics")
    ]
    assert report["tenants"] == {"a": "team", "b": "team"}
    assert report["daemon"]["pid"] == place.daemon.pid
    assert report["left"].endswith("are dropped")
    checks = [check for door in report["doors"] for check in door["checks"]]
    assert all(check.keys() == {"door", "check", "verdict", "control", "detail"} for check in checks)
    # What cannot be decided by a check is not called closed.
    told = {(check["door"], check["check"]) for check in checks if check["verdict"] == "not_probed"}
    assert told == {
        ("session", "arenas_differ"),
        ("session", "other_users_are_refused"),
        ("metrics", "tenants_are_not_named"),
    }
    salts = (place.daemon.folder / "nvme/secrets.toml").read_text()
    text = json.dumps(report) + place.daemon.log.read_text()
    assert not [word for word in salts.split('"') if len(word) == 64 and word in text]
    group = place.daemon.group("team")
    assert group["host"]["ready"] == 0
    place.daemon.assert_sound()
    place.daemon.assert_quiet("team")
    # Again, in the same life of the daemon, with what the first has dropped.
    assert place.opened("--as", "b", "--as", "a") == set()


def test_trust_groups_apart(stage: Scene) -> None:
    place = audited(stage, tenants=APART)
    _, report = place.run()
    assert report["ok"], report
    verdicts = {(c["door"], c["check"]): c["verdict"] for door in report["doors"] for c in door["checks"]}
    assert verdicts["session", "arenas_differ"] == "closed"
    assert verdicts["grpc", "foreign_events_are_not_told"] == "closed"
    assert verdicts["nvme", "other_group_has_none (a)"] == "closed"


def test_as_text(stage: Scene) -> None:
    daemon = stage.start_daemon(TWO)
    done = kvstore("audit-isolation", "--config", str(daemon.config))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("as a (group team) and b (group team), at ")
    assert any(line.startswith("CLOSED      session unix:") for line in lines)
    assert "not probed  nvme" in lines
    assert "  not probed  reached: nvme.directory is not set: nothing lies on a disk" in lines
    assert any(line.startswith("  control     own_blocks: a finds 3 blocks of its 3") for line in lines)
    assert lines[-1] == "3 closed, 2 not probed; 12 of its 12 blocks of 4 KiB are dropped"


def test_doors_that_cannot_be_probed_are_not_closed(stage: Scene) -> None:
    """No tokens, a port that the kernel chose, no gRPC at all: each with its reason."""
    place = audited(stage, metrics__listen='"127.0.0.1:0"')
    done = kvstore("audit-isolation", "--config", str(place.daemon.config), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["open"], report["not_probed"]) == (0, [], ["grpc", "metrics"])
    tcp, metrics = report["doors"][2], report["doors"][-1]
    assert tcp["checks"][-1]["detail"].endswith("--token-file a=PATH --token-file b=PATH")
    assert "port 0" in metrics["checks"][0]["detail"]
    off = ("--set", "grpc.listen=", "--set", "nvme.directory=")
    done = kvstore("audit-isolation", "--config", str(place.daemon.config), *off, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["not_probed"]) == (0, ["grpc", "nvme", "metrics"])
    assert report["left"].endswith("are left to eviction: no gRPC door let it drop them")


def test_quotas_in_the_way_are_waited_for(stage: Scene) -> None:
    """A tenant that may ask twice a second is audited all the same, only slower."""
    place = audited(stage, tenants=TWO.replace("group", "lookups_per_s = 2\ngroup"))
    status, report = place.run()
    assert (status, report["not_probed"]) == (0, []), report
    assert not [c for d in report["doors"] for c in d["checks"] if "lookups_per_s" in c["detail"]], report


def test_a_disk_that_took_nothing_is_not_closed(stage: Scene) -> None:
    place = audited(stage, nvme__write_budget_bytes_per_day="4000")
    status, report = place.run()
    assert (status, report["not_probed"]) == (0, ["nvme"]), report
    (control,) = (c for c in report["doors"][3]["checks"] if c["check"] == "own_blocks (a)")
    assert control["detail"].startswith("control failed: 0 of 3 blocks of a lie in")
    assert "the write budget did not let them in" in control["detail"]


def test_certificates_are_checked(stage: Scene) -> None:
    """Against their authority; with another, or none that can be read, nothing is proven."""
    place = audited(stage)
    ours, other = place.daemon.folder / "ca.pem", place.daemon.folder / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    assert place.run("--tls-root", str(ours))[1]["not_probed"] == []
    for path, why in ((other, "CERTIFICATE_VERIFY_FAILED"), (Path("/nowhere"), "no such file")):
        status, report = place.run("--tls-root", str(path))
        assert (status, report["not_probed"]) == (0, ["grpc"])
        checks = {check["check"]: check for check in report["doors"][2]["checks"]}
        assert checks["plaintext_is_refused"]["verdict"] == "closed"
        assert why in checks["reached"]["detail"]


def test_callers_that_need_a_certificate(stage: Scene) -> None:
    place = audited(stage, grpc__tls_clients=f'"{stage.folder / "d" / "ca.pem"}"')
    status, report = place.run()
    assert (status, report["not_probed"]) == (0, ["grpc"])
    checks = {check["check"]: check["verdict"] for check in report["doors"][2]["checks"]}
    assert (checks["no_certificate_is_refused"], checks["own_blocks"]) == ("closed", "not_probed")


def test_an_administrator_may_drop_what_was_saved(stage: Scene) -> None:
    place = audited(stage, grpc__tokens_on_unix="true")
    assert place.run()[1]["left"].endswith("no gRPC door let it drop them")
    made = json.loads(kvstore("token", "ops", "-t", "*", "-v", "admin", "--json").stdout)
    entries = place.daemon.folder / "tokens.toml"
    entries.write_text(f"{entries.read_text()}\n{made['entry']}")
    place.daemon.send(signal.SIGHUP)
    log = place.daemon.log
    eventually(lambda: "configuration reloaded" in log.read_text(), "the token is known")
    admin = place.daemon.folder / "admin"
    admin.write_text(made["token"])
    status, report = place.run("--token-file", f"*={admin}")
    assert (status, report["open"]) == (0, []), report
    assert report["left"].endswith("of its 15 blocks of 4 KiB are dropped")
    assert place.daemon.group("team")["host"]["ready"] == 0


def test_users_of_this_machine(street: Scene) -> None:
    """Tenants that name their users are refused to others at both sockets, and to callers without a token."""
    place = audited(street, tenants=BOUND, daemon__socket_mode="0o666")
    status, report = place.run()
    assert status == 0, report
    found = {(c["door"], c["check"]): c["verdict"] for door in report["doors"] for c in door["checks"]}
    assert found["session", "other_users_are_refused"] == "closed"
    assert found["grpc", "other_users_are_refused"] == "closed"
    assert report["not_probed"] == []


# ---- open --------------------------------------------------------------------------------------------------

SALTLESS = {"roots_differ", "roots_are_salted", "roots_are_of_the_salts", "same_tokens_find_nothing"}


def test_a_session_without_salts(stage: Scene) -> None:
    """What it saves lies on the disk under keys that anybody can compute; the other door is closed."""
    found = audited(stage, "session").opened()
    assert {check for door, check in found if door == "session"} >= SALTLESS | {"foreign_root_is_refused"}
    assert {door for door, _ in found} == {"session", "nvme"}
    assert ("nvme", "unsalted_keys_are_not_there") in found


def test_a_public_api_without_salts(stage: Scene) -> None:
    """Its records bring the unsalted root to the disk; what the sessions saved is found nowhere."""
    found = audited(stage, "grpc").opened()
    assert {check for door, check in found if door == "grpc"} >= SALTLESS | {"same_tokens_fetch_nothing"}
    assert {door for door, _ in found} == {"grpc", "nvme"}
    assert {check for door, check in found if door == "nvme"} == {"unsalted_keys_are_not_there"}


def test_a_disk_without_salts(stage: Scene) -> None:
    assert audited(stage, "nvme").opened() == {("nvme", "unsalted_keys_are_not_there")}


LEAKS = [
    ("root", {("session", "foreign_root_is_refused"), ("session", "foreign_root_takes_no_save")}),
    ("keys", {("session", "foreign_keys_find_nothing"), ("grpc", "foreign_keys_find_nothing")}),
    ("lease", {("session", "foreign_lease_is_refused"), ("session", "foreign_lease_lives_on")}),
    ("filling", {("session", "foreign_filling_is_refused"), ("session", "foreign_filling_lives_on")}),
    ("tenant", {("session", "unknown_tenant_is_refused")}),
    (
        "words",
        {("session", "foreign_request_is_not_told"), ("session", "foreign_counts_are_not_told")},
    ),
    (
        "tokens",
        {
            ("grpc", "token_opens_its_tenant_alone"),
            ("grpc", "foreign_lease_is_refused"),
            ("grpc", "foreign_lease_lives_on"),
            ("grpc", "foreign_events_are_not_told"),
        },
    ),
    ("tls", {("grpc", "plaintext_is_refused")}),
    ("pages", {("status", "no_salts"), ("metrics", "no_salts")}),
]


@pytest.mark.parametrize(("leak", "expected"), LEAKS, ids=[leak for leak, _ in LEAKS])
def test_whatever_is_forgotten_is_named(stage: Scene, leak: str, expected: set[tuple[str, str]]) -> None:
    assert audited(stage, leak).opened() == expected


def test_a_door_for_strangers(stage: Scene) -> None:
    found = audited(stage, "strangers").opened()
    assert found >= {
        ("grpc", check)
        for check in ("no_token_is_refused", "unknown_token_is_refused", "administration_is_refused")
    }
    assert {door for door, _ in found} == {"grpc"}


def test_events_that_are_one(stage: Scene) -> None:
    assert audited(stage, "events", APART).opened() == {("grpc", "foreign_events_are_not_told")}


def test_arenas_that_are_one(stage: Scene) -> None:
    place = audited(stage, "arena", APART, nvme__directory='""')
    assert ("session", "arenas_differ") in place.opened()


def test_users_that_do_not_matter(street: Scene) -> None:
    place = audited(street, "users", BOUND, daemon__socket_mode="0o666")
    assert place.opened() == {("session", "other_users_are_refused"), ("grpc", "other_users_are_refused")}


def test_sockets_that_everybody_may_open(street: Scene) -> None:
    place = audited(street, daemon__socket_mode="0o666")
    assert place.opened() == {("session", "socket_mode"), ("grpc", "socket_mode")}


def test_files_that_others_may_read(stage: Scene) -> None:
    place = audited(stage)
    nvme = place.daemon.folder / "nvme"
    (nvme / "secrets.toml").chmod(0o640)
    (nvme / "team").chmod(0o755)
    assert place.opened() == set(), "nobody else gets as far as that"
    nvme.chmod(0o711)
    assert place.opened() == {("nvme", "salts_are_private"), ("nvme", "directory_is_private (team)")}


# ---- it cannot begin ---------------------------------------------------------------------------------------


def complaint(*words: str) -> str:
    done = kvstore("audit-isolation", *words, "--json")
    assert (done.returncode, done.stderr) == (2, ""), done
    said = json.loads(done.stdout)
    return f"{said['error']}; {said['fix']}"


def test_what_it_cannot_begin_with(stage: Scene) -> None:
    daemon = stage.start_daemon(TWO)
    config = ("--config", str(daemon.config))
    assert "need TENANT=PATH" in complaint(*config, "--token-file", "c=/x")
    assert "no such file" in complaint(*config, "--token-file", "a=/nowhere").lower()
    assert "has no tenant 'c', only a, b" in complaint(*config, "--as", "a", "--as", "c")
    assert "two different tenants, as in --as a --as b" in complaint(*config, "--as", "a")
    daemon.end()
    assert "no daemon answers at" in complaint(*config)


def test_one_tenant_is_not_enough(stage: Scene) -> None:
    daemon = stage.start_daemon()
    said = complaint("--config", str(daemon.config))
    assert "needs two that reuse blocks, the configuration has 1 (default)" in said
    assert "[[tenants]]" in said


def test_a_tenant_that_the_daemon_does_not_know(stage: Scene) -> None:
    """The command was given another configuration than the daemon."""
    daemon = stage.start_daemon(TWO)
    other = stage.folder / "other.toml"
    other.write_text(daemon.config.read_text().replace('name = "b"', 'name = "c"'))
    assert "'c' is not configured on this daemon" in complaint("--config", str(other))
