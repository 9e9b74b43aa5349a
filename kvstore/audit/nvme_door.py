"""What lies on the disk: whose files they are, and under which keys blocks are recorded.

A key on the disk is found by whoever can compute it, after a restart, too: so the blocks of a tenant must lie
there under keys that its salt made, and under no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.audit.as_configured import judge_configuration
from kvstore.audit.modes import judge_private
from kvstore.audit.probe import Pair, Probe, Secret
from kvstore.audit.secret_file import salt_file
from kvstore.audit.segments import Scan, Segments
from kvstore.audit.session import ToolSession
from kvstore.audit.verdicts import Door
from kvstore.config import Config
from kvstore.config.doors import DISK_KEYS
from kvstore.errors import KVStoreError
from kvstore.rpc import messages as m

__all__ = ["Disk", "nvme_door"]

SALT_BYTES_MIN = 16
# As long as `kvstore flush` waits: a full write queue takes a second on any NVMe, some ten on a slow disk.
FLUSH_S = 60.0


class Disk:
    """The directories of both tenants' trust groups; make it before anything is saved.

    Attributes:
        segments: group → its files; absent where they cannot be read.
        unread: group → why not.
    """

    def __init__(self, config: Config, pair: Pair) -> None:
        self.segments: dict[str, Segments] = {}
        self.unread: dict[str, str] = {}
        if not config.nvme.directory:
            return
        for group in dict.fromkeys((pair.a.group, pair.b.group)):
            folder = Path(config.nvme.directory) / group
            try:
                self.segments[group] = Segments(folder)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                self.unread[group] = f"{folder}: {why}; run as the daemon's user"


def nvme_door(probe: Probe, disk: Disk) -> Door:
    """Judge the files, flush the daemon's disks, and search what was written since `disk` was made."""
    directory = probe.config.nvme.directory
    door = Door("nvme", directory)
    judge_configuration(door, probe, DISK_KEYS)
    if not directory:
        door.skip("reached", "nvme.directory is not set: nothing lies on a disk")
        return door
    door.core.update(("foreign_keys_are_not_there", "unsalted_keys_are_not_there", "no_secrets_are_there"))
    for group in dict.fromkeys((probe.pair.a.group, probe.pair.b.group)):
        judge_private(door, f"directory_is_private ({group})", Path(directory) / group, probe)
    _salts(door, probe)
    if probe.no_room:
        door.skip("own_blocks", probe.no_room, control=True)
        return door
    if disk.unread:
        door.skip("own_blocks", "; ".join(disk.unread.values()), control=True)
        return door
    why = _flushed(probe)
    if why:
        door.skip("own_blocks", f"the daemon could not be flushed: {why}", control=True)
        return door
    try:
        scans = {group: segments.search(_wanted(probe)) for group, segments in disk.segments.items()}
    except OSError as error:
        told = f"{error.filename}: {(error.strerror or str(error)).lower()}"
        door.skip("own_blocks", told, control=True)
        return door
    _own_blocks(door, probe, scans)
    _foreign_keys(door, probe, scans)
    _secrets(door, probe, scans)
    return door


def _salts(door: Door, probe: Probe) -> None:
    path = salt_file(probe.config)
    if path is None:
        door.skip("salts_are_private", "the salts are in no file")
        return
    judge_private(door, "salts_are_private", path, probe)
    if not probe.salts:
        door.skip("salts_are_distinct", probe.salts_unread)
        return
    short = sorted(name for name, salt in probe.salts.items() if len(salt) < SALT_BYTES_MIN)
    count, distinct = len(probe.salts), len(set(probe.salts.values()))
    told = f"{count} names have {distinct} salts"
    if short:
        told += f"; shorter than {SALT_BYTES_MIN} bytes: {', '.join(short)}"
    door.judge("salts_are_distinct", count == distinct and not short, told)


def _flushed(probe: Probe) -> str:
    """Let everything that the disks have accepted reach them; why that was not done, "" = it was."""
    try:
        with ToolSession(probe) as session:
            reply = session.ask(m.Flush(), FLUSH_S)
    except KVStoreError as error:
        return str(error)
    if isinstance(reply, m.Flushed):
        return reply.error
    return str(getattr(reply, "message", type(reply).__name__))


# ---- keys -------------------------------------------------------------------------------------------------


def _keys(probe: Probe, what: str, root: bytes, tokens: NDArray[np.uint32]) -> list[Secret]:
    chain = probe.chain(root, tokens)
    return [Secret(f"{what}, block {block}", (key.tobytes(),)) for block, key in enumerate(chain.keys)]


def _wanted(probe: Probe) -> list[Secret]:
    """All that is searched for at once, by the names below; what gRPC saved like what sessions saved."""
    found = [Secret("the unsalted root", (probe.unsalted,)), *probe.hidden()]
    others = dict(zip(probe.pair.names, probe.pair.names[::-1], strict=True))
    for number, saved in enumerate(probe.grpc_saved):
        name, tokens = f"{saved.tenant}, by gRPC {number}", saved.tokens
        found += _keys(probe, f"grpc {name}", probe.roots[saved.tenant], tokens)
        found += _keys(probe, f"foreign {name}", probe.roots[others[saved.tenant]], tokens)
        found += _keys(probe, f"unsalted {name}", probe.unsalted, tokens)
    for name, other in (probe.pair.names, probe.pair.names[::-1]):
        tokens = probe.tokens[name]
        found += _keys(probe, f"own {name}", probe.roots[name], tokens)
        found += _keys(probe, f"foreign {name}", probe.roots[other], tokens)
        found += _keys(probe, f"unsalted {name}", probe.unsalted, tokens)
    return found


def _named(scans: Sequence[Scan], prefix: str) -> int:
    """How many different keys of a kind lie in any of them."""
    return len({what for scan in scans for what in scan.found if what.startswith(f"{prefix}, ")})


def _own_blocks(door: Door, probe: Probe, scans: dict[str, Scan]) -> None:
    """Controls: what a tenant has saved lies in its own group's files, under its own keys."""
    for tenant in (probe.pair.a, probe.pair.b):
        scan, blocks = (
            scans[tenant.group],
            len(probe.chain(probe.roots[tenant.name], probe.tokens[tenant.name])),
        )
        there = _named([scan], f"own {tenant.name}")
        told = (
            f"{there} of {blocks} blocks of {tenant.name} lie in {scan.files} files of group {tenant.group}"
        )
        if there < blocks:
            told += (
                _left(scan) or "; the write budget did not let them in, or the disk refuses (kvstore status)"
            )
        door.control(f"own_blocks ({tenant.name})", there == blocks, told)


def _left(scan: Scan) -> str:
    if not scan.left_files:
        return ""
    read = f"{scan.files} of them, {scan.read_bytes >> 20} MiB"
    return f"; {scan.left_files} more files were written meanwhile than were read ({read})"


def _secrets(door: Door, probe: Probe, scans: dict[str, Scan]) -> None:
    """Salts and bearer tokens, which no record holds."""
    check, names = "no_secrets_are_there", [secret.what for secret in probe.hidden()]
    there = [name for name in names if any(scan.found.get(name) for scan in scans.values())]
    left = "".join(_left(scan) for scan in scans.values())
    if there:
        door.judge(check, False, f"{', '.join(there)} lie there")
    elif left or not names:
        door.skip(
            check,
            f"none of {len(names)} salts and bearer tokens was found{left}" if names else "none is known",
        )
    else:
        door.judge(check, True, f"none of {len(names)} salts and bearer tokens lies there")


def _foreign_keys(door: Door, probe: Probe, scans: dict[str, Scan]) -> None:
    every = list(scans.values())
    left = "".join(_left(scan) for scan in every)
    for check, prefix, what in (
        ("foreign_keys_are_not_there", "foreign", "the other tenant could compute"),
        ("unsalted_keys_are_not_there", "unsalted", "anybody could compute"),
    ):
        there = sum(_named(every, f"{prefix} {name}") for name in probe.pair.names)
        told = f"{there} keys that {what} lie there{left}"
        if prefix == "unsalted":
            roots = sum(scan.found.get("the unsalted root", 0) for scan in every)
            there += roots
            told = f"{there} keys and roots that {what} lie there{left}"
        if left and not there:  # what was not read may hold them
            door.skip(check, told)
        else:
            door.judge(check, not there, told)
    if probe.pair.together:
        return
    for tenant, other in ((probe.pair.a, probe.pair.b), (probe.pair.b, probe.pair.a)):
        own = (f"own {tenant.name}", f"grpc {tenant.name}")
        there = sum(_named([scans[other.group]], prefix) for prefix in own)
        told = f"{there} blocks of {tenant.name} lie in the files of group {other.group}"
        door.judge(f"other_group_has_none ({tenant.name})", not there, told)
