"""What the engine's latest steps were like, as far as the plan of a request depends on it."""

from __future__ import annotations

from collections import deque
from statistics import median

from .request import StepTime

__all__ = ["Pace"]

# A median of so many steps: one that was stopped, or shared its cores, does not count for much.
_STEPS = 9
# More is not a prediction.
_SECONDS_MAX = 600.0


class Pace:
    """Of one engine.

    Attributes:
        decodes: sequences that got one token in the latest step.
        decode_context: tokens of their contexts.
    """

    def __init__(self) -> None:
        self.decodes = self.decode_context = 0
        self._token_s: deque[float] = deque(maxlen=_STEPS)

    def note(self, step: StepTime) -> None:
        """A step has ended."""
        self.decodes, self.decode_context = step.decodes, step.decode_context
        if step.prefill_tokens > step.decodes:  # mostly prefill
            self._token_s.append(step.seconds / step.prefill_tokens)

    def seconds(self, tokens: int) -> float:
        """To compute so many prompt tokens as fast as of late, at most 10 minutes; 0 before any step."""
        return min(tokens * median(self._token_s), _SECONDS_MAX) if self._token_s else 0.0
