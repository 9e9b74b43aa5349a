"""A remembered decision in plain words, for a person who has to understand one request.

Two digits are what a prediction is good for, so no time shows more; counts are exact. The same as values, for
programs, in `Explanation.facts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.decisions import DECISIONS_MAX, Decisions, Outcome, Recorded, TrustChange, found
from kvstore.errors import NotFound
from kvstore.policy.reload import Choice
from kvstore.types import Tier

__all__ = ["Explanation", "Memory", "Since", "about", "explain", "words"]

# Up to a quarter off is as good as predictions are.
_AS_PREDICTED = 1.25
# What a person should hear of: less regret is noise of the machine.
_REGRET_SHARE = 0.05
# In a reason: "310 ms", "1.73 s", but no number of blocks.
_SECONDS = re.compile(r"\b(\d+(?:\.\d+)?(?:e[+-]?\d+)?) (ms|s)\b")


@dataclass(frozen=True, slots=True)
class Memory:
    """What one trust group remembers, and whom it doubts now: source → why."""

    decisions: Decisions
    doubted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Since:
    """What happened after a plan.

    Attributes:
        plans: made later, by choice.
        changes: of trust, oldest first.
        doubted: sources that nobody may wait for now, and why.
    """

    plans: Mapping[Choice, int]
    changes: tuple[TrustChange, ...] = ()
    doubted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One request's story.

    Attributes:
        words: sentences, in order.
        facts: the same, JSON-ready, words included.
    """

    words: tuple[str, ...]
    facts: dict[str, Any]


def explain(
    memories: Mapping[str, Memory], request: str, now_s: float, tenants: frozenset[str] | None = None
) -> Explanation:
    """The story of one request. Some ms at most: for people.

    Args:
        memories: of the trust groups to look at, by name.
        request: the engine's name for it, or the number of its lease; "" = the latest of all.
        now_s: of the clock that plans are timed by.
        tenants: whose requests may be told; None = everybody's.

    Raises:
        NotFound: nothing is remembered, or not this; says which.
    """
    chosen: tuple[str, Recorded] | None = None
    anything = False
    for group, memory in memories.items():
        mine = (r for r in memory.decisions.recent() if tenants is None or r.asked.tenant in tenants)
        first = next(mine, None)
        if first is None:
            continue
        anything = True
        record = first if not request else found(iter((first, *mine)), request)
        if record is not None and (chosen is None or record.asked.at_s > chosen[1].asked.at_s):
            chosen = group, record
    if chosen is None:
        if anything:
            raise NotFound(
                f"explain: no plan of a request or lease {request!r:.80} is remembered; the latest "
                f"{DECISIONS_MAX} plans of each trust group are"
            )
        raise NotFound("explain: no plan was recorded yet: no request has matched a block since the start")
    group, record = chosen
    since = _since(memories[group], record, tenants)
    said = words(record, now_s, since)
    return Explanation(said, {"group": group, **_facts(record, now_s, since), "words": list(said)})


def words(record: Recorded, now_s: float, since: Since) -> tuple[str, ...]:
    """Sentences: who asked, what was known, what was chosen and why, what came of it, what changed since."""
    return (
        _who(record, now_s),
        _known(record),
        f"Choice: {record.decision.choice}. Reason: {_rounded(record.decision.reason)}.",
        _predicted(record),
        _happened(record),
        _changed(since, now_s),
    )


def about(seconds: float) -> str:
    """A time as far as it can be believed: 420 µs, 4.2 ms, 310 ms, 1.7 s, 12 s, 3 min, 2 h."""
    if seconds < 1e-6:
        return "no time"
    two = float(f"{seconds:.2g}")
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (100.0, 1.0, "s")):
        if two < limit:
            return f"{two * factor:.3g} {unit}"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# ---- sentences --------------------------------------------------------------------------------------------


def _who(record: Recorded, now_s: float) -> str:
    asked = record.asked
    name = "".join(
        c if c.isprintable() else "?" for c in asked.request
    )  # an engine's client may have chosen it
    who = f"Request {name}" if name else "A request"
    lease = f" (lease {asked.lease})" if asked.lease else ""
    return (
        f"{who}{lease} of tenant {asked.tenant} with {asked.namespace}, {_ago(now_s - asked.at_s)}: "
        f"a prompt of {_count(asked.prompt_tokens, 'token')}."
    )


def _known(record: Recorded) -> str:
    parts = [
        f"{_count(blocks, 'block')} on {'the device' if tier is Tier.GPU else tier}"
        for tier, blocks in record.asked.blocks
        if blocks
    ]
    return f"Known of its KV: {_listed(parts)}." if parts else "Nothing was known of its KV."


def _predicted(record: Recorded) -> str:
    """The chosen first."""
    chosen, predicted = record.decision.choice, record.decision.predicted_s
    parts = []
    for choice in sorted(predicted, key=lambda choice: choice is not chosen):
        seconds = predicted[choice]
        text = "not possible or not known" if seconds is None else about(seconds)
        parts.append(f"{choice} {text}{' (chosen)' if choice is chosen else ''}")
    return f"Predicted until its KV is complete: {', '.join(parts)}."


def _happened(record: Recorded) -> str:
    outcome = record.outcome
    if outcome is None:
        return "What came of it was not told: it is under way, or its engine does not tell."
    if outcome.seconds is None:
        return f"{_load(record, outcome)}How long it took in all its engine did not tell."
    return f"{_load(record, outcome)}It took {about(outcome.seconds)}{_compared(record)}."


def _load(record: Recorded, outcome: Outcome) -> str:
    """What became of the load, as a sentence with a blank; empty where there was none."""
    planned = record.decision.load_stop - record.decision.load_start
    if not planned:
        return ""
    why = f": {_rounded(outcome.why)}" if outcome.why else ""
    got = outcome.loaded_blocks
    of = "an unknown number" if got is None else f"{got:,}"
    if outcome.abandoned_s is not None:
        return (
            f"The load was given up by the lag rule after {about(outcome.abandoned_s)}{why}; "
            f"{of} of {_count(planned, 'block')} had arrived and were kept, the rest was computed. "
        )
    if got is None:
        return f"How many of {_count(planned, 'block')} arrived was not told{why}. "
    if got < planned:
        some = f"Only {of}" if got else "Not one"
        return f"{some} of {_count(planned, 'block')} arrived{why}; the rest was computed. "
    return f"All {_count(planned, 'block')} arrived. " if planned > 1 else "Its block arrived. "


def _compared(record: Recorded) -> str:
    """Actual seconds against what was predicted, of this choice and of the best other one."""
    error, predicted_s, regret_s = record.error, record.predicted_s, record.regret_s
    if error is None or predicted_s is None:
        text = ""
    elif error > _AS_PREDICTED:
        text = f", {f'{error:.1f}' if error < 9.95 else f'{error:,.0f}'} times as long as predicted"
    elif error < 1 / _AS_PREDICTED:
        text = f", less than the {about(predicted_s)} that were predicted"
    else:
        text = ", about as predicted"
    best_s, outcome = record.best_other_s, record.outcome
    if regret_s is None or best_s is None or outcome is None or outcome.seconds is None:
        return text
    if regret_s <= _REGRET_SHARE * outcome.seconds:
        return f"{text}; no other choice was predicted to be faster than that"
    chosen, predicted = record.decision.choice, record.decision.predicted_s
    other = next(choice for choice, s in predicted.items() if choice is not chosen and s == best_s)
    return f"{text}; {other} was predicted to take {about(regret_s)} less than that"


def _changed(since: Since, now_s: float) -> str:
    parts = []
    for change in since.changes:
        what = "regained" if change.trusted else "lost"
        why = f" ({_rounded(change.reason)})" if change.reason and not change.trusted else ""
        parts.append(f"{change.source} {what} trust {_ago(now_s - change.at_s)}{why}")
    told = {change.source for change in since.changes}
    parts += [
        f"{source} is doubted now ({_rounded(why)})"
        for source, why in since.doubted.items()
        if source not in told
    ]
    plans = [f"{count:,} {choice}" for choice, count in since.plans.items() if count]
    total = sum(since.plans.values())
    parts.append(f"{_count(total, 'more plan')}: {_listed(plans)}" if total else "no more plans")
    return f"Since then: {'; '.join(parts)}."


# ---- parts ------------------------------------------------------------------------------------------------


def _since(memory: Memory, record: Recorded, tenants: frozenset[str] | None) -> Since:
    plans = dict.fromkeys(Choice, 0)
    for later in memory.decisions.recent():
        if later.id <= record.id:
            break
        if tenants is None or later.asked.tenant in tenants:
            plans[later.decision.choice] += 1
    changes = tuple(c for c in memory.decisions.changes if c.at_s >= record.asked.at_s)
    return Since(plans, changes, memory.doubted)


def _facts(record: Recorded, now_s: float, since: Since) -> dict[str, Any]:
    asked, decision, outcome = record.asked, record.decision, record.outcome
    return {
        "request": asked.request,
        "lease": asked.lease,
        "tenant": asked.tenant,
        "namespace": asked.namespace,
        "ago_s": max(0.0, now_s - asked.at_s),
        "prompt_tokens": asked.prompt_tokens,
        "blocks": {str(tier): blocks for tier, blocks in asked.blocks},
        "choice": str(decision.choice),
        "load": [decision.load_start, decision.load_stop],
        "spans": [[str(span.tier), span.start, span.stop] for span in decision.spans],
        "predicted_s": {str(choice): seconds for choice, seconds in decision.predicted_s.items()},
        "lag_rule": {
            "from_s": decision.lag_from_s,
            "load_s": decision.load_s,
            "recompute_s": decision.recompute_s,
        },
        "reason": decision.reason,
        "outcome": None
        if outcome is None
        else {
            "seconds": outcome.seconds,
            "loaded_blocks": outcome.loaded_blocks,
            "abandoned_s": outcome.abandoned_s,
            "why": outcome.why,
        },
        "regret_s": record.regret_s,
        "actual_over_predicted": record.error,
        "since": {
            "plans": {str(choice): count for choice, count in since.plans.items()},
            "trust": [
                {
                    "source": change.source,
                    "trusted": change.trusted,
                    "reason": change.reason,
                    "ago_s": max(0.0, now_s - change.at_s),
                }
                for change in since.changes
            ],
            "doubted": dict(since.doubted),
        },
    }


def _rounded(text: str) -> str:
    """A reason whose times show no more digits than they are worth."""
    return _SECONDS.sub(lambda m: about(float(m[1]) * (1e-3 if m[2] == "ms" else 1.0)), text)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 1.0 else f"{about(seconds)} ago"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
