"""What must be equal for a kept arena to be adopted, and that its secrets go nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kvstore.config import Config, DaemonConfig, NvmeConfig, Salts, TenantConfig
from kvstore.keep.facts import FORMAT, Facts
from kvstore.types import Reuse

TENANTS = (
    TenantConfig(name="a", group="g", reuse=Reuse.GROUP),
    TenantConfig(name="b", group="g"),
    TenantConfig(name="c", group="h"),
)


def config(
    tenants: tuple[TenantConfig, ...] = TENANTS, secrets: str = "", disk: str = "", **host: int
) -> Config:
    nvme = NvmeConfig(directory=disk)
    base = Config(tenants=tenants, daemon=DaemonConfig(secrets_file=secrets), nvme=nvme)
    return msgspec.structs.replace(base, host=msgspec.structs.replace(base.host, **host))


def salts(**changes: bytes) -> Salts:
    named = {"a": b"a" * 16, "b": b"b" * 16, "c": b"c" * 16, **changes}
    return Salts(named, {"g": b"g" * 16, "h": b"h" * 16})


def facts(settings: Config, secret: Salts | None = None) -> Facts:
    return Facts.of(settings, secret or salts(), "1.0")


def through_a_memfd(value: Facts) -> Facts:
    fd = value.to_fd()
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        return Facts.from_fd(fd)
    finally:
        os.close(fd)


def of_text(text: bytes) -> str:
    """Why a facts file is refused."""
    fd = os.memfd_create("facts", os.MFD_CLOEXEC)
    try:
        os.write(fd, text)
        with pytest.raises(ValueError) as refused:
            Facts.from_fd(fd)
        return str(refused.value)
    finally:
        os.close(fd)


def test_they_come_back_as_they_were() -> None:
    for settings in (config(), config(secrets="/s"), config(disk="/d")):
        assert through_a_memfd(facts(settings)) == facts(settings)
        assert all(facts(settings).why_not(facts(settings), group) == "" for group in ("g", "h"))


def test_random_salts_are_kept_and_new_names_get_new_ones() -> None:
    kept = facts(config())
    fresh = Salts({"a": b"x" * 16, "d": b"d" * 16}, {"g": b"y" * 16})
    merged = kept.salts(fresh)
    assert merged.tenants == {"a": b"a" * 16, "d": b"d" * 16}
    assert merged.groups == {"g": b"g" * 16}


def test_salts_of_a_file_are_not_in_them_and_no_text_shows_any() -> None:
    from_file, minted, random = (facts(c) for c in (config(secrets="/s"), config(disk="/d"), config()))
    for value in salts().tenants.values():
        assert value.hex() not in msgspec.json.encode(from_file).decode()
        assert value.hex() not in msgspec.json.encode(minted).decode()
        assert value.hex() in msgspec.json.encode(random).decode()
        assert value.hex() not in repr(from_file) + repr(random) + str(random)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (facts(config(capacity_bytes=2 << 30)), "host.capacity_bytes was 1073741824 and is 2147483648"),
        (facts(config(slab_bytes=64 << 20)), "host.slab_bytes was 33554432 and is 67108864"),
        (facts(config(TENANTS[2:])), "not configured any more"),
        (facts(config(secrets="/s")), "its salts were random"),
        (facts(config(disk="/d")), "its salts were random"),
    ],
)
def test_why_an_arena_is_of_no_use(now: Facts, reason: str) -> None:
    assert reason in facts(config()).why_not(now, "g")
    assert "nothing of this group" in facts(config(TENANTS[2:])).why_not(facts(config()), "g")


def test_a_salt_of_a_file_that_changed_concerns_its_own_group() -> None:
    before = facts(config(secrets="/s"))
    now = facts(config(secrets="/s"), salts(b=b"B" * 16))
    assert before.why_not(now, "g") == "daemon.secrets_file or nvme.directory has another salt for b"
    assert before.why_not(now, "h") == ""
    # Tenants come and go: blocks of those who went are never asked for, and leave like any others.
    fewer = facts(config(TENANTS[1:], secrets="/s"))
    assert before.why_not(fewer, "g") == ""
    assert fewer.why_not(before, "g") == ""


def test_other_formats_and_nonsense_are_refused() -> None:
    assert f"format {FORMAT + 1}, this version keeps format {FORMAT}" in of_text(
        msgspec.json.encode({"format": FORMAT + 1, "anything": [1]})
    )
    for text in (b"", b"{}", b'{"format": "x"}', b"\xff", b'{"format": %d}' % FORMAT, b"[" * 100_000):
        assert of_text(text)


def test_they_live_in_memory_only(tmp_path: Path) -> None:
    fd = facts(config()).to_fd()
    try:
        assert str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:kvstore-facts")
    finally:
        os.close(fd)
