"""Salts: read from a file that nobody else can read, never shown."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.config import Config, DaemonConfig, NvmeConfig, Salts, TenantConfig
from kvstore.errors import ConfigError
from kvstore.types import Reuse

A, B, G = "a1" * 32, "b2" * 16, "c3" * 64
TENANTS = (
    TenantConfig(name="alice", group="red", reuse=Reuse.GROUP),
    TenantConfig(name="bob", group="red", reuse=Reuse.OWN),
)
GOOD = f'[tenants]\nalice = "{A}"\nbob = "{B}"\n[groups]\nred = "{G}"\n'


@pytest.fixture
def salts_of(tmp_path: Path):
    def salts_of(text: str, mode: int = 0o600, tenants: tuple[TenantConfig, ...] = TENANTS) -> Salts:
        path = tmp_path / "secrets.toml"
        path.write_text(text)
        path.chmod(mode)
        return Salts.load(Config(daemon=DaemonConfig(secrets_file=str(path)), tenants=tenants))

    return salts_of


def test_salts_by_name(salts_of) -> None:
    salts = salts_of(GOOD)
    assert salts.tenants == {"alice": bytes.fromhex(A), "bob": bytes.fromhex(B)}
    assert salts.groups == {"red": bytes.fromhex(G)}


def test_a_group_that_shares_nothing_needs_no_salt(salts_of) -> None:
    salts = salts_of(f'[tenants]\nbob = "{B}"\n', tenants=TENANTS[1:])
    assert salts.groups == {}


def test_no_secret_is_ever_shown(salts_of) -> None:
    shown = repr(salts_of(GOOD)) + str(salts_of(GOOD))
    for secret in (A, B, G):
        assert secret not in shown
        assert repr(bytes.fromhex(secret))[2:10] not in shown


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o611, 0o777])
def test_a_file_open_to_others_is_refused(salts_of, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"^daemon\.secrets_file: .* is open to others; run chmod 600"):
        salts_of(GOOD, mode)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_private_file_is_read(salts_of, mode: int) -> None:
    assert salts_of(GOOD, mode).groups


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('"xyz"', "alice: not hexadecimal"),
        ('"' + "aa" * 15 + '"', "alice: need 16 to 64 bytes, got 15"),
        ('"' + "aa" * 65 + '"', "alice: need 16 to 64 bytes, got 65"),
        ('""', "alice: need 16 to 64 bytes, got 0"),
        ("5", "has no salt for alice"),
    ],
)
def test_bad_salts_name_the_tenant_and_hide_the_value(salts_of, bad: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        salts_of(f'[tenants]\nalice = {bad}\nbob = "{B}"\n[groups]\nred = "{G}"\n')
    assert "aaaa" not in str(caught.value) and B not in str(caught.value)


@pytest.mark.parametrize("table", ["tenants", "groups"])
def test_a_missing_salt_is_named(salts_of, table: str) -> None:
    name = {"tenants": "alice", "groups": "red"}[table]
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(name))
    with pytest.raises(ConfigError, match=rf"\[{table}\] has no salt for {name}; add {name} = "):
        salts_of(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        Salts.load(Config(daemon=DaemonConfig(secrets_file=str(tmp_path / "absent.toml"))))


@pytest.mark.parametrize(
    "again",
    [
        f'[tenants]\nalice = "{A}"\nbob = "{A}"\n[groups]\nred = "{G}"\n',
        f'[tenants]\nalice = "{G}"\nbob = "{B}"\n[groups]\nred = "{G}"\n',
    ],
)
def test_two_names_never_share_a_salt(salts_of, again: str) -> None:
    """Equal salts are equal roots: one tenant would read the other's blocks."""
    with pytest.raises(ConfigError, match="same salt"):
        salts_of(again)


def test_without_a_file_salts_are_random() -> None:
    one, two = (Salts.load(Config(tenants=TENANTS)) for _ in range(2))
    values = [*one.tenants.values(), *one.groups.values(), *two.tenants.values(), *two.groups.values()]
    assert len(set(values)) == len(values)
    assert all(len(value) >= 16 for value in values)
    assert one.tenants.keys() == {"alice", "bob"} and one.groups.keys() == {"red"}


def test_a_relative_file_lies_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets.toml").write_text(f'[tenants]\ndefault = "{"ab" * 16}"\n')
    (tmp_path / "secrets.toml").chmod(0o600)
    (tmp_path / "kvstore.toml").write_text('[daemon]\nsecrets_file = "secrets.toml"\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = Config.load(tmp_path / "kvstore.toml", environ={})
    assert Salts.load(config).tenants == {"default": b"\xab" * 16}


def test_a_missing_file_names_the_key() -> None:
    config = Config.load(environ={}, flags=["daemon.secrets_file=/nowhere/secrets.toml"])
    with pytest.raises(ConfigError, match=r"daemon\.secrets_file: /nowhere/secrets\.toml"):
        Salts.load(config)


# ---- minted into nvme.directory ---------------------------------------------------------------------------


def with_disk(directory: Path, *tenants: TenantConfig, secrets_file: str = "") -> Config:
    daemon = DaemonConfig(secrets_file=secrets_file)
    return Config(daemon=daemon, nvme=NvmeConfig(directory=str(directory)), tenants=tenants or TENANTS)


def test_salts_beside_the_blocks_outlive_the_process(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    first = Salts.load(with_disk(directory))
    file = directory / "secrets.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    before = file.stat()
    assert Salts.load(with_disk(directory)) == first
    assert file.stat().st_mtime_ns == before.st_mtime_ns, "written once"
    assert sorted(entry.name for entry in directory.iterdir()) == ["secrets.toml"]
    assert first.tenants.keys() == {"alice", "bob"} and first.groups.keys() == {"red"}
    assert len({*first.tenants.values(), *first.groups.values()}) == 3


def test_names_that_come_get_salts_and_names_that_go_keep_theirs(tmp_path: Path) -> None:
    alice, bob = TENANTS
    only = Salts.load(with_disk(tmp_path, alice))
    dots = TenantConfig(name="a.b-c_d", group="0")
    more = Salts.load(with_disk(tmp_path, bob, dots))
    assert more.tenants.keys() == {"bob", "a.b-c_d"} and more.groups.keys() == {"red", "0"}
    assert more.groups["red"] == only.groups["red"]
    back = Salts.load(with_disk(tmp_path, alice, bob, dots))
    assert back.tenants == {**only.tenants, **more.tenants}
    assert back.groups == more.groups
    assert stat.S_IMODE((tmp_path / "secrets.toml").stat().st_mode) == 0o600


def test_a_secrets_file_wins_and_nothing_is_minted(tmp_path: Path, salts_of) -> None:
    salts_of(GOOD)
    directory = tmp_path / "nvme"
    config = with_disk(directory, secrets_file=str(tmp_path / "secrets.toml"))
    assert Salts.load(config).tenants["alice"] == bytes.fromhex(A)
    assert not directory.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o611, 0o777])
def test_minted_salts_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    Salts.load(with_disk(tmp_path))
    (tmp_path / "secrets.toml").chmod(mode)
    with pytest.raises(ConfigError, match=r"^nvme\.directory: .* is open to others; run chmod 600"):
        Salts.load(with_disk(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenants]\n",
        "[tenants",
        f'[tenants]\nalice = "{A}"\n[groups]\n[more]\n',
        "tenants = 5\n[groups]\n",
        f'[tenants]\nalice = "{A}"\n[groups]\nred = 5\n',
        f'[tenants]\nalice = "{A}z"\n[groups]\n',
        f'[tenants]\nalice = "{A[:10]}"\n[groups]\n',
        f'[tenants]\nalice = "{A}"\nbob = "{A}"\n[groups]\n',
    ],
)
def test_minted_salts_that_are_damaged_are_never_minted_again(tmp_path: Path, text: str) -> None:
    """The blocks on the disk need the old ones: only a person may give them up."""
    Salts.load(with_disk(tmp_path))
    (tmp_path / "secrets.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"^nvme\.directory: .*secrets\.toml: .*; bring it back") as caught:
        Salts.load(with_disk(tmp_path))
    assert A[:10] not in str(caught.value)
    assert (tmp_path / "secrets.toml").read_text() == text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    Salts.load(with_disk(target))
    for number, make in enumerate(
        (
            lambda path: path.symlink_to(target / "secrets.toml"),
            lambda path: path.mkdir(),
            lambda path: os.mkfifo(path, 0o600),
            lambda path: (path.write_bytes(b"#" * (2 << 20)), path.chmod(0o600)),
            lambda path: (path.write_bytes(b"\xff\xfe"), path.chmod(0o600)),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory / "secrets.toml")
        with pytest.raises(ConfigError, match=r"^nvme\.directory: "):
            Salts.load(with_disk(directory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    Salts.load(with_disk(tmp_path))
    os.chown(tmp_path / "secrets.toml", 65534, 65534)
    with pytest.raises(ConfigError, match=r"^nvme\.directory: .* belongs to another user"):
        Salts.load(with_disk(tmp_path))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^nvme\.directory: .*/file/nvme/secrets\.toml cannot be used: "):
        Salts.load(with_disk(tmp_path / "file" / "nvme"))


def test_what_a_crash_left_beside_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".secrets.toml.new").write_text("half of it")
    Salts.load(with_disk(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["secrets.toml"]


@contextmanager
def held(directory: Path) -> Iterator[None]:
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def test_a_daemon_that_mints_is_not_disturbed(tmp_path: Path) -> None:
    Salts.load(with_disk(tmp_path, TENANTS[0]))
    with held(tmp_path):
        assert Salts.load(with_disk(tmp_path, TENANTS[0])).tenants, "reading needs nobody's leave"
        with pytest.raises(
            ConfigError, match=r"^nvme\.directory: another daemon is just writing .*; start again"
        ):
            Salts.load(with_disk(tmp_path))
    assert Salts.load(with_disk(tmp_path)).tenants


def test_two_that_start_at_once_agree(tmp_path: Path) -> None:
    got: list[Salts | ConfigError] = []
    begin = threading.Barrier(4)

    def start() -> None:
        begin.wait(30)
        try:
            got.append(Salts.load(with_disk(tmp_path)))
        except ConfigError as error:
            got.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    salts = [found for found in got if isinstance(found, Salts)]
    assert salts
    assert all(found == Salts.load(with_disk(tmp_path)) for found in salts)
    assert all("start again" in str(found) for found in got if isinstance(found, ConfigError))
