"""Reload or recompute: what to load of a match. Pure.

    device          start                              blocks                prompt
    |---- GPU ------|---- HOST ----|---- NVME, … ------|-- never known ------|
    there           could be loaded, or computed        computed anyway

    recompute   queue + C(start, prompt)
    load        the best k:  max(queue, L[start, k)) + C(k, prompt)
    split       the best k:  max(queue + C(start, k), L[k, blocks)) + C(blocks, prompt)

C = the prefill curve, L = seconds to load, queue = until the engine could begin to compute; loads do not wait
for that. Tiers work side by side, and what comes from below HOST crosses HOST on its way, piece by piece: L
is the slowest of them. A tier that is doubted ends what can be loaded.

Loading has to be predicted to save a twentieth of the computing that it replaces; else everything is
computed, which cannot lag. Whoever loads follows the lag rule (kvstore/policy/lag.py) from the moment at
which the engine could have begun; with R and W of `Decision` the whole takes at most 1.1 times recompute.
A load that would fall under that rule although it comes as predicted is not begun.

`decide` compares; `fixed` does what it is told, with the same predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvstore.policy.lag import LAG_SHARE, LagRule
from kvstore.policy.ways import Prefill, ReloadQuestion, Terms, Way
from kvstore.types import Choice, Span, Tier

__all__ = ["BLIND_S", "Choice", "Decision", "Prefill", "ReloadQuestion", "Way", "decide", "fixed"]

# As long as nothing is known of computing, so much may be spent on loading what could perhaps be computed
# faster: at 3 GB/s that is 24,000 tokens of an 8B model. One computed prompt ends this state.
BLIND_S = 1.0
# W has to be below so much of R: less gain is within the error of both predictions, and a load that lags may
# cost a tenth of R.
_WORTH = 0.95
# A split has to save so much of what computing the match takes, beside a load: its parts share cores and
# memory, and meet somewhere inside of a step.
_TROUBLE = 0.03
# A load of everything that takes so little of R is not compared with shorter ones: they could save no more.
_CLEAR = 0.03
# Lengths of a load that are compared, beside those where its slope changes. Between two of those the seconds
# are concave but for the engine's steps, so the best is at an end, or a step's overhead off.
_LENGTHS = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and what would have been.

    Attributes:
        choice: see the top of this file.
        load_start, load_stop: blocks to load; equal = none. What is neither on the device nor loaded is
            computed: behind `load_stop`, and with SPLIT before `load_start` too.
        spans: where each part comes from, GPU hits included.
        predicted_s: seconds from now until the prompt's KV is complete: of what was chosen, and of the other
            choices at their best. None = not possible, or nothing is known to predict it from.
        lag_from_s: seconds from now until the lag rule's clock starts: until then the engine is busy
            otherwise, or with the head of a split.
        load_s: W of the lag rule, seconds from then until everything is loaded.
        recompute_s: R of the lag rule, seconds from then to compute what is to be loaded; 0 = no rule.
            Not known: as much as lets a load lag by BLIND_S (and every block has the same share of it).
        reason: one sentence.
    """

    choice: Choice
    load_start: int
    load_stop: int
    spans: tuple[Span, ...]
    predicted_s: Mapping[Choice, float | None]
    lag_from_s: float
    load_s: float
    recompute_s: float
    reason: str

    def lag_rule(self, late_s: float = 0.0) -> LagRule | None:
        """The rule for this load; None: there is none, or it may take what it takes. `late_s`: see there."""
        if self.load_start == self.load_stop or not self.recompute_s:
            return None
        return LagRule(self.recompute_s, self.load_s, late_s)


@dataclass(frozen=True, slots=True)
class _Option:
    """A load, and what the lag rule needs to know of it."""

    choice: Choice
    start: int
    stop: int
    total_s: float
    lag_from_s: float
    load_s: float
    recompute_s: float


def decide(question: ReloadQuestion) -> Decision:
    """The fastest of recompute, load and split. Some 30 calls of the prefill curve, 0.3 ms.

    Without a curve (the first request ever) it loads what is predicted to be there within `BLIND_S`.

    Raises:
        ValueError: `prefill` gave what is no number of seconds.
    """
    terms = Terms(question)
    all_s = terms.compute(question.device, question.prompt_tokens)
    if terms.reach == question.device:
        total = None if all_s is None else question.queued_s + all_s
        return _computed(terms, {Choice.RECOMPUTE: total, Choice.LOAD: None, Choice.SPLIT: None}, None)
    if all_s is None:
        return _blind(terms)
    loads, splits = _loads(terms, all_s), _splits(terms, all_s) if question.can_split else []
    predicted: dict[Choice, float | None] = {
        Choice.RECOMPUTE: question.queued_s + all_s,
        Choice.LOAD: loads[0].total_s if loads else None,
        Choice.SPLIT: splits[0].total_s if splits else None,
    }
    rest_s = terms.compute(terms.reach, question.prompt_tokens) or 0.0
    trouble_s = _TROUBLE * (all_s - rest_s)
    options = sorted(
        loads + splits, key=lambda o: o.total_s + (trouble_s if o.choice is Choice.SPLIT else 0.0)
    )
    worth = (o for o in options if o.load_s < _WORTH * o.recompute_s and _comes_through(terms, o, all_s))
    best = next(worth, None)
    if best is None:
        return _computed(terms, predicted, options[0] if options else None)
    predicted[best.choice] = best.total_s  # a better one of its kind may have been too much of a risk
    spans = _spans(question, best.start, best.stop)
    why = f"loads blocks {best.start} to {best.stop} from {_tiers(spans)}"
    if best.choice is Choice.SPLIT:
        why += f" and computes {question.device} to {best.start} meanwhile"
    why += f": {_compared(best.choice, predicted)}"
    return _loaded(best, spans, predicted, why + terms.doubt)


def fixed(question: ReloadQuestion, choice: Choice) -> Decision:
    """What is done where nobody compares, with what `decide` predicts: load all that is known, or nothing.

    No lag rule holds, and nobody is doubted.

    Raises:
        ValueError: to split is no fixed choice.
    """
    if choice is Choice.SPLIT:
        raise ValueError("choice: a split needs a comparison")
    question = replace(question, ways=tuple(replace(way, doubted="") for way in question.ways))
    device = question.device
    stop = question.ways[-1].span.stop if question.ways and choice is Choice.LOAD else device
    made = Choice.LOAD if stop > device else Choice.RECOMPUTE
    why = "every known block is loaded" if choice is Choice.LOAD else "nothing is loaded"
    return Decision(
        made,
        device,
        stop,
        _spans(question, device, stop),
        decide(question).predicted_s,
        0.0,
        0.0,
        0.0,
        f"plan.mode = {choice}: {why}, whatever it takes",
    )


def _loads(terms: Terms, all_s: float) -> list[_Option]:
    """Loads that begin where the device's blocks end, the best first."""
    question, start, reach = terms.question, terms.question.device, terms.reach
    count = reach - start
    lengths = {start + -(-count * part // _LENGTHS) for part in range(1, _LENGTHS + 1)}
    lengths |= terms.turns
    all_rest_s = terms.compute(reach, question.prompt_tokens)
    if all_rest_s is not None and terms.load(start, reach) <= _CLEAR * (all_s - all_rest_s):
        lengths = {reach}
    options = []
    for k in lengths:
        rest_s = terms.compute(k, question.prompt_tokens)
        if rest_s is not None:
            beyond_s = max(0.0, terms.load(start, k) - question.queued_s)
            total_s = question.queued_s + beyond_s + rest_s
            options.append(
                _Option(Choice.LOAD, start, k, total_s, question.queued_s, beyond_s, all_s - rest_s)
            )
    return sorted(options, key=_total)


def _splits(terms: Terms, all_s: float) -> list[_Option]:
    """The two lengths of a head around the point where computing and loading meet, the better first."""
    question, start, reach = terms.question, terms.question.device, terms.reach
    rest_s = terms.compute(reach, question.prompt_tokens)
    if reach - start < 2 or rest_s is None:
        return []

    def head_s(k: int) -> float:
        seconds = terms.compute(start, terms.tokens(k))
        return question.queued_s + (math.inf if seconds is None else seconds)

    meets = _last(start, reach - 1, lambda k: head_s(k) <= terms.load(k, reach))
    options = []
    for k in {max(start + 1, meets), min(reach - 1, meets + 1)}:
        until_s, load_s = head_s(k), terms.load(k, reach)
        if until_s < math.inf:
            total_s = max(until_s, load_s) + rest_s
            left_s = question.queued_s + all_s - until_s - rest_s
            options.append(
                _Option(Choice.SPLIT, k, reach, total_s, until_s, max(0.0, load_s - until_s), left_s)
            )
    return sorted(options, key=_total)


def _comes_through(terms: Terms, option: _Option, all_s: float) -> bool:
    """Whether the lag rule lets it end when everything comes as predicted.

    That of a split needs no look: it begins when the head is done, with almost everything there.
    """
    if option.choice is Choice.SPLIT:
        return True
    rule = LagRule(option.recompute_s, option.load_s)
    start, count = option.start, option.stop - option.start
    looks = {start + count * part // _LENGTHS for part in range(_LENGTHS)}
    looks |= {k - 1 for k in terms.turns if k <= option.stop}
    for there in sorted(looks):
        rest_s = terms.compute(there, terms.question.prompt_tokens)
        share = 0.0 if rest_s is None else min(max(0.0, (all_s - rest_s) / option.recompute_s), 1.0)
        due_s = rule.due_s(share, max(0.0, terms.load(start, there) - option.lag_from_s))
        if terms.load(start, there + 1) - option.lag_from_s >= due_s:
            return False
    return True


def _last(start: int, stop: int, holds: Callable[[int], bool]) -> int:
    """The last k in (start, stop] for which it holds, `start` if for none: from some k on it does not."""
    low, high = start, stop
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _computed(terms: Terms, predicted: Mapping[Choice, float | None], other: _Option | None) -> Decision:
    question = terms.question
    if other is not None:
        tiers = _tiers(_spans(question, other.start, other.stop))
        why = f"computes everything: {_compared(Choice.RECOMPUTE, predicted)} from {tiers}"
        if other.load_s < _WORTH * other.recompute_s:
            why += ", which could not be given up in time if it lagged"
        elif other.load_s < other.recompute_s:
            why += ", which saves too little to risk it"
    elif terms.doubt:
        why = "computes everything that the device lacks"
    else:
        why = "nothing can be loaded" if not question.device else "nothing but the device's blocks is known"
    device = question.device
    spans = _spans(question, device, device)
    return Decision(Choice.RECOMPUTE, device, device, spans, predicted, 0.0, 0.0, 0.0, why + terms.doubt)


def _blind(terms: Terms) -> Decision:
    """Nothing is known of computing."""
    question, start = terms.question, terms.question.device
    stop = _last(start, terms.reach, lambda k: terms.load(start, k) < _WORTH * BLIND_S)
    nothing: dict[Choice, float | None] = dict.fromkeys(Choice)
    if terms.load(start, start + 1) >= LAG_SHARE * BLIND_S:
        why = "computes everything: no step was seen yet, and loading a block takes a while"
        spans = _spans(question, start, start)
        return Decision(Choice.RECOMPUTE, start, start, spans, nothing, 0.0, 0.0, 0.0, why + terms.doubt)
    load_s = terms.load(start, stop)
    spans = _spans(question, start, stop)
    why = (
        f"loads blocks {start} to {stop} from {_tiers(spans)} in {_text(load_s)}: no step was seen to compare"
    )
    option = _Option(Choice.LOAD, start, stop, load_s, 0.0, load_s, BLIND_S / LAG_SHARE)
    return _loaded(option, spans, nothing, why + terms.doubt)


def _loaded(
    option: _Option, spans: tuple[Span, ...], predicted: Mapping[Choice, float | None], why: str
) -> Decision:
    return Decision(
        option.choice,
        option.start,
        option.stop,
        spans,
        predicted,
        option.lag_from_s,
        option.load_s,
        option.recompute_s,
        why,
    )


def _spans(question: ReloadQuestion, start: int, stop: int) -> tuple[Span, ...]:
    """The device's blocks, and where [start, stop) comes from."""
    spans = [Span(Tier.GPU, 0, question.device)] if question.device else []
    for way in question.ways:
        first, last = max(way.span.start, start), min(way.span.stop, stop)
        if first < last:
            spans.append(Span(way.span.tier, first, last))
    return tuple(spans)


def _total(option: _Option) -> float:
    return option.total_s


_DOING = {Choice.RECOMPUTE: "computing all", Choice.LOAD: "loading", Choice.SPLIT: "doing both at once"}


def _compared(choice: Choice, predicted: Mapping[Choice, float | None]) -> str:
    """What was predicted, the chosen first."""
    chosen = predicted[choice]
    others = [
        f"{_text(seconds)} for {_DOING[other]}"
        for other, seconds in predicted.items()
        if other is not choice and seconds is not None
    ]
    return f"{_text(chosen or 0.0)} against {' and '.join(others)}"


def _tiers(spans: tuple[Span, ...]) -> str:
    return " and ".join(dict.fromkeys(str(span.tier) for span in spans if span.tier is not Tier.GPU))


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
