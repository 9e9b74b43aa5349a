"""A decision from the moment it was made: which plan it is, and how its load is watched. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.policy.lag import LagRule, arrived_share
from kvstore.policy.reload import Decision
from kvstore.policy.ways import Terms
from kvstore.types import Choice, FetchPlan

__all__ = ["Planned", "Watch"]

# What is left to compute takes some time, whatever a noisy curve says: 0 would mean that all has arrived.
_LEAST_S = 1e-6


def _not_told(_: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    """The lag rule for one fetch, from the moment at which it begins.

    Attributes:
        rule: R and W of what is fetched.
        rest_s: predicted seconds to compute what has not arrived, of how many leading blocks of the fetch
            have; 0 only for all of them. Those that were on HOST when it began count as arrived.
        on_time_s: predicted seconds from the start until so many have arrived; 0 = not known.
        from_s: when the rule's clock starts, if that is later than the fetch: until then the engine has
            something else to do.
    """

    rule: LagRule
    rest_s: Callable[[int], float]
    on_time_s: Callable[[int], float] = _not_told
    from_s: float = 0.0

    def due_s(self, arrived: int) -> float:
        """When to look if no more arrives than these, in seconds since the clock started; perhaps infinite.

        Raises:
            ValueError: a prediction is no number of seconds.
        """
        share = arrived_share(self.rule.recompute_s, self.rest_s(arrived))
        return self.rule.due_s(share, self.on_time_s(arrived))


@dataclass(frozen=True, slots=True)
class Planned:
    """What a lease carries of its plan.

    Attributes:
        id: in the memory of plans, 1 at least.
        at_s: when it was made, on the daemon's monotonic clock.
        decision: what is done.
        terms: what its seconds are made of; None = nobody compared, and nothing is watched.
    """

    id: int
    at_s: float
    decision: Decision
    terms: Terms | None = None

    def fetch_plan(self) -> FetchPlan:
        """The same for the engine."""
        made = self.decision
        watched = self.terms is not None and made.choice is Choice.LOAD
        lag = (made.lag_from_s, made.load_s, made.recompute_s) if watched else (0.0, 0.0, 0.0)
        return FetchPlan(made.load_start, made.load_stop, made.spans, made.reason, made.choice, self.id, *lag)

    def watch(self, start: int) -> Watch | None:
        """For a fetch that begins at block `start`; None = nothing is to be given up for being late.

        The tail of a split needs none: its engine goes on computing towards what has not come.
        """
        decision, terms = self.decision, self.terms
        rule = decision.lag_rule()
        if terms is None or rule is None or decision.choice is not Choice.LOAD:
            return None
        first, stop, prompt = decision.load_start, decision.load_stop, terms.question.prompt_tokens
        behind_s = terms.compute(stop, prompt)
        blind = behind_s is None or terms.compute(first, prompt) is None

        def rest_s(arrived: int) -> float:
            there = min(start + arrived, stop)
            if there == stop:
                return 0.0
            whole_s = None if blind else terms.compute(there, prompt)
            if whole_s is None or behind_s is None:  # then every block has the same share
                return rule.recompute_s * (stop - there) / max(1, stop - first)
            return max(whole_s - behind_s, _LEAST_S)

        def on_time_s(arrived: int) -> float:
            return max(0.0, terms.load(first, min(start + arrived, stop)) - decision.lag_from_s)

        return Watch(rule, rest_s, on_time_s, self.at_s + decision.lag_from_s)
