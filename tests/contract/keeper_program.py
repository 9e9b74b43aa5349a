"""A daemon as far as its keeper sees it; run by `test_keepers.py`. Descriptors hold a text each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))

from systemd_end import take_places

from kvstore.keep.base import Keeper
from kvstore.keep.holding import Holding
from kvstore.keep.nothing import KeepNothing
from kvstore.keep.systemd import SystemdStore, offers_store


def with_text(text: str) -> int:
    fd = os.memfd_create("text", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return fd


def keeper_of(kind: str, path: Path, passed: list[int]) -> Keeper:
    if kind == "holder":
        return Holding(path, 600.0)
    if kind == "systemd":
        take_places(passed)
        assert offers_store(os.environ)
        return SystemdStore(os.environ)
    return KeepNothing()


def answer(keeper: Keeper, ask: dict[str, Any]) -> Any:
    match ask["do"]:
        case "take":
            found = keeper.take()
            assert not [fd for fd in found.values() if os.get_inheritable(fd)]
            return {name: os.pread(fd, 100, 0).decode() for name, fd in found.items()}
        case "put":
            fds = {name: with_text(text) for name, text in ask["texts"].items()}
            keeper.put(fds)
            for fd in fds.values():
                os.close(fd)
        case "drop":
            keeper.drop(ask["names"])
        case "leave":
            keeper.leave()
        case "end":
            keeper.end()
        case "holder":
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
            return int(children.split()[0])
    return None


def main() -> None:
    """Arguments: kind, path, descriptors."""
    kind, path, *fds = sys.argv[1:]
    keeper = keeper_of(kind, Path(path), [int(fd) for fd in fds])
    for line in sys.stdin:
        print(json.dumps(answer(keeper, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
