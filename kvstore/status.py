"""What status pages show: plain values, no key, no salt, no token id.

Cheap enough to ask every second: no walk over blocks, and at most ENGINES_LISTED_MAX engines are described.
Totals only grow, so that rates are differences of two reports of one epoch.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict

from kvstore import __version__
from kvstore.callers import Caller, Engine
from kvstore.config.doors import door_facts
from kvstore.group import Group
from kvstore.policy.trust import PROBE_BYTES
from kvstore.pricing import Pricing, Source
from kvstore.store import Store
from kvstore.tiers.noop import NoDisk
from kvstore.tiers.nvme import NvmeTier

__all__ = ["quarantined", "status"]

# A report must fit in one frame; a node with more engines than this is read from its counts.
ENGINES_LISTED_MAX = 256
_MODEL_CHARS_MAX = 80
# Prompts by whose seconds a curve is shown: one that fits a step or two, and one that is mostly attention.
_PROMPTS = (1_000, 8_000)


def status(store: Store, caller: Caller | None = None) -> dict[str, object]:
    """State of a store by trust group; JSON-ready. Its age counts from when its arenas were ready.

    Args:
        caller: an engine that asks: it hears of itself and its tenants only.
    """
    now = store.clock.now()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "uptime_s": round(max((now - group.opened_s for group in store.groups.values()), default=0.0), 3),
        "epoch": store.epoch.hex(),
        **({"doors": door_facts(store.config)} if caller is None else {}),
        "groups": {
            name: _group(group) if caller is None else _own(caller)
            for name, group in store.groups.items()
            if caller is None or caller.group is group
        },
    }


def _own(caller: Caller) -> dict[str, object]:
    """What an engine may hear of its trust group: itself, and its tenants."""
    group, engine = caller.group, caller.engine
    return {
        "engines": {engine.id.hex(): _engine(group, engine)},
        "tokens": {name: facts for name, facts in _tokens(group).items() if name in caller.tenants},
        "quotas": {name: used for name, used in group.quotas.report().items() if name in caller.tenants},
    }


def _tokens(group: Group) -> dict[str, object]:
    return {
        name: {"lookup": tokens.lookup, "hit": dict(tokens.hit), "saved": tokens.saved}
        for name, tokens in group.meters.tenants.items()
    }


def _group(group: Group) -> dict[str, object]:
    return {
        "host": {
            **group.host.counts(),
            "capacity_bytes": group.arena.capacity_bytes,
            "huge_pages": group.huge,
            "corrupt_blocks": group.host.corrupt_blocks,
            "dropped": dict(group.host.dropped),
        },
        "nvme": _nvme(group.nvme),
        "index": {"nodes": len(group.index), "nodes_max": group.index.nodes_max},
        "alarm": group.checked.broken if group.checked and group.checked.broken else group.alarm,
        "checked": _checked(group),
        "leases": len(group.leases),
        "pins": group.index.pins(),
        "fillings": len(group.fillings),
        "quarantined": quarantined(group),
        "events": group.events.sequence,
        "published": asdict(group.events.published),
        "sessions": len(group.callers),
        "engine_count": len(group.engines),
        "engines": {
            engine.id.hex(): _engine(group, engine)
            for engine in itertools.islice(group.engines.values(), ENGINES_LISTED_MAX)
        },
        "counters": asdict(group.counters),
        "tokens": _tokens(group),
        "quotas": group.quotas.report(),
        "transfers": {kind: asdict(moved) for kind, moved in group.meters.moved.items()},
        "prefill_tokens_per_s": group.meters.prefill_tokens_per_s,
        "pricing": _pricing(group),
    }


def _nvme(nvme: NvmeTier | NoDisk) -> dict[str, object] | None:
    """The disk tier; None where none is configured."""
    if not isinstance(nvme, NvmeTier):
        return None
    return {
        **nvme.counts(),
        "io": nvme.io,
        "trouble": nvme.trouble,
        "queued_bytes": nvme.queued_bytes,
        "promotions": nvme.promotions,
        **nvme.counters.report(),
        "admission": nvme.admission.report(),
    }


def _pricing(group: Group) -> dict[str, object]:
    """What is known of the cost of bytes: by source to load them, by namespace to compute them."""
    pricing = group.pricing
    listed = {engine.namespace for engine in itertools.islice(group.engines.values(), ENGINES_LISTED_MAX)}
    models = {namespace.digest.hex(): namespace.model for namespace in listed}
    return {
        "sources": {_name(source): _source(pricing, source) for source in pricing.sources()},
        "curves": {name: _curve(pricing, name, models.get(name)) for name in pricing.namespaces()},
    }


def _name(source: Source) -> str:
    return f"{source.tier}:{source.name}" if source.name else str(source.tier)


def _source(pricing: Pricing, source: Source) -> dict[str, object]:
    """Bandwidth is that of a probe's bytes; trust is None where nobody has asked for it yet."""
    speed = pricing.rates.speed(source, PROBE_BYTES)
    trust = pricing.trusts.get(source)
    return {
        "latency_s": speed.latency_s,
        "bytes_per_s": speed.bytes_per_s,
        "samples": speed.samples,
        "trust": trust.report() if trust is not None else None,
    }


def _curve(pricing: Pricing, namespace: str, model: str | None) -> dict[str, object]:
    """`seconds` by tokens of a prompt, computed on its own; `model` is None where no engine is attached."""
    curve = pricing.curves[namespace]
    return {
        "model": model[:_MODEL_CHARS_MAX] if model is not None else None,
        "steps": curve.steps,
        "seconds": {str(tokens): curve.seconds(0, tokens) for tokens in _PROMPTS},
    }


def _checked(group: Group) -> dict[str, object] | None:
    """The last check that ended, whoever asked for it; None before the first."""
    last = group.checked
    if last is None:
        return None
    age_s = round(group.clock.now() - last.at_s, 3)
    return {"ok": not last.broken, "broken": last.broken, "complete": last.complete, "age_s": age_s}


def quarantined(group: Group) -> int:
    """Slots that wait for processes whose engine has no connection any more."""
    return sum(len(f.slots) for f in group.fillings if not _open(group, f.engine))


def _open(group: Group, engine: bytes) -> bool:
    """Whether an engine still has a connection; slots of one that has not wait for its processes."""
    known = group.engines.get(engine)
    return known is not None and bool(known.sessions)


def _engine(group: Group, engine: Engine) -> dict[str, object]:
    now = group.clock.now()
    silent = [now - group.callers[session].heard_s for session in engine.sessions]
    return {
        "model": engine.namespace.model[:_MODEL_CHARS_MAX],
        "block_tokens": engine.layout.block_tokens,
        "block_bytes": engine.layout.block_bytes,
        "silent_s": round(max(silent, default=0.0), 3),
        "sessions": len(engine.sessions),
        "writers": len(engine.writers),
        "pool": engine.device.kind,
        "device": engine.device.counts(),
    }
