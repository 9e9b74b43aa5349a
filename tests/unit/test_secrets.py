"""Salts: read from a file that nobody else can read, never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import Config, DaemonConfig, Salts, TenantConfig
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
