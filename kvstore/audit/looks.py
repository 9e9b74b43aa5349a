"""A question for blocks, and how it ended: it found some or none, was refused, or nobody answered it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.audit.verdicts import Door

__all__ = ["QUOTAS", "REFUSALS", "Look", "again", "answered", "judge_look", "judge_refusals"]

T = TypeVar("T")

# A caller's mistake or a lack of rights: nothing was looked for. Any other status says nothing of a lock.
REFUSALS = ("INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND", "FAILED_PRECONDITION")
# How the reason begins with which a lookup was not even made, or a save dropped (`kvstore/quotas.py`).
QUOTAS = ("tenants.", "shared.")
# A rate of a tenant (tenants.lookups_per_s) has a second's worth again after a second.
_AGAIN_S, _TRIES = 1.05, 4


@dataclass(frozen=True, slots=True)
class Look:
    """How one question ended.

    Attributes:
        blocks: that it found, or bytes.
        refused: the status with which it was refused, "" = it was answered.
        unanswered: why it was neither: a quota, a limit, a silence.
    """

    blocks: int = 0
    refused: str = ""
    unanswered: str = ""

    @staticmethod
    def failed(status: str, said: str) -> Look:
        """One that ended with an error."""
        if status in REFUSALS:
            return Look(refused=status)
        return Look(unanswered=f"{status} {said:.160}".rstrip())

    @property
    def words(self) -> str:
        """What came of it."""
        if self.unanswered:
            return f"is not answered: {self.unanswered}"
        return f"is refused ({self.refused})" if self.refused else f"finds {self.blocks} blocks"


def answered(ask: Callable[[], Look]) -> Look:
    """Ask again after a while where a quota was in the way."""
    return again(ask, lambda look: not look.unanswered)


def again(ask: Callable[[], T], settled: Callable[[T], bool]) -> T:
    """Ask until that settles it, a few times, with pauses in which the rates of tenants recover."""
    answer = ask()
    for _ in range(_TRIES - 1):
        if settled(answer):
            break
        threading.Event().wait(_AGAIN_S)
        answer = ask()
    return answer


def judge_look(door: Door, check: str, look: Look, what: str) -> None:
    """A question that must find nothing, whether it is let in or not."""
    if look.unanswered:
        door.skip(check, f"{what} {look.words}")
    else:
        door.judge(check, not look.blocks, f"{what} {look.words}")


def judge_refusals(
    door: Door, check: str, ends: Mapping[str, str], words: str, expected: Sequence[str] = REFUSALS
) -> None:
    """Calls that must all be refused; one that is let in opens, whatever became of the others.

    Args:
        ends: what was tried → the status with which it ended, "" or OK = it was let in.
        words: on whom, and by whom.
        expected: statuses that are refusals; any other says nothing of a lock.
    """
    told = words + "; ".join(f"{what}: {status or 'OK'}" for what, status in ends.items())
    if any(status in ("", "OK") for status in ends.values()):
        door.judge(check, False, told)
    elif ends and all(status in expected for status in ends.values()):
        door.judge(check, True, told)
    else:
        door.skip(check, told)
