"""Is anything lost or wrong after kill -9 in the middle of writing? A hundred times, on the same directories.

In a round, engines save chains of random shapes (blocks of 16 and 256 KiB, many chains begin like older ones,
some in small pieces), somebody asks for a flush now and then, a namespace is dropped now and then, and at a
random moment the daemon gets SIGKILL. Another one is started on the same directory, and asked for every chain
that was ever offered to it, and for others that end in a block that nobody has saved. In every fifth round
one more daemon is killed before that, while it is still opening the directory. Rounds take turns between two
directories: in one nothing is ever evicted, the other is so small that its segments are recycled all the
time.

    flushed_lost    blocks that a flush had vouched for and that were not found, or not loaded, afterwards
                    (in the small directory: of chains too young to be evicted, see bench/kill9_ledger.py)
    corrupt         blocks that were loaded with other bytes than those of their key
    phantom         blocks that the daemon said it had and could not give; that it said it had although no
                    save of them had ever begun, or none since a drop of their namespace that it had
                    acknowledged; and records that it counted beyond those that all chains together can name

At the end one more namespace is dropped, and the file that says so is taken away: then its blocks come back,
and must be counted as phantoms, or that figure says nothing (`drops_noticed`). Then a byte in every 4 KiB of
both directories is inverted: that must be noticed, or the other figures say nothing (`damage_noticed`), and
still no wrong byte may be served.

`kills_with_writes_in_flight`: either proof counts. (a) Just before the kill the daemon said that more bytes
were not on the disk yet than any disk (8 GB/s) could have taken between that question and the kill. (b) After
the restart blocks were missing that had been acknowledged and let in, but not flushed: they were still under
way. `kills_that_lost_unflushed` is (b) alone.

Exit status: 1 a bar is missed or something happened that must not.
"""

from __future__ import annotations

import random
import secrets
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kill9_ledger import KINDS, Ledger
from bench.kill9_look import Look, World
from bench.kill9_savers import Savers, Tally, save_and_drop
from bench.measure import finish, parser
from bench.nvme_place import disk_folder
from kvstore.logs import configure_logs

__all__ = ["IN_FLIGHT_SHARE", "Report", "Rounds", "main", "need_bytes"]

MIB = 1 << 20
IN_FLIGHT_SHARE = 0.9
HOST_BYTES = 256 * MIB
# Shallow: whatever the disk and the load of the machine, engines in a rush save faster than it is written.
DEPTH = 8
ROOM_BYTES = HOST_BYTES // 4
# Of the directory where nothing is evicted: what a round writes (calm, and a rush of some 20 ms), and three
# segments that the kill leaves half full.
_ROUND_BYTES = 160 * MIB
_LARGE_SEGMENT, _SMALL_SEGMENT = 16 * MIB, 2 * MIB
_SMALL_CAPACITY = 128 * MIB
_CALM_S, _RUSH_S = (0.05, 0.35), (0.0, 0.015)
_OPENING_S = (0.3, 1.5)
_IN_FLIGHT_S = 0.2
FASTEST_BYTES_PER_S = 8e9


@dataclass(slots=True)
class Report:
    """What all rounds together saw.

    Attributes:
        flushed_lost, corrupt, phantom, kills_with_writes_in_flight, kills_that_lost_unflushed: see above.
        kills_while_opening: more kills, of daemons that had not finished opening.
        blocks_verified: loaded and compared, after all restarts together.
        blocks_evicted: given up where segments are recycled.
        blocks_evicted_wrongly: given up where there was room for everything.
        unsound: restarted daemons of which `kvstore check` finds a law broken.
        damage_noticed, drops_noticed: the negative controls.
        why: of what must not happen, the first cases.
        kill_after_ms: from the last status to the kill, by round.
    """

    rounds: int = 0
    flushed_lost: int = 0
    corrupt: int = 0
    phantom: int = 0
    kills_with_writes_in_flight: int = 0
    kills_that_lost_unflushed: int = 0
    kills_while_opening: int = 0
    blocks_verified: int = 0
    blocks_evicted: int = 0
    blocks_evicted_wrongly: int = 0
    unsound: int = 0
    damage_noticed: bool = False
    drops_noticed: bool = False
    tally: Tally = field(default_factory=Tally)
    why: list[str] = field(default_factory=list)
    kill_after_ms: list[float] = field(default_factory=list)

    def note(self, text: str) -> None:
        """One case of what must not happen."""
        if len(self.why) < 20:
            self.why.append(text[:300])

    def fail(self, text: str) -> None:
        """Something that makes the whole run worthless."""
        self.tally.errors = (*self.tally.errors, text)

    def missed(self) -> list[str]:
        """Bars that are not reached, as text; empty = all are."""
        zero = ("flushed_lost", "corrupt", "phantom", "blocks_evicted_wrongly", "unsound")
        short = [f"{name} {getattr(self, name)}, bar 0" for name in zero if getattr(self, name)]
        need = int(IN_FLIGHT_SHARE * self.rounds)
        if self.kills_with_writes_in_flight < need:
            short.append(f"kills_with_writes_in_flight {self.kills_with_writes_in_flight}, bar {need}")
        if not self.tally.blocks_flushed:
            short.append("no flush was acknowledged: nothing was proven")
        if not self.damage_noticed:
            short.append("damage was not noticed: nothing was proven")
        if not self.drops_noticed:
            short.append("what came back after a drop was not noticed: no phantom would be")
        return short + [f"error: {text}" for text in self.tally.errors]

    def json(self) -> dict[str, Any]:
        """For the result."""
        plain = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("tally", "kill_after_ms")
        }
        tally = self.tally
        return {
            **plain,
            "chains_offered": tally.chains,
            "flushes": tally.flushes,
            "flushes_unsure": tally.unsure,
            "blocks_flushed": tally.blocks_flushed,
            "namespaces_dropped": tally.drops,
            "kill_after_ms": round(statistics.median(self.kill_after_ms or [0.0]), 2),
            "missed": self.missed(),
        }


class Rounds:
    """Two directories and what has happened to them.

    Args:
        home: for sockets and logs; a short path.
        disk: for the directories.
        rounds: how many there will be.
        seed: of every choice.
        direct: whether the file system knows O_DIRECT (a test's may not).
    """

    def __init__(self, home: Path, disk: Path, rounds: int, seed: int, direct: bool = True) -> None:
        self.report = Report()
        self._random = random.Random(seed)
        large = _large_capacity(rounds)
        shared = {
            "host.capacity_bytes": HOST_BYTES,
            "host.slab_bytes": 2 * MIB,
            "host.huge_pages": "false",
            "nvme.direct": str(direct).lower(),
            "nvme.depth": DEPTH,
            "grpc.listen": "auto",
        }
        self._worlds: list[World] = []
        for name, capacity, segment, window in (
            ("large", large, _LARGE_SEGMENT, 0),
            ("small", _SMALL_CAPACITY, _SMALL_SEGMENT, _SMALL_CAPACITY // 3),
        ):
            settings = {**shared, "nvme.capacity_bytes": capacity, "nvme.segment_bytes": segment}
            self._worlds.append(World(home / name, disk / name, settings, Ledger(segment, window)))

    def close(self) -> None:
        """End both daemons; whatever they have said of themselves that they should not have."""
        for world in self._worlds:
            world.close()
            if "Traceback" in (world.home / "daemon.log").read_text(errors="replace"):
                self.report.fail(f"a traceback in the log of {world.home.name}")

    def run(self) -> None:
        """One round."""
        number = self.report.rounds
        world = self._worlds[number % 2]
        daemon, seed = world.live, self._random.getrandbits(40)
        savers = Savers(daemon, world.ledger, ROOM_BYTES, self.report.tally, seed)
        savers.start()
        try:
            proven = self._kill(world, savers)
        finally:
            daemon.kill()  # once more is harmless; if something went wrong nobody shall wait for it
            savers.join()
        world.ledger.kill()
        if number % 10 > 7:
            self._kill_while_opening(world)
        world.start()
        lost = self._look(world)
        world.ledger.forget_unflushed()
        self.report.kills_with_writes_in_flight += proven or lost
        self.report.kills_that_lost_unflushed += lost
        self.report.rounds += 1

    def _kill(self, world: World, savers: Savers) -> bool:
        """Kill in the middle of writes; whether the daemon's own word proves that it was."""
        daemon, report = world.live, self.report
        with daemon.tool() as tool:
            time.sleep(self._random.uniform(*_CALM_S))
            savers.rush()
            time.sleep(self._random.uniform(*_RUSH_S))
            until = time.perf_counter() + _IN_FLIGHT_S
            while True:
                asked = time.perf_counter()
                nvme = tool.ask("status")["groups"]["default"]["nvme"]
                since = time.perf_counter() - asked
                proven = bool(nvme["queued_bytes"] > FASTEST_BYTES_PER_S * since)
                if proven or asked > until:
                    savers.expect_the_end()
                    daemon.kill()
                    break
        report.kill_after_ms.append(1000 * since)
        given_up = sum(nvme["dropped"].get(reason, 0) for reason in ("evicted", "over_budget", "lost"))
        if world.ledger.evicts:
            report.blocks_evicted += given_up
        else:
            report.blocks_evicted_wrongly += given_up
        return proven

    def _kill_while_opening(self, world: World) -> None:
        daemon = world.start()
        time.sleep(self._random.uniform(*_OPENING_S))
        daemon.kill()
        world.ledger.kill()
        self.report.kills_while_opening += 1

    def control(self) -> None:
        """What must be noticed: a drop that is undone, and damage."""
        whole = self.report
        whole.drops_noticed = self._undo_a_drop(self._worlds[0]).phantom > 0
        self._damage(whole)

    def _undo_a_drop(self, world: World) -> Report:
        """Save, drop, kill, and take away what says that it was dropped: what a look sees then."""
        whole, self.report = self.report, Report()
        save_and_drop(world.live, world.ledger)
        world.live.kill()
        world.undrop()
        world.start()
        self._look(world)
        seen, self.report = self.report, whole
        return seen

    def _damage(self, whole: Report) -> None:
        """Damage both directories and look: what was flushed must be missed, and nothing wrong be served."""
        self.report = Report()
        for world in self._worlds:
            world.live.kill()
            world.damage()
            world.start()
            self._look(world)
        seen, self.report = self.report, whole
        # Few rounds may have flushed nothing where nothing is evicted: then it shows in that nothing is left.
        nothing_left = whole.blocks_verified > 0 and not seen.blocks_verified
        whole.damage_noticed = seen.flushed_lost > 0 or nothing_left
        whole.corrupt += seen.corrupt
        whole.unsound += seen.unsound

    # ---- after a restart -----------------------------------------------------------------------------------

    def _look(self, world: World) -> bool:
        """Ask for every chain, load what is there; whether something is gone that no flush covered."""
        report, daemon = self.report, world.live
        with ThreadPoolExecutor(len(KINDS)) as pool:
            looks = [pool.submit(Look(world, kind).run) for kind in KINDS]
            seen = [look.result() for look in looks]
        found = sum(len(one.found) for one in seen)
        lost = sum(len(one.lost) for one in seen)
        # Counted last: a daemon may evict at its start, to have segments to write to.
        extra = max(0, int(daemon.nvme()["records"]) - found)
        with daemon.tool() as tool:
            checked = tool.ask("check")
        report.flushed_lost += lost
        report.corrupt += sum(one.corrupt for one in seen)
        report.phantom += extra + sum(one.phantom for one in seen)
        report.blocks_verified += sum(one.verified for one in seen)
        report.unsound += not checked["ok"]
        if lost:
            report.note(f"round {report.rounds}, {world.home.name}: {lost} flushed blocks are not there")
        if extra:
            report.note(f"{world.home.name}: {extra} more records are counted than the {found} found")
        for text in [text for one in seen for text in one.why] + ([] if checked["ok"] else [str(checked)]):
            report.note(text)
        return any(one.gone for one in seen)


def _large_capacity(rounds: int) -> int:
    """Holds everything that is ever written, and four segments more."""
    return ((rounds + 1) // 2 + 1) * _ROUND_BYTES + 4 * _LARGE_SEGMENT


def need_bytes(rounds: int) -> int:
    """On the disk, for both directories."""
    return _large_capacity(rounds) + _SMALL_CAPACITY


def show(report: Report, began_s: float) -> None:
    """A line about the rounds so far."""
    names = ("flushed_lost", "corrupt", "phantom", "kills_with_writes_in_flight", "blocks_verified")
    facts = ", ".join(f"{name} {getattr(report, name)}" for name in names)
    print(
        f"{report.rounds:4} rounds, {time.monotonic() - began_s:4.0f} s: {facts}", file=sys.stderr, flush=True
    )


def main() -> int:
    """Returns the exit status."""
    command = parser("kill9", __doc__)
    command.add_argument("--rounds", type=int, default=100, help="kills (100)")
    command.add_argument("--seed", type=int, default=None, help="of every choice (random)")
    options = command.parse_args()
    configure_logs("error")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    began_s = time.monotonic()
    with (
        disk_folder(need_bytes(options.rounds)) as disk,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as home,
    ):
        rounds = Rounds(Path(home), disk, options.rounds, seed)
        try:
            while rounds.report.rounds < options.rounds:
                rounds.run()
                if not options.json and rounds.report.rounds % 10 == 0:
                    show(rounds.report, began_s)
            rounds.control()
        finally:
            rounds.close()
    report = rounds.report
    figures = {**report.json(), "seed": seed, "seconds": round(time.monotonic() - began_s)}
    for text in report.missed():
        print(f"missed: {text}", file=sys.stderr)
    status = finish("kill9", options, figures, [])
    return status or int(bool(report.missed()))


if __name__ == "__main__":
    raise SystemExit(main())
