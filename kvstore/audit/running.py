"""The order of an audit: the session first, because what it saves is looked for everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.audit.grpc_door import drop, grpc_doors
from kvstore.audit.nvme_door import Disk, nvme_door
from kvstore.audit.pages_door import metrics_door, status_door
from kvstore.audit.probe import Pair, Probe
from kvstore.audit.secret_file import read_salts, salt_file
from kvstore.audit.session_door import session_door
from kvstore.audit.verdicts import Report
from kvstore.config import Config

__all__ = ["audit"]


def audit(
    config: Config,
    pair: Pair,
    tokens: Mapping[str, str],
    tls_root: Path | None,
    daemon: Mapping[str, Any],
) -> Report:
    """Ask a running daemon as two of its tenants, over every door.

    Saves some ten blocks of 4 KiB for each address and trust group, counts as lookups and saves of both
    tenants in the daemon's metrics, and drops what it saved. Two audits of one daemon at once disturb each
    other's controls: run one.

    Args:
        config: the daemon's.
        pair: the two tenants (`pick`).
        tokens: tenant → bearer token for the gRPC API; "*" → one that may administer, to drop what was saved.
        tls_root: PEM file that its certificate is checked against; None = the certificate itself.
        daemon: its status report.

    Cost: about a second, and reading what the disk has taken meanwhile.

    Raises:
        KVStoreError: the daemon refuses one of them, or goes away.
    """
    salts, path = read_salts(config), salt_file(config)
    place = str(path) if path is not None else ""
    probe = Probe(config, pair, str(daemon["epoch"]), salts.salts, place, salts.unread)
    disk = Disk(config, probe.pair)
    left = ""
    try:
        doors = [session_door(probe)]
        doors += grpc_doors(probe, tokens, tls_root)
        doors += [nvme_door(probe, disk), status_door(probe), metrics_door(probe)]
    finally:
        if probe.saved_blocks:
            left = drop(probe, tokens, tls_root)
    facts = {"socket": str(probe.socket), "pid": daemon["pid"], "version": daemon["version"]}
    groups = {tenant.name: tenant.group for tenant in (probe.pair.a, probe.pair.b)}
    return Report(facts, groups, doors, left or "it saved nothing")
