"""Kill a daemon under load, start it again, and see that nothing was lost: one round, any number of times.

    python tests/e2e/keep_rounds.py --rounds 100       (make soak)

prints {"rounds": …, "host_hits": …, "wrong_bytes": 0, "slots_lost": 0, "generations_back": 0}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from children import Child
from fake_engine import BIG, LIMITS, FakeEngine
from raw_session import RawSession
from real_daemon import RealDaemon, eventually

from kvstore import _native
from kvstore.keys import KeyChain
from kvstore.types import Hit

__all__ = ["Report", "Rounds"]

IMPATIENT = replace(LIMITS, call_s=5.0, attach_s=20.0)
BLOCKS = 6
SETTINGS = {"host.capacity_bytes": '"32MiB"', "daemon.stall_s": "0.2"}


@dataclass(slots=True)
class Report:
    """What all rounds together saw."""

    rounds: int = 0
    host_hits: int = 0
    wrong_bytes: int = 0
    slots_lost: int = 0
    generations_back: int = 0


class Rounds:
    """A daemon that keeps its arena, an engine here, engines in processes of their own.

    Args:
        folder: short path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = RealDaemon(folder, {**SETTINGS, "daemon.keep_arena": "true"}).start()
        self.engine = FakeEngine(
            self.daemon.socket, model="rounds", layout=BIG, blocks=BLOCKS, limits=IMPATIENT
        )
        self.engine.attached()
        self.report = Report()
        self._loader = self._child("load_for_ever", 1)  # goes on through every restart
        self._generations = np.zeros(0, np.uint64)

    def close(self) -> None:
        """End everything."""
        self._loader.close()
        self.engine.close()
        self.daemon.end(signal.SIGTERM)
        self.daemon.close()

    def run(self) -> None:
        """One round: engines at work, the daemon killed in the middle and started again, then compared."""
        number = self.report.rounds
        saver = self._child("save_for_ever", number * 10_000 + 10)
        chains = [self.engine.chain(seed, BLOCKS) for seed in (1, 1_000_000 + number)]
        for chain in chains:
            assert self.engine.save(chain).dropped == 0
            self.engine.hit(chain)  # a lease, so that the saver's load does not evict it before the kill
        saver.answer()
        self._generations = self._seen()
        attaches = self.engine.client.generation
        for chain in chains:  # the newest of all: the arena is full, and an attach needs a slot for its proof
            assert self.engine.matched(chain) == BLOCKS
        if number % 2:
            saver.stop()  # in the middle of whatever it writes: it may go on at any time
        self.daemon.end(signal.SIGKILL)
        if not number % 2:
            saver.kill()
        self.daemon.start()
        eventually(
            lambda: self.engine.client.generation > attaches and self.engine.client.attached, "attached"
        )
        self.engine.client.poll()
        for chain in chains:
            self._restore(chain)
        self._compare_generations()
        saver.close()
        assert self._loader.process.poll() is None, "the loader met wrong bytes; see child.log"
        self._count_lost()
        self.report.rounds += 1

    def _child(self, op: str, seed: int) -> Child:
        options = {"socket": str(self.daemon.socket), "model": "rounds", "big": True}
        child = Child(self.folder / "child.log", **options)
        child.tell(op, seed=seed, blocks=BLOCKS)
        return child

    def _restore(self, chain: KeyChain) -> None:
        """The first lookup after the restart: a hit on HOST, with the bytes that were saved."""
        found = self.engine.client.lookup(chain)
        if not isinstance(found, Hit) or found.device or found.blocks < BLOCKS:
            return
        blocks = np.arange(BLOCKS, dtype=np.uint32)
        result = self.engine.client.load(found, blocks).wait()
        assert result is not None
        self.engine.client.release(found.lease)
        self.report.host_hits += result.good == BLOCKS
        good = result.good
        self.report.wrong_bytes += len(self.engine.memory.wrong(blocks[:good].tolist(), chain.keys[:good]))

    def _seen(self) -> np.ndarray:
        """(pages,) generation of every slot, as clients see it."""
        arena = self.engine.arena()
        return np.asarray(_native.slot_generations(arena, np.arange(arena.pages, dtype=np.uint32)))

    def _compare_generations(self) -> None:
        self.report.generations_back += int((self._seen() < self._generations).sum())

    def _count_lost(self) -> None:
        """When every process of the round is gone, no slot may be anything but free or readable."""

        def settled() -> dict[str, Any] | None:
            group = self.daemon.group()
            host = group["host"]
            return group if host["filling"] == host["draining"] == 0 else None

        try:
            eventually(settled, "nothing is being filled any more", 30.0)
        except AssertionError:
            self.report.slots_lost += int(self.daemon.group()["host"]["filling"])
        with RawSession(self.daemon.socket) as tool:
            assert tool.check() == {"ok": True}


def main() -> None:
    """See the top of this file."""
    wanted = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 100
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        rounds = Rounds(Path(folder))
        try:
            for _ in range(wanted):
                rounds.run()
                if os.isatty(2):
                    print(json.dumps(asdict(rounds.report)), file=sys.stderr)
        finally:
            rounds.close()
    print(json.dumps(asdict(rounds.report)))
    lost = rounds.report.host_hits < 2 * wanted
    raise SystemExit(
        lost or rounds.report.wrong_bytes or rounds.report.slots_lost or rounds.report.generations_back
    )


if __name__ == "__main__":
    main()
