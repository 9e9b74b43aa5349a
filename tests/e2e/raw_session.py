"""The session protocol by hand: one blocking socket, every byte of it decided by a test."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from kvstore import _native
from kvstore._native import Arena, SlotFormat
from kvstore.keys import KeyChain, test_vector
from kvstore.rpc import messages as m
from kvstore.testing import small_layout
from kvstore.testing.driver import namespace_of, wire_layout
from kvstore.types import BlockLayout, Part

__all__ = ["RawSession", "frame", "hello"]

TIMEOUT_S = 60.0
_decode = msgspec.msgpack.Decoder(m.ReplyFrame).decode


def frame(ident: int, body: Any) -> bytes:
    """One whole frame."""
    payload = msgspec.msgpack.encode([ident, body])
    return len(payload).to_bytes(4, "little") + payload


def hello(layout: BlockLayout | None = None, *, model: str = "model", **changes: Any) -> m.Attach:
    """An Attach as an honest engine sends it, with some fields changed."""
    layout = layout or small_layout()
    part = Part.whole(layout)
    honest = m.Attach(
        m.PROTOCOL_VERSION,
        "both",
        b"",
        namespace_of(layout, model),
        wire_layout(layout),
        (part.layer_start, part.layers, part.head_start, part.heads),
        ["default"],
        test_vector(),
    )
    return msgspec.structs.replace(honest, **changes)


class RawSession:
    """A connection to the daemon at `path`."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(timeout_s)
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise
        self._in = b""
        self._last = 0
        self.fds: list[int] = []
        self.arena: Arena | None = None
        self.welcome: m.Attached | None = None
        self.shape: SlotFormat | None = None
        self.layout: BlockLayout | None = None

    def __enter__(self) -> RawSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up without a word, and unmap."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    # ---- frames -------------------------------------------------------------------------------------------

    def send(self, body: Any) -> int:
        """Send one request; its id."""
        self._last += 1
        self.sock.sendall(frame(self._last, body))
        return self._last

    def send_together(self, *bodies: Any) -> list[int]:
        """Send requests in one write, so that the daemon reads all before it answers the first; their ids."""
        ids = [self._last + 1 + number for number in range(len(bodies))]
        self._last += len(bodies)
        self.sock.sendall(b"".join(frame(*pair) for pair in zip(ids, bodies, strict=True)))
        return ids

    def receive(self) -> m.ReplyFrame | None:
        """The next frame, None at the end of the stream."""
        while True:
            if len(self._in) >= 4:
                length = int.from_bytes(self._in[:4], "little")
                if len(self._in) >= 4 + length:
                    body, self._in = self._in[4 : 4 + length], self._in[4 + length :]
                    return _decode(body)
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            except ConnectionResetError:
                return None
            self.fds += fds
            if not data:
                return None
            self._in += data

    def ask(self, body: Any) -> Any:
        """Send one request, return the body of its reply."""
        ident = self.send(body)
        got = self.receive()
        assert got is not None, "the daemon hung up"
        assert got.id == ident
        return got.body

    def failure(self, body: Any) -> m.Failed:
        """A request that must fail, with the connection still open."""
        answer = self.ask(body)
        assert isinstance(answer, m.Failed), answer
        return answer

    def refused(self, body: Any) -> m.Failed:
        """A request that must be refused: a reason, then the end of the connection."""
        self.send(body)
        return self.last_words()

    def last_words(self) -> m.Failed:
        """What the daemon says before it hangs up."""
        got = self.receive()
        assert got is not None, "hung up without a reason"
        assert isinstance(got.body, m.Failed), got.body
        assert self.receive() is None, "the connection is still open"
        return got.body

    # ---- conversations ------------------------------------------------------------------------------------

    def tool(self) -> RawSession:
        """Attach as a tool."""
        self.welcome = self.ask(
            m.Attach(m.PROTOCOL_VERSION, "tool", b"", {}, None, (0,) * 4, [], test_vector())
        )
        assert isinstance(self.welcome, m.Attached), self.welcome
        return self

    def status(self) -> dict[str, Any]:
        """The daemon's status; attaches as a tool first if need be."""
        return self._report(m.Status())

    def check(self) -> dict[str, Any]:
        """The daemon's self-check; attaches as a tool first if need be."""
        return self._report(m.Check())

    def _report(self, question: m.Status | m.Check) -> dict[str, Any]:
        if self.welcome is None:
            self.tool()
        found: dict[str, Any] = json.loads(self.ask(question).json)
        return found

    def attach(self, layout: BlockLayout | None = None, **changes: Any) -> RawSession:
        """Attach as an engine process and map the arena; the proof is not begun."""
        self.layout = layout or small_layout()
        self.shape = SlotFormat(self.layout.layers, self.layout.kv_heads, self.layout.cell_bytes)
        self.welcome = self.ask(hello(self.layout, **changes))
        assert isinstance(self.welcome, m.Attached), self.welcome
        self.arena = Arena.attach(self.fds[0], self.fds[1], self.welcome.capacity_bytes)
        return self

    def prove(self) -> RawSession:
        """Pass the layout proof."""
        self.prove_store()
        assert self.ask(m.Proved(True)) == m.Done()
        return self

    def prove_store(self) -> None:
        """First half of the layout proof, by writing the slot directly."""
        self.write_proof()
        assert isinstance(self.ask(m.ProvedStore()), m.ProveLoad)

    def write_proof(self) -> None:
        """Begin the layout proof and write its slot; the daemon is not told yet."""
        arena, shape = self.mapped()
        task = self.ask(m.Prove())
        assert isinstance(task, m.ProveSlot), task
        view = arena.view(task.slot, shape.length)
        sums = view[shape.table_offset :].view("<u4")
        for number in range(shape.layers * shape.heads):
            cell = m.pattern(task.seed, *divmod(number, shape.heads), shape.cell_bytes)
            view[number * shape.cell_stride :][: shape.cell_bytes] = np.frombuffer(cell, np.uint8)
            sums[number] = _native.crc32c(cell)

    def engine(self, layout: BlockLayout | None = None, **changes: Any) -> RawSession:
        """Attach and prove."""
        return self.attach(layout, **changes).prove()

    def mapped(self) -> tuple[Arena, SlotFormat]:
        """The arena and the form of a slot in it."""
        assert self.arena is not None, "not attached"
        assert self.shape is not None
        return self.arena, self.shape

    def chain(self, seed: int, blocks: int, tenant: str = "default", reuse: str = "own") -> KeyChain:
        """A chain of tokens that only this seed has."""
        assert self.welcome is not None, "not attached"
        assert self.layout is not None
        tokens = np.random.default_rng(seed).integers(0, 1 << 32, blocks * self.layout.block_tokens)
        root = self.welcome.roots[tenant][reuse]
        return KeyChain.of(root, tokens.astype(np.uint32), self.layout.block_tokens)

    def reserve(self, chain: KeyChain, start: int = 0, stop: int | None = None) -> m.Reserved:
        """Slots for blocks [start, stop)."""
        keys = chain.keys[start:stop].tobytes()
        got = self.ask(m.Reserve(chain.root, chain.parent(start), keys))
        assert isinstance(got, m.Reserved), got
        return got

    def lookup(self, chain: KeyChain) -> m.Found:
        """Ask with every key at once."""
        positions = np.arange(len(chain), dtype="<u4").tobytes()
        got = self.ask(m.Lookup(chain.root, len(chain), positions, chain.keys.tobytes()))
        assert isinstance(got, m.Found), got
        return got
