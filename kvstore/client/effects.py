"""What an operation may ask of the world.

An operation is a generator, written once: it yields effects and is sent their results. A driver (sync.py,
aio.py) performs them. An effect that fails raises a `KVStoreError` at its `yield`.

    effect    result                          fails with
    Call      Reply                           Unavailable, DeadlineExceeded (both: the link is dead now)
    Connect   Link                            Unavailable
    Job       Completion, once it is there    DeadlineExceeded, unless patient: cancelled and still not done
    Hear      did `done` come true in time?   Unavailable
    Work      what the function returns       what it raises
    Watch     nothing: time is up, the link is dead, or the client wants attention
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvstore._native import Completion
from kvstore.rpc.messages import Progress, Reply, Request

__all__ = ["Call", "Connect", "Effect", "Hear", "Job", "Link", "Op", "Outcome", "Watch", "Work"]

T = TypeVar("T")


class Link(Protocol):
    """One connection to a daemon, driven by somebody else."""

    on_notice: Callable[[Progress], None] | None

    @property
    def dead(self) -> str:
        """Why it can't be used any more, "" while it can."""
        ...

    def hung_up(self) -> bool:
        """Whether the daemon is gone as far as the kernel knows at this moment; `dead` may be late."""
        ...

    def fail(self, reason: str) -> None:
        """Stop using it; everybody who waits on it is told. Idempotent, any thread."""
        ...

    def take_fds(self) -> list[int]:
        """File descriptors that came with the last replies; the caller closes them."""
        ...

    def close(self) -> None:
        """Give the socket back. Only its owner calls this, once nothing waits on it for long."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """Send a request, await its reply until `deadline` (seconds on the client's clock)."""

    link: Link
    message: Request
    deadline: float


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to the client's socket path."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Job:
    """Await a copier job; cancel it at `deadline`.

    A patient one is awaited until it has really ended, because device blocks depend on it; the other gives
    its blocked caller back after another `limits.copy_s`.
    """

    id: int
    deadline: float
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Hear:
    """Read notices until `done` says that enough came."""

    link: Link
    done: Callable[[], bool]
    deadline: float


@dataclass(frozen=True, slots=True)
class Work:
    """Run something that takes long without holding up a loop."""

    function: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Watch:
    """Sleep, but wake when the link dies or the client is asked to do something."""

    link: Link | None
    seconds: float


Effect = Call | Connect | Job | Hear | Work | Watch
Outcome = Reply | Link | Completion | bool | object | None
Op = Generator[Effect, Any, T]
