"""What a check found, and what that makes of a door and of the whole audit.

finding   closed      the check was made, and nothing came through
          open        something did; the detail is the evidence
          not_probed  it could not be made, and why: it says nothing either way
control   a finding that only says whether the others mean anything: a probe that does not even find its
          own blocks has proven nothing by not finding them elsewhere
door      open if any finding is; closed if its controls passed, its core checks were all made and found
          closed, and there is anything that was; otherwise not_probed
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AS_CONFIGURED", "Door", "Finding", "Report", "Verdict"]

# The control that the audit was told of the same door as the daemon has.
AS_CONFIGURED = "as_configured"


class Verdict(enum.StrEnum):
    """Of one check, and of a door."""

    CLOSED = "closed"
    OPEN = "open"
    NOT_PROBED = "not_probed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name, constant over versions.
        verdict: of this check alone.
        detail: the evidence, or why there is none; one sentence without any secret in it.
        control: it says whether the others of its door mean anything; closed = it passed.
    """

    check: str
    verdict: Verdict
    detail: str
    control: bool = False


@dataclass(slots=True)
class Door:
    """One way into the daemon, or to what it leaves behind.

    Attributes:
        name: session, grpc, nvme, status or metrics.
        place: its address, or the directory; "" where there is none.
        findings: in the order in which the checks were made.
        core: names of the checks without which it cannot be called closed; more where more can be tried.
    """

    name: str
    place: str
    findings: list[Finding] = field(default_factory=list)
    core: set[str] = field(default_factory=set)

    def control(self, check: str, passed: bool, detail: str) -> bool:
        """Note a control; whether it passed."""
        verdict = Verdict.CLOSED if passed else Verdict.NOT_PROBED
        told = detail if passed else f"control failed: {detail}"
        self.findings.append(Finding(check, verdict, told, control=True))
        return passed

    def judge(self, check: str, closed: bool, detail: str) -> None:
        """Note a check that was made."""
        self.findings.append(Finding(check, Verdict.CLOSED if closed else Verdict.OPEN, detail))

    def skip(self, check: str, why: str, *, control: bool = False) -> None:
        """Note a check, or a control, that could not be made."""
        self.findings.append(Finding(check, Verdict.NOT_PROBED, why, control))

    @property
    def verdict(self) -> Verdict:
        """Of all its findings."""
        if any(finding.verdict is Verdict.OPEN for finding in self.findings):
            return Verdict.OPEN
        if any(finding.control and finding.verdict is not Verdict.CLOSED for finding in self.findings):
            return Verdict.NOT_PROBED
        left = {finding.check for finding in self.findings if finding.verdict is Verdict.NOT_PROBED}
        if self.core & left or not self.core <= {finding.check for finding in self.findings}:
            return Verdict.NOT_PROBED
        closed = any(f.verdict is Verdict.CLOSED for f in self.findings if not f.control)
        return Verdict.CLOSED if closed else Verdict.NOT_PROBED

    def json(self) -> dict[str, Any]:
        """JSON-ready; every check names its door, so that a list of checks stands alone."""
        checks = [
            {
                "door": self.name,
                "check": finding.check,
                "verdict": finding.verdict.value,
                "control": finding.control,
                "detail": finding.detail,
            }
            for finding in self.findings
        ]
        return {"door": self.name, "place": self.place, "verdict": self.verdict.value, "checks": checks}


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit found.

    Attributes:
        daemon: socket, pid and version of the one that was asked.
        tenants: name → trust group, of the two in whose names it was asked.
        doors: all of them, the session first.
        left: what became of the blocks that the audit saved.
    """

    daemon: Mapping[str, Any]
    tenants: Mapping[str, str]
    doors: Sequence[Door]
    left: str

    def named(self, verdict: Verdict) -> list[str]:
        """Doors of this verdict, in order, each name once."""
        return list(dict.fromkeys(door.name for door in self.doors if door.verdict is verdict))

    @property
    def ok(self) -> bool:
        """No door is open, the session was probed (every daemon has that one), and all doors were known."""
        found = [door.verdict for door in self.doors]
        return not self.open and found[:1] == [Verdict.CLOSED] and not self.strange

    @property
    def open(self) -> bool:
        """A door is."""
        return any(door.verdict is Verdict.OPEN for door in self.doors)

    @property
    def strange(self) -> bool:
        """The daemon has a door that the audit was not told of, or was told otherwise."""
        return any(
            finding.check == AS_CONFIGURED and finding.verdict is not Verdict.CLOSED
            for door in self.doors
            for finding in door.findings
        )

    @property
    def skipped(self) -> list[str]:
        """ "DOOR CHECK" of all that could not be made, whatever became of its door; each once."""
        return list(
            dict.fromkeys(
                f"{door.name} {finding.check}"
                for door in self.doors
                for finding in door.findings
                if finding.verdict is Verdict.NOT_PROBED
            )
        )

    def json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": self.ok,
            "daemon": dict(self.daemon),
            "tenants": dict(self.tenants),
            "open": self.named(Verdict.OPEN),
            "not_probed": self.named(Verdict.NOT_PROBED),
            "skipped": self.skipped,
            "left": self.left,
            "doors": [door.json() for door in self.doors],
        }
