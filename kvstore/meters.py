"""Plain counters of one trust group: what the exporter reads at scrape time.

Nothing here knows Prometheus. A count costs a dictionary look-up and an addition on the request path; names,
labels and text are made when somebody asks (`rpc.metrics`).

Tokens: `lookup` is what engines asked about, `hit` what ended leases had matched, by tier, `saved` what
connectors say they did not compute. lookup >= hit >= saved holds for each tenant at any moment, because a
lease counts at its end and a connector cannot claim more than its leases held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.types import Tier

__all__ = [
    "OTHER_TENANTS",
    "TENANTS_MAX",
    "TRANSFER_KINDS",
    "TTFT_BOUNDS_S",
    "Histogram",
    "Meters",
    "Moved",
    "PrefillStep",
    "TenantTokens",
]

# A tenant is a label of four series. 128 of them are 512 of a scrape's samples, at some 4 µs each; the
# tenants that come later share one label, so that a scrape's cost has a bound whatever is configured.
TENANTS_MAX = 128
OTHER_TENANTS = "(other)"  # not a name that a tenant can have: config._NAME
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# load, store, demote: between device and arena, timed by the process that copied. verify: sums that the
# daemon recomputed over slots that were reported bad.
TRANSFER_KINDS = ("load", "store", "demote", "verify")
# Steps that a prefill curve starts from: at 50 a second the last ten seconds, 8 KiB.
PREFILL_STEPS_MAX = 512


class Histogram:
    """Counts of values by upper bound; what is beyond the last bound counts too.

    Args:
        bounds: ascending.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value. O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, values up to it) in ascending order, the last bound infinite."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield bound, total


@dataclass(slots=True)
class TenantTokens:
    """Tokens of one tenant since start.

    Attributes:
        lookup: asked about.
        hit: matched by leases that ended, by the tier that held them.
        claimed: said to be saved, by connectors.
    """

    lookup: int = 0
    hit: dict[Tier, int] = field(default_factory=lambda: {Tier.GPU: 0, Tier.HOST: 0, Tier.NVME: 0})
    claimed: int = 0

    @property
    def hits(self) -> int:
        """Tokens hit on all tiers."""
        return sum(self.hit.values())

    @property
    def saved(self) -> int:
        """Tokens not computed; never more than were hit, whatever a connector claims."""
        return min(self.claimed, self.hits)

    def plus(self, other: TenantTokens) -> TenantTokens:
        """The sum of two counters."""
        hit = {tier: self.hit[tier] + other.hit[tier] for tier in self.hit}
        # Each side is bounded by its own hits first, so that the sum of `saved` stays what it was.
        return TenantTokens(self.lookup + other.lookup, hit, self.saved + other.saved)


@dataclass(slots=True)
class Moved:
    """Copies of one kind since start."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One step of an engine that mostly computed prompts."""

    tokens: int
    seconds: float


class Meters:
    """Counters of one trust group, owned by the daemon's event loop.

    Args:
        tenants: names that are expected.
    """

    def __init__(self, tenants: Sequence[str] = ()) -> None:
        self.tenants: dict[str, TenantTokens] = {}
        self.expect(tenants)
        self.ttft = {True: Histogram(TTFT_BOUNDS_S), False: Histogram(TTFT_BOUNDS_S)}
        """By warm: whether a part of the prompt was reused."""
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.prefill_steps: deque[PrefillStep] = deque(maxlen=PREFILL_STEPS_MAX)
        """The latest, for what learns from them; survives a restart with `daemon.state_dir`."""
        self.moved = {kind: Moved() for kind in TRANSFER_KINDS}
        self.lost_timings = 0
        """Timings that clients could not deliver or keep."""

    def expect(self, tenants: Sequence[str]) -> None:
        """Give configured tenants series from the start; of too many, those that ask first get them."""
        if len(tenants) <= TENANTS_MAX:
            for name in tenants:
                self.of_tenant(name)

    def of_tenant(self, name: str) -> TenantTokens:
        """Counters of a tenant; those of OTHER_TENANTS once TENANTS_MAX have some."""
        found = self.tenants.get(name)
        if found is None:
            name = name if len(self.tenants) < TENANTS_MAX else OTHER_TENANTS
            found = self.tenants.setdefault(name, TenantTokens())
        return found

    def count_lookup(self, tenant: str, tokens: int) -> None:
        """An engine asked about that many tokens."""
        self.of_tenant(tenant).lookup += tokens

    def count_hit(self, tenant: str, tokens: Mapping[Tier, int]) -> None:
        """A lease ended that had matched so many tokens on each tier."""
        hit = self.of_tenant(tenant).hit
        for tier, count in tokens.items():
            hit[tier] += count

    def observe_ttft(self, seconds: float, warm: bool, tenant: str) -> None:
        """A request of a tenant got its first token.

        Not labelled by tenant: a histogram is 14 series, and 1,000 tenants would make a scrape of 28,000.
        """
        self.of_tenant(tenant)  # a tenant that was served has series, also when nothing of it was ever hit
        self.ttft[warm].observe(seconds)

    def observe_saved(self, tokens: int, tenant: str) -> None:
        """A connector reused that many tokens of a prompt instead of computing them."""
        self.of_tenant(tenant).claimed += tokens

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step of an engine computed that many prompt tokens."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds
        self.prefill_steps.append(PrefillStep(tokens, seconds))

    def observe_transfer(self, kind: str, copies: int, size_bytes: int, seconds: float) -> None:
        """Copies of one of TRANSFER_KINDS ended; `seconds` is the sum of their durations."""
        moved = self.moved[kind]
        moved.copies += copies
        moved.bytes += size_bytes
        moved.seconds += seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed over the latest prefill steps, 0 before the first."""
        seconds = sum(step.seconds for step in self.prefill_steps)
        return sum(step.tokens for step in self.prefill_steps) / seconds if seconds > 0 else 0.0

    def check(self) -> None:
        """Raises RuntimeError unless lookup >= hit >= saved tokens for every tenant."""
        for name, tokens in self.tenants.items():
            if not tokens.lookup >= tokens.hits >= tokens.saved >= 0:
                raise RuntimeError(
                    f"tenant {name}: tokens asked {tokens.lookup} >= hit {tokens.hits} >= "
                    f"saved {tokens.saved} does not hold"
                )
