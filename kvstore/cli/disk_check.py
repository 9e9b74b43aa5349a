"""What lies in NVMe directories that no daemon uses: every record is read, down to its checksums."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.units import count_text, size_text
from kvstore.errors import BadRequest, KVStoreError
from kvstore.progress import READING

if TYPE_CHECKING:
    from kvstore._native import DiskDirectory, DiskSurvey

__all__ = ["Verdict", "check_disks"]

# More threads than this only queue at the disk.
_THREADS_MAX = 8
_BAR_S = 0.1
_PAGE_BYTES = 4096
_MARK = "kvstore.disk"
_SEGMENTS = "segment-*.kvs"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one trust group's directory holds.

    Attributes:
        path: of the directory.
        id: hex, given to it when it was made.
        size_bytes: of its segment files.
        counts: segments by state, records that are whole, their bytes, and `rotten` ones.
        unreadable: segments that the disk did not give.
        lost: segments whose own header is damaged: nobody can tell any more what is in them.
        repaired: segments whose footers were written, None = nobody asked for that.
        rotten_left: rotten records that a daemon could still come across.
    """

    path: Path
    id: str
    size_bytes: int
    counts: dict[str, int]
    unreadable: int
    lost: int
    repaired: int | None
    rotten_left: int

    @property
    def ok(self) -> bool:
        """Whether everything is whole, by now."""
        return not (self.unreadable or self.lost or self.rotten_left)

    def json(self) -> dict[str, Any]:
        """JSON-ready."""
        facts = {"ok": self.ok, "path": str(self.path), "id": self.id, "bytes": self.size_bytes}
        repaired = {} if self.repaired is None else {"repaired": self.repaired}
        return {**facts, **self.counts, "unreadable": self.unreadable, "lost": self.lost, **repaired}

    def lines(self, name: str) -> list[str]:
        """For people."""
        counts = self.counts
        records = f"{count_text(counts['records'])} blocks, {size_text(counts['payload_bytes'])}, verified"
        never = counts["unfinished"] - self.unreadable - self.lost
        states = [
            (counts["sealed"], "sealed", "in order"),
            (counts["unsealed"], "unsealed", "no footer yet: read through at the next start"),
            (counts["empty"], "empty", "to be filled next"),
            (never, "unfinished", "made anew at the next start"),
            (self.unreadable, "UNREADABLE", "the disk refuses: look at the kernel's log, replace the disk"),
            (self.lost, "LOST", "the header is damaged: made anew at the next start, without its blocks"),
        ]
        lines = [f"{name}: {'whole' if self.ok else 'DAMAGED'} ({self.path})", f"  {records}"]
        lines.append(f"  {count_text(counts['segments'])} segments, {size_text(self.size_bytes)}")
        lines += [f"    {count_text(count):>8} {state:<10}  {what}" for count, state, what in states if count]
        if counts["rotten"]:
            cure = "left out of the footers now" if not self.rotten_left else "--repair leaves them out"
            lines.append(
                f"  {count_text(counts['rotten'])} ROTTEN blocks, each a miss when it is asked for; {cure}"
            )
        if self.repaired is not None:
            lines.append(f"  repaired: {count_text(self.repaired)} footers written")
        return lines


def check_disks(directory: Path, *, repair: bool) -> dict[str, Verdict]:
    """Read everything below nvme.directory, or in one trust group's directory.

    Args:
        repair: then write the footers of what is good.

    Returns:
        By name of the trust group. All are held before the first is read, so that nothing is repaired where
        one of them is in use.

    Raises:
        KVStoreError: one cannot be opened or written; the message says why, and what to do.
    """
    disks = {name: _opened(path) for name, path in _found(directory).items()}
    with _bar() as show:
        return {name: _verdict(name, disk, repair, show) for name, disk in disks.items()}


def _found(directory: Path) -> dict[str, Path]:
    try:
        if _is_disk(directory):
            return {directory.resolve().name: directory}
        found = {path.name: path for path in sorted(directory.iterdir()) if path.is_dir() and _is_disk(path)}
    except OSError as error:
        raise BadRequest(
            f"{directory}: {(error.strerror or str(error)).lower()}; name an NVMe directory"
        ) from None
    if not found:
        raise BadRequest(
            f"{directory}: no {_MARK} in it or in a directory below it; name nvme.directory, or one trust "
            "group's directory in it"
        )
    return found


def _is_disk(path: Path) -> bool:
    return (path / _MARK).is_file() or any(path.glob(_SEGMENTS))


def _opened(path: Path) -> DiskDirectory:
    from kvstore._native import DiskDirectory

    try:
        return DiskDirectory.open(str(path), direct=_takes_direct(path), create=False)
    except ValueError as error:  # in use, not ours, of another version: the message says what to do
        raise BadRequest(_with_path(path, error)) from None
    except OSError as error:
        raise _refused(path, error) from None


def _takes_direct(path: Path) -> bool:
    """Past the page cache where that is possible: what is in memory says little about the disk."""
    try:
        os.close(os.open(path / _MARK, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _with_path(path: Path, error: Exception) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _refused(path: Path, error: Exception) -> KVStoreError:
    return BadRequest(
        f"{_with_path(path, error)}; run as the user of the daemon, and look at the kernel's log"
    )


def _verdict(name: str, disk: DiskDirectory, repair: bool, show: Callable[[str, int, int], None]) -> Verdict:
    from kvstore._native import DiskSurvey

    path, threads = Path(disk.path), min(os.cpu_count() or 1, _THREADS_MAX)
    lost_headers = _headers(path)
    survey = DiskSurvey(disk)

    def read() -> None:
        survey.read(threads)
        survey.verify(threads)

    try:
        _watched(survey, read, lambda done, total: show(name, done, total))
        counts, errors = survey.counts(), survey.errors
        lost = max(0, lost_headers - (counts["segments"] - counts["unfinished"]))
        repaired, left = None, counts["rotten"]
        if repair:
            repaired = survey.repair()
            again = DiskSurvey(disk)
            again.read(threads)
            left = again.counts()["rotten"]
    except OSError as error:
        raise _refused(path, error) from None
    return Verdict(path, disk.id.hex(), disk.bytes, counts, errors, lost, repaired, left)


def _headers(path: Path) -> int:
    """Segment files that have a header, right or wrong: a file that was never finished begins with zeros."""
    found = 0
    for file in path.glob(_SEGMENTS):
        try:
            with file.open("rb") as segment:
                found += any(segment.read(_PAGE_BYTES))
        except OSError:  # counted as unreadable by the survey
            continue
    return found


def _watched(survey: DiskSurvey, work: Callable[[], None], show: Callable[[int, int], None]) -> None:
    """Do it on a thread of its own: a terminal's Ctrl-C ends the command, whatever is being read."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits)
            failed.append(error)

    worker = threading.Thread(target=run, name="kvstore-check", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_BAR_S)
        show(survey.bytes_read, survey.bytes_in_all)
    if failed:
        raise failed[0]


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """How far it is, on a terminal; it disappears when all is read."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from kvstore.cli.arena_bar import ArenaBar

    with ArenaBar() as show:
        yield lambda name, done, total: show(name, done, total, READING)
