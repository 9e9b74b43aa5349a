"""Where the KV of each token of a request came from: computed by itself, or brought in from a tier.

A prompt's tokens are `fresh` when the request computed them at least once, over all its admissions; the
others were brought. After a preemption a reused prefix may be the request's own work, which stays fresh.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Account"]

_KINDS = _NOTHING, _OWN = 0, 1


class Account:
    """One byte a token: nothing yet, computed here, or brought from the tier with that number."""

    def __init__(self) -> None:
        self._origin = bytearray()
        self._tiers: list[str] = []
        self.recomputed_tokens = 0
        """Tokens that were computed once more."""

    @property
    def begun(self) -> bool:
        """Something was computed."""
        return _OWN in self._origin

    def computed(self, start: int, stop: int) -> None:
        """The request computed tokens [start, stop)."""
        self._reach(stop)
        self.recomputed_tokens += self._origin.count(_OWN, start, stop)
        self._origin[start:stop] = bytes([_OWN]) * (stop - start)

    def brought(self, start: int, tokens: Mapping[str, int]) -> None:
        """So many tokens by tier, from `start` on, were brought in; its own work among them stays that."""
        for tier, count in tokens.items():
            if tier not in self._tiers:
                self._tiers.append(tier)
            number = len(_KINDS) + self._tiers.index(tier)
            self._reach(start + count)
            part = self._origin[start : start + count]
            self._origin[start : start + count] = bytes(_OWN if kind == _OWN else number for kind in part)
            start += count

    def fresh_tokens(self, size: int) -> int:
        """Of the first `size`, those that the request computed itself."""
        return self._origin.count(_OWN, 0, size)

    def reused(self, size: int) -> dict[str, int]:
        """Of the first `size`, those that were brought, by tier."""
        numbers = enumerate(self._tiers, len(_KINDS))
        return {tier: self._origin.count(number, 0, size) for number, tier in numbers}

    def _reach(self, stop: int) -> None:
        if stop > len(self._origin):
            self._origin.extend(bytes([_NOTHING]) * (stop - len(self._origin)))
