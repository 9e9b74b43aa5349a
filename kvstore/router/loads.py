"""What the router knows of its replicas' work, from what it sends there itself: requests in flight, queues
in seconds, how fast each computes, and which does not answer.

Everything is an array over *places*; a replica keeps its place for its life.

A queue in seconds: a replica computes prompts one after the other, or, in chunks, as if it did. So a request
begins when the uncached tokens of those before it that have no first byte yet are computed:

    queue_s = tokens ahead / tokens per second

and its first byte says how fast that was: (tokens ahead of it + its own) / seconds. The speed follows these
samples in the logarithm, long prefills more than short ones, one step limited to a factor of two, so that a
stall or a wrong guess of what was cached does not spoil it. A replica that was never measured is taken to be
as fast as the others: or it would look better, or worse, only for being new.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock

__all__ = ["Loads"]

_GAIN = 0.2
_STEP_MAX = math.log(2.0)
# Shorter prefills are dominated by what every request costs; at this many tokens a sample weighs half.
_SAMPLE_TOKENS_MIN = 32
_SAMPLE_TOKENS_HALF = 512
# A replica that failed is left alone for so long, then one request finds out; each failure doubles it.
_AWAY_S, _AWAY_MAX_S = 0.5, 15.0
# How long that one request may take to say so, before another one tries.
_TRIAL_S = 5.0


class Loads:
    """Of one deployment.

    Args:
        count: replicas.
        tokens_per_s: what each computes, until it is measured.
        clock: monotonic.
    """

    def __init__(self, count: int, tokens_per_s: float, clock: Clock) -> None:
        self.assigned = np.zeros(count, np.int64)
        self.in_flight = np.zeros(count, np.int64)
        self.ahead_tokens = np.zeros(count, np.int64)
        self.tokens_per_s = np.full(count, tokens_per_s)
        self.failures = np.zeros(count, np.int64)
        """In a row."""
        self.failed = np.zeros(count, np.int64)
        """In all."""
        self._measured = np.zeros(count, bool)
        self._away_until_s = np.full(count, -math.inf)
        self._clock = clock

    def queue_s(self) -> NDArray[np.float64]:
        """(places,) predicted seconds until each would begin with another request."""
        seconds: NDArray[np.float64] = self.ahead_tokens / self.tokens_per_s
        return seconds

    def up(self) -> NDArray[np.bool_]:
        """(places,) whether requests are sent there just now."""
        return self._away_until_s <= self._clock.now()

    def begin(self, place: int, tokens: int) -> None:
        """A request goes there; so many of its tokens have to be computed."""
        self.assigned[place] += 1
        self.in_flight[place] += 1
        self.ahead_tokens[place] += tokens
        if self.failures[place]:  # this one finds out; nobody else tries meanwhile
            self._away_until_s[place] = self._clock.now() + _TRIAL_S

    def computed(self, place: int, tokens: int) -> None:
        """A request's prompt is done, or will never be."""
        self.ahead_tokens[place] -= tokens

    def answered(self, place: int) -> None:
        """The replica answers: it may be sent more."""
        self.failures[place] = 0
        self._away_until_s[place] = -math.inf

    def end(self, place: int) -> None:
        """A request is over."""
        self.in_flight[place] -= 1

    def fail(self, place: int) -> None:
        """A request failed and the replica is to blame."""
        self.failures[place] += 1
        self.failed[place] += 1
        away_s = min(_AWAY_S * 2.0 ** min(int(self.failures[place]) - 1, 10), _AWAY_MAX_S)
        self._away_until_s[place] = self._clock.now() + away_s

    def sample(self, place: int, tokens: int, seconds: float) -> None:
        """So many tokens, those ahead of a request and its own, took so long until its first byte."""
        if tokens < _SAMPLE_TOKENS_MIN or not seconds > 0:
            return
        seen = tokens / seconds
        if self._measured[place]:
            gain = 2 * _GAIN * tokens / (tokens + _SAMPLE_TOKENS_HALF)
            step = gain * math.log(seen / self.tokens_per_s[place])
            self.tokens_per_s[place] *= math.exp(min(max(step, -_STEP_MAX), _STEP_MAX))
        else:
            self._measured[place] = True
            self.tokens_per_s[place] = seen
        known = np.log(self.tokens_per_s[self._measured])
        self.tokens_per_s[~self._measured] = math.exp(float(known.mean()))
