"""ai-dynamo-runtime's RadixTree behind one line a request, for bench.routing_index.

    plant BLOCKS WORKERS EVENT_BLOCKS SEED  → {version, seconds}
    find LENGTH TIMES                       → {seconds}; median of one find_matches
    close                                   → {}

Its own background thread is part of what is timed: nothing else of it can be called from Python.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from bench.peers.chains import Chain, Event, chains, events

__all__ = ["RadixTreeService"]


class RadixTreeService:
    """The protocol's state."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found] # of its own environment

        self._tree = RadixTree()
        self._planted: list[Chain] = []
        self._random = random.Random(2)

    def answer(self, line: str) -> dict[str, Any]:
        """The reply to one request.

        Raises:
            ValueError: no such request.
        """
        match line.split():
            case ["plant", blocks, workers, event_blocks, seed]:
                self._planted = chains(int(blocks), int(workers), int(seed))
                seconds = self._apply(events(self._planted, int(event_blocks), mixed=True))
                return {"version": version("ai-dynamo-runtime"), "seconds": seconds}
            case ["find", length, times]:
                return {"seconds": statistics.median(self._find(int(length)) for _ in range(int(times)))}
            case ["close"]:
                return {}
        raise ValueError(f"no such request: {line.strip()!r}")

    def _find(self, length: int) -> float:
        chain = self._random.choice([c for c in self._planted if len(c.hashes) == length])
        begin = time.perf_counter()
        found = self._tree.find_matches(chain.hashes)
        seconds = time.perf_counter() - begin
        expected = {(chain.owner, 0): length, (chain.half_owner, 0): length // 2}
        if found.scores != expected:
            raise ValueError(f"found {found.scores}, expected {expected}")
        return seconds

    def _apply(self, wanted: Iterable[Event]) -> float:
        messages = [(event.worker, self._message(number, event)) for number, event in enumerate(wanted)]
        begin = time.perf_counter()
        for worker, message in messages:
            self._tree.apply_event(worker, message)
        # Events are queued; a lookup is answered behind them.
        self._tree.find_matches([1])
        return time.perf_counter() - begin

    @staticmethod
    def _message(number: int, event: Event) -> bytes:
        blocks = [{"block_hash": h, "tokens_hash": h} for h in event.hashes]
        data = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
        return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


def main() -> None:
    """Until the other side closes the pipe."""
    service = RadixTreeService()
    for line in sys.stdin:
        try:
            reply = service.answer(line)
        except Exception as error:  # noqa: BLE001 - whatever the peer raises is the reply, and it lives on
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
