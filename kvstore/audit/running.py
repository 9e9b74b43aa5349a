"""The order of an audit: the session first, because what it saves is looked for everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.audit.events_door import events_doors
from kvstore.audit.grpc_door import drop, grpc_doors
from kvstore.audit.nvme_door import Disk, nvme_door
from kvstore.audit.pages_door import metrics_door, status_door
from kvstore.audit.probe import Pair, Probe
from kvstore.audit.secret_file import read_salts, salt_file
from kvstore.audit.session_door import session_door
from kvstore.audit.verdicts import Report
from kvstore.config import Config

__all__ = ["Given", "audit", "no_room"]


@dataclass(frozen=True, slots=True)
class Given:
    """What callers of the gRPC API need.

    Attributes:
        tokens: tenant → bearer token; "*" → one that may administer, to drop what was saved.
        tls_root: PEM file that certificates are checked against; None = the certificate itself.
    """

    tokens: Mapping[str, str] = field(default_factory=dict)
    tls_root: Path | None = None

    def __repr__(self) -> str:
        return f"Given({', '.join(self.tokens)})"


def audit(
    config: Config, pair: Pair, given: Given, daemon: Mapping[str, Any], *, may_evict: bool = False
) -> Report:
    """Ask a running daemon as two of its tenants, over every door.

    Saves some dozen blocks of 4 KiB for each address and trust group, counts as lookups and saves of both
    tenants in the daemon's metrics, and drops what it saved. Two audits of one daemon at once disturb each
    other's controls: run one.

    Args:
        config: the daemon's.
        pair: the two tenants (`pick`).
        given: what callers of the gRPC API need.
        daemon: its status report.
        may_evict: save even where a slab (`host.slab_bytes`) of what was used longest ago leaves for it.

    Cost: about a second, and reading what the disk has taken meanwhile.

    Raises:
        KVStoreError: the daemon refuses one of them, or goes away.
    """
    salts, path = read_salts(config), salt_file(config)
    place = str(path) if path is not None else ""
    probe = Probe(config, pair, str(daemon["epoch"]), salts.salts, place, salts.unread)
    probe.listens, probe.bearers = daemon.get("doors"), given.tokens
    probe.no_room = "" if may_evict else no_room(pair, daemon)
    disk = Disk(config, probe.pair)
    left = ""
    try:
        doors = [session_door(probe)]
        doors += grpc_doors(probe, given.tls_root)
        doors += [nvme_door(probe, disk), status_door(probe), metrics_door(probe), *events_doors(probe)]
    finally:
        if probe.saved_blocks:
            left = drop(probe, given.tls_root)
    facts = {"socket": str(probe.socket), "pid": daemon["pid"], "version": daemon["version"]}
    groups = {tenant.name: tenant.group for tenant in (probe.pair.a, probe.pair.b)}
    return Report(facts, groups, doors, left or "it saved nothing")


def no_room(pair: Pair, daemon: Mapping[str, Any]) -> str:
    """Why an audit may not save: the arena is full, so that it would cost others theirs. "" = it may.

    Blocks of 4 KiB are a size that no engine has: the first opens a slab of its own, and all fit in one.
    """
    full = [
        group
        for group in dict.fromkeys((pair.a.group, pair.b.group))
        if not daemon["groups"].get(group, {}).get("host", {}).get("free_slabs", 0)
    ]
    if not full:
        return ""
    return (
        f"no slab of the arena of {' and '.join(full)} is free: what was used longest ago would leave for "
        "the audit's blocks; --may-evict lets it"
    )
