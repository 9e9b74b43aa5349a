"""One fuzzed conversation: an honest beginning over a real socket, then anything."""

from __future__ import annotations

import array
import os
import random
import socket
import struct
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from raw_session import hello

from kvstore import _native
from kvstore._native import Arena, SlotFormat
from kvstore.keys import KeyChain
from kvstore.rpc import messages as m
from kvstore.types import BlockLayout

from .hostile import Hostile, Known

__all__ = ["ENGINES", "Journal", "Stage", "Talk", "Tally", "encode", "framed"]

# 8 KiB a block, so that chains, arena and index are all larger than one another's limits allow.
LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32", block_tokens=4)
SHAPE = SlotFormat(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.cell_bytes)
ENGINES = [bytes([number]) * 16 for number in range(1, 13)]
_CHAINS, _CHAIN_BLOCKS = 40, 64
# No honest answer takes this long; a daemon that needs longer hangs.
_PATIENCE_S = 60
_FDS_SPACE = socket.CMSG_SPACE(8 * 4)
_decode = msgspec.msgpack.Decoder(m.ReplyFrame).decode
encode = msgspec.msgpack.Encoder().encode


def framed(payload: bytes) -> bytes:
    """With its length in front."""
    return len(payload).to_bytes(4, "little") + payload


@dataclass(slots=True)
class Tally:
    """What was sent and what came back."""

    frames: int = 0
    replies: int = 0
    sessions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    internal: list[str] = field(default_factory=list)

    def add(self, body: Any) -> None:
        """Count a reply; an INTERNAL one is a bug of the daemon."""
        self.replies += 1
        self.answers[type(body).__name__] += 1
        if isinstance(body, m.Failed):
            self.statuses[body.status] += 1
            if body.status == "INTERNAL":
                self.internal.append(body.message)


class Journal:
    """The last pieces that were sent, by connection: what `--replay` sends again.

    Args:
        pieces: how many to keep.
    """

    def __init__(self, pieces: int = 20_000) -> None:
        self.pieces: deque[tuple[int, str, bytes]] = deque(maxlen=pieces)

    def sent(self, talk: int, data: bytes) -> None:
        self.pieces.append((talk, "send", data))

    def closed(self, talk: int) -> None:
        self.pieces.append((talk, "close", b""))

    def write(self, path: Path, facts: dict[str, Any]) -> None:
        """One line of facts, then one piece a line."""
        lines = [msgspec.json.encode(facts)]
        lines += [msgspec.json.encode([talk, what, data.hex()]) for talk, what, data in self.pieces]
        path.write_bytes(b"\n".join(lines) + b"\n")


class Stage:
    """What all conversations of one process share.

    Args:
        socket: the daemon's.
        chance: every decision.
    """

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path = path
        self.chance = chance
        self.tally = Tally()
        self.journal = Journal()
        self.arena: Arena | None = None
        self.hello = hello(LAYOUT, tenants=["default", "friend"])
        self._numbers = iter(range(1 << 62))
        with Talk(self, "scheduler", ENGINES[0]) as first:
            self.token: int = first.welcome.token
            roots = [root for by_reuse in first.welcome.roots.values() for root in by_reuse.values()]
        tokens = np.random.default_rng(7).integers(0, 1 << 32, (_CHAINS, _CHAIN_BLOCKS * LAYOUT.block_tokens))
        self.chains = [
            KeyChain.of(roots[number % len(roots)], row.astype(np.uint32), LAYOUT.block_tokens)
            for number, row in enumerate(tokens)
        ]
        self.hostile = Hostile(chance, self.chains, self.hello)

    def number(self) -> int:
        """Of the next conversation."""
        return next(self._numbers)

    def write_pattern(self, task: m.ProveSlot) -> None:
        """An engine's part of the layout proof, by writing the slot directly."""
        assert self.arena is not None
        view = self.arena.view(task.slot, SHAPE.length)
        sums = view[SHAPE.table_offset :].view("<u4")
        for number in range(SHAPE.layers * SHAPE.heads):
            cell = m.pattern(task.seed, *divmod(number, SHAPE.heads), SHAPE.cell_bytes)
            view[number * SHAPE.cell_stride :][: SHAPE.cell_bytes] = np.frombuffer(cell, np.uint8)
            sums[number] = _native.crc32c(cell)

    def close(self) -> None:
        """Unmap."""
        if self.arena is not None:
            self.arena.close()


class Talk:
    """One connection.

    Args:
        role: to attach with; "" = do not attach.
        engine: id that many conversations share, so that they meet each other's leases and fillings.
    """

    def __init__(self, stage: Stage, role: str = "", engine: bytes = b"") -> None:
        self.stage = stage
        self.known = Known()
        self.open = True
        self._number = stage.number()
        self._in = bytearray()
        self._fds: list[int] = []
        self._last_id = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Not settimeout(): Python would wait for that long even with MSG_DONTWAIT.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _PATIENCE_S, 0))
        self._sock.connect(str(stage.path))
        stage.tally.sessions += 1
        try:
            if role:
                self._begin(role, engine)
        except BaseException:  # whatever it was, nobody else will close the socket
            self.close()
            raise

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up without a word."""
        if self.open:
            self.open = False
            self.stage.journal.closed(self._number)
            self._sock.close()
        self._drop_fds()

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    # ---- honest ------------------------------------------------------------------------------------------

    def _begin(self, role: str, engine: bytes) -> None:
        if role == "tool":
            self._ask(msgspec.structs.replace(self.stage.hello, role="tool", layout=None))
            return
        self.welcome = self._ask(msgspec.structs.replace(self.stage.hello, role=role, engine=engine))
        assert isinstance(self.welcome, m.Attached), self.welcome
        if self.stage.arena is None:
            self.stage.arena = Arena.attach(*self._fds[:2], self.welcome.capacity_bytes)
        self._drop_fds()
        if self.stage.chance.random() < 0.7:  # else the slots of earlier sessions wait for this process's end
            self._ask(m.Quiesced())
        if role != "scheduler" and self.stage.chance.random() < 0.95:
            task = self._ask(m.Prove())
            if isinstance(task, m.ProveSlot):  # a full arena refuses, and that is fine
                self.stage.write_pattern(task)
                self._ask(m.ProvedStore())
                self._ask(m.Proved(True))

    def _ask(self, body: Any) -> Any:
        answer = self.exchange(self._frame(body))
        assert answer is not None, f"hung up on an honest {type(body).__name__}"
        return answer

    def exchange(self, frame: bytes) -> Any:
        """Send a frame and wait for its answer; None when the daemon hangs up instead."""
        before, answer = self.stage.tally.replies, None
        self.send([frame])
        while self.open and self.stage.tally.replies == before:
            answer = self._receive()
        return answer

    # ---- frames ------------------------------------------------------------------------------------------

    def _frame(self, body: Any) -> bytes:
        self._last_id += 1
        self.stage.tally.kinds[type(body).__name__] += 1
        return framed(encode([self._last_id, body]))

    def send(self, frames: list[bytes]) -> None:
        """Send pieces, each counted as a frame; a daemon that hung up is noticed on reading."""
        data = b"".join(frames)
        self.stage.tally.frames += len(frames)
        self.stage.journal.sent(self._number, data)
        try:
            self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self._drain(socket.MSG_DONTWAIT)
            self.close()

    def _receive(self, flags: int = 0) -> Any:
        """Read once; the last reply in what came."""
        try:
            # Not recv_fds(), which forgets its flags (Python 3.11).
            data, brought, _, _ = self._sock.recvmsg(1 << 18, _FDS_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            if not flags:
                raise TimeoutError(f"no answer and no end for {_PATIENCE_S} s") from None
            return None
        except ConnectionResetError:
            data, brought = b"", []
        for _, _, numbers in brought:
            self._fds += array.array("i", numbers)
        if not data:
            self.close()
            return None
        self._in += data
        return self._take()

    def _take(self) -> Any:
        body, at = None, 0
        with memoryview(self._in) as view:
            while len(view) - at >= 4:
                length = int.from_bytes(view[at : at + 4], "little")
                if len(view) - at - 4 < length:
                    break
                frame = _decode(view[at + 4 : at + 4 + length])
                body = frame.body
                at += 4 + length
                self.known.learn(frame.id, body)
                self.stage.tally.add(body)
        del self._in[:at]
        return body

    def _drain(self, flags: int = 0) -> None:
        """Read what is there (MSG_DONTWAIT), or to the end of the stream."""
        while self.open:
            before = len(self._in), self.stage.tally.replies
            self._receive(flags)
            if flags and (len(self._in), self.stage.tally.replies) == before:
                return

    # ---- anything ----------------------------------------------------------------------------------------

    def batch(self, count: int) -> None:
        """Send that many structurally valid messages, then read what has been answered."""
        message = self.stage.hostile.message
        self.send([self._frame(message(self.known, self._last_id + 1)) for _ in range(count)])
        if self.open:
            self.catch_up()

    def catch_up(self) -> None:
        """Read what has been answered so far."""
        self._drain(socket.MSG_DONTWAIT)
        self._drop_fds()

    def tell(self, body: Any) -> None:
        """Send one message; its answer is read with the next batch."""
        self.send([self._frame(body)])

    def honest_payload(self) -> bytes:
        """A message as an engine would send it."""
        body = self.stage.hostile.message(self.known, 1)
        self.stage.tally.kinds[type(body).__name__] += 1
        return encode([1, body])

    def hang_up(self) -> None:
        """Say that nothing more comes, and read to the end: all that was sent has been seen."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._drain()
        self.close()

    def send_with_fds(self, data: bytes, count: int) -> None:
        """A frame that brings descriptors nobody asked for."""
        self.stage.tally.frames += 1
        self.stage.journal.sent(self._number, data)
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [data], [0] * count)
