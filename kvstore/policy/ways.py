"""The ways to have a prompt's KV on the device, and what each would take: what `decide` is asked about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from kvstore.types import Span, Tier

__all__ = ["Prefill", "ReloadQuestion", "Terms", "Way"]

_SECONDS_MAX = 1e9  # 30 years: more is a mistake in a unit
_COMPUTE_S_MAX = 1e7  # nobody waits for the difference; sums of it stay below that
_TOKENS_MAX, _BYTES_MAX = 1 << 31, 1 << 62


class Prefill(Protocol):
    """Seconds to compute tokens: `PrefillCurve.seconds` with the load of now bound to it."""

    def __call__(self, start: int, stop: int, /) -> float | None:
        """For tokens [start, stop) behind `start` tokens that are there. None = nothing is known."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """Blocks of one tier, and what loading them is predicted to take.

    Attributes:
        span: where, in blocks. That of HOST may be empty: then HOST only carries what comes from below.
        latency_s: until the first byte; at least 0.
        bytes_per_s: from then on; above 0.
        queued_s: until the tier has served what it was asked for before.
        doubted: why nobody may wait for this tier now; empty = it is trusted.

    Raises:
        ValueError: names the field.
    """

    span: Span
    latency_s: float
    bytes_per_s: float
    queued_s: float = 0.0
    doubted: str = ""

    def __post_init__(self) -> None:
        _need_seconds("latency_s", self.latency_s)
        _need_seconds("queued_s", self.queued_s)
        if not 0.0 < self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s: need more than 0, and finite, got {self.bytes_per_s!r}")


@dataclass(frozen=True, slots=True)
class ReloadQuestion:
    """A match, and what is known of the ways to have its KV on the device.

    Attributes:
        prompt_tokens: tokens whose KV is needed; the part behind the match is computed in any case.
        block_tokens, block_bytes: of one block, at least 1.
        device: leading blocks that are on the device: cost nothing.
        ways: from block `device` on, in chain order, without a gap; empty = nothing can be loaded.
        prefill: seconds to compute tokens, with the load of now.
        queued_s: until the engine begins to compute this prompt.
        can_split: whether the engine can compute a head while its tail is loading.

    Raises:
        ValueError: names the field.
    """

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    device: int
    ways: tuple[Way, ...]
    prefill: Prefill
    queued_s: float = 0.0
    can_split: bool = False

    def __post_init__(self) -> None:
        _need_count("prompt_tokens", self.prompt_tokens, 0, _TOKENS_MAX)
        _need_count("block_tokens", self.block_tokens, 1, _TOKENS_MAX)
        _need_count("block_bytes", self.block_bytes, 1, _BYTES_MAX)
        _need_count("device", self.device, 0, _TOKENS_MAX)
        _need_seconds("queued_s", self.queued_s)
        reached = self.device
        for way in self.ways:
            span = way.span
            if span.start != reached or span.stop < span.start + (span.tier is not Tier.HOST):
                raise ValueError(f"ways: need spans one behind the other from {reached} on, got {span}")
            if span.tier is Tier.GPU:
                raise ValueError("ways: nothing is loaded from the device; raise `device` instead")
            reached = span.stop
        if reached * self.block_tokens > self.prompt_tokens:
            raise ValueError(
                f"prompt_tokens: {self.prompt_tokens} are less than the {reached} blocks of "
                f"{self.block_tokens} that are known"
            )


class Terms:
    """The seconds that a question's answers are made of.

    Attributes:
        reach: blocks [device, reach) can be loaded.
        doubt: why that is less than what is known, as the end of a sentence.
        turns: lengths k at which the slope of L[device, k) changes: a tier begins or ends, another is now the
            slowest; and those at which the engine's queue ends. Between two blocks: both.
    """

    def __init__(self, question: ReloadQuestion) -> None:
        self.question = question
        self.reach = question.device
        self.doubt = ""
        self.ways: list[Way] = []
        for way in question.ways:
            if way.doubted:
                self.doubt = f"; {way.span.tier} is doubted: {way.doubted}"
                break
            self.reach = way.span.stop
            self.ways.append(way)
        self._host = next((way for way in self.ways if way.span.tier is Tier.HOST), None)
        self.turns = self._turned()

    def tokens(self, block: int) -> int:
        return block * self.question.block_tokens

    def compute(self, start: int, stop_tokens: int) -> float | None:
        """C from block `start` to a token."""
        first = self.tokens(start)
        if first == stop_tokens:
            return 0.0
        seconds = self.question.prefill(first, stop_tokens)
        if seconds is not None and not 0.0 <= seconds < math.inf:
            raise ValueError(f"prefill: need seconds for tokens {first} to {stop_tokens}, got {seconds!r}")
        return None if seconds is None else min(seconds, _COMPUTE_S_MAX)

    def load(self, start: int, stop: int) -> float:
        """L of blocks [start, stop)."""
        return max(self._ends(start, stop).values(), default=0.0)

    def _turned(self) -> set[int]:
        start, found = self.question.device, set[int]()
        for way in self.ways:
            first, last = max(way.span.start, start) + 1, way.span.stop
            if first > last:
                continue
            found |= {first, last}
            at_first, at_next = self._ends(start, first), self._ends(start, first + (last > first))
            lines = [(ends, at_next[tier] - ends) for tier, ends in at_first.items()]
            for (a, rises), (b, falls) in combinations([(self.question.queued_s, 0.0), *lines], 2):
                if rises != falls and abs(b - a) < abs(rises - falls) * (last - first):
                    crossing = first + (b - a) / (rises - falls)
                    found |= {k for k in (math.floor(crossing), math.ceil(crossing)) if first <= k <= last}
        return found

    def _ends(self, start: int, stop: int) -> dict[Tier, float]:
        """When each tier that takes part has delivered its blocks of [start, stop)."""
        size, ends = self.question.block_bytes, dict[Tier, float]()
        for way in self.ways:
            blocks = min(way.span.stop, stop) - max(way.span.start, start)
            if blocks > 0 and way is not self._host:
                begins_s = way.queued_s + way.latency_s
                moves_s = blocks * size / way.bytes_per_s
                # Ways of one tier share it; the latest of them to begin delays both.
                ends[way.span.tier] = max(ends.get(way.span.tier, 0.0), begins_s) + moves_s
        host = self._host
        if host is not None and stop > start:
            moves_s = (stop - start) * size / host.bytes_per_s
            ends[Tier.HOST] = host.queued_s + host.latency_s + moves_s
        return ends


def _need_seconds(name: str, value: float) -> None:
    if not 0.0 <= value <= _SECONDS_MAX:  # NaN too
        raise ValueError(f"{name}: need 0 to {_SECONDS_MAX:g} seconds, got {value!r}")


def _need_count(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}: need {least} to {most}, got {value!r:.80}")
