"""Whether an audit was told of the doors that the daemon has: each goes by a configuration of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.audit.probe import Probe
from kvstore.audit.verdicts import AS_CONFIGURED, Door
from kvstore.config.doors import door_facts

__all__ = ["judge_configuration"]


def judge_configuration(door: Door, probe: Probe, keys: Sequence[str]) -> None:
    """Control: what the daemon says of these keys is what the audit's configuration says."""
    if probe.listens is None:
        door.control(AS_CONFIGURED, False, "the daemon does not say what it listens on: it is an older one")
        return
    ours = door_facts(probe.config)
    other = [
        f"{key}: the daemon has {probe.listens.get(key, '')!r}, the audit was told {ours[key]!r}"
        for key in keys
        if probe.listens.get(key, "") != ours[key]
    ]
    told = "; ".join(other) + "; audit with the daemon's own configuration" if other else "as the daemon says"
    door.control(AS_CONFIGURED, not other, told)
