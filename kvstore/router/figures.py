"""What is counted of one deployment: who gets how much, what was expected and what was really reused."""

from __future__ import annotations

import math

import numpy as np

from kvstore.clock import Clock

__all__ = ["BUCKETS_S", "Figures"]

BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, math.inf)
# So many answers in a row that contradict the index are no chance.
_ALARM_REQUESTS = 20
# Traffic of the last so many seconds makes the entropy.
_WINDOW_S = 60.0


class Figures:
    """Totals since start, over places.

    Attributes:
        requests, prompt_tokens, expected_tokens, best_tokens: by place; best - expected is what the policy
            gave up for balance.
        cached_tokens, told_tokens: that engines said they reused, and of which prompts.
        over_tokens: expected, but not reused: a stale or incompatible index.
        under_tokens: reused, but not expected.
        running_tokens: of prompts between pick and finish.
        first_byte_s: (places, 2, buckets) counts, cold and warm.
    """

    def __init__(self, count: int, clock: Clock) -> None:
        self.requests, self.prompt_tokens, self.expected_tokens = np.zeros((3, count), np.int64)
        self.best_tokens, self.cached_tokens, self.told_tokens = np.zeros((3, count), np.int64)
        self.over_tokens, self.under_tokens, self.running_tokens = np.zeros((3, count), np.int64)
        self.first_byte_s = np.zeros((count, 2, len(BUCKETS_S)), np.int64)
        self.first_byte_sum_s = np.zeros((count, 2))
        self.skew_max = 0
        self._over_in_row, self._under_in_row = np.zeros((2, count), np.int64)
        self._recent = np.zeros(count)
        self._recent_s = clock.now()
        self._clock = clock

    def picked(self, place: int, tokens: int, expected: int, best: int) -> None:
        """A request was sent to a place that was expected to reuse so much; `best`: the most of any."""
        self.requests[place] += 1
        self.prompt_tokens[place] += tokens
        self.expected_tokens[place] += expected
        self.best_tokens[place] += best
        self.running_tokens[place] += tokens
        self._fade()
        self._recent[place] += 1
        self.skew_max = max(self.skew_max, int(self.requests.max() - self.requests.min()))

    def first_byte(self, place: int, seconds: float, *, warm: bool) -> None:
        """The first byte of an answer came."""
        self.first_byte_s[place, int(warm), int(np.searchsorted(BUCKETS_S, seconds))] += 1
        self.first_byte_sum_s[place, int(warm)] += seconds

    def finished(
        self, place: int, tokens: int, expected: int, cached: int | None, prompt: int | None
    ) -> None:
        """A request is over.

        Args:
            tokens, expected: as at `picked`.
            cached, prompt: as the engine counted; None = it did not say.
        """
        self.running_tokens[place] -= tokens
        if cached is None or not prompt:
            return
        # In our tokens, which are pseudo-tokens where there is no tokenizer.
        told = round(cached * tokens / prompt)
        self.cached_tokens[place] += told
        self.told_tokens[place] += tokens
        self.over_tokens[place] += max(0, expected - told)
        self.under_tokens[place] += max(0, told - expected)
        if expected:
            self._over_in_row[place] = 0 if told else self._over_in_row[place] + 1
        self._under_in_row[place] = self._under_in_row[place] + 1 if told and not expected else 0

    def alarm(self, place: int) -> str:
        """Why the index and a replica must be talking of different blocks; "" = nothing says so."""
        if self._over_in_row[place] >= _ALARM_REQUESTS:
            return (
                f"{self._over_in_row[place]} prompts in a row should have been there in part, and nothing "
                "of them was reused: prefix caching is off there, or blocks leave before their events come"
            )
        if self._under_in_row[place] >= _ALARM_REQUESTS:
            return (
                f"of {self._under_in_row[place]} prompts in a row a part was reused that the index did not "
                "find: blocks are named by other tokens than the engine's (tokenizer, chat template, block "
                "size, salt)"
            )
        return ""

    def entropy(self) -> float:
        """Of the traffic of the last minute over places, 1 = even, 0 = all to one. NaN without traffic."""
        self._fade()
        total = float(self._recent.sum())
        if total < 1e-6 or len(self._recent) < 2:
            return math.nan
        shares = self._recent[self._recent > 0] / total
        return float(-(shares * np.log(shares)).sum() / math.log(len(self._recent)))

    def _fade(self) -> None:
        now_s = self._clock.now()
        self._recent *= math.exp(-(now_s - self._recent_s) / _WINDOW_S)
        self._recent_s = now_s
