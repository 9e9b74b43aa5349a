"""Whether what is predicted of a source is believed: lost at once, regained by cheap probes.

    TRUSTED ──a load that disappoints──→ DOUBTED ──3 in a row as predicted, probes or loads──→ TRUSTED
                                         DOUBTED ──one that is slower, fails, or does not end──→ DOUBTED

While it is doubted no request waits for it. Trust is about predictions, not about speed: a disk that became
slow and stays slow is believed again once the rates have learnt it, and then the plan itself says no.

That is why a trusted source is probed too, as long as requests pass it by: else its rates would never hear
that it got faster. The first probe comes at once after a loss, the next while probes go well too; after every
one that teaches nothing new the wait doubles, from a quarter of a second to eight seconds. Probes cost
nothing where no request asks for that source, and `PROBE_BYTES` each 8 s, 0.5 MB/s, where they do.
"""

from __future__ import annotations

import enum
import math

__all__ = ["PROBES_GOOD", "PROBE_BYTES", "Trust", "TrustState", "kept"]

# A probe loads so much at most (and one block at least): 4 MiB take 1 ms at 4 GB/s, 0.8 s at 5 MB/s.
PROBE_BYTES = 4 << 20
# In a row. As many as make the rates forget what was before: kvstore/policy/speeds.py.
PROBES_GOOD = 3
_WAIT_S_MIN, _WAIT_S_MAX = 0.25, 8.0
# What takes twice as long was not predicted; 20 ms are what a busy machine may take from anybody.
_FACTOR, _GRAIN_S = 2.0, 0.02
# A probe that has not ended after so long has failed: 4 MiB at 1 MB/s.
_PROBE_S_MAX = 4.0


class TrustState(enum.StrEnum):
    """Whether requests may wait for a source."""

    TRUSTED = "trusted"
    DOUBTED = "doubted"


class Trust:
    """Of one source. Seconds are of a monotonic clock; one that goes back stands still.

    Attributes:
        state: see the top of this file.
        reason: why it is doubted, or was last; one clause.
        losses: how often trust was lost.
        probes: how many were begun.
    """

    def __init__(self, now_s: float) -> None:
        self.state = TrustState.TRUSTED
        self.reason = ""
        self.losses = 0
        self.probes = 0
        self._now_s = now_s
        self._good = 0  # probes in a row
        self._wait_s = _WAIT_S_MIN
        self._due_s = now_s + _WAIT_S_MIN
        self._probe_ends_s: float | None = None

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def trusted(self) -> bool:
        """Whether a request may wait for this source."""
        return self.state is TrustState.TRUSTED

    @property
    def doubt(self) -> str:
        """Why not; empty when it may."""
        return "" if self.trusted else self.reason

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probe_ends_s is not None

    def probe_due(self, now_s: float) -> bool:
        """Whether to begin a probe now. Ask when a request could have used the source and does not.

        A probe that should have ended by now counts as failed first.
        """
        now_s = self._advanced(now_s)
        if self._probe_ends_s is not None and now_s >= self._probe_ends_s:
            self._probe_ends_s = None
            self._disappointed("a probe did not end")
        return self._probe_ends_s is None and now_s >= self._due_s

    # ---- what happened -----------------------------------------------------------------------------------

    def loaded(self, predicted_s: float | None, seconds: float, now_s: float) -> bool:
        """A load ended that a request had waited for. False: it disappointed, trust is lost.

        Args:
            predicted_s: None = nothing was known of the source: nothing was promised.
            seconds: what it took; infinite = it failed.

        Raises:
            ValueError: names the argument.
        """
        self._advanced(now_s)
        if not kept(predicted_s, seconds):
            self._disappointed(_why("a load", predicted_s, seconds))
            return False
        if self.trusted:
            self._wait(_WAIT_S_MIN)  # it was just heard
        else:  # somebody waited in spite of the doubt, or had begun before it: as good as a probe
            self._good += 1
            self._believe_again()
        return True

    def abandoned(self, reason: str, now_s: float) -> None:
        """A load lagged and was given up, or an error ended it."""
        self._advanced(now_s)
        self._disappointed(reason)

    def begin_probe(self, now_s: float) -> None:
        """A probe is under way.

        Raises:
            RuntimeError: one is already: `probe_due` was not asked.
        """
        if self._probe_ends_s is not None:
            raise RuntimeError("begin_probe: one is under way")
        self._probe_ends_s = self._advanced(now_s) + _PROBE_S_MAX
        self.probes += 1

    def probed(self, predicted_s: float | None, seconds: float, now_s: float) -> None:
        """The probe ended. Late, after it was counted as failed: it says nothing any more.

        Args:
            predicted_s: by the rates as they were before this probe; None = nothing was known.
            seconds: what it took; infinite = it failed.

        Raises:
            ValueError: names the argument.
        """
        self._advanced(now_s)
        good = kept(predicted_s, seconds)
        if self._probe_ends_s is None:
            return
        self._probe_ends_s = None
        if not good:
            self._disappointed(_why("a probe", predicted_s, seconds))
        elif _news(predicted_s, seconds):
            self._wait(0.0)  # faster than thought: the rates want to hear more of it
            self._good += 1
        else:
            self._good += 1
            self._wait(min(_WAIT_S_MAX, max(_WAIT_S_MIN, 2 * self._wait_s)) if self.trusted else 0.0)
        self._believe_again()

    def probe_without_result(self, now_s: float) -> None:
        """The probe ended, and says nothing of the source: the next one comes when that one was due."""
        self._advanced(now_s)
        if self._probe_ends_s is not None:
            self._probe_ends_s = None
            self._wait(max(_WAIT_S_MIN, self._wait_s))

    def report(self) -> dict[str, object]:
        """JSON-ready, for people."""
        return {
            "state": str(self.state),
            "reason": self.doubt,
            "losses": self.losses,
            "probes": self.probes,
        }

    # ---- inside ------------------------------------------------------------------------------------------

    def _advanced(self, now_s: float) -> float:
        if not math.isfinite(now_s):
            raise ValueError(f"now_s: need seconds of a monotonic clock, got {now_s!r}")
        self._now_s = max(self._now_s, now_s)
        return self._now_s

    def _believe_again(self) -> None:
        if self._good >= PROBES_GOOD and not self.trusted:
            self.state = TrustState.TRUSTED
            self._wait(_WAIT_S_MIN)

    def _wait(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._due_s = self._now_s + wait_s

    def _disappointed(self, reason: str) -> None:
        """The first time it is probed at once: perhaps it was one bad moment."""
        self._good = 0
        self.reason = reason
        if self.trusted:
            self.state = TrustState.DOUBTED
            self.losses += 1
            self._wait(0.0)
        else:
            self._wait(min(_WAIT_S_MAX, max(_WAIT_S_MIN, 2 * self._wait_s)))


def kept(predicted_s: float | None, seconds: float) -> bool:
    """Whether it took about as long as was predicted, or less."""
    if not seconds >= 0.0:  # NaN too
        raise ValueError(f"seconds: need 0 at least, got {seconds!r}")
    if predicted_s is not None and not 0.0 <= predicted_s < math.inf:
        raise ValueError(f"predicted_s: need 0 at least, and finite, got {predicted_s!r}")
    if predicted_s is None:
        return seconds < math.inf
    return seconds <= _FACTOR * predicted_s + _GRAIN_S


def _news(predicted_s: float | None, seconds: float) -> bool:
    """Whether it was much faster than predicted."""
    return predicted_s is not None and _FACTOR * seconds + _GRAIN_S < predicted_s


def _why(what: str, predicted_s: float | None, seconds: float) -> str:
    if seconds == math.inf:
        return f"{what} failed"
    return f"{what} took {seconds:.3g} s, {predicted_s or 0.0:.3g} s were predicted"
