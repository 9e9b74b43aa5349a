"""Metrics by tenant: tokens, bytes in use, limits, refusals. `metrics.tenants` says what labels call them."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.meters import OTHER_TENANTS, Meters, TenantTokens
from kvstore.quotas import Used
from kvstore.rpc.metrics.families import Metric, Row, Sources
from kvstore.types import Reuse

__all__ = ["TENANT_COUNTERS", "TENANT_GAUGES"]

TENANT = ("tenant",)
EVERYBODY = "all"


def _called(sources: Sources, name: str, reuse: Reuse = Reuse.OWN) -> str:
    """What a label says for a tenant, or for what a group shares."""
    how = sources.store.config.metrics.tenants
    if how == "none":
        return EVERYBODY
    if how == "digests":
        return sources.store.tenants.alias(name, reuse)
    return name if reuse is Reuse.OWN else f"group:{name}"


def _summed(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows with the same labels are one: a page names every series once."""
    sums: dict[tuple[str, ...], float] = {}
    for row in rows:
        sums[row.labels] = sums.get(row.labels, 0) + row.value
    return (Row(labels, value) for labels, value in sums.items())


def _tenants(sources: Sources) -> Iterator[tuple[str, TenantTokens]]:
    """Of all groups; a name that two groups share (OTHER_TENANTS, a group's own name) comes twice."""
    for group in sources.store.groups.values():
        for name, tokens in group.meters.tenants.items():
            yield _called(sources, name), tokens


def _lookup_tokens(sources: Sources) -> Iterator[Row]:
    return _summed(Row((name,), tokens.lookup) for name, tokens in _tenants(sources))


def _hit_tokens(sources: Sources) -> Iterator[Row]:
    return _summed(
        Row((tier.value, name), count)
        for name, tokens in _tenants(sources)
        for tier, count in tokens.hit.items()
    )


def _saved_tokens(sources: Sources) -> Iterator[Row]:
    return _summed(Row((name,), tokens.saved) for name, tokens in _tenants(sources))


def _used(sources: Sources) -> Iterator[tuple[str, Used]]:
    """Of everybody: tenants without series of their own count among OTHER_TENANTS, so that sums are right."""
    for group in sources.store.groups.values():
        for used in group.quotas.used():
            name = used.owner if used.reuse is Reuse.GROUP else _listed(group.meters, used.owner)
            yield _called(sources, name, used.reuse), used


def _listed(meters: Meters, owner: str) -> str:
    """Who has series of tokens has these, and for good: a counter must not go to another name, or go."""
    meters.of_tenant(owner)
    return owner if owner in meters.tenants else OTHER_TENANTS


def _bytes(sources: Sources) -> Iterator[Row]:
    return _summed(
        Row((name, tier), size)
        for name, used in _used(sources)
        for tier, size in (("HOST", used.host_bytes), ("NVME", used.nvme_bytes))
    )


def _limits(sources: Sources) -> Iterator[Row]:
    return _summed(
        Row((name, limit.value), value)
        for name, used in _used(sources)
        for limit, value in used.limits.items()
    )


def _refused(sources: Sources) -> Iterator[Row]:
    return _summed(
        Row((name, limit.value), count)
        for name, used in _used(sources)
        for limit, count in used.refused.items()
    )


TENANT_COUNTERS = (
    Metric("kvstore_lookup_tokens", "Prompt tokens that engines asked about.", TENANT, _lookup_tokens),
    Metric(
        "kvstore_hit_tokens",
        "Prompt tokens whose KV was found, by the tier that held it; counted when the lease is released.",
        ("tier", "tenant"),
        _hit_tokens,
    ),
    Metric(
        "kvstore_saved_prefill_tokens",
        "Prompt tokens that engines did not compute, as connectors say; never more than hit tokens.",
        TENANT,
        _saved_tokens,
    ),
    Metric(
        "kvstore_quota_refused",
        "Lookups, saves and writes to the disk that a tenant was refused, by the limit that it had reached.",
        ("tenant", "limit"),
        _refused,
    ),
)

TENANT_GAUGES = (
    Metric("kvstore_tenant_bytes", "Bytes of a tenant's blocks.", ("tenant", "tier"), _bytes),
    Metric("kvstore_quota", "Limits of a tenant, in their own units.", ("tenant", "limit"), _limits),
)
