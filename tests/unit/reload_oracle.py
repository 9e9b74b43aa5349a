"""Questions for the decision, and every answer to them written out."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvstore.policy.reload import Choice, Decision, Prefill, ReloadQuestion, Way
from kvstore.types import Span, Tier

TOKENS, BYTES = 16, 1 << 20
LOWER = (Tier.NVME, Tier.PEER, Tier.REMOTE)


@dataclass(frozen=True)
class Curve:
    """Seconds to compute tokens, in steps of up to `chunk` that cost `c0` each."""

    c0: float = 0.0
    a: float = 1e-3
    b: float = 0.0
    chunk: int = 512

    def __call__(self, start: int, stop: int, /) -> float:
        tokens = stop - start
        return self.c0 * -(-tokens // self.chunk) + self.a * tokens + self.b * tokens * (start + tokens / 2)


def unknown(start: int, stop: int, /) -> float | None:
    """First request ever."""
    return None


@st.composite
def questions(draw: st.DrawFn, prefill: Prefill | None = None, fast: bool = False) -> ReloadQuestion:
    """`fast`: most of these are worth a load."""
    device = draw(st.integers(0, 20))
    tiers = [Tier.HOST, *draw(st.permutations(LOWER))]
    reached, ways = device, []
    for tier in tiers[: draw(st.integers(1 if fast else 0, 4))]:
        blocks = draw(st.integers(20 if fast else 0 if tier is Tier.HOST else 1, 60))
        ways.append(
            Way(
                Span(tier, reached, reached + blocks),
                draw(st.sampled_from([0.0, 1e-4, 2e-3, 0.05])),
                10.0 ** draw(st.floats(8.5 if fast else 6, 10)),
                draw(st.sampled_from([0.0, 0.0, 0.01, 1.0])) * (not fast or tier is not Tier.HOST),
                draw(st.sampled_from(["", "", "", "it lagged"])) * (not fast),
            )
        )
        reached += blocks
    curve = Curve(
        draw(st.sampled_from([0.0, 1e-3, 0.02])),
        10.0 ** draw(st.floats(-3 if fast else -5, -2)),
        draw(st.sampled_from([0.0, 1e-8, 1e-6])),
        draw(st.sampled_from([64, 512])),
    )
    return ReloadQuestion(
        reached * TOKENS + draw(st.integers(0, 1000)),
        TOKENS,
        BYTES,
        device,
        tuple(ways),
        curve if prefill is None else prefill,
        draw(st.sampled_from([0.0, 0.0, 0.03, 2.0])),
        draw(st.booleans()),
    )


# ---- the same, written out --------------------------------------------------------------------------------


def reach(question: ReloadQuestion) -> int:
    """Blocks before the first that is doubted."""
    for way in question.ways:
        if way.doubted:
            return way.span.start
    return question.ways[-1].span.stop if question.ways else question.device


def load_s(question: ReloadQuestion, start: int, stop: int) -> float:
    """Block by block: each tier delivers its own; HOST passes on everything."""
    if start == stop:
        return 0.0
    ends = {}
    for way in question.ways:
        blocks = [k for k in range(start, stop) if way.span.start <= k < way.span.stop]
        if way.span.tier is Tier.HOST:
            blocks = list(range(start, stop))
        if blocks:
            ends[way.span.tier] = way.queued_s + way.latency_s + sum(BYTES / way.bytes_per_s for _ in blocks)
    return max(ends.values())


def compute_s(question: ReloadQuestion, start: int, stop: int) -> float:
    if start == stop:
        return 0.0
    seconds = question.prefill(start, stop)
    assert seconds is not None
    return seconds


def written_out(question: ReloadQuestion) -> dict[Choice, float | None]:
    device, end, stop = question.device, reach(question), question.prompt_tokens
    loads = [
        max(question.queued_s, load_s(question, device, k)) + compute_s(question, k * TOKENS, stop)
        for k in range(device + 1, end + 1)
    ]
    splits = [
        max(question.queued_s + compute_s(question, device * TOKENS, k * TOKENS), load_s(question, k, end))
        + compute_s(question, end * TOKENS, stop)
        for k in range(device + 1, end)
    ]
    return {
        Choice.RECOMPUTE: question.queued_s + compute_s(question, device * TOKENS, stop),
        Choice.LOAD: min(loads, default=None),
        Choice.SPLIT: min(splits, default=None) if question.can_split else None,
    }


def total_s(question: ReloadQuestion, decision: Decision) -> float:
    """Of what was decided, when everything comes as predicted."""
    start, stop = decision.load_start, decision.load_stop
    tail = compute_s(question, stop * TOKENS, question.prompt_tokens)
    head = compute_s(question, question.device * TOKENS, start * TOKENS)
    return max(question.queued_s + head, load_s(question, start, stop)) + tail
