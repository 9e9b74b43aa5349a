"""What the HTTP front is made of, beside its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.clock import Clock, MonotonicClock
from kvstore.router.door import Door, OpenDoor
from kvstore.router.placing import Picker
from kvstore.router.tokens import Tokenizers

__all__ = ["Front"]


@dataclass(frozen=True, slots=True)
class Front:
    """The parts.

    Attributes:
        picker: the core; it is called on the application's event loop.
        tokenizers: of the models that are served; by default all are approximated.
        door: who is let in; by default everybody, as the same caller, without a salt.
        clock: monotonic.
        keys: replica → bearer token that is shown there.
        metrics: gives the page of /metrics; None = there is none here.
    """

    picker: Picker
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
    door: Door = field(default_factory=OpenDoor)
    clock: Clock = field(default_factory=MonotonicClock)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics: Callable[[], bytes] | None = None
