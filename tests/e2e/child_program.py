"""An engine process that does one thing at a time and waits; run by `children.Child`.

With `raw` it speaks the protocol by hand (and so can stop in the middle of a save), else through the client.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import BIG, SMALL, FakeEngine
from raw_session import RawSession

from kvstore._native import NONE
from kvstore.rpc import messages as m
from kvstore.testing import write_slot
from kvstore.types import Hit

Answer = dict[str, Any]


class RawChild:
    """An engine by hand."""

    def __init__(self, options: dict[str, Any]) -> None:
        layout = BIG if options.get("big") else SMALL
        engine = bytes.fromhex(options.get("engine", ""))
        self.session = RawSession(Path(options["socket"])).engine(
            layout, model=options["model"], engine=engine
        )
        assert self.session.welcome is not None
        self.ready = {"engine": self.session.welcome.engine.hex(), "session": self.session.welcome.session}
        self._slots: list[int] = []
        self._token = 0

    def reserve(self, seed: int, blocks: int) -> Answer:
        """Slots for a chain; nothing is written yet."""
        self._chain = self.session.chain(seed, blocks)
        got = self.session.reserve(self._chain)
        self._slots = np.frombuffer(got.slots, "<u4").tolist()
        self._token = got.token
        return {"token": got.token, "slots": self._slots, "busy": got.busy, "reason": got.reason}

    def write(self, blocks: int, half: bool = False) -> Answer:
        """Write the first slots; with `half` the last of them is left in the middle."""
        arena, shape = self.session.mapped()
        done = 0
        for position, slot in enumerate(self._slots[:blocks]):
            if slot == NONE:
                continue
            if half and position == blocks - 1:
                arena.view(slot, shape.length)[: shape.length // 2] = 0xEE
            else:
                write_slot(arena, shape, slot, self._chain.keys[position].tobytes())
            done += 1
        return {"written": done}

    def scribble(self) -> Answer:
        """Store into every slot that was ever ours, whoever has it now (a process that nobody stopped)."""
        arena, shape = self.session.mapped()
        for slot in self._slots:
            arena.view(slot, shape.length)[:] = 0xAB
        return {}

    def publish(self, blocks: int) -> Answer:
        """Say that they are written."""
        got = self.session.ask(m.Publish(self._token, blocks, True))
        return {
            "kind": type(got).__name__,
            "ready": getattr(got, "ready", 0),
            "why": getattr(got, "message", ""),
        }

    def lookup(self, seed: int, blocks: int) -> Answer:
        """A lease that is held until the end."""
        found = self.session.lookup(self.session.chain(seed, blocks))
        return {"blocks": found.blocks, "lease": found.lease}

    def hang_up(self) -> Answer:
        """Close the socket and live on, the arena mapped."""
        self.session.sock.close()
        return {}

    def fork(self) -> Answer:
        """A child that holds the socket open and does nothing."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return {"pid": pid}


class ClientChild:
    """An engine with the client."""

    def __init__(self, options: dict[str, Any]) -> None:
        layout = BIG if options.get("big") else SMALL
        self.engine = FakeEngine(Path(options["socket"]), model=options["model"], layout=layout).attached()
        self.ready = {"engine": self.engine.client.engine.hex()}
        self._hit: Hit | None = None

    def save(self, seed: int, blocks: int) -> Answer:
        """Save a chain."""
        done = self.engine.save(self.engine.chain(seed, blocks))
        return {"ready": done.ready, "filled": done.filled, "dropped": done.dropped, "reason": done.reason}

    def save_for_ever(self, seed: int, blocks: int) -> Answer:
        """Save chain after chain, and say after each that it is acknowledged. Ends by a signal."""
        while True:
            done = self.engine.save(self.engine.chain(seed, blocks))
            say({"seed": seed, "ready": done.ready, "dropped": done.dropped})
            seed += 1

    def load_for_ever(self, seed: int, blocks: int) -> Answer:
        """Load the same chain over and over. Ends by a signal."""
        chain = self.engine.chain(seed, blocks)
        while True:
            say({"restored": self.engine.restored(chain)})

    def lookup(self, seed: int, blocks: int) -> Answer:
        """A lease that is held."""
        self._chain = self.engine.chain(seed, blocks)
        found = self.engine.client.lookup(self._chain)
        self._hit = found if isinstance(found, Hit) else None
        return {"blocks": found.blocks if isinstance(found, Hit) else 0}

    def load(self) -> Answer:
        """Load what the lease named; wrong bytes that count as good fail in `FakeEngine.load`."""
        assert self._hit is not None
        result = self.engine.load(self._hit, self._chain)
        return {"good": result.good, "status": result.status.tolist(), "reason": result.reason}

    def restored(self, seed: int, blocks: int) -> Answer:
        """Look up, load, verify, release."""
        return {"good": self.engine.restored(self.engine.chain(seed, blocks))}

    def leave(self) -> Answer:
        """Close in order, live on."""
        self.engine.close()
        return {}


_REPLIES = 3


def say(answer: Answer) -> None:
    """One line."""
    os.write(_REPLIES, json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Options: socket, model, raw, big, engine."""
    options = json.loads(sys.argv[1])
    # Whatever a library prints must not end up between the replies.
    os.dup2(1, _REPLIES)
    os.dup2(2, 1)
    child = RawChild(options) if options.get("raw") else ClientChild(options)
    say({"pid": os.getpid(), **child.ready})
    for line in sys.stdin:
        ask = json.loads(line)
        operation: Callable[..., Answer] = getattr(child, ask.pop("op"))
        say(operation(**ask))


if __name__ == "__main__":
    main()
