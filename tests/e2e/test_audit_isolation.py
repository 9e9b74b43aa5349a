"""`kvstore audit-isolation` on real daemons whose doors are closed: what it says, and what it leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import trustme
from audited import APART, BOUND, TWO, audited, free_port, street
from command_line import kvstore
from real_daemon import eventually
from scene import Scene

__all__ = ["street"]


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
        ("session", "group_root_finds_nothing"),
        ("grpc", "group_root_finds_nothing"),
        ("session", "other_users_are_refused"),
        ("metrics", "tenants_are_not_named"),
    }
    assert sorted(report["skipped"]) == sorted(" ".join(names) for names in told)
    # Whatever could let somebody in was tried by who has a right to it, too.
    controls = {(check["door"], check["check"]) for check in checks if check["control"]}
    assert controls >= {
        (door, check) for door in ("session", "grpc") for check in ("own_blocks", "own_blocks_of_the_other")
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
    assert lines[-2].startswith("not made: session ")
    assert lines[-1] == "3 closed, 2 not probed; 21 of its 21 blocks of 4 KiB are dropped"


def test_doors_that_cannot_be_probed_are_not_closed(stage: Scene) -> None:
    """No tokens, a port that the kernel chose, no gRPC at all: each with its reason."""
    place = audited(stage, metrics__listen='"127.0.0.1:0"')
    done = kvstore("audit-isolation", "--config", str(place.daemon.config), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["open"], report["not_probed"]) == (0, [], ["grpc", "metrics"])
    tcp, metrics = report["doors"][2], report["doors"][-1]
    assert tcp["checks"][-1]["detail"].endswith("--token-file a=PATH --token-file b=PATH")
    assert "port 0" in metrics["checks"][1]["detail"]


def test_doors_that_the_configuration_does_not_name(stage: Scene) -> None:
    """The daemon says what it listens on: an audit that was told otherwise cannot say that all is well."""
    place = audited(stage)
    off = ("--set", "grpc.listen=", "--set", "nvme.directory=")
    status, report = place.run(*off)
    assert (status, report["ok"], report["open"]) == (3, False, [])
    assert report["not_probed"] == ["grpc", "nvme"]
    found = place.checks(report)
    assert found["grpc", "as_configured"] == found["nvme", "as_configured"] == "not_probed"
    assert found["metrics", "as_configured"] == "closed"
    assert report["left"].endswith("are left to eviction: no gRPC door let it drop them")
    text = kvstore("audit-isolation", *place.words, *off).stdout
    assert "grpc.listen: the daemon has 'auto,127.0.0.1:" in text


def test_a_full_arena_is_left_alone(stage: Scene) -> None:
    """What an engine keeps there is worth more than an audit's control, unless somebody says otherwise."""
    daemon = stage.start_daemon(TWO)
    engine = stage.engine(tenant="a")
    seeds = iter(range(10_000))
    while daemon.group("team")["host"]["free_slabs"]:
        engine.saved(next(seeds), 100)
    before = daemon.group("team")["host"]["dropped"]["evicted"]
    words = ("audit-isolation", "--config", str(daemon.config), "--json")
    done = kvstore(*words)
    report = json.loads(done.stdout)
    assert (done.returncode, report["open"], report["not_probed"][:2]) == (3, [], ["session", "grpc"])
    assert (report["left"], daemon.group("team")["host"]["dropped"]["evicted"]) == (
        "it saved nothing",
        before,
    )
    assert "--may-evict" in report["doors"][0]["checks"][1]["detail"]
    done = kvstore(*words, "--may-evict")
    assert (done.returncode, json.loads(done.stdout)["doors"][0]["verdict"]) == (0, "closed")
    assert daemon.group("team")["host"]["dropped"]["evicted"] > before


def test_quotas_in_the_way_are_waited_for(stage: Scene) -> None:
    """A tenant that may ask twice a second is audited all the same, only slower."""
    place = audited(stage, tenants=TWO.replace("group", "lookups_per_s = 8\ngroup"))
    status, report = place.run()
    assert (status, report["not_probed"]) == (0, []), report
    quotas = place.daemon.group("team")["quotas"]
    assert quotas["a"]["refused"]["lookups_per_s"] and quotas["b"]["refused"]["lookups_per_s"], "or none was"
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
        assert checks["plaintext_is_refused"]["verdict"] == "not_probed", "who answers there is not known"
        assert why in checks["reached"]["detail"]


def test_callers_that_need_a_certificate(stage: Scene) -> None:
    place = audited(stage, grpc__tls_clients=f'"{stage.folder / "d0" / "ca.pem"}"')
    status, report = place.run()
    assert (status, report["not_probed"]) == (0, ["grpc"])
    checks = {check["check"]: check["verdict"] for check in report["doors"][2]["checks"]}
    assert (checks["no_certificate_is_refused"], checks["own_blocks"]) == ("closed", "not_probed")


def test_a_port_where_nobody_listens(stage: Scene) -> None:
    """Silence is no refusal."""
    place = audited(stage)
    address = f"127.0.0.1:{free_port()}"
    for more in ((), ("--set", f"grpc.tls_clients={place.daemon.folder / 'ca.pem'}")):
        status, report = place.run("--set", f"grpc.listen={address}", *more)
        assert (status, report["open"]) == (3, [])
        (door,) = (door for door in report["doors"] if door["door"] == "grpc")
        assert {check["verdict"] for check in door["checks"]} == {"not_probed"}, door


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
    before = log.read_text().count('"administration refused"')
    status, report = place.run("--token-file", f"*={admin}")
    assert (status, report["open"]) == (0, []), report
    assert report["left"].endswith("of its 33 blocks of 4 KiB are dropped")
    refused = [
        json.loads(line) for line in log.read_text().splitlines() if '"administration refused"' in line
    ]
    assert {line["agent"].split()[0] for line in refused} == {"kvstore-audit-isolation"}
    assert {line["tenant"] for line in refused[before:]} == {"(all)"}, "dropping was let in at the first try"
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
