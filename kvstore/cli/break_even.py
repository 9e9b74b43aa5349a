"""From how long a prefix on is reloading faster than computing? Pure: the planner itself is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.policy.rates import Rates, Source
from kvstore.policy.reload import Choice, ReloadQuestion, Way, decide
from kvstore.types import Span, Tier

__all__ = ["TOKENS_MAX", "Block", "Computing", "computing_of", "first_win"]

# Longer prompts than most models take: a tier that has not won by then never does.
TOKENS_MAX = 131_072


@dataclass(frozen=True, slots=True)
class Block:
    """Of the model that is asked about."""

    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Computing:
    """Seconds for a token at position p: `token_s` + `position_s` · p.

    Attributes:
        token_s, position_s: at least 0, not both 0.
        origin: where it comes from, for people.
    """

    token_s: float
    position_s: float
    origin: str

    def __call__(self, start: int, stop: int, /) -> float:
        """For tokens [start, stop)."""
        return (stop - start) * (self.token_s + self.position_s * (start + stop) / 2)


def computing_of(report: Mapping[str, Any]) -> Computing | None:
    """What a daemon has learnt of its engines: of the curve with most steps; None = nothing yet.

    Args:
        report: of `kvstore status`.
    """
    best: tuple[int, Computing] | None = None
    for group in report["groups"].values():
        for curve in group.get("pricing", {}).get("curves", {}).values():
            found = _through(curve)
            if found is not None and (best is None or curve["steps"] > best[0]):
                best = curve["steps"], found
    if best is not None:
        return best[1]
    speed = max((group["prefill_tokens_per_s"] for group in report["groups"].values()), default=0.0)
    return Computing(1 / speed, 0.0, "the latest prefill steps of the daemon's engines") if speed else None


def _through(curve: Mapping[str, Any]) -> Computing | None:
    """Through the prompts that a status shows: the shortest and the longest."""
    points = sorted((int(tokens), seconds) for tokens, seconds in curve["seconds"].items() if seconds)
    if not points:
        return None
    (few, few_s), (many, many_s) = points[0], points[-1]
    origin = (
        f"the prefill curve of {curve.get('model') or 'an engine that has left'}, {curve['steps']:,} steps"
    )
    if many == few:
        return Computing(few_s / few, 0.0, origin)
    position_s = max(0.0, 2 * (many_s / many - few_s / few) / (many - few))
    return Computing(max(0.0, many_s / many - position_s * many / 2), position_s, origin)


def first_win(
    rates: Rates, source: Source, block: Block, computing: Callable[[int, int], float]
) -> int | None:
    """The shortest prefix in tokens, in whole blocks, that the planner would load from this source.

    The prompt goes on for one token behind it, and the engine has nothing else to do.

    Returns:
        None = it loads none of up to TOKENS_MAX tokens.
    """

    def loads(blocks: int) -> bool:
        ways = _ways(rates, source, blocks, block)
        prompt = blocks * block.tokens + 1
        question = ReloadQuestion(prompt, block.tokens, block.size_bytes, 0, ways, computing)
        decision = decide(question)
        return decision.choice is not Choice.RECOMPUTE

    lost, blocks, most = 0, 1, max(1, TOKENS_MAX // block.tokens)
    while not loads(blocks):
        lost, blocks = blocks, 2 * blocks
        if blocks > most:
            return None
    while blocks - lost > 1:
        middle = (lost + blocks) // 2
        lost, blocks = (lost, middle) if loads(middle) else (middle, blocks)
    return blocks * block.tokens


def _ways(rates: Rates, source: Source, blocks: int, block: Block) -> tuple[Way, ...]:
    """What lies below HOST crosses it on its way."""
    host = rates.speed(Source(Tier.HOST), blocks * block.size_bytes)
    if source.tier is Tier.HOST:
        return (Way(Span(Tier.HOST, 0, blocks), host.latency_s, host.bytes_per_s),)
    below = rates.speed(source, blocks * block.size_bytes)
    return (
        Way(Span(Tier.HOST, 0, 0), host.latency_s, host.bytes_per_s),
        Way(Span(source.tier, 0, blocks), below.latency_s, below.bytes_per_s),
    )
