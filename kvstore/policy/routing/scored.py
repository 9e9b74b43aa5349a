"""Scored: seconds. How long until this replica begins, and how long until it has what this prompt needs.

    score = queue
          + w · obtain       uncached tokens computed, cached ones moved up from their tier
          + preempt          tokens that running requests would have to compute again for want of blocks
          + 10 · late        how far the first token would miss what the caller asked for

A second of computing is worth more than a second of waiting, because it is gone for everybody who waits
behind, and what one replica computes for the second time takes the place of something that it had: that is w.
At w = 1 the score is the predicted time to the first token, which is myopic; on the conversation trace 3 to 4
keep that time and reuse a tenth more, and an overloaded fleet gains up to w = 12, because there only less
work shortens the queues.

Tokens that nearly every request shares count as if every replica had them. Whoever lacks them computes them
once; if they counted, the one replica that has them would get every request that has nothing else, and no
other would ever learn them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.policy.routing.base import Ask, Choice, Fleet, Ties, lowest

__all__ = ["OVERLOAD_S", "WEIGHT", "WEIGHT_MAX", "Scored"]

WEIGHT = 3.5
WEIGHT_MAX = 12.0
# Where even the shortest queue is so long, w has reached its maximum.
OVERLOAD_S = 10.0
_LATE_WEIGHT = 10.0
# Cold requests may go to a queue that is longer by this share of their own computing, if that replica is
# emptier: what it evicts for them is worth more than that.
_COLD_WINDOW = 0.05

Floats = NDArray[np.float64]


class Scored:
    """The smallest score. Equal scores are drawn by lot.

    A cold placement, on replicas that have no more of it than what everybody shares, goes to the least filled
    of those whose score is within 5 % of its own computing time of the best: small queue *and* footprint.

    When not to use it: where nothing predicts queues in seconds; then `hybrid` over requests in flight.

    Args:
        weight: w of a fleet that is not overloaded, 1 at least.
        weight_max: w where even the shortest queue is OVERLOAD_S or more; in proportion between.
            None = the larger of WEIGHT_MAX and `weight`; the same as `weight` = w is fixed.

    Raises:
        BadRequest: names the argument.
    """

    name = "scored"

    def __init__(self, weight: float = WEIGHT, weight_max: float | None = None) -> None:
        if not 1.0 <= weight < math.inf:
            raise BadRequest(f"weight: need 1 at least, and finite, got {weight}")
        top = max(WEIGHT_MAX, weight) if weight_max is None else weight_max
        if not weight <= top < math.inf:
            raise BadRequest(f"weight_max: need {weight} (the weight) at least, and finite, got {top}")
        self.weight = weight
        self.weight_max = top

    def pick(self, ask: Ask, fleet: Fleet, ties: Ties) -> Choice:
        """See `Policy`."""
        weight = self.weight_of(fleet)
        obtain_s = _obtain_s(ask, fleet, ask.universal_tokens)
        preempt_s = _preempt_s(ask, fleet)
        score_s = fleet.queue_s + weight * obtain_s + preempt_s
        if ask.slo_s is not None:
            first_s = fleet.queue_s + _obtain_s(ask, fleet, 0) + preempt_s
            score_s = score_s + _LATE_WEIGHT * np.maximum(first_s - ask.slo_s, 0.0)
        best = lowest(score_s)
        cold = int(fleet.longest_tokens[best].max()) <= ask.universal_tokens
        if cold:
            best = _emptiest(ask, fleet, score_s)
        replica = ties(best)
        had = "cold" if cold else f"{fleet.longest_tokens[replica]} tokens matched"
        queue_s, needs_s = fleet.queue_s[replica], obtain_s[replica]
        reason = f"{had}: queue {queue_s:.3g} s + {weight:.3g} × {needs_s:.3g} s to obtain"
        return Choice(replica, score_s, reason)

    def weight_of(self, fleet: Fleet) -> float:
        """w for a fleet as loaded as this one. The shortest queue counts: one that is long is no overload."""
        load = min(1.0, float(fleet.queue_s.min()) / OVERLOAD_S)
        return self.weight + (self.weight_max - self.weight) * load


def _obtain_s(ask: Ask, fleet: Fleet, free_tokens: int) -> Floats:
    """(n,) seconds to have the whole prompt computed or moved up.

    A tier that takes longer than computing is not used: the replica's own plan sees to that.

    Args:
        free_tokens: so many leading tokens cost nothing, wherever they are.
    """
    free_tokens = min(free_tokens, ask.tokens)
    compute_s = 1.0 / fleet.prefill_tokens_per_s
    reach = np.clip(fleet.matched_tokens, free_tokens, ask.tokens)
    seconds: Floats = (ask.tokens - reach[:, -1]) * compute_s
    if fleet.tier_s_per_token.any():
        price_s = np.minimum(fleet.tier_s_per_token, compute_s[:, None])
        in_gpu = reach[:, :1] - free_tokens
        seconds = seconds + (np.concatenate([in_gpu, np.diff(reach, axis=1)], axis=1) * price_s).sum(axis=1)
    return seconds


def _preempt_s(ask: Ask, fleet: Fleet) -> Floats:
    """(n,) seconds of work that running requests lose: each block short is a block of theirs, computed again.

    Blocks of the prompt that lie on the device are shared, not taken.
    """
    fresh = ask.tokens - np.minimum(fleet.matched_tokens[:, 0], ask.tokens)
    short = np.maximum(-(-fresh // fleet.block_tokens) - fleet.free_blocks, 0)
    seconds: Floats = short * fleet.block_tokens / fleet.prefill_tokens_per_s
    return seconds


def _emptiest(ask: Ask, fleet: Fleet, score_s: Floats) -> NDArray[np.int64]:
    """Of those near the best score the least filled, of these the best."""
    window_s = _COLD_WINDOW * ask.tokens / float(fleet.prefill_tokens_per_s.max())
    near = np.flatnonzero(score_s <= score_s.min() + window_s)
    filled = fleet.blocks / np.maximum(fleet.capacity_blocks, 1)
    return lowest(score_s, lowest(filled, near))
