"""Whether the disk's predictions are believed, and the small loads that find that out (policy/trust.py).

A load that ended tells the rates and the trust; one that lagged, stalled or failed costs the trust at once.
While requests pass the disk by, now and then a few of the blocks that they could have had from it are brought
to HOST with nobody waiting: a probe. What changes is remembered among the decisions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore._native import SlotFormat
from kvstore.clock import Clock
from kvstore.decisions import Decisions, TrustChange
from kvstore.leases import Lease, Leases, LeaseState
from kvstore.policy.rates import Source, Transfer
from kvstore.policy.trust import PROBE_BYTES, Trust, kept
from kvstore.pricing import Pricing
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.promotion import Promotion
from kvstore.types import Tier

__all__ = ["Probing"]

_DISK = Source(Tier.NVME)
# Leases of probes belong to a session that no client can have.
_NOBODY = 0


class Probing:
    """Of one trust group's disk."""

    def __init__(
        self,
        pricing: Pricing,
        decisions: Decisions,
        leases: Leases,
        host: HostTier,
        nvme: NvmeTier,
        clock: Clock,
    ) -> None:
        self._pricing = pricing
        self._decisions = decisions
        self._leases = leases
        self._host = host
        self._nvme = nvme
        self._clock = clock
        nvme.observe(self._moved, self._lagged)

    def consider(self, nodes: NDArray[np.uint32], shape: SlotFormat) -> None:
        """A request could have had these from the disk, and computes them: probe it, if that is due.

        Args:
            nodes: (n,) blocks that continue what is on HOST or NVME, in chain order.
        """
        trust, now_s = self._trust(), self._clock.now()
        was = trust.trusted
        due = trust.probe_due(now_s)
        self._tell(trust, was)
        nodes = nodes[self._host.leading(nodes) :]  # what others have brought meanwhile shows nothing
        if not due or not len(nodes):
            return
        nodes = nodes[: max(1, PROBE_BYTES // shape.length)]
        trust.begin_probe(now_s)
        size = len(nodes) * shape.length
        predicted_s = self._pricing.rates.seconds(_DISK, size, self._nvme.ahead_bytes(size))
        lease = self._leases.grant(_NOBODY, b"", 0, nodes)

        def changed(promotion: Promotion) -> None:
            if promotion.over:
                self._probed(lease, promotion, predicted_s, now_s)

        promotion = self._nvme.promote(nodes, shape, changed)
        if promotion.over:  # it could not begin
            self._probed(lease, promotion, predicted_s, now_s)

    def _probed(self, lease: Lease, promotion: Promotion, predicted_s: float, began_s: float) -> None:
        trust, now_s = self._trust(), self._clock.now()
        was = trust.trusted
        if promotion.whole:
            trust.probed(predicted_s, max(0.0, now_s - began_s), now_s)
        else:  # no room, a rotten block: nothing to do with speed. A stall was told already
            trust.probe_without_result(now_s)
        self._tell(trust, was)
        self._leases.end(lease, LeaseState.RELEASED)

    def _moved(self, transfer: Transfer) -> None:
        """A promotion read something."""
        trust = self._trust()
        # As they were before this one.
        predicted_s = self._pricing.rates.seconds(_DISK, transfer.size_bytes, transfer.ahead_bytes)
        self._pricing.observe_transfer(_DISK, transfer)
        if transfer.given_up or trust.probing:
            return
        if not transfer.whole and kept(predicted_s, transfer.seconds):
            return  # what came came in time; the rest, who knows
        was = trust.trusted
        trust.loaded(predicted_s, transfer.seconds, self._clock.now())
        self._tell(trust, was)

    def _lagged(self, reason: str) -> None:
        trust = self._trust()
        was = trust.trusted
        trust.abandoned(reason, self._clock.now())
        self._tell(trust, was)

    def _trust(self) -> Trust:
        return self._pricing.trust(_DISK)

    def _tell(self, trust: Trust, was: bool) -> None:
        if trust.trusted != was:
            change = TrustChange(self._clock.now(), str(_DISK.tier), trust.trusted, trust.doubt)
            self._decisions.trust_changed(change)
