"""The same moves through other stores, beside ours: one process a store, turn and turn about, one table.

Every process measures memcpy between its own pages right beside the store's calls, so each ratio is to memcpy
in the same process and turn. How every store is run, and why, is in bench/README.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.limits import Echo, LibcCopy
from bench.measure import Arm, Measured, Ratio, last_level_cache_bytes, measure
from bench.peer_process import OURS, PEERS, Child, PeerError, System, named

__all__ = ["Comparison", "arguments", "compare", "peers", "table"]

MIB = 1 << 20
SIZES = {"2m": 2 * MIB, "64k": 64 << 10}
FIRST_BYTES = 256 * MIB
LENGTHS = (1000, 8000)
CHAINS = 6
KINDS = ("hit", "half", "miss")
LOOKUP_BLOCK_BYTES = 4096
# Memory that a store's process takes for every byte of its working set: both ends of memcpy, and the store.
_MEMORY_OF = {"kvstore": 2.25, "lmcache": 3.4, "openlake": 3.2, "redhare": 3.2}
_MEMORY_SHARE = 0.7
_WORKING_SET_MIN = 64 * MIB


@dataclass(slots=True)
class Entry:
    """What is known of one store.

    Attributes:
        figures: plain numbers.
        spread: quartiles of those that are ratios.
        failed: reasons.
        voids: of its memcpy against itself.
        wrong_blocks: blocks that came back with other bytes.
    """

    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    version: str = ""
    note: str = ""
    failed: list[str] = field(default_factory=list)
    voids: list[str] = field(default_factory=list)
    wrong_blocks: int = 0

    def keep(self, name: str, ratio: Ratio) -> None:
        """A ratio's median, and its spread."""
        made = ratio.json()
        self.figures[name], self.spread[name] = made["median"], made

    def json(self) -> dict[str, Any]:
        """For a result file."""
        return {
            **self.figures,
            "version": self.version,
            "note": self.note,
            "wrong_blocks": self.wrong_blocks,
            "failed": "; ".join(dict.fromkeys(self.failed)),
            "void": "; ".join(self.voids),
            "spread": self.spread,
        }


class Comparison:
    """Ours and some peers through every part of the comparison.

    Args:
        names: of peers.
        turns: repetitions that count.
        bytes_: of the working set; 0 = four times the last-level cache, or what memory allows.
    """

    def __init__(self, names: Sequence[str], turns: int, bytes_: int) -> None:
        self.systems = [OURS, *(PEERS[name] for name in names)]
        self.entries = {system.name: Entry() for system in self.systems}
        self.turns = turns
        self.wanted_bytes = max(4 * last_level_cache_bytes(), FIRST_BYTES)
        self.bytes = bytes_ or self._affordable_bytes()

    def _affordable_bytes(self) -> int:
        text = Path("/proc/meminfo").read_text()
        available = int(text.partition("MemAvailable:")[2].split()[0]) << 10
        needed = sum(_MEMORY_OF[system.name] for system in self.systems)
        allowed = int(_MEMORY_SHARE * available / needed)
        bytes_ = min(self.wanted_bytes, allowed)
        return max(_WORKING_SET_MIN, bytes_ - bytes_ % _WORKING_SET_MIN)

    # ---- copies ------------------------------------------------------------------------------------------

    def copies(self, size: str) -> None:
        """First puts of fresh stores, then steady puts, then gets, of one block size."""
        block_bytes = SIZES[size]
        blocks = self.bytes // block_bytes
        with self._stage() as (folder, children):
            self._first_puts(size, folder, blocks, children)
            for way in ("put", "get"):
                # Gets come last: some stores would keep what was read rather than take what is put.
                if way == "get":
                    self._each(children, lambda child: child.ask(f"put {blocks}"))
                name = "put_steady" if way == "put" else "get"
                done = self._moves(way, blocks, children)
                for child in children:
                    entry = self.entries[child]
                    own = replace(done, limit=f"{child} memcpy")
                    entry.keep(f"{name}_over_memcpy_{size}", own.speed(f"{child} {way}"))
                    entry.figures[f"{name}_bytes_per_s_{size}"] = round(
                        self.bytes / statistics.median(done.wall_s[f"{child} {way}"])
                    )
                    if own.void:
                        entry.voids.append(f"{name} {size}: {own.void}")

    def _first_puts(self, size: str, folder: Path, blocks: int, children: dict[str, Child]) -> None:
        """As many fresh stores as there are turns, each with one put; the last ones stay for what follows."""
        some = min(blocks, FIRST_BYTES // SIZES[size])
        ratios: dict[str, list[float]] = {system.name: [] for system in self.systems}
        lost: set[str] = set()
        for turn in range(self.turns):
            for system in self.systems:
                if system.name in lost:
                    continue
                try:
                    child = self._open(system, folder / f"{system.name}-{turn}", SIZES[size], blocks, blocks)
                    children[system.name] = child
                    first_s = child.ask(f"put {some}")["seconds"]
                    limit_s = [child.ask(f"memcpy put {some}")["seconds"] for _ in range(3)]
                    ratios[system.name].append(statistics.median(limit_s) / first_s)
                    if turn < self.turns - 1:
                        children.pop(system.name).close()
                except PeerError as error:
                    lost.add(system.name)
                    self._lose(system.name, str(error), children)
        for name, got in ratios.items():
            if got:
                self.entries[name].keep(f"put_first_over_memcpy_{size}", Ratio.of(got))

    def _moves(self, way: str, blocks: int, children: dict[str, Child]) -> Measured:
        """All blocks by every store, each between two runs of memcpy in its process."""
        arms = []
        for name in list(children):
            command = way if way == "get" else f"put {blocks}"
            memcpy = f"memcpy {way} {blocks}"
            arms += [
                Arm(f"{name} memcpy", self._asked(name, memcpy, children), settle=True),
                Arm(f"{name} {way}", self._asked(name, command, children), settle=True),
                Arm(f"{name} memcpy again", self._asked(name, memcpy, children), settle=True),
            ]
        if OURS.name not in children:
            raise SystemExit(f"our own store failed: {'; '.join(self.entries[OURS.name].failed)}")
        own, rest = arms[0], arms[1:]
        del rest[1]  # measure() runs the limit's second turn itself
        return measure([own], rest, turns=self.turns)

    def _asked(self, name: str, request: str, children: dict[str, Child]) -> Callable[[], float]:
        """An arm's work; once a store has failed it costs nothing and counts for nothing."""

        def work() -> float:
            child = children.get(name)
            if child is None:
                return math.nan
            try:
                reply = child.ask(request)
            except PeerError as error:
                self._lose(name, str(error), children)
                return math.nan
            self.entries[name].wrong_blocks += reply.get("wrong", 0)
            return float(reply["seconds"])

        return work

    # ---- lookups -----------------------------------------------------------------------------------------

    def lookups(self) -> None:
        """Chains of every length: all, half and none of their blocks are there."""
        held = CHAINS * sum(LENGTHS)
        with self._stage() as (folder, children):
            for system in self.systems:
                try:
                    part = folder / system.name
                    child = self._open(system, part, LOOKUP_BLOCK_BYTES, max(LENGTHS), held)
                    children[system.name] = child
                    for length in LENGTHS:
                        child.ask(f"plant {length} {CHAINS}")
                except PeerError as error:
                    self._lose(system.name, str(error), children)
            echo = Echo(folder)
            try:
                for length in LENGTHS:
                    self._lookups_of(length, echo, children)
            finally:
                echo.close()

    def _lookups_of(self, length: int, echo: Echo, children: dict[str, Child]) -> None:
        payload, into = bytes(32 * length), bytearray(32 * length + 4)

        def bounce() -> float:
            start = time.perf_counter()
            echo.ask(payload, into)
            return time.perf_counter() - start

        arms = [
            Arm(f"{name} {kind}", self._asked(name, f"lookup {length} {kind}", children))
            for name in list(children)
            for kind in KINDS
        ]
        done = measure([Arm("echo", bounce)], arms, turns=5 * self.turns, warm_turns=5)
        for name in children:
            entry = self.entries[name]
            for kind in KINDS:
                key = f"lookup_{length}" if kind == "hit" else f"lookup_{kind}_{length}"
                entry.figures[f"{key}_us"] = round(1e6 * statistics.median(done.wall_s[f"{name} {kind}"]), 1)
                entry.keep(f"{key}_over_echo", done.cost(f"{name} {kind}"))
            if done.void:
                entry.voids.append(f"lookup {length}: {done.void}")

    # ---- processes ---------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self) -> Iterator[tuple[Path, dict[str, Child]]]:
        """A folder, and running children by name that end with the block."""
        children: dict[str, Child] = {}
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path:
            folder = Path(path)
            LibcCopy(folder)
            try:
                yield folder, children
            finally:
                for child in children.values():
                    child.close()

    def _open(self, system: System, folder: Path, block_bytes: int, blocks: int, capacity: int) -> Child:
        folder.mkdir()
        child = Child(system, folder)
        try:
            library = folder.parent / "limit.so"
            reply = child.ask(f"open {folder} {library} {block_bytes} {blocks} {capacity}")
        except BaseException:  # it goes on upwards: the process must not outlive it
            child.close()
            raise
        entry = self.entries[system.name]
        entry.version, entry.note = reply["version"], reply["note"]
        return child

    def _lose(self, name: str, reason: str, children: dict[str, Child]) -> None:
        self.entries[name].failed.append(reason)
        if name in children:
            children.pop(name).close()

    def _each(self, children: dict[str, Child], work: Callable[[Child], object]) -> None:
        for name, child in list(children.items()):
            try:
                work(child)
            except PeerError as error:
                self._lose(name, str(error), children)


def arguments(command: argparse.ArgumentParser) -> None:
    """Add --peers to a benchmark's command line."""
    command.add_argument(
        "--peers",
        nargs="?",
        const=(),
        type=named,
        metavar="NAMES",
        help=f"other stores in the same run: {','.join(PEERS)}; all of them without NAMES (make peers)",
    )
    command.add_argument(
        "--peers-mib", type=int, default=0, metavar="MIB", help="their working set, to try things out"
    )


def compare(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What the command line asks for.

    Returns:
        Figures, and the exit status: 4 when a peer that was asked for by name failed in some part.
    """
    names = options.peers
    if names is None and "peers" in (options.only or []):
        names = ()
    if names is None:
        return {}, 0
    say = (lambda _: None) if options.json else print
    figures, failed = peers(names or list(PEERS), options.turns, options.peers_mib * MIB, say)
    say(table(figures))
    return figures, 4 if names and failed else 0


def peers(
    names: Sequence[str], turns: int, bytes_: int = 0, say: Callable[[str], object] = print
) -> tuple[dict[str, Any], list[str]]:
    """Ours and these peers.

    Args:
        names: of peers.
        turns: repetitions that count.
        bytes_: of the working set, 0 = by the rule.
        say: told what begins.

    Returns:
        Figures ("peers" by name, ours first), and the peers that failed in some part.
    """
    run = Comparison(names, turns, bytes_)
    for size in SIZES:
        say(f"peers: {size} blocks, {run.bytes >> 20} MiB each …")
        run.copies(size)
    say("peers: lookups …")
    run.lookups()
    why = "--peers-mib" if bytes_ else "so much memory is free"
    rule = "" if run.bytes >= run.wanted_bytes else f"smaller than 4 × last-level cache: {why}"
    figures = {
        "peers": {name: entry.json() for name, entry in run.entries.items()},
        "peers_working_set": {"bytes": run.bytes, "wanted_bytes": run.wanted_bytes, "note": rule},
    }
    if run.entries[OURS.name].failed:
        raise SystemExit(f"our own store failed: {'; '.join(run.entries[OURS.name].failed)}")
    return figures, [name for name in names if run.entries[name].failed]


_COLUMNS = (
    *((f"{what} {size}", f"{key}_over_memcpy_{size}") for size in SIZES for what, key in (
        ("get", "get"), ("first put", "put_first"), ("put", "put_steady"))),
    *((f"{kind} {length} µs", f"lookup_{'' if kind == 'hit' else kind + '_'}{length}_us")
      for length in LENGTHS for kind in KINDS),
)  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """Text: a line a store, ours first. Moves are in memcpy's speed (bigger is better), lookups in µs."""
    entries: dict[str, dict[str, Any]] = figures["peers"]
    width = 2 + max(len(f"{name} {entry['version']}") for name, entry in entries.items())
    lines = [" " * width + "".join(f"{title:>14}" for title, _ in _COLUMNS)]
    notes = []
    for name, entry in entries.items():
        cells = [f"{entry[key]:>14.3g}" if key in entry else f"{'-':>14}" for _, key in _COLUMNS]
        lines.append(f"{name + ' ' + entry['version']:<{width}}" + "".join(cells))
        if entry["failed"]:
            notes.append(f"{name}: not (wholly) measured: {entry['failed']}")
        if entry["wrong_blocks"]:
            notes.append(f"{name}: WRONG BYTES in {entry['wrong_blocks']} of the blocks compared")
        if entry["void"]:
            notes.append(f"{name}: {entry['void']}")
        if entry["note"]:
            notes.append(f"{name}: {entry['note']}")
    size = figures["peers_working_set"]
    notes.append(
        f"working set {size['bytes'] >> 20} MiB a store" + (f", {size['note']}" if size["note"] else "")
    )
    legend = "get, put: times as fast as memcpy in the same process and turn; lookups: microseconds"
    return "\n".join([*lines, legend, *notes])
