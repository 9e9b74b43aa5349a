"""How fast this machine's tiers are: measured with a small daemon of its own, configured like the real one.

Asking a daemon that serves would push its engines' blocks out of HOST to have something on NVMe to read, and
would measure its load. The trial's daemon has a small arena, and a hidden directory beside the real one's on
the same disk; both are gone afterwards.

    HOST   the chain that was saved last, loaded into paged memory in pieces of all sizes
    NVME   chains that HOST has no room for any more, fetched in such pieces, one chain after the other
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvstore._native import PagedLayout
from kvstore.cli.tool import Tool
from kvstore.client import Client, Limits
from kvstore.config import Config
from kvstore.errors import KVStoreError, Unavailable
from kvstore.keys import KeyChain
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.types import BlockLayout, Hit, Namespace, Part, Reuse, Tier

__all__ = ["TRIAL_S", "Trial", "Tried", "measure"]

# All of it, from the daemon's start to its end: people wait for it.
TRIAL_S = 18.0
_START_S, _END_S = 8.0, 2.0
_HOST_S, _NVME_S = 2.5, 4.0
# 64 MiB a chain. HOST holds a little less than two of them, so each is gone when its turn comes again.
CHAINS, CHAIN_BLOCKS = 4, 32
_HOST_BYTES, _SLAB_BYTES = 128 << 20, 32 << 20
_DISK_BYTES, _SEGMENT_BYTES = 512 << 20, 32 << 20
# Where a chain is cut: pieces of 2 to 38 MiB tell latency from bandwidth.
_CUTS = (0, 1, 5, 13, CHAIN_BLOCKS)
# With four pieces a turn: more samples than the rates remember.
_TURNS_MAX = 16
# More than a core's own caches; of a huge shared one a part. 20 ms.
_OTHERS_BYTES = 96 << 20
# 32 layers of 8 KV heads of 128 in bfloat16, as in Llama 3 8B: 2 MiB.
_LAYOUT = BlockLayout(32, 8, 128, "bfloat16", 16)
_PLACE = ".calibrate-"
_PR_SET_PDEATHSIG = 1

Show = Callable[[str, float], None]
"""Told what is being done, and which share of all is behind it."""


@dataclass(slots=True)
class Tried:
    """What was measured.

    Attributes:
        rates: as the daemon would have learnt them.
        left_out: tiers that were not measured, and why.
    """

    rates: Rates = field(default_factory=Rates)
    left_out: dict[Tier, str] = field(default_factory=dict)


def measure(config: Config, show: Show) -> Tried:
    """Measure HOST, and NVME where the configuration has one. Takes TRIAL_S at most.

    Raises:
        KVStoreError: the trial's daemon does not start, or gives back what was not saved.
    """
    tried = Tried()
    with contextlib.ExitStack() as made:
        # What ends politely leaves nothing: SIGTERM, too, unwinds what was made.
        made.callback(
            signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler)
        )
        home = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-")))
        disk = _disk_place(config, tried)
        if disk is not None:
            made.callback(shutil.rmtree, disk, ignore_errors=True)
        show("starting a daemon", 0.0)
        trial = made.enter_context(Trial(config, home, disk))
        trial.run(tried, show)
    return tried


def _disk_place(config: Config, tried: Tried) -> Path | None:
    """A fresh directory beside those of the real daemon; None where there can be none."""
    if not config.nvme.directory:
        tried.left_out[Tier.NVME] = "nvme.directory is not set"
        return None
    parent = Path(config.nvme.directory)
    try:
        for left in parent.glob(f"{_PLACE}*"):  # of a calibration that was killed
            if not Path(f"/proc/{left.name.removeprefix(_PLACE)}").exists():
                shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(parent).free
        if free < 2 * _DISK_BYTES:
            tried.left_out[Tier.NVME] = f"{free >> 20} MiB are free on its disk, need {2 * _DISK_BYTES >> 20}"
            return None
        place = parent / f"{_PLACE}{os.getpid()}"
        place.mkdir(mode=0o700)
    except OSError as error:
        tried.left_out[Tier.NVME] = f"{parent}: {(error.strerror or str(error)).lower()}"
        return None
    return place


class Trial:
    """A daemon of a calibration and a client of it."""

    def __init__(self, config: Config, home: Path, disk: Path | None) -> None:
        self._ends_s = time.monotonic() + TRIAL_S - _END_S
        self._disk = disk
        self._socket = home / "kv.sock"
        self._log = home / "log"
        self._settings = _settings(config, self._socket, disk)
        self._memory = _Memory(CHAIN_BLOCKS + 1)
        self._all = np.arange(CHAIN_BLOCKS, dtype=np.uint32)
        self._others = np.zeros(_OTHERS_BYTES // 8, np.uint64)
        self._newest = 0  # chain: on HOST for certain
        self._until_s = self._ends_s

    def __enter__(self) -> Trial:
        flags = [word for key, value in self._settings.items() for word in ("--set", f"{key}={value}")]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                preexec_fn=_end_with_parent,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, tried: Tried, show: Show) -> None:
        """Fill `tried`.

        Raises:
            KVStoreError: see `measure`.
        """
        namespace = Namespace("calibrate", "w", "t", "none", "rope", _LAYOUT.dtype, _LAYOUT.fingerprint, "16")
        limits = Limits(call_s=5.0, attach_s=10.0)
        with Client(
            self._socket, namespace, self._memory, scratch_block=CHAIN_BLOCKS, limits=limits
        ) as client:
            if not client.wait_attached(_START_S):
                told = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
                why = client.refusal or told or "it is silent"
                raise Unavailable(f"calibrate: the trial's daemon did not start: {why!s:.300}")
            written = self._save(client, show)
            for turn in self._turns(_HOST_S, "reading HOST", 0.5, show):
                self._load(client, tried.rates, turn)
            if self._disk is None:
                return
            if not written:
                tried.left_out[Tier.NVME] = "its disk did not take the blocks in time"
                return
            for turn in self._turns(_NVME_S, "reading NVME", 0.6, show):
                why = self._fetch(client, tried.rates, turn % CHAINS)
                if why:
                    tried.left_out[Tier.NVME] = why
                    return

    def _save(self, client: Client, show: Show) -> bool:
        """Whether there is something on the disk that is not on HOST."""
        for chain in range(CHAINS if self._disk is not None else 1):
            show("writing", 0.1 + 0.1 * chain)
            saved = client.save(_chain(client, chain), 0, CHAIN_BLOCKS, self._all).wait()
            if saved is None or saved.ready != CHAIN_BLOCKS:
                raise Unavailable(f"calibrate: {saved.reason if saved else 'a save did not end'}")
            self._newest = chain
            left_s = self._ends_s - _HOST_S - _NVME_S - time.monotonic()
            if self._disk is None:
                break
            if left_s <= 0.1:
                return False
            try:
                with Tool(self._socket) as tool:
                    if tool.flush(left_s).error:
                        return False
            except KVStoreError:  # it takes too long: HOST can be measured all the same
                return False
        return self._disk is not None

    def _turns(self, seconds: float, what: str, share: float, show: Show) -> Iterator[int]:
        """0, 1, 2 …: one at least, and until the time or the rates have enough."""
        began_s = time.monotonic()
        self._until_s = min(self._ends_s, began_s + seconds)
        for turn in range(_TURNS_MAX):
            now_s = time.monotonic()
            if turn and now_s >= self._until_s:
                return
            done = max(turn / _TURNS_MAX, (now_s - began_s) / seconds)
            show(what, share + done * (0.1 if share < 0.6 else 0.4))
            yield turn

    def _hit(self, client: Client, chain: KeyChain) -> Hit:
        hit = client.lookup(chain)
        if not isinstance(hit, Hit) or hit.blocks != CHAIN_BLOCKS:
            raise Unavailable("calibrate: the trial's daemon does not find what was saved")
        return hit

    def _load(self, client: Client, rates: Rates, turn: int) -> None:
        """The latest chain from HOST."""
        chain = _chain(client, self._newest)
        hit = self._hit(client, chain)
        try:
            for start, stop in pairwise(_CUTS):
                self._others += 1  # nobody's KV waits in a processor's cache for its turn
                began_s = time.monotonic()
                part = slice(start, stop)
                loaded = client.load_slots(hit.slots[part], chain.keys[part], self._all[part]).wait()
                if loaded is None or loaded.good != stop - start:
                    raise Unavailable("calibrate: a load gave other blocks than were saved")
                if turn:  # the first meets cold pages
                    _learn(rates, Tier.HOST, stop - start, began_s)
        finally:
            client.release(hit.lease)

    def _fetch(self, client: Client, rates: Rates, number: int) -> str:
        """A chain from the disk, as far as there is time; why it did not come, "" = it did."""
        hit = self._hit(client, _chain(client, number))
        try:
            if hit.ready:  # HOST kept a part of it
                return ""
            for start, stop in pairwise(_CUTS):
                source, size_bytes = Source(Tier.NVME), (stop - start) * _LAYOUT.block_bytes
                now_s = time.monotonic()
                if start and now_s + rates.seconds(source, size_bytes) > self._until_s:
                    return ""
                fetched = client.fetch(hit, start, stop).wait()
                if fetched is None or fetched.ready != stop:
                    came = 0 if fetched is None else fetched.ready - start
                    return f"its disk brought {came} of {stop - start} blocks (nvme.stall_s)"
                _learn(rates, Tier.NVME, stop - start, now_s)
        finally:
            client.release(hit.lease)
        return ""


def _learn(rates: Rates, tier: Tier, blocks: int, began_s: float) -> None:
    now_s = time.monotonic()
    rates.observe(Source(tier), Transfer(blocks * _LAYOUT.block_bytes, 0, now_s - began_s), now_s)


def _chain(client: Client, number: int) -> KeyChain:
    count = CHAIN_BLOCKS * _LAYOUT.block_tokens
    tokens = np.arange(number * count, (number + 1) * count, dtype=np.uint32)
    chain = client.chain(tokens, "default", Reuse.OWN)
    if chain is None:
        raise Unavailable("calibrate: the trial's daemon is gone")
    return chain


def _settings(config: Config, socket: Path, disk: Path | None) -> dict[str, object]:
    """What decides about speed is the real daemon's, and what takes room is small."""
    nvme = config.nvme
    settings: dict[str, object] = {
        "daemon.socket": socket,
        "daemon.log_level": "warning",
        "host.capacity_bytes": _HOST_BYTES,
        "host.slab_bytes": _SLAB_BYTES,
        "host.huge_pages": str(config.host.huge_pages).lower(),
        "host.limit_bytes_per_s": config.host.limit_bytes_per_s,
        "host.added_latency_s": config.host.added_latency_s,
        "grpc.listen": "",
        "plan.mode": "load",
    }
    if disk is not None:
        settings |= {
            "nvme.directory": disk,
            "nvme.capacity_bytes": _DISK_BYTES,
            "nvme.segment_bytes": _SEGMENT_BYTES,
            "nvme.write_budget_bytes_per_day": 0,
            "nvme.io": nvme.io,
            "nvme.depth": nvme.depth,
            "nvme.direct": str(nvme.direct).lower(),
            "nvme.threads": nvme.threads,
            "nvme.stall_s": nvme.stall_s,
            "nvme.limit_bytes_per_s": nvme.limit_bytes_per_s,
            "nvme.added_latency_s": nvme.added_latency_s,
        }
    return settings


def _end_with_parent() -> None:
    """In the child, before exec: a calibration that is killed leaves no daemon."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Memory:
    """KV memory as attention kernels have it: [layer][block][K, V][head][token][dim]."""

    def __init__(self, blocks: int) -> None:
        self.layout = _LAYOUT
        self.part = Part.whole(_LAYOUT)
        self.blocks = blocks
        shape = (_LAYOUT.layers, blocks, 2, _LAYOUT.kv_heads, _LAYOUT.cell_bytes // 2)
        # Touched here, or the first load would measure page faults.
        self._cells = np.full(shape, 0x5A, np.uint8)

    def paged(self) -> PagedLayout:
        """Where the cells lie."""
        cells = self._cells
        bases = np.array([[plane.ctypes.data for plane in row[0]] for row in cells], np.uint64)
        return PagedLayout(
            bases,
            blocks=self.blocks,
            heads=_LAYOUT.kv_heads,
            block_stride=cells.strides[1],
            head_stride=cells.strides[3],
            piece_stride=cells.strides[3],
            piece_bytes=cells.strides[3],
            pieces=1,
        )

    def read_cell(self, block: int, layer: int, head: int) -> bytes:
        """K then V of one head."""
        return self._cells[layer, block, :, head].tobytes()

    def write_cell(self, block: int, layer: int, head: int, data: bytes) -> None:
        """Set them."""
        self._cells[layer, block, :, head] = np.frombuffer(data, np.uint8).reshape(2, -1)
