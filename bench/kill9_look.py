"""The directories of bench.kill9, and what a restarted daemon still has of them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.kill9_ledger import Kind, Ledger, Offered, State, names
from bench.kill9_memory import KeyedMemory
from bench.kill9_savers import engine
from bench.nvme_place import DiskDaemon
from kvstore.client import Client
from kvstore.types import PAGE_BYTES, Busy, Hit, Miss, Reuse

__all__ = ["Look", "World"]


class World:
    """A directory over all rounds, what was handed to it, and the daemon that has it now."""

    def __init__(self, home: Path, disk: Path, settings: Mapping[str, object], ledger: Ledger) -> None:
        home.mkdir()
        self.home, self.ledger = home, ledger
        self._disk, self._settings = disk, settings
        self.live = self.start()

    def start(self) -> DiskDaemon:
        """Another daemon on the directory."""
        self.live = DiskDaemon(self.home, self._disk, self._settings)
        return self.live

    def damage(self) -> None:
        """Invert a byte in each page of every segment, its headers apart."""
        for path in self._disk.rglob("segment-*"):
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
                bytes_ = np.frombuffer(pages, np.uint8)
                bytes_[PAGE_BYTES + 2000 :: PAGE_BYTES] ^= 0xFF
                del bytes_  # the mapping cannot be closed under it

    def undrop(self) -> None:
        """Take away what says which namespaces were dropped."""
        for path in self._disk.rglob("dropped.json"):
            path.unlink()

    def close(self) -> None:
        """End the daemon."""
        self.live.__exit__(None, None, None)


class Look:
    """What a restarted daemon has of all chains of one kind.

    Attributes:
        found: keys that it says it has.
        lost: keys that it should have, and that did not come, or came wrong.
        gone: something is missing that was acknowledged, and never flushed.
    """

    def __init__(self, world: World, kind: Kind) -> None:
        self._world, self._kind = world, kind
        self.found: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.gone = False
        self.verified = self.corrupt = self.phantom = 0
        self.why: list[str] = []

    def run(self) -> Look:
        """Look at every chain."""
        ledger = self._world.ledger
        client, memory = engine(self._world.live, self._kind)
        with client:
            for offered in ledger.chains(self._kind):
                keys = names(offered.chain)
                said, good = self._load(client, memory, offered)
                self.found.update(keys[:said])
                self._look_for_a_stranger(client, offered)
                if ledger.must_be_there(offered):
                    self.lost.update(keys[good:])
                self.gone |= offered.state is State.ACKNOWLEDGED and said < len(keys)
        strays = len(ledger.strays(self._kind, self.found))
        self.phantom += strays
        if strays:
            self.why.append(
                f"{strays} blocks of kind {self._kind.name} are there that were never saved, or dropped"
            )
        return self

    def _look_for_a_stranger(self, client: Client, offered: Offered) -> None:
        """Ask for a chain like it that ends in a block that nobody has ever saved."""
        tokens = offered.tokens[: len(offered.chain) * self._kind.layout.block_tokens].copy()
        tokens[-1] ^= 1
        chain = client.chain(tokens, "default", Reuse.OWN)
        hit = client.lookup(chain) if chain is not None else None
        if chain is not None and isinstance(hit, Hit):
            client.release(hit.lease)
            self.found.update(names(chain)[: hit.blocks])

    def _load(self, client: Client, memory: KeyedMemory, offered: Offered) -> tuple[int, int]:
        """Blocks that the daemon says it has, and leading ones that came with the right bytes."""
        chain = offered.chain
        hit = client.lookup(chain)
        if isinstance(hit, Miss):
            if client.attached:
                return 0, 0
            raise SystemExit("the daemon has ended by itself")
        if isinstance(hit, Busy):
            raise SystemExit(f"a lookup with nobody else there: {hit}")
        blocks = np.arange(hit.blocks, dtype=np.uint32)
        memory.clear(hit.blocks)
        done = client.load(hit, blocks).wait()
        client.release(hit.lease)
        good = done.good if done is not None else 0
        wrong = memory.wrong(chain.keys[:good])
        self.verified += good
        if good < hit.blocks:
            self.phantom += hit.blocks - good
            self.why.append(f"{hit.blocks} blocks were said to be there, {good} came: {done}")
        if wrong:
            self.corrupt += len(wrong)
            self.why.append(f"wrong bytes in blocks {wrong} of a chain of {len(chain)}")
        return hit.blocks, min(good, wrong[0]) if wrong else good
