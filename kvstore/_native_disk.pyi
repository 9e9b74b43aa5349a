"""The disk half of kvstore._native (its stub only: at run time everything is in kvstore._native)."""

import numpy as np
from numpy.typing import NDArray

from kvstore._native import Arena, HostPool, Index, SlotFormat, Walk

__all__ = ["DiskDirectory", "DiskEvent", "DiskPool", "DiskSurvey"]

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

class DiskDirectory:
    """A directory of segment files that this process holds (native/src/disk_directory.h)."""
    @staticmethod
    def open(
        path: str,
        *,
        capacity_bytes: int = 0,
        segment_bytes: int = 128 << 20,
        direct: bool = True,
        create: bool = True,
    ) -> DiskDirectory:
        """capacity_bytes = 0: as large as it is. Removes what a lowered capacity has no room for.

        ValueError with what to do: another process holds it, it is not ours, of another version, or its file
        system refuses O_DIRECT. OSError: whatever the system refuses.
        """
    path: str
    id: bytes
    bytes: int
    """Of all segment files."""
    segments: int
    removed: int
    """Unfinished files that open() removed for want of capacity."""
    def close(self) -> None:
        """Let others use it; a pool or survey of it must be closed or gone."""

class DiskSurvey:
    """What a directory holds. Its methods release the GIL."""
    def __init__(self, directory: DiskDirectory) -> None: ...
    def read(self, threads: int) -> None:
        """Footers of sealed segments; of the others everything, verified."""
    def verify(self, threads: int) -> None:
        """After read(): the records of sealed segments too, down to their cells."""
    def repair(self) -> int:
        """Write footers of what read() and verify() found good; how many segments. OSError."""
    bytes_in_all: int
    bytes_read: int
    errors: int
    """Segments that could not be read."""
    def counts(self) -> dict[str, int]:
        """segments, unfinished, empty, sealed, unsealed, records, rotten, payload_bytes."""
    def records(self, segment: int) -> tuple[U8, U32]:
        """Of one segment of the directory: (n, 32) keys, and (n, 2) depth and page."""

class DiskEvent:
    kind: str
    """written, read, flushed, or failed (of no job: a segment could not be made, opened or sealed)."""
    job: int
    ok: U32
    corrupt: U32
    failed: U32
    last: bool
    error: int
    """errno, 0 = none"""
    bytes: int
    seconds: float

class DiskPool:
    """Which node's bytes lie in which record; fills, seals and gives up segments (native/src/disk_pool.h)."""
    def __init__(
        self,
        index: Index,
        arena: Arena,
        directory: DiskDirectory,
        *,
        io: str = "auto",
        depth: int = 64,
        threads: int = 1,
        reinsert_share: float = 0.25,
        write_bytes_max: int = 256 << 20,
        records_max: int = ...,
        faults: str = "",
    ) -> None:
        """io: auto, uring or threads. threads: that verify. faults: for tests (native/src/disk_faulty.h)."""
    def adopt(self, survey: DiskSurvey) -> dict[str, int]:
        """Once, first: readable, orphaned, older, no_room, rotten, segments, unsealed."""
    def put_below(self, host: HostPool) -> None:
        """From now on the host pool publishes blocks whose parent is readable there or here."""
    eventfd: int
    """Readable while pump() has something."""
    io: str
    """What it uses: uring or threads."""
    segments: int
    memory_bytes: int
    def match(self, walk: Walk) -> int:
        """Leading blocks of the walk that HOST had when it was made or that are readable here."""
    def readable(self, nodes: U32) -> U8: ...  # (n,) 0 or 1
    def missing(self, node: int) -> U32:
        """The blocks above and including node that are neither readable nor on their way here, up to the
        nearest that is, in chain order."""
    def nodes(self, start: int = 0, most: int = ..., coming: bool = False) -> U32:
        """Every readable node of the segments [start, start + most); coming: those on their way too."""
    def present(self, nodes: U32) -> U8: ...  # (n,) 1 = readable, or on its way
    def touch(self, nodes: U32) -> None:
        """A chain, or a part of one, was used now."""
    def write(self, nodes: U32, slots: U32, format: SlotFormat) -> tuple[int, int]:
        """(job, accepted leading blocks); job 0 = nothing begun: ask again after a pump(). See the header."""
    def read(self, nodes: U32, slots: U32, format: SlotFormat) -> int:
        """Into FILLING slots; the job. ValueError unless every node is readable here."""
    def cancel(self, job: int) -> None: ...
    def flush(self) -> int:
        """A job whose event says that everything accepted so far is on the medium."""
    def pump(self) -> list[DiskEvent]: ...
    def resume(self) -> None:
        """Try again what the disk refused."""
    def forget(self, node: int) -> bool: ...
    def drop(self, node: int) -> bool: ...
    def claim(self, root: int, account: int) -> None:
        """The root (a node of depth 0), with what it has, is this account's; 0 = nobody's, no limit."""
    def set_limit(self, account: int, bytes: int | None) -> None:
        """How many bytes of records trim() leaves it, None = all. ValueError: 255 accounts have a limit."""
    def used_bytes(self, account: int) -> int:
        """Of records that are readable or on their way."""
    def trim(self, account: int, bytes: int, keep: int = ...) -> bool:
        """Forget blocks of an account, leaves first, until it could have so many bytes more.

        The chain above and including the node `keep` stays. True: it could. Looks at some thousand records
        in a call (1 ms): ask again."""
    mark: tuple[int, int]
    """(sequence, page): all records made so far lie before it, every later one at or behind it."""
    forgotten: tuple[int, int]
    """A mark behind everything that `forget` took: evacuations carry records past an earlier one."""
    oldest_sequence: int
    """Of the segments with records; marks below it have nothing more to say."""
    def forget_before(self, roots: list[tuple[int, int, int]]) -> int:
        """After a restart: forget what (root, sequence, page) each had before that mark; how many blocks.

        Looks at every record once, however many roots there are."""
    def take_stored(self) -> U8: ...
    def take_removed(self) -> U8: ...
    def take_dropped(self) -> dict[str, int]:
        """evicted, reinserted, over_budget, over_limit, rot, lost, events_lost, reinserted_bytes, compacted
        (segments) since the last call."""
    def counts(self) -> dict[str, int]:
        """Segments by state, records, live_bytes, writing, capacity_bytes, file_bytes."""
    def check(self) -> None: ...
    def close(self, timeout_s: float = 2.0) -> None:
        """Seal what is being filled if the time allows; nothing is found here any more. Releases the GIL."""
