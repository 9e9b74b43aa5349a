"""What a kept arena depends on, in a sealed memfd beside it: another daemon compares before it adopts.

Random salts are in here too: without them no key of the arena could ever be computed again. They live in
memory as the arena does, never on disk and never in a log. Salts that are in a file (daemon.secrets_file, or
minted into nvme.directory) are not: a digest tells whether the file still holds the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping

import msgspec

from kvstore.config import Config, Salts

__all__ = ["FORMAT", "Facts", "GroupFacts"]

# Of everything that is kept: slots, ledger entries, rows of writers, keys, and this file.
FORMAT = 1
_BYTES_MAX = 16 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class GroupFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trust group's arena."""

    capacity_bytes: int
    slab_bytes: int
    digests: dict[str, str]  # tenant or "group:" + group → digest of its salt; empty with random salts


class _Format(msgspec.Struct, frozen=True):
    """The one field that every version has."""

    format: int


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything, as JSON.

    Attributes:
        format: FORMAT.
        version: of the daemon that wrote it, for the log.
        groups: name → arena.
        tenants, group_salts: random salts by name, hex; empty when they come from a file.
    """

    format: int
    version: str
    groups: dict[str, GroupFacts]
    tenants: dict[str, str]
    group_salts: dict[str, str]

    @staticmethod
    def of(config: Config, salts: Salts, version: str) -> Facts:
        """What the arenas of this daemon depend on."""
        random = not config.salts_kept
        host = config.host
        groups = {
            name: GroupFacts(
                host.capacity_bytes, host.slab_bytes, {} if random else _digests(config, salts, name)
            )
            for name in config.groups()
        }
        return Facts(
            FORMAT,
            version,
            groups,
            {name: salt.hex() for name, salt in salts.tenants.items()} if random else {},
            {name: salt.hex() for name, salt in salts.groups.items()} if random else {},
        )

    def __repr__(self) -> str:
        return f"Facts(format {self.format}, {sorted(self.groups)})"

    def to_fd(self) -> int:
        """A sealed memfd that holds them."""
        data = msgspec.json.encode(self)
        fd = os.memfd_create("kvstore-facts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd

    @staticmethod
    def from_fd(fd: int) -> Facts:
        """Read them back.

        Raises:
            ValueError: why they are of no use to this version.
        """
        if os.fstat(fd).st_size > _BYTES_MAX:
            raise ValueError("its facts are too long to be true")
        data = os.pread(fd, _BYTES_MAX, 0)
        try:
            found = msgspec.json.decode(data, type=_Format).format
            if found != FORMAT:
                raise ValueError(f"it has format {found}, this version keeps format {FORMAT}")
            return msgspec.json.decode(data, type=Facts)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"its facts cannot be read: {error}") from None

    def salts(self, fresh: Salts) -> Salts:
        """Random salts: the kept ones where there are any, `fresh` ones for new names."""
        return Salts(_over(fresh.tenants, self.tenants), _over(fresh.groups, self.group_salts))

    def why_not(self, now: Facts, group: str) -> str:
        """Why a group's arena is of no use to a daemon with the facts `now`, "" if it is."""
        before, after = self.groups.get(group), now.groups.get(group)
        if before is None:
            return "nothing of this group was kept"
        if after is None:
            return "the group is not configured any more"
        for key in ("capacity_bytes", "slab_bytes"):
            was, now_is = getattr(before, key), getattr(after, key)
            if was != now_is:
                return f"host.{key} was {was} and is {now_is}"
        if bool(before.digests) != bool(after.digests):
            return "its salts were random and now come from a file, or the reverse"
        for name in before.digests.keys() & after.digests.keys():
            if before.digests[name] != after.digests[name]:
                named = name.removeprefix("group:")
                return f"daemon.secrets_file or nvme.directory has another salt for {named}"
        return ""


def _digests(config: Config, salts: Salts, group: str) -> dict[str, str]:
    members = {tenant.name for tenant in config.tenants if tenant.group == group}
    named = {name: salt for name, salt in salts.tenants.items() if name in members}
    named |= {f"group:{name}": salt for name, salt in salts.groups.items() if name == group}
    return {
        name: hashlib.blake2b(salt, digest_size=16, person=b"kvstore-sd-v1").hexdigest()
        for name, salt in named.items()
    }


def _over(fresh: Mapping[str, bytes], kept: Mapping[str, str]) -> dict[str, bytes]:
    return {name: bytes.fromhex(kept[name]) if name in kept else salt for name, salt in fresh.items()}
