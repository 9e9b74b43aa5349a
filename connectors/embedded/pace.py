"""What the engine's latest steps were like, as far as the plan of a request depends on it."""

from __future__ import annotations

from .request import StepTime

__all__ = ["Pace"]

# Of what was known before a step with prefill: some ten steps count.
_KEPT = 0.9


class Pace:
    """Of one engine.

    Attributes:
        decodes: sequences that got one token in the latest step.
        decode_context: tokens of their contexts.
    """

    def __init__(self) -> None:
        self.decodes = self.decode_context = 0
        self._tokens = self._seconds = 0.0

    def note(self, step: StepTime) -> None:
        """A step has ended."""
        self.decodes, self.decode_context = step.decodes, step.decode_context
        if step.prefill_tokens > step.decodes:  # mostly prefill
            self._tokens = _KEPT * self._tokens + step.prefill_tokens
            self._seconds = _KEPT * self._seconds + step.seconds

    def seconds(self, tokens: int) -> float:
        """To compute so many prompt tokens as fast as of late; 0 before the first step."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
