"""What one trust group knows of the cost of its bytes: to load them, to compute them, and whom to believe.

    rates     latency and bandwidth of every source        from every transfer     kvstore/policy/rates.py
    curves    seconds to compute, for every namespace      from engines' steps     kvstore/policy/prefill.py
    trusts    whether a request may wait for a source      from loads that ended   kvstore/policy/trust.py

Rates and curves survive a restart. Trust does not: what it doubted was a moment, and a source that stayed
slow is known to the rates as such. The time that a daemon was away does not count as age.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated

import msgspec

from kvstore.clock import Clock
from kvstore.policy.prefill import CURVES_MAX, PrefillCurves, Step
from kvstore.policy.rates import SOURCES_MAX, Rates, Source, Transfer
from kvstore.policy.trust import Trust

__all__ = ["Pricing", "Source", "Step", "Transfer"]

# The hex of a namespace's digest.
_NAME_CHARS_MAX = 64


class Pricing:
    """Of one trust group; owned by the daemon's event loop.

    Args:
        clock: monotonic.
    """

    def __init__(self, clock: Clock) -> None:
        self.rates = Rates()
        self.curves = PrefillCurves()
        self.learnt = 0
        """Steps and transfers that were learnt from since the start."""
        self._clock = clock
        self._trusts: dict[Source, Trust] = {}

    @property
    def trusts(self) -> Mapping[Source, Trust]:
        """Of the sources that were asked about, the latest asked about last."""
        return self._trusts

    def trust(self, source: Source) -> Trust:
        """The trust in a source, made on first use.

        Of more than SOURCES_MAX, one that is trusted and was not asked about for longest is forgotten: it
        would start as trusted again.
        """
        found = self._trusts.pop(source, None) or Trust(self._clock.now())
        self._trusts[source] = found
        if len(self._trusts) > SOURCES_MAX:
            others = islice(self._trusts, SOURCES_MAX)
            oldest = next((one for one in others if self._trusts[one].trusted), next(iter(self._trusts)))
            del self._trusts[oldest]
        return found

    def sources(self) -> list[Source]:
        """Those that something was learnt of, or that were asked about."""
        return list(dict.fromkeys((*self.rates, *self._trusts)))

    def observe_step(self, namespace: str, step: Step) -> bool:
        """An engine computed a step just now. Some µs, at times 1 ms.

        Args:
            namespace: the hex of its digest.
            step: what it computed, and how long that took.

        Returns:
            Whether the curve learns from it: `PrefillCurve.observe`.
        """
        learnt = self.curves.observe(namespace, step, self._clock.now())
        self.learnt += learnt
        return learnt

    def observe_transfer(self, source: Source, transfer: Transfer) -> None:
        """Bytes of a source arrived just now. Some 0.2 ms."""
        self.rates.observe(source, transfer, self._clock.now())
        self.learnt += 1

    def report(self) -> dict[str, object]:
        """What was learnt, JSON-ready, for `restore`: 2 KiB for a source, 25 KiB for a curve at most."""
        curves = {name: self.report_curve(name) for name in reversed(self.namespaces())}
        return {"rates": self.report_rates(), "curves": curves}

    def report_rates(self) -> dict[str, object]:
        """That part of `report`."""
        return self.rates.report(self._clock.now())

    def report_curve(self, namespace: str) -> dict[str, object]:
        """The part of one of `namespaces`. Some 0.3 ms."""
        return self.curves[namespace].report(self._clock.now())

    def namespaces(self) -> list[str]:
        """Those with a curve, by name; that of the latest step first."""
        return [name for name in reversed(list(self.curves)) if self.curves[name].steps]

    def restore(self, report: object) -> list[str]:
        """Take up what an earlier daemon reported. What is no good of it is left out, and starts cold.

        Returns:
            Why a part was left out, one sentence each; empty when everything was taken.
        """
        now_s = self._clock.now()
        try:
            file = msgspec.convert(report, _Report)
        except msgspec.ValidationError as error:
            return [f"pricing: {error}"]
        refused = []
        if file.rates is not None:
            try:
                self.rates.restore(file.rates, now_s)
            except ValueError as error:
                refused.append(f"rates: {error}")
        for name, curve in file.curves.items():
            try:
                self.curves.restore({name: curve}, now_s)
            except ValueError as error:
                refused.append(f"curves.{name}: {error}")
        return refused


class _Report(msgspec.Struct):
    """What parts hold is checked by those who take them."""

    rates: object | None = None
    curves: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=_NAME_CHARS_MAX)], object],
        msgspec.Meta(max_length=CURVES_MAX),
    ] = msgspec.field(default_factory=dict)
