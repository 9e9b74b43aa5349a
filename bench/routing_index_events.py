"""How many new blocks a second the router learns from serialised events, for bench.routing_index.

Three ways, turn and turn about: `Event` messages straight into the index, messages of the daemon's stream
through `Holdings`, and vLLM's msgpack, whose token ids are hashed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvstore.clock import MonotonicClock
from kvstore.keys import KEY_BYTES
from kvstore.router.chain_names import TokenNames
from kvstore.router.kv_schema import Stored, decode_batch
from kvstore.router.prefixes import Prefixes
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb

__all__ = ["event_rates", "spread"]

BLOCK_TOKENS = 16
# Blocks of an event → blocks of a turn: some ms, so that a busy machine spoils few of them.
SIZES = {256: 1 << 16, 1: 1 << 12}
TURNS_PER_TURN = 3


_Packed = Callable[[int, np.random.Generator], bytes]


class _Told:
    """A worker of its own that stores new blocks in every turn, and forgets them before the next one.

    Args:
        prefixes: already full of others' blocks.
    """

    def __init__(self, prefixes: Prefixes) -> None:
        self._holdings = prefixes.join(max(SIZES.values()), told=True)
        self._holdings.ready()
        self._index = prefixes.index
        self._random = np.random.default_rng(1)
        self._wire: list[bytes] = []

    def rate(self, event_blocks: int, packed: _Packed, work: Callable[[], None]) -> float:
        """Blocks a second of one turn.

        Args:
            event_blocks: of an event.
            packed: makes its bytes.
            work: what is timed, one of those below.
        """
        self._holdings.cleared(None)
        count = SIZES[event_blocks] // event_blocks
        self._wire = [packed(event_blocks, self._random) for _ in range(count)]
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        held = int(self._holdings.blocks().sum())
        if held != SIZES[event_blocks]:
            raise SystemExit(f"{held} blocks after events that stored {SIZES[event_blocks]}")
        return held / seconds

    def by_index(self) -> None:
        """Bytes of `Event` → the index."""
        index, column = self._index, self._holdings.column
        for data in self._wire:
            index.stored(column, 1, pb.Event.FromString(data).keys, KEY_BYTES)

    def by_holdings(self) -> None:
        """Bytes of the stream's message → `Stored` → `Holdings`."""
        for data in self._wire:
            event = pb.SubscribeResponse.FromString(data).event
            self._holdings.stored(Stored(event.keys, KEY_BYTES, event.parent, None, 0, b"", Tier.HOST))

    def by_vllm(self) -> None:
        """Bytes of a batch of one event → `Stored` → `Holdings`."""
        for data in self._wire:
            for event in decode_batch(data).events:
                if isinstance(event, Stored):
                    self._holdings.stored(event)


def _event(blocks: int, random: np.random.Generator) -> pb.Event:
    return pb.Event(
        kind=pb.EVENT_KIND_STORED,
        tier=pb.TIER_HOST,
        parent=random.bytes(KEY_BYTES),
        keys=random.bytes(KEY_BYTES * blocks),
    )


def _event_bytes(blocks: int, random: np.random.Generator) -> bytes:
    return _event(blocks, random).SerializeToString()


def _message_bytes(blocks: int, random: np.random.Generator) -> bytes:
    event = _event(blocks, random)
    return pb.SubscribeResponse(epoch=bytes(16), sequence=1, last=True, event=event).SerializeToString()


def _vllm_bytes(blocks: int, random: np.random.Generator) -> bytes:
    """The start of a prompt, so that its parent is known."""
    hashes = random.integers(1, 1 << 63, blocks).tolist()
    tokens = random.integers(0, 150_000, blocks * BLOCK_TOKENS).tolist()
    stored = ["BlockStored", hashes, None, tokens, BLOCK_TOKENS, None, "GPU"]
    return msgspec.msgpack.encode([1.0, [stored], 0])


def event_rates(prefixes: Prefixes, turns: int) -> dict[str, Any]:
    """Medians over three times as many turns, and their quartiles.

    Args:
        prefixes: the index, full of others' blocks, with a place for one more replica.
        turns: of the lookups.
    """
    by_keys, by_tokens = _Told(prefixes), _Told(_token_named(prefixes.index.nodes))
    figures: dict[str, Any] = {}
    for size in SIZES:
        arms: dict[str, Callable[[], float]] = {
            "": partial(by_keys.rate, size, _event_bytes, by_keys.by_index),
            "_holdings": partial(by_keys.rate, size, _message_bytes, by_keys.by_holdings),
            "_vllm": partial(by_tokens.rate, size, _vllm_bytes, by_tokens.by_vllm),
        }
        rates: dict[str, list[float]] = {way: [] for way in arms}
        for turn in range(-1, TURNS_PER_TURN * turns):
            for way in arms if turn % 2 == 0 else reversed(arms):
                rate = arms[way]()
                if turn >= 0:
                    rates[way].append(rate)
        for way, got in rates.items():
            figures[f"events_blocks_per_s_{size}{way}"] = round(statistics.median(got))
            figures[f"events_blocks_per_s_{size}{way}_spread"] = spread(got)
    return figures


def _token_named(blocks: int) -> Prefixes:
    """As full as the other index, by names of token ids."""
    prefixes = Prefixes(TokenNames(BLOCK_TOKENS, (), Random(1)), 2 * blocks, 2, MonotonicClock())
    column = prefixes.join(blocks, told=True).column
    random = np.random.default_rng(1)
    while prefixes.index.nodes < blocks:
        prefixes.index.stored(column, 0, random.bytes(8 * 256), 8)
    return prefixes


def spread(values: list[float]) -> list[float]:
    """Low and high quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [float(f"{low:.4g}"), float(f"{high:.4g}")]
