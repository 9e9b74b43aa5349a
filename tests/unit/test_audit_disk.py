"""What an audit reads from a disk: keys wherever they lie in segment files, and what that says of tenants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.audit import segments as segments_module
from kvstore.audit.nvme_door import Disk, nvme_door
from kvstore.audit.probe import Pair, Probe, SavedChain, Secret, fresh_tokens
from kvstore.audit.segments import Segments
from kvstore.audit.verdicts import Door, Verdict
from kvstore.config import Config, NvmeConfig, TenantConfig
from kvstore.config.doors import door_facts

EPOCH = "00" * 16


def verdicts(door: Door) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in door.findings}


def test_keys_are_found_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a file's ends, across the pieces that are read, twice; and nowhere in a file from before."""
    monkeypatch.setattr(segments_module, "CHUNK_BYTES", 64)
    key, other = Secret("key", (os.urandom(32),)), Secret("other", (os.urandom(32),))
    raw = key.forms[0]
    before = tmp_path / "segment-000000.kvs"
    before.write_bytes(raw)
    os.utime(before, ns=(0, 10**18))
    found = Segments(tmp_path)
    os.utime(before, ns=(0, 10**18 - 1))
    for number, data in enumerate(
        (raw, bytes(50) + raw + bytes(50), bytes(200) + raw, raw + bytes(32) + raw)
    ):
        (tmp_path / f"segment-00001{number}.kvs").write_bytes(data)
    (tmp_path / "elsewhere.txt").write_bytes(raw)
    scan = found.search([key, other])
    assert (scan.found, scan.files, scan.left_files) == ({"key": 5}, 4, 0)
    assert scan.read_bytes == 32 + 132 + 232 + 96
    monkeypatch.setattr(segments_module, "SCAN_BYTES_MAX", 100)
    scan = found.search([key])
    assert scan.left_files == 4 - scan.files > 0


def test_a_disk_that_cannot_be_read_is_not_closed(tmp_path: Path) -> None:
    pair = Pair(TenantConfig(name="a"), TenantConfig(name="b"))
    config = Config(tenants=(pair.a, pair.b), nvme=NvmeConfig(directory=str(tmp_path)))
    of = Probe(config, pair, EPOCH, daemon_uid=os.geteuid())
    disk = Disk(config, pair)
    assert "no such file" in disk.unread["default"]
    (tmp_path / "default").mkdir(mode=0o700)
    (tmp_path / "secrets.toml").touch(mode=0o600)
    assert nvme_door(of, disk).verdict is Verdict.NOT_PROBED
    assert nvme_door(Probe(Config(), pair, EPOCH), Disk(Config(), pair)).verdict is Verdict.NOT_PROBED


def disk_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *groups: str) -> tuple[Probe, Disk]:
    """A probe that has saved as a and b, and the disk of their groups, still empty."""
    tenants = tuple(TenantConfig(name=n, group=g) for n, g in zip("ab", groups, strict=True))
    config = Config(tenants=tenants, nvme=NvmeConfig(directory=str(tmp_path)))
    of = Probe(config, Pair(*tenants), EPOCH, daemon_uid=os.geteuid())
    of.salts = {name: name.encode() * 32 for name in "ab"}
    of.listens = door_facts(config)
    of.roots = {name: of.namespace.root(salt) for name, salt in of.salts.items()}
    of.tokens = {name: fresh_tokens() for name in "ab"}
    for group in groups:
        (tmp_path / group).mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "secrets.toml").touch(mode=0o600)
    monkeypatch.setattr("kvstore.audit.nvme_door._flushed", lambda _: "")
    return of, Disk(config, of.pair)


def put(path: Path, of: Probe, root: bytes, tenant: str) -> None:
    """Keys of what a tenant has saved, under a root, into a segment."""
    with path.open("ab") as file:
        file.write(bytes(100) + of.chain(root, of.tokens[tenant]).keys.tobytes())


def test_keys_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, disk = disk_of(tmp_path, monkeypatch, "blue", "red")
    files = {"a": tmp_path / "blue/segment-000001.kvs", "b": tmp_path / "red/segment-000001.kvs"}
    put(files["a"], of, of.roots["a"], "a")
    door = nvme_door(of, disk)
    assert (door.verdict, verdicts(door)["own_blocks (b)"]) == (Verdict.NOT_PROBED, "not_probed")
    put(files["b"], of, of.roots["b"], "b")
    sound = verdicts(nvme_door(of, disk))
    assert set(sound.values()) == {"closed"}

    def opened(path: Path, root: bytes, tenant: str) -> set[str]:
        kept = path.read_bytes()
        put(path, of, root, tenant)
        found = {check for check, verdict in verdicts(nvme_door(of, disk)).items() if verdict == "open"}
        path.write_bytes(kept)
        return found

    assert opened(files["b"], of.roots["a"], "a") == {"other_group_has_none (a)"}
    assert opened(files["a"], of.roots["b"], "a") == {"foreign_keys_are_not_there"}
    assert opened(files["a"], of.unsalted, "b") == {"unsalted_keys_are_not_there"}
    # What was saved through gRPC, and what no record holds.
    of.bearers, of.grpc_saved = {"b": "bearer-of-b"}, [SavedChain("b", fresh_tokens())]
    assert set(verdicts(nvme_door(of, disk)).values()) == {"closed"}
    kept = files["a"].read_bytes()
    for more, check in (
        (of.salts["a"], "no_secrets_are_there"),
        (b"bearer-of-b", "no_secrets_are_there"),
        (of.chain(of.roots["a"], of.grpc_saved[0].tokens).keys.tobytes(), "foreign_keys_are_not_there"),
        (of.chain(of.roots["b"], of.grpc_saved[0].tokens).keys.tobytes(), "other_group_has_none (b)"),
        (of.chain(of.unsalted, of.grpc_saved[0].tokens).keys.tobytes(), "unsalted_keys_are_not_there"),
    ):
        files["a"].write_bytes(kept + more)
        found = {check for check, verdict in verdicts(nvme_door(of, disk)).items() if verdict == "open"}
        assert found == {check}
    files["a"].write_bytes(kept + of.unsalted)
    assert verdicts(nvme_door(of, disk))["unsalted_keys_are_not_there"] == "open"


def test_what_was_not_read_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, disk = disk_of(tmp_path, monkeypatch, "team", "team")
    for number, name in enumerate("ab"):
        path = tmp_path / f"team/segment-00000{number}.kvs"
        put(path, of, of.roots[name], name)
        os.utime(path, ns=(0, 10**18 + number))
    monkeypatch.setattr(segments_module, "SCAN_BYTES_MAX", 1)
    found = verdicts(nvme_door(of, disk))
    assert found["own_blocks (a)"] == found["foreign_keys_are_not_there"] == "not_probed"


def test_salts_that_are_the_same_or_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for salts, verdict in (
        ((b"a" * 32, b"b" * 32), "closed"),
        ((b"a" * 32, b"a" * 32), "open"),
        ((b"a" * 32, b"b"), "open"),
    ):
        folder = tmp_path / os.urandom(4).hex()
        folder.mkdir()
        of, disk = disk_of(folder, monkeypatch, "team", "team")
        of.salts = dict(zip("ab", salts, strict=True))
        assert verdicts(nvme_door(of, disk))["salts_are_distinct"] == verdict
