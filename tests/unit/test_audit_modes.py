"""Who may read the files of a daemon, as an audit sees it."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.audit.modes import judge_private
from kvstore.audit.probe import Pair, Probe
from kvstore.audit.verdicts import Door, Verdict
from kvstore.config import Config, TenantConfig


def probe() -> Probe:
    a, b = TenantConfig(name="a"), TenantConfig(name="b")
    return Probe(Config(tenants=(a, b)), Pair(a, b), "00" * 16, daemon_uid=os.geteuid())


def verdicts(door: Door) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in door.findings}


def test_files_and_who_may_read_them(tmp_path: Path) -> None:
    of, folder = probe(), tmp_path / "nvme"
    folder.mkdir()
    path = folder / "secrets.toml"
    path.touch()

    def found(mode: int, around: int = 0o755) -> str:
        folder.chmod(around)
        path.chmod(mode)
        door = Door("nvme", "")
        judge_private(door, "check", path, of)
        return verdicts(door)["check"]

    assert (found(0o600), found(0o640), found(0o604)) == ("closed", "open", "open")
    assert found(0o644, 0o700) == "closed"
    if os.geteuid() == 0:
        os.chown(path, 61_000, 61_000)
        assert found(0o600) == "open"
        of.daemon_uid = 61_000
        assert found(0o600) == "closed"
    path.unlink()
    path.symlink_to("/etc/hostname")
    door = Door("nvme", "")
    judge_private(door, "check", path, of)
    assert verdicts(door) == {"check": "open"}
    path.unlink()
    judge_private(door, "check", path, of)
    assert door.findings[-1].verdict is Verdict.NOT_PROBED
