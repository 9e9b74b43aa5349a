"""Files and sockets, and who may open them."""

from __future__ import annotations

import pwd
import stat
from pathlib import Path

from kvstore.audit.probe import Probe
from kvstore.audit.verdicts import Door

__all__ = ["judge_private", "judge_socket", "user_of"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_THROUGH = stat.S_IXGRP | stat.S_IXOTH


def user_of(uid: int) -> str:
    """Name of a user, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def judge_socket(door: Door, check: str, path: Path, bound: str) -> None:
    """A Unix socket lets in whoever may write to it: that must not be everybody where nothing else is asked.

    Args:
        bound: what a caller needs besides, "" = nothing: then it may act as any tenant.
    """
    try:
        facts = path.stat()
    except OSError as error:
        door.skip(check, f"{path}: {_why(error)}")
        return
    mode = stat.S_IMODE(facts.st_mode)
    everybody = bool(mode & stat.S_IWOTH) and _reachable(path.parent)
    who = "every local user may open it" if everybody else "not everybody may open it"
    then = f"; who does still needs {bound}" if bound else "; who does may act as any tenant"
    told = f"mode {mode:04o}, owner {user_of(facts.st_uid)}: {who}{then} (daemon.socket_mode)"
    door.judge(check, bool(bound) or not everybody, told)


def judge_private(door: Door, check: str, path: Path, probe: Probe) -> None:
    """A file or directory is its owner's alone, and the owner is the daemon's user or root."""
    try:
        facts = path.stat(follow_symlinks=False)
    except OSError as error:
        door.skip(check, f"{path}: {_why(error)}")
        return
    if stat.S_ISLNK(facts.st_mode):
        door.judge(check, False, f"{path} is a link: what it names is not the daemon's own")
        return
    mode = stat.S_IMODE(facts.st_mode)
    told, shut = f"{path}: mode {mode:04o}, owner {user_of(facts.st_uid)}", not mode & _OTHERS
    if not shut and not path.parent.stat().st_mode & _THROUGH:
        told, shut = f"{told}; nobody else gets through {path.parent}", True
    ours = facts.st_uid in (0, probe.daemon_uid)
    if not ours:
        told += f", who is not the daemon's user ({user_of(probe.daemon_uid)})"
    door.judge(check, shut and ours, told)


def _reachable(folder: Path) -> bool:
    """Whether everybody may pass through all directories on the way."""
    for part in (folder.absolute(), *folder.absolute().parents):
        try:
            if not part.stat().st_mode & stat.S_IXOTH:
                return False
        except OSError:  # not even we can look: nobody else is shown to be kept out
            continue
    return True


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
