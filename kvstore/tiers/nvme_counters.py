"""What is counted of one trust group's disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["NvmeCounters"]


@dataclass(slots=True)
class NvmeCounters:
    """Totals since start, in blocks unless the name says otherwise."""

    written: int = 0
    written_bytes: int = 0
    write_failed: int = 0
    read: int = 0
    read_bytes: int = 0
    read_failed: int = 0
    corrupt: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, object]:
        """JSON-ready; `dataclasses.asdict` would count a Counter's items."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "errors": dict(self.errors), "dropped": dict(self.dropped)}
