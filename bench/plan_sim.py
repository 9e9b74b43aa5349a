"""What would the plan gain on a GPU that is not here? A SIMULATION over a request trace, with our own policy.

    python -m bench.plan_sim --trace mooncake_conversation_trace.jsonl --json

Nothing is measured and nothing is moved. Times come from a model of an 8B model on one GPU: to compute the
token at position p takes (1 + p / 31,000) / 25,000 s, its KV is 128 KiB, a load takes 2 ms and then bytes
over bandwidth. What is real is the trace, and `kvstore.policy`: the daemon's curve and rates learn those
costs from steps and transfers that have them, without noise, and its `decide` is asked about every match.

**What is summed.** Only the reused prefix: for every request with a match of n tokens, the seconds until the
KV of [0, n) is there. The rest of the prompt is computed afterwards, by every choice alike, and is in no sum
but those of `…_with_rest`. With C(a, b) for computing [a, b) and L(a, b) for loading it:

    recompute = C(0, n)        load = L(0, n)        min = the smaller one, request by request
    split = min over k of max(C(0, k), L(k, n)), k in blocks of 16 tokens; k = n and k = 0 are those two

`split_over_min` is the sum of split over the sum of min. Nothing is ever evicted, a prompt is known from the
next request on, and each request has engine and tier to itself. To load [0, k) and compute [k, n) is no
choice of its own here: tokens cost the more the later they come, their loads do not, so its best k is 0 or n.

`break_even_gb_per_s` is the bandwidth at which load = recompute, by slowdown of prefill. It depends on n:
`mean` and `median` are over requests, `of_sums` is where both sums are equal, so long prefixes weigh more.

`policy_over_exact` is what the policy's choices take, over split for an engine that can split, over min for
one that cannot. The latter computes some matches that a load would have brought sooner: where the first block
comes later than a tenth of what computing all takes, the lag rule would end the load, so it must not begin.
That is the price of its bound.

`rules_over_min` is what rules that look at one number cost: their seconds over min, the best of an engine
that cannot split; `rules_over_split`: over the best of one that can. `tokens_…` load matches of so many
tokens and more, `bandwidth_…` load from tiers at least as fast as that break-even of an idle engine. All of
them were set with hindsight, on this very trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import finish, parser
from bench.plan_costs import BLOCK_TOKENS, GB, NEVER, Cell, Costs, Floats, Matches, Whole, tuned
from bench.plan_trace import Trace, TraceError, read_trace
from kvstore.policy.prefill import PrefillCurve, Step
from kvstore.policy.rates import Rates, Source, Transfer
from kvstore.policy.reload import Choice, Decision, ReloadQuestion, Way, decide
from kvstore.types import Span, Tier

__all__ = ["BARS", "BARS_WITHIN", "Asked", "Policy", "main", "missed", "simulate"]

BANDWIDTHS = (1.0, 2.0, 2.5, 3.0, 6.0, 12.0, 50.0)
"""GB/s: from an object store over disks and wires to memory across PCIe."""
SLOWDOWNS = (1.0, 3.0)
"""An engine with nothing else to do, and one whose prefill takes three times as long under load."""
# The trace that the bars are about, by its SHA-256; split_over_min of an idle engine by GB/s.
BARS_TRACE = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
BARS = {"1": 0.63, "2": 0.53, "2.5": 0.53, "3": 0.53, "6": 0.68, "12": 0.80, "50": 0.94}
BARS_WITHIN = 0.03
_DEFINITION = (
    "sums over requests with a match of n tokens, of the seconds until the KV of these n is there; the rest "
    "of the prompt, computed by every choice alike, is not in them; split = min over k of "
    "max(compute [0,k), load [k,n)) in blocks of 16 tokens; min = min(compute [0,n), load [0,n))"
)
STEP_TOKENS = 2048
_ENGINES = {"can_split": True, "cannot_split": False}
# One tier, straight to the device: which name it bears changes nothing.
_SOURCE = Source(Tier.HOST)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the policy chose, one entry per length of match.

    Attributes:
        choices: as it names them.
        seconds: what its choices take by the model, whatever it predicted.
        predicted_s: what it predicted of them.
    """

    choices: list[Choice]
    seconds: Floats
    predicted_s: Floats

    def shares(self, matches: Matches) -> dict[str, float]:
        """Share of the requests by choice."""
        counts = dict.fromkeys(Choice, 0)
        for choice, requests in zip(self.choices, matches.requests, strict=True):
            counts[choice] += int(requests)
        return {str(choice): _short(count / int(matches.requests.sum())) for choice, count in counts.items()}


class Policy:
    """The daemon's curve and rates after they saw an engine and a tier with these costs, and its `decide`.

    Args:
        costs: of the steps and transfers that it is shown.
        tokens_max: of the longest match that it will be asked about.
    """

    def __init__(self, costs: Costs, tokens_max: int) -> None:
        self._costs = costs
        self._block_bytes = BLOCK_TOKENS * costs.token_bytes
        self._curve, self._rates = PrefillCurve(), Rates()
        # Full and half steps all over the context: a curve needs lengths and positions that differ.
        for at, start in enumerate(np.linspace(0, max(tokens_max, 2 * STEP_TOKENS), 60).tolist()):
            tokens = STEP_TOKENS >> at % 2
            ends_s = costs.compute_s(np.array([start, start + tokens]))
            area = tokens * (start + tokens / 2)
            self._curve.observe(Step(tokens, area, 0, 0, float(ends_s[1] - ends_s[0])), float(at))
        # From one block to a prompt of half a million tokens, thrice.
        for at in range(3 * 16):
            size = self._block_bytes << at % 16
            seconds = costs.setup_s + size / costs.bytes_per_s
            self._rates.observe(_SOURCE, Transfer(size, 0, seconds, costs.setup_s), float(at))

    def decide(self, tokens: int, *, can_split: bool, rest: int = 0) -> Decision:
        """About a match of whole blocks, all in one tier, with `rest` tokens of the prompt behind it."""
        blocks = tokens // BLOCK_TOKENS
        speed = self._rates.speed(_SOURCE, blocks * self._block_bytes)
        way = Way(Span(_SOURCE.tier, 0, blocks), speed.latency_s, speed.bytes_per_s)
        question = ReloadQuestion(
            tokens + rest,
            BLOCK_TOKENS,
            self._block_bytes,
            0,
            (way,),
            self._curve.seconds,
            can_split=can_split,
        )
        return decide(question)

    def ask(self, lengths: Whole, *, can_split: bool) -> Asked:
        """`decide` for many lengths, each choice priced by the model. The rest of a prompt changes none."""
        decisions = [self.decide(int(tokens), can_split=can_split) for tokens in lengths]
        starts = BLOCK_TOKENS * np.array([each.load_start for each in decisions], float)
        stops = BLOCK_TOKENS * np.array([each.load_stop for each in decisions], float)
        predicted = [each.predicted_s[each.choice] or 0.0 for each in decisions]
        seconds = self._costs.reload_s(starts, stops, lengths.astype(float))
        return Asked([each.choice for each in decisions], seconds, np.array(predicted))


def simulate(trace: Trace) -> dict[str, Any]:
    """All figures of a trace, JSON-ready. Some seconds.

    Raises:
        TraceError: no request of it has a match.
    """
    matches = Matches.of(trace)
    every = [Costs(speed * GB, slowdown) for slowdown in SLOWDOWNS for speed in BANDWIDTHS]
    cells = [Cell.of(matches.tokens, costs) for costs in every]
    even = {f"{slowdown:g}": matches.break_even(Costs(slowdown=slowdown)) for slowdown in SLOWDOWNS}
    rules = Rules(
        tokens={
            "always_load": 0,
            "never_load": NEVER,
            "tokens_best_at_3_gb_idle": tuned(matches, [cells[BANDWIDTHS.index(3.0)]]),
            "tokens_best_over_all": tuned(matches, cells),
        },
        bytes_per_s={f"bandwidth_{name}": even["1"][name] for name in ("mean", "of_sums")},
    )
    rows = [_row(cell, matches, rules) for cell in cells]
    return {
        "simulation": True,
        "definition": _DEFINITION,
        "split_over_min": {f"{row['gb_per_s']:g}": row["split_over_min"] for row in rows[: len(BANDWIDTHS)]},
        "break_even_gb_per_s": {
            slowdown: {name: _short(value / GB) for name, value in values.items()}
            for slowdown, values in even.items()
        },
        "policy_over_exact_max": _largest(rows, "policy_over_exact"),
        "policy_prediction_off_max": max(row["policy_prediction_off_max"] for row in rows),
        "rules": rules.json(),
        "rules_over_min_max": _largest(rows, "rules_over_min"),
        "trace": {
            "requests": len(trace),
            "requests_with_match": int(matches.requests.sum()),
            "prompt_tokens": int(trace.prompt_tokens.sum()),
            "matched_tokens": int(trace.matched_tokens.sum()),
            "sha256": trace.sha256,
        },
        "model": {
            "block_tokens": BLOCK_TOKENS,
            **{
                name: value
                for name, value in asdict(Costs()).items()
                if name not in ("bytes_per_s", "slowdown")
            },
        },
        "cells": rows,
    }


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that look at one number.

    Attributes:
        tokens: by name, the tokens from which on a match is loaded.
        bytes_per_s: by name, the bandwidth from which on all matches are loaded.
    """

    tokens: Mapping[str, int]
    bytes_per_s: Mapping[str, float]

    def seconds(self, cell: Cell, matches: Matches) -> dict[str, float]:
        """What each would take in a cell."""
        least = dict(self.tokens)
        for name, speed in self.bytes_per_s.items():
            least[name] = 0 if cell.costs.bytes_per_s >= speed else NEVER
        return {name: matches.sum(cell.threshold_s(tokens)) for name, tokens in least.items()}

    def json(self) -> dict[str, str]:
        """In words."""
        words = {
            name: f"loads matches of {max(1, least)} tokens and more" if least < NEVER else "loads nothing"
            for name, least in self.tokens.items()
        }
        for name, speed in self.bytes_per_s.items():
            words[name] = f"loads from tiers of {speed / GB:.3g} GB/s and more"
        return words


def _row(cell: Cell, matches: Matches, rules: Rules) -> dict[str, Any]:
    """One tier and one load of the engine."""
    costs, lengths = cell.costs, matches.tokens
    policy = Policy(costs, int(lengths[-1]))
    asked = {name: policy.ask(lengths, can_split=can) for name, can in _ENGINES.items()}
    exact = {"can_split": matches.sum(cell.split_s), "cannot_split": matches.sum(cell.pure_s)}
    least, split = exact["cannot_split"], exact["can_split"]
    rest = matches.rest_s * costs.slowdown
    seconds = rules.seconds(cell, matches)
    return {
        "gb_per_s": costs.bytes_per_s / GB,
        "slowdown": costs.slowdown,
        "split_over_min": _short(split / least),
        "split_over_min_with_rest": _short((split + rest) / (least + rest)),
        "choices": {name: each.shares(matches) for name, each in asked.items()},
        "policy_over_exact": {
            name: _short(matches.sum(each.seconds) / exact[name]) for name, each in asked.items()
        },
        "policy_prediction_off_max": _short(
            max(float(np.abs(each.predicted_s / each.seconds - 1).max()) for each in asked.values())
        ),
        "rules_over_min": {name: _short(value / least) for name, value in seconds.items()},
        "rules_over_split": {name: _short(value / split) for name, value in seconds.items()},
        "seconds": {
            "recompute": _short(matches.sum(cell.recompute_s)),
            "load": _short(matches.sum(cell.load_s)),
            "min": _short(least),
            "split": _short(split),
        },
    }


def _largest(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[str, float]:
    """By name, over all cells."""
    return {name: max(row[figure][name] for row in rows) for name in rows[0][figure]}


def missed(figures: Mapping[str, Any]) -> list[str]:
    """Figures of the trace that the bars are about that are off; of another trace none are."""
    if figures["trace"]["sha256"] != BARS_TRACE:
        return []
    got = figures["split_over_min"]
    return [
        f"{speed} GB/s: {got[speed]} for {bar} ± {BARS_WITHIN}"
        for speed, bar in BARS.items()
        if abs(got[speed] - bar) > BARS_WITHIN
    ]


def _short(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def _show(figures: Mapping[str, Any]) -> None:
    trace = figures["trace"]
    print(
        f"SIMULATION, nothing measured. {trace['requests_with_match']} of {trace['requests']} requests have "
        f"a match, together {trace['matched_tokens'] / trace['prompt_tokens']:.0%} of all prompt tokens."
    )
    for name, words in figures["rules"].items():
        print(f"  {name}: {words}")
    for row in figures["cells"]:
        print(
            f"{row['gb_per_s']:4g} GB/s, prefill × {row['slowdown']:g}: split/min "
            f"{row['split_over_min']:.3f}, policy/best {row['policy_over_exact']['can_split']:.3f}"
        )
        for engine, shares in row["choices"].items():
            print(f"  {engine}: " + ", ".join(f"{choice} {share:.1%}" for choice, share in shares.items()))
        print(
            "  rule/min: " + ", ".join(f"{name} {over:.2f}" for name, over in row["rules_over_min"].items())
        )
    for slowdown, even in figures["break_even_gb_per_s"].items():
        print(f"break-even, prefill × {slowdown}: {even['mean']:.2f} GB/s, the mean over requests")


def main() -> int:
    """Returns the exit status: 0, 1 a bar was missed on the trace it is about."""
    command = parser("plan_sim", __doc__)
    command.add_argument("--trace", type=Path, required=True, help="JSON lines, as Mooncake publishes them")
    options = command.parse_args()
    try:
        figures = simulate(read_trace(options.trace))
    except TraceError as error:
        command.error(str(error))
    off = missed(figures)
    figures |= {"bars": BARS, "bars_within": BARS_WITHIN, "missed": off}
    if not options.json:
        _show(figures)
    return finish("plan_sim", options, figures, []) or int(bool(off))


if __name__ == "__main__":
    raise SystemExit(main())
