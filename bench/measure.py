"""How every benchmark here measures: alternating turns, medians, spread, and a control that can void it.

The machines are shared and noisy, so an absolute time proves nothing. What is compared is run in the same
process, turn and turn about (A B C, C B A, …), and judged by the median of the ratios within a turn. The
limit (memcpy, an echo, a bare hash, …) also runs a second time in every turn as if it were something else:
that ratio of a thing to itself should be 1, and when it is not, the figures are marked "void: noise".
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.machine import RESULTS, where

__all__ = [
    "Arm",
    "Measured",
    "Ratio",
    "finish",
    "last_level_cache_bytes",
    "measure",
    "parser",
    "working_set_bytes",
]

CONTROL_BOUND = 0.08
"""The median of a thing against itself may be off by this much."""
_WORKING_SET_MIN = 256 << 20
_AGAIN = " again"


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared.

    Attributes:
        name: in the result.
        work: what is timed. Returning a float means: it timed itself, these are the seconds.
        before: run before every turn of it, not timed.
        settle: do the work once untimed before it counts. Plain stores leave the last-level cache full of
            dirty lines, and whoever comes next pays for writing them out; so each starts from its own.
    """

    name: str
    work: Callable[[], float | None]
    before: Callable[[], object] | None = None
    settle: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the ratios within turns, and how far they spread.

    Attributes:
        median, low, high: the low and high quartile are what "spread" means here.
        turns: how many ratios there were.
    """

    median: float
    low: float
    high: float
    turns: int

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """Of at least one ratio."""
        low, median, high = _quartiles(ratios)
        return Ratio(median, low, high, len(ratios))

    def json(self) -> dict[str, float]:
        """Rounded, for a result file."""
        return {"median": _short(self.median), "low": _short(self.low), "high": _short(self.high)}


@dataclass(slots=True)
class Measured:
    """Seconds of every arm, turn by turn.

    Attributes:
        limit: name of the arm that stands for what the machine can do.
        wall_s: by arm, one a turn.
        cpu_s: the same in CPU seconds of this process, all threads.
    """

    limit: str
    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def speed(self, name: str) -> Ratio:
        """How many times as fast as the limit (bigger is better)."""
        return Ratio.of([b / a for a, b in self._pairs(name)])

    def cost(self, name: str) -> Ratio:
        """How many times the time of the limit (smaller is better)."""
        return Ratio.of([a / b for a, b in self._pairs(name)])

    @property
    def control(self) -> Ratio:
        """The limit against itself."""
        return self.speed(self.limit + _AGAIN)

    @property
    def void(self) -> str:
        """Why nobody should believe these figures; "" if they may."""
        off = abs(self.control.median - 1)
        if off <= CONTROL_BOUND:
            return ""
        return f"void: noise ({self.limit} against itself is off by {off:.0%}, bound {CONTROL_BOUND:.0%})"

    def json(self, unit_bytes: int = 0) -> dict[str, Any]:
        """Medians of every arm and the control.

        Args:
            unit_bytes: bytes that a turn moves; then each arm also gets bytes per second.
        """
        arms: dict[str, Any] = {}
        for name, seconds in self.wall_s.items():
            median = statistics.median(seconds)
            arms[name] = {
                "seconds": _short(median),
                "cpu_seconds": _short(statistics.median(self.cpu_s[name])),
            }
            if unit_bytes:
                arms[name]["bytes_per_s"] = round(unit_bytes / median)
        turns = len(self.wall_s[self.limit])
        return {"limit": self.limit, "turns": turns, "control": self.control.json(), "arms": arms}

    def cpu_speed(self, name: str) -> Ratio:
        """As `speed`, by CPU seconds: a check on a busy machine, where waiting for a turn costs wall time."""
        return Ratio.of([b / a for a, b in zip(self.cpu_s[name], self.cpu_s[self.limit], strict=True)])

    def _pairs(self, name: str) -> list[tuple[float, float]]:
        return list(zip(self.wall_s[name], self.wall_s[self.limit], strict=True))


def measure(limits: Sequence[Arm], arms: Sequence[Arm], *, turns: int = 9, warm_turns: int = 1) -> Measured:
    """Run limits and arms turn and turn about.

    Args:
        limits: ways to reach the same limit; the fastest by median is the one that counts, and each has its
            second run, so that the control is there whichever wins.
        arms: what is compared with it.
        turns: that count; odd, so that the median is one of them.
        warm_turns: before those, not counted.
    """
    again = [replace(limit, name=limit.name + _AGAIN) for limit in limits]
    order = [*limits, *arms, *again]
    done = Measured("", {arm.name: [] for arm in order}, {arm.name: [] for arm in order})
    collecting = gc.isenabled()
    gc.disable()  # a collection would land in whichever arm is running
    try:
        for turn in range(-warm_turns, turns):
            for arm in order if turn % 2 == 0 else reversed(order):
                wall_s, cpu_s = _timed(arm)
                if turn >= 0:
                    done.wall_s[arm.name].append(wall_s)
                    done.cpu_s[arm.name].append(cpu_s)
    finally:
        if collecting:
            gc.enable()
    done.limit = min((limit.name for limit in limits), key=lambda name: statistics.median(done.wall_s[name]))
    return done


def _timed(arm: Arm) -> tuple[float, float]:
    if arm.settle:
        _prepare(arm)
        arm.work()
    _prepare(arm)
    cpu, wall = time.process_time(), time.perf_counter()
    own = arm.work()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return (wall_s if own is None else own), cpu_s


def _prepare(arm: Arm) -> None:
    if arm.before is not None:
        arm.before()


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _short(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")


# ---- the machine ------------------------------------------------------------------------------------------


def last_level_cache_bytes() -> int:
    """As the kernel tells (a virtual machine is told the whole host's); 32 MiB if it does not."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        text = (index / "size").read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=32 << 20)


def working_set_bytes() -> int:
    """Four times the last-level cache, so that no pass finds the bytes of the one before in it.

    Raises:
        SystemExit: the machine has not got that much memory twice (source and target).
    """
    wanted = max(4 * last_level_cache_bytes(), _WORKING_SET_MIN)
    wanted += -wanted % (64 << 20)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 3 * wanted > available:
        raise SystemExit(
            f"working set of {wanted >> 20} MiB (4 × last-level cache), three of them in memory: only "
            f"{available >> 20} MiB are free"
        )
    return wanted


# ---- results ----------------------------------------------------------------------------------------------


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Command line of a benchmark: --json and --save, to which it adds its own."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print the JSON object only")
    made.add_argument("--save", action="store_true", help=f"keep it as bench/results/{name}.json")
    return made


def finish(
    name: str,
    options: argparse.Namespace,
    figures: dict[str, Any],
    voids: Sequence[str],
    keep_as: str = "",
) -> int:
    """Print the result as the last line, keep it if asked to.

    Args:
        name: of the benchmark.
        keep_as: of the result, where that is another one.
        figures: JSON-ready.
        voids: every `Measured.void`; one that is not empty voids the whole run.

    Returns:
        Exit status: 0, or 3 when void.
    """
    void = "; ".join(dict.fromkeys(reason for reason in voids if reason))
    command = " ".join([f"python -m bench.{name}", *(word for word in sys.argv[1:] if word != "--json")])
    result = {**figures, "void": void, "command": command, "where": where()}
    if options.save and not void:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{keep_as or name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 3 if void else 0
