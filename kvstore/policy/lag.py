"""The lag rule: when a load that was predicted faster is given up for computing, and why that is never dear.

With R = predicted seconds to recompute a span, W < R = predicted seconds to load it, and a = the share of R
that what arrived so far stands for, the load is abandoned at the first moment t at which

    t − a·W  >=  0.1·R

What arrived is kept, the rest is computed: t + (1 − a)·R = 1.1·R − a·(R − W) <= 1.1·R. As `a` only grows, the
left side rises with time and falls when something arrives, so the first crossing is met with equality; a load
that ends before it has taken less than 0.1·R + W < 1.1·R. This holds for any slowdown, stall or death.

Where late blocks cost more to compute than early ones and the same to load, `a` is behind the bytes, and a
load that is in time could fall under the rule. So what arrived is given the seconds w until which it was
predicted to arrive, if these are more, but never more than its share of R, which keeps the bound:

    t  >=  0.1·R + min(a·R, max(a·W, w)):    t + (1 − a)·R <= 1.1·R

A load that falls under the rule even so, though all its blocks come as predicted (a first byte later than
0.1·R, or few and huge blocks), cannot be bounded, and must not begin: `decide` does not choose it.

What is not continuous in real life:

    arrivals are seen late    costs nothing: the rule uses what is known. A timer at `due_s` keeps 1.1·R, and
                              a load that was in time may be given up for what was not seen yet.
    the rule is asked late    by dt at most (a tick, a timer, a copy that has to end first): dt earlier it was
                              not due, so t <= 0.1·R + a·W + dt and the total is at most 1.1·R + dt. With
                              `late_s` = dt the rule fires that much earlier: 1.1·R again.
    the machine was stopped   the moment has passed: it is abandoned at the next look, dearer by that time.
    what arrived is lost      `a` falls. Each share costs its R again: count only what is checked and stays.

A span that is split (computed from the front while its tail loads) needs the rule only for the blocks that
are still under way when the two meet: R and W of those, t from the moment they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LAG_SHARE", "LagRule", "arrived_share"]

# Of R: what a load may lose against computing. Less gives up loads that would have won: the rates of a disk
# that others use too vary by more than 5 % within a second.
LAG_SHARE = 0.1
# 10^9 s are 30 years: more is a mistake in a unit, not a prediction.
_SECONDS_MAX = 1e9


@dataclass(frozen=True, slots=True)
class LagRule:
    """The rule for one load that has begun.

    Attributes:
        recompute_s: R, predicted seconds to compute what is loaded; above 0.
        load_s: W, predicted seconds to load it; at least 0 and below R, else it must not be begun.
        late_s: dt, by how much the rule may be asked, or obeyed, too late.

    Raises:
        ValueError: names the field.
    """

    recompute_s: float
    load_s: float
    late_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("recompute_s", "load_s", "late_s"):
            value = getattr(self, name)
            if not 0.0 <= value <= _SECONDS_MAX:  # NaN too
                raise ValueError(f"{name}: need 0 to {_SECONDS_MAX:g} seconds, got {value!r}")
        if not self.load_s < self.recompute_s:
            raise ValueError(
                f"load_s: {self.load_s!r} s are not less than recompute_s, {self.recompute_s!r} s: compute it"
            )

    @property
    def bound_s(self) -> float:
        """Seconds from the start of the load until everything is loaded or computed, at most.

        1.1·R where `late_s` is not exceeded and `worth_beginning`.
        """
        return (1.0 + LAG_SHARE) * self.recompute_s

    @property
    def worth_beginning(self) -> bool:
        """False: the looks are so far apart that the first one could come too late for the bound."""
        return self.late_s < LAG_SHARE * self.recompute_s

    def due_s(self, share: float, on_time_s: float = 0.0) -> float:
        """When the rule fires if nothing more arrives: when next to look, in seconds since the load began.

        Args:
            share: a, in [0, 1]: `arrived_share`.
            on_time_s: w, predicted seconds from the start until this much had to be there; 0 = not known.

        Returns:
            Seconds, 0 at least; infinite once everything has arrived: then there is nothing to give up.

        Raises:
            ValueError: names the argument.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: need 0 to 1, got {share!r}")
        if not 0.0 <= on_time_s <= _SECONDS_MAX:
            raise ValueError(f"on_time_s: need 0 to {_SECONDS_MAX:g} seconds, got {on_time_s!r}")
        if share == 1.0:
            return math.inf
        granted_s = min(share * self.recompute_s, max(share * self.load_s, on_time_s))
        return max(0.0, LAG_SHARE * self.recompute_s + granted_s - self.late_s)

    def lags(self, elapsed_s: float, share: float, on_time_s: float = 0.0) -> bool:
        """Whether to abandon the load now, and compute what has not arrived.

        Args:
            elapsed_s: t, seconds since the load began, on the monotonic clock. Below 0 counts as 0.
            share, on_time_s: as for `due_s`.

        Raises:
            ValueError: names the argument.
        """
        if math.isnan(elapsed_s):
            raise ValueError("elapsed_s: need seconds, got nan")
        return max(0.0, elapsed_s) >= self.due_s(share, on_time_s)


def arrived_share(recompute_s: float, rest_s: float) -> float:
    """a: the share of R that what has arrived stands for.

    Taken from what is still to be computed and not from what arrived: the two do not add up to R exactly (a
    prompt that is computed in two parts may need a step more), and the bound rests on the rest.

    Args:
        recompute_s: R, above 0.
        rest_s: predicted seconds to compute what has not arrived: blocks behind the first gap included, as
            an engine that loads in chain order cannot use them. 0 only when everything has arrived.

    Returns:
        In [0, 1]; 1 only for a rest of 0.

    Raises:
        ValueError: names the argument.
    """
    if not 0.0 < recompute_s <= _SECONDS_MAX:
        raise ValueError(f"recompute_s: need more than 0 seconds, got {recompute_s!r}")
    if not 0.0 <= rest_s <= _SECONDS_MAX:
        raise ValueError(f"rest_s: need 0 to {_SECONDS_MAX:g} seconds, got {rest_s!r}")
    if rest_s == 0.0:
        return 1.0
    return min(max(0.0, 1.0 - rest_s / recompute_s), 1.0 - 2**-53)
