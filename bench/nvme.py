"""How close to the disk are fetches and saves through the daemon, and how soon is a full disk open again?

Ours is what an engine sees. A fetch is lookup, lease, the daemon's read into the arena with every sum
checked, the client's copy into paged memory with every sum checked again, release; four requests are under
way at once. A save is the client's copy into the arena, summed, the daemon's write, and at the end the flush
that makes the whole set durable. Payload bytes count: headers (4 KiB a block) and sums (a page) are our loss.

The limit is fio in the same turn, on files like the store's own in the same directory (bench/nvme_fio.py:
which job, and why), over a set of the same size, with the same block size and as many bytes under way as the
daemon lets be at most. HOST is a quarter of the set, and chains are asked for in an order in which none is
still there: the daemon's own counters must say that each block of each turn came from the disk, or the run
fails.

A ratio `…_over_fio_…` is speed (1 = as fast as the disk); `read_over_fio_shallow_…` is over a fio with 8 MiB
under way, and so into 8 MiB of memory, which no store does (bench/README.md). `reopen_s_100k_blocks`: see
bench/nvme_reopen.py.

Everything lies in a folder of its own under $KVSTORE_BENCH_DIR (or the temporary directory, if that is on a
disk), some 12 GiB, and is removed at the end. Exit status: 1 a bar is missed, 3 void.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import Arm, Measured, Ratio, finish, measure, parser
from bench.nvme_fio import Fio, FioJob, need_fio
from bench.nvme_moves import REQUESTS, WRITE_QUEUE_BYTES, Moves
from bench.nvme_place import DiskDaemon, client_for, disk_folder
from bench.nvme_reopen import REOPEN_BLOCKS, need_bytes, reopen
from bench.paged import PagedMemory, layout_of
from kvstore.logs import configure_logs

__all__ = ["BARS", "main", "missed"]

MIB = 1 << 20
SIZES = {"2m": 2 * MIB, "256k": 256 << 10}
# Figure → what it should be: at least, for speeds, or at most, for seconds.
BARS = {
    **{f"read_over_fio_{name}": 0.95 for name in SIZES},
    **{f"write_over_fio_{name}": 0.9 for name in SIZES},
    "reopen_s_100k_blocks": 1.0,
}
SET_MIB = 4096
# Of chains, in turn; 64 MiB on average, for REQUESTS of them.
CHAIN_MIB = (40, 88, 56, 72)
CHAIN_BYTES = sum(CHAIN_MIB) * MIB // REQUESTS
SEGMENT_BYTES = 128 * MIB  # nvme.segment_bytes, its default
# What the daemon lets be under way at the disk (native/src/mover.h: Limits).
READ_BYTES_MAX, WRITE_BYTES_MAX = 64 * MIB, 32 * MIB
# fio reads into as many bytes as are under way, again and again: so few stay in the caches of a processor.
SHALLOW_BYTES = 8 * MIB
_HOST_SHARE = 4


def missed(figures: dict[str, Any]) -> list[str]:
    """Which of the bars that were measured are not reached, as text."""
    short = []
    for name, bar in BARS.items():
        value = figures.get(name)
        if value is None:
            continue
        if value > bar if name.startswith("reopen") else value < bar:
            short.append(f"{name} {value:.3f}, bar {bar}")
    return short


class Sized:
    """One block size: a daemon, a client, and fio beside them.

    Args:
        name: key of SIZES.
        disk: folder on the disk.
        options: turns, set_mib.
    """

    def __init__(self, name: str, disk: Path, options: argparse.Namespace) -> None:
        self.name, self.size, self._disk = name, SIZES[name], disk / name
        self._turns: int = options.turns
        self._set_bytes: int = options.set_mib * MIB
        self._host_bytes = self._set_bytes // _HOST_SHARE
        self._capacity_bytes = capacity_bytes(self._set_bytes)

    def run(self) -> tuple[dict[str, Any], list[str]]:
        """Saves, then fetches of the last set; figures, and reasons why they may not be believed."""
        settings = {
            "host.capacity_bytes": self._host_bytes,
            "nvme.capacity_bytes": self._capacity_bytes,
            "nvme.segment_bytes": SEGMENT_BYTES,
            "nvme.write_queue_bytes": WRITE_QUEUE_BYTES,
        }
        lengths = [mib * MIB // self.size for mib in CHAIN_MIB]
        memory = PagedMemory(layout_of(self.size), REQUESTS * max(lengths))
        with (
            tempfile.TemporaryDirectory(prefix="kvstore-bench-") as home,
            DiskDaemon(Path(home), self._disk, settings) as daemon,
            client_for(daemon, memory) as client,
        ):
            fio = Fio(self._disk / "default", self._set_bytes // SEGMENT_BYTES, SEGMENT_BYTES)
            fio.lay_out()
            moves = Moves(daemon, client, memory, lengths, self._host_bytes)
            self._fill(daemon, moves)
            write = self._saves(daemon, moves, fio)
            read = self._fetches(daemon, moves, fio)
            wrong = moves.wrong_blocks(moves.saved)
            status = daemon.settle()
        name = self.name
        figures: dict[str, Any] = {
            f"read_over_fio_{name}": read.speed("fetch").json(),
            f"read_over_fio_shallow_{name}": _over(read, "fetch", "fio shallow").json(),
            f"write_over_fio_{name}": write.speed("save").json(),
            f"read_{name}": read.json(self._set_bytes),
            f"write_{name}": write.json(self._set_bytes),
            f"fio_{name}": {
                "read": fio.describe(self._job("read")),
                "write": fio.describe(self._job("write")),
            },
            f"daemon_{name}": {key: status[key] for key in ("io", "written_bytes", "read_bytes", "corrupt")},
            f"wrong_blocks_{name}": wrong,
        }
        return figures, [write.void, read.void]

    def _job(self, verb: str) -> FioJob:
        if verb == "read":
            return FioJob("read", self.size, READ_BYTES_MAX)
        return FioJob("write", self.size, WRITE_BYTES_MAX)

    def _chains(self) -> int:
        return self._set_bytes // CHAIN_BYTES

    def _fill(self, daemon: DiskDaemon, moves: Moves) -> None:
        """Until every segment has been written once: from then on saves overwrite."""
        while daemon.settle()["file_bytes"] + SEGMENT_BYTES <= self._capacity_bytes:
            moves.prepare(self._chains())
            moves.save()

    def _saves(self, daemon: DiskDaemon, moves: Moves, fio: Fio) -> Measured:
        job = self._job("write")

        def fresh() -> None:
            daemon.settle()
            moves.prepare(self._chains())

        limit = Arm("fio", lambda: fio.seconds(job), daemon.settle)
        return measure([limit], [Arm("save", moves.save, fresh)], turns=self._turns)

    def _fetches(self, daemon: DiskDaemon, moves: Moves, fio: Fio) -> Measured:
        job = self._job("read")

        def shuffled() -> None:
            daemon.settle()
            moves.shuffle()

        limit = Arm("fio", lambda: fio.seconds(job), daemon.settle)
        shallow = replace(job, under_way_bytes=SHALLOW_BYTES)
        more = Arm("fio shallow", lambda: fio.seconds(shallow), daemon.settle)
        return measure([limit], [Arm("fetch", moves.fetch, shuffled), more], turns=self._turns)


def _over(done: Measured, name: str, other: str) -> Ratio:
    """How many times as fast one arm is as another."""
    return Ratio.of([b / a for a, b in zip(done.wall_s[name], done.wall_s[other], strict=True)])


def capacity_bytes(set_bytes: int) -> int:
    """Of the store: the set, half of it again for what is being filled, emptied and kept free."""
    return (set_bytes * 3 // 2 + 4 * SEGMENT_BYTES) // SEGMENT_BYTES * SEGMENT_BYTES


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The plain numbers first, then their spread, then the rest."""
    ratios = {key: value for key, value in figures.items() if isinstance(value, dict) and "median" in value}
    rest = {key: value for key, value in figures.items() if key not in ratios}
    plain: dict[str, Any] = {key: value["median"] for key, value in ratios.items()}
    plain |= {key: value for key, value in rest.items() if isinstance(value, int | float)}
    return {**plain, "spread": ratios, **rest}


def show(figures: dict[str, Any]) -> None:
    """A part's figures as text, as soon as it is done."""
    for key, value in figures.items():
        if isinstance(value, dict) and "median" in value:
            spread = f"quartiles {value['low']:.3f} … {value['high']:.3f}"
            print(f"{key:24} {value['median']:6.3f}   {spread}", flush=True)
        elif isinstance(value, int | float):
            print(f"{key:24} {value:6}", flush=True)


def _set_mib(text: str) -> int:
    value = int(text)
    unit = 2 * REQUESTS * CHAIN_BYTES // MIB
    if value < 4 * unit or value % unit:  # less, and the leases of all requests would not fit HOST
        raise argparse.ArgumentTypeError(f"need a multiple of {unit} from {4 * unit} on, got {value}")
    return value


def main() -> int:
    """Returns the exit status."""
    command = parser("nvme", __doc__)
    command.add_argument("--turns", type=int, default=7, help="repetitions that count (7)")
    command.add_argument("--set-mib", type=_set_mib, default=SET_MIB, help=f"bytes of a turn ({SET_MIB})")
    command.add_argument("--reopen-blocks", type=int, default=REOPEN_BLOCKS, help=argparse.SUPPRESS)
    command.add_argument("--only", choices=[*SIZES, "reopen"], action="append", help="a part of it")
    options = command.parse_args()
    configure_logs("error")
    parts = options.only or [*SIZES, "reopen"]
    figures: dict[str, Any] = {"set_bytes": options.set_mib * MIB}
    voids: list[str] = []
    if set(parts) & set(SIZES):
        figures["fio"] = need_fio()
    need = options.set_mib * MIB + capacity_bytes(options.set_mib * MIB)
    if "reopen" in parts:
        need = max(need, need_bytes(options.reopen_blocks, options.turns) * 2)
    for part in parts:
        with disk_folder(need) as disk:  # one at a time: nothing of the one before is left
            if part in SIZES:
                some, why = Sized(part, disk, options).run()
            else:
                with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as home:
                    some, why = reopen(Path(home), disk, options.reopen_blocks, options.turns), []
        figures.update(some)
        voids += why
        if not options.json:
            show(some)
    figures = summary(figures)
    short = missed(figures)
    for text in short:
        print(f"missed: {text}", file=sys.stderr)
    status = finish("nvme", options, {**figures, "bars": BARS, "missed": short}, voids)
    wrong = sum(figures[key] for key in figures if key.startswith("wrong_blocks"))
    return 1 if wrong else status or int(bool(short))


if __name__ == "__main__":
    raise SystemExit(main())
