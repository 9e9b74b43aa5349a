"""Secrets of tenants and trust groups, from one of three places:

daemon.secrets_file    written by whoever runs the daemon, read only
nvme.directory         secrets.toml in it, minted here: a disk outlives the daemon, so must what its keys are
                       made of; a name that is new gets a salt at the next start or reload
neither                random, for the life of the process (and of a kept arena)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.config.sources import read_file
from kvstore.config.tables import SECRETS_NAME
from kvstore.errors import ConfigError
from kvstore.types import Reuse

if TYPE_CHECKING:
    from kvstore.config import Config

__all__ = ["Salts", "tenant_salts"]

SALT_BYTES_MIN, SALT_BYTES_MAX = 16, 64
# 1,000 tenants are 80 KiB; what is longer is not ours.
FILE_BYTES_MAX = 1 << 20
_TABLES = ("tenants", "groups")
_MINTED = (
    "# Salts of this directory's tenants, minted by kvstore. Without this file nobody can use its blocks.\n"
)


@dataclass(frozen=True, slots=True)
class Salts:
    """Secrets of tenants and trust groups; never logged, never sent.

    Attributes:
        tenants: name → 16 to 64 bytes.
        groups: name → 16 to 64 bytes.
    """

    tenants: Mapping[str, bytes]
    groups: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"Salts({len(self.tenants)} tenants, {len(self.groups)} groups)"

    @staticmethod
    def load(config: Config, text: str | None = None) -> Salts:
        """Read them, and mint those that nobody has written down.

        A file holds `[tenants]` and `[groups]` tables of name = "hex"; it must not be readable by others.
        Minting into `nvme.directory` waits for the disk: some milliseconds, seconds on one that is busy.

        Args:
            config: whose tenants need salts, and where they are.
            text: content of `daemon.secrets_file`, if somebody has read it already.

        Raises:
            ConfigError: unreadable, too open, not hex, wrong length, or a tenant or group without a salt.
        """
        names, groups = [t.name for t in config.tenants], config.groups()
        if config.daemon.secrets_file:
            shared = [t.group for t in config.tenants if t.reuse is Reuse.GROUP]
            return _written(Path(config.daemon.secrets_file), names, shared, text)
        if config.nvme.directory:
            return _kept(Path(config.nvme.directory), names, groups)
        return Salts(_minted(names), _minted(groups))


def _minted(names: Sequence[str]) -> dict[str, bytes]:
    return {name: os.urandom(32) for name in names}


# ---- daemon.secrets_file ----------------------------------------------------------------------------------


def _written(path: Path, names: Sequence[str], shared: Sequence[str], text: str | None) -> Salts:
    data = _private(path, "daemon.secrets_file", text)
    salts = Salts(_salts(data, "tenants", names, path), _salts(data, "groups", shared, path))
    _check_distinct(salts, path)
    return salts


def tenant_salts(path: Path, key: str) -> Mapping[str, bytes]:
    """All salts under [tenants] of a secrets file, whoever they are of.

    Args:
        key: of the configuration, for messages.

    Raises:
        ConfigError: unreadable, too open, not hex, wrong length, two are equal, or there is none.
    """
    data = _private(path, key)
    entries = data.get("tenants")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{key}: {path}: need [tenants] with a salt for each")
    salts = Salts(_salts(data, "tenants", list(entries), path), {})
    _check_distinct(salts, path)
    return salts.tenants


def _private(path: Path, key: str, text: str | None = None) -> Mapping[str, Any]:
    """Tables of a file that nobody else can read."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path} is not there; write it, mode 0600, or unset the key")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{key}: {path} is open to others; run chmod 600 {path}")
    return read_file(path, text)


def _check_distinct(salts: Salts, path: Path) -> None:
    """Equal salts are equal roots: one name would read the other's blocks."""
    values = [*salts.tenants.values(), *salts.groups.values()]
    if len(set(values)) < len(values):
        raise ConfigError(f"{path}: two names have the same salt; every tenant and group needs its own")


def _salts(data: Mapping[str, Any], table: str, needed: Sequence[str], path: Path) -> dict[str, bytes]:
    entries = data.get(table, {})
    out = {}
    for name in needed:
        text = entries.get(name) if isinstance(entries, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f'{path}: [{table}] has no salt for {name}; add {name} = "64 hex digits"')
        try:
            salt = bytes.fromhex(text)
        except ValueError:
            raise ConfigError(f"{path}: [{table}] {name}: not hexadecimal") from None
        if not SALT_BYTES_MIN <= len(salt) <= SALT_BYTES_MAX:
            raise ConfigError(f"{path}: [{table}] {name}: need 16 to 64 bytes, got {len(salt)}")
        out[name] = salt
    return out


# ---- nvme.directory ---------------------------------------------------------------------------------------


def _kept(directory: Path, names: Sequence[str], groups: Sequence[str]) -> Salts:
    """Of these names; whoever has left the configuration keeps its salt in the file, and may come back."""
    path = directory / SECRETS_NAME
    try:
        known = _known(path)
        if known is None or not (known.tenants.keys() >= set(names) and known.groups.keys() >= set(groups)):
            _make(directory)
            with _alone(directory):
                known = _known(path) or Salts({}, {})  # another daemon may have been first
                known = Salts({**_minted(names), **known.tenants}, {**_minted(groups), **known.groups})
                _replace(directory, path, _text(known))
    except OSError as error:
        raise ConfigError(
            f"nvme.directory: {path} cannot be used: {error.strerror}; make it this user's, or set "
            "daemon.secrets_file"
        ) from None
    return Salts({name: known.tenants[name] for name in names}, {name: known.groups[name] for name in groups})


def _known(path: Path) -> Salts | None:
    """What the file holds, None if there is none yet."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _check_file(path, os.fstat(file))
        data = os.read(file, FILE_BYTES_MAX)
    finally:
        os.close(file)
    try:
        tables = read_file(path, data.decode())
        # An empty file is no file of ours: minting again would lose what the old salts are needed for.
        if set(tables) != set(_TABLES) or not all(isinstance(entries, dict) for entries in tables.values()):
            raise ConfigError(f"{path}: need the tables [tenants] and [groups], and nothing else")
        salts = Salts(*(_salts(tables, name, list(tables[name]), path) for name in _TABLES))
        _check_distinct(salts, path)
    except (ConfigError, UnicodeDecodeError) as error:
        raise _malformed(path, str(error).removeprefix(f"{path}: ")) from None
    return salts


def _check_file(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > FILE_BYTES_MAX:
        raise _malformed(path, "not a file of this kind")
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"nvme.directory: {path} is open to others; run chmod 600 {path}")
    if facts.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"nvme.directory: {path} belongs to another user, who thus knows the salts; use a directory of "
            "your own, or remove that file (the blocks there are lost then)"
        )


def _make(directory: Path) -> None:
    """With its parents, and so that it is there after a crash, too."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _malformed(path: Path, why: str) -> ConfigError:
    fix = "bring it back from a backup, or remove it: a new one is made, and the blocks there are lost"
    return ConfigError(f"nvme.directory: {path}: {why}; {fix}")


def _text(salts: Salts) -> str:
    """As TOML; quoted, because a name may hold dots."""
    lines = [_MINTED]
    for table, entries in zip(_TABLES, (salts.tenants, salts.groups), strict=True):
        lines += [f"[{table}]\n", *(f'"{name}" = "{salt.hex()}"\n' for name, salt in sorted(entries.items()))]
    return "".join(lines)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two daemons that mint at once must not overwrite each other's."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"nvme.directory: another daemon is just writing {directory / SECRETS_NAME}; start again"
            ) from None
        yield
        os.fsync(lock)
    finally:
        os.close(lock)


def _replace(directory: Path, path: Path, text: str) -> None:
    """Whole old or whole new content, whenever the machine stops; the directory is synced by `_alone`."""
    beside = directory / f".{path.name}.new"
    with contextlib.suppress(FileNotFoundError):  # left over from a crash
        beside.unlink()
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(text.encode())
            out.flush()
            os.fsync(out.fileno())
        beside.replace(path)
    except BaseException:  # a full disk leaves nothing half written
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
