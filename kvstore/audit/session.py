"""One engine, or a tool, at the session socket, frame by frame: also what an honest client never asks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import NONE, Arena, SlotFormat
from kvstore.audit.looks import QUOTAS, Look, again, answered
from kvstore.audit.probe import LAYOUT, Probe
from kvstore.errors import DeadlineExceeded, KVStoreError, Refused, Unavailable, from_status
from kvstore.keys import KeyChain, test_vector
from kvstore.processes import peer_ids
from kvstore.rpc import messages as m
from kvstore.types import Part

__all__ = ["ANSWER_S", "Memory", "ProbeSession", "Saved", "ToolSession"]

# A daemon answers in under a millisecond; a layout proof waits for its turn.
ANSWER_S = 10.0
_LENGTH = struct.Struct("<I")
_CELL = 0

Memory = tuple[tuple[int, int], ...]
"""Device and inode of each piece of memory that a session was handed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save.

    Attributes:
        ready: blocks that are readable because of it.
        reason: why it is not all of them.
    """

    ready: int
    reason: str = ""


class _Session:
    """A connection to the session socket; `close` it."""

    def __init__(self, probe: Probe) -> None:
        self._fds: list[int] = []
        self._in = b""
        self._last = 0
        self._sock = _connected(probe.socket)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    # ---- asking ------------------------------------------------------------------------------------------

    def ask(self, body: m.Request, answer_s: float = ANSWER_S) -> Any:
        """One request; its reply, which may be a `Failed`.

        Raises:
            Unavailable: the daemon hung up, or sent what is no reply.
            DeadlineExceeded: no reply within `answer_s`.
        """
        self._last += 1
        payload = msgspec.msgpack.encode(m.RequestFrame(self._last, body))
        deadline_s = time.monotonic() + answer_s
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
            while True:
                frame = self._receive(deadline_s)
                if frame.id == self._last:
                    return frame.body
                if isinstance(frame.body, m.Failed):  # of the connection as a whole; else it is a notice
                    raise Unavailable(f"audit: {frame.body.message}")
        except TimeoutError:
            what = type(body).__name__
            raise DeadlineExceeded(f"audit: no answer to {what} within {answer_s:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise Unavailable("audit: the daemon hung up") from None

    def need(self, body: m.Request, kind: type[Any]) -> Any:
        """One request that an honest engine may make.

        Raises:
            KVStoreError: the daemon's reply is another.
        """
        reply = self.ask(body)
        if isinstance(reply, m.Failed):
            raise from_status(reply.status, reply.message)
        if not isinstance(reply, kind):
            raise Unavailable(f"audit: {type(reply).__name__} in answer to {type(body).__name__}")
        return reply

    def refusal(self, body: m.Request) -> str:
        """The status with which a request ends; "" = it was let in."""
        reply = self.ask(body)
        return reply.status if isinstance(reply, m.Failed) else ""

    def status(self) -> dict[str, Any]:
        """The daemon's report."""
        report: dict[str, Any] = json.loads(self.need(m.Status(), m.StatusReport).json)
        return report

    def _receive(self, deadline_s: float) -> m.ReplyFrame:
        length = _LENGTH.unpack(self._take(_LENGTH.size, deadline_s))[0]
        if not 0 < length <= m.FRAME_BYTES_MAX:
            raise Unavailable(f"audit: a frame of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._take(length, deadline_s), type=m.ReplyFrame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Unavailable(f"audit: what answers does not speak this protocol ({error})") from None

    def _take(self, length: int, deadline_s: float) -> bytes:
        while len(self._in) < length:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 4)
            self._fds += fds
            if not data:
                raise Unavailable("audit: the daemon hung up; look at its log")
            self._in += data
        taken, self._in = self._in[:length], self._in[length:]
        return taken


class ToolSession(_Session):
    """A tool's: it may ask for the state of the whole daemon and flush it.

    Raises:
        KVStoreError: as the daemon refuses it (`daemon.admins`).
    """

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        try:
            hello = m.Attach(m.PROTOCOL_VERSION, "tool", b"", {}, None, (0, 0, 0, 0), [], test_vector())
            self.need(hello, m.Attached)
        except BaseException:  # whatever it was, nobody else will close the socket
            self.close()
            raise

    def __enter__(self) -> ToolSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ProbeSession(_Session):
    """An engine's: attached, and past the layout proof.

    Args:
        probe: whose socket and namespace.
        tenant: in whose name.
        prove: no: it is attached and no more, which takes no slot of the arena, and asks for nothing.

    Raises:
        KVStoreError: as the daemon refuses it.
        Unavailable, DeadlineExceeded: it hangs up, or does not answer within ANSWER_S.
    """

    def __init__(self, probe: Probe, tenant: str, *, prove: bool = True) -> None:
        super().__init__(probe)
        self.tenant = tenant
        self._arena: Arena | None = None
        self._format = SlotFormat(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.cell_bytes)
        try:
            self._attach(probe, tenant)
            if prove:
                self._prove()
        except BaseException:  # whatever it was, nobody else will close the socket
            self.close()
            raise

    def _attach(self, probe: Probe, tenant: str) -> None:
        welcome = self.need(_hello(probe, tenant), m.Attached)
        if len(self._fds) != 2:
            raise Unavailable(f"audit: {len(self._fds)} descriptors in answer to an attach")
        self.roots: dict[str, bytes] = welcome.roots.get(tenant, {})
        self.memory: Memory = tuple((facts.st_dev, facts.st_ino) for facts in map(os.fstat, self._fds))
        self.daemon_uid = peer_ids(self._sock)[1]
        self._arena = Arena.attach(self._fds[0], self._fds[1], welcome.capacity_bytes)

    def _prove(self) -> None:
        task = self.need(m.Prove(), m.ProveSlot)
        self._write(task.slot, m.pattern(task.seed, _CELL, _CELL, LAYOUT.cell_bytes))
        self.need(m.ProvedStore(), m.ProveLoad)
        self.need(m.Proved(True), m.Done)

    def __enter__(self) -> ProbeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say that nothing is written any more, unmap, hang up. Idempotent."""
        if self._arena is not None:
            with contextlib.suppress(KVStoreError, OSError):  # it has gone: then it waits for nothing
                self.ask(m.Quiesced())
            self._arena.close()
            self._arena = None
        super().close()

    # ---- blocks ------------------------------------------------------------------------------------------

    def lookup(self, chain: KeyChain, request: str = "", more: int = 0) -> Any:
        """Found, or why it may not even be asked.

        Args:
            request: names it for `Explain`.
            more: blocks that the chain is said to have behind these.
        """
        positions = np.arange(len(chain), dtype="<u4").tobytes()
        intent: m.IntentRow = (0, request, 0.0, False, 0, 0, 0, "")
        return self.ask(m.Lookup(chain.root, len(chain) + more, positions, chain.keys.tobytes(), intent))

    def look(self, chain: KeyChain) -> Look:
        """Whether any of a chain is found; nothing stays held."""
        return answered(lambda: self._look(chain))

    def _look(self, chain: KeyChain) -> Look:
        found = self.lookup(chain)
        if isinstance(found, m.Failed):
            return Look.failed(found.status, found.message)
        if found.lease:
            self.ask(m.Release(found.lease))
        quota = found.busy or (found.reason if found.reason.startswith(QUOTAS) else "")
        return Look(found.blocks, unanswered="" if found.blocks else quota)

    def reserve(self, chain: KeyChain, parent: bytes = b"") -> m.Reserved:
        """Slots for a whole chain, behind `parent`, b"" = at its root; nothing is written yet.

        Raises:
            KVStoreError: refused.
        """
        body = m.Reserve(chain.root, parent or chain.root, chain.keys.tobytes())
        reply: m.Reserved = self.need(body, m.Reserved)
        return reply

    def publish(self, got: m.Reserved) -> Saved:
        """Write random bytes into reserved slots, and make them readable."""
        slots = [slot for slot in _numbers(got.slots) if slot != NONE]
        if not got.token:
            return Saved(0, got.busy or got.reason or "nothing of it was ours to write")
        for slot in slots:
            self._write(slot, os.urandom(LAYOUT.cell_bytes))
        reply = self.ask(m.Publish(got.token, len(slots), True))
        if isinstance(reply, m.Failed):
            return Saved(0, reply.message)
        return Saved(reply.ready, got.reason)

    def save(self, chain: KeyChain) -> Saved:
        """Both halves of it, again where a quota was in the way."""
        return again(lambda: self._save(chain), lambda saved: not saved.reason.startswith(QUOTAS))

    def _save(self, chain: KeyChain) -> Saved:
        try:
            return self.publish(self.reserve(chain))
        except (DeadlineExceeded, Unavailable):
            raise
        except KVStoreError as error:
            return Saved(0, str(error))

    # ---- bytes -------------------------------------------------------------------------------------------

    def _write(self, slot: int, cell: bytes) -> None:
        """The only cell of a slot and its sum, as a copy of an engine's block would write them."""
        assert self._arena is not None
        view = self._arena.view(slot, self._format.length)
        view[: len(cell)] = np.frombuffer(cell, np.uint8)
        view[self._format.table_offset :].view("<u4")[_CELL] = _native.crc32c(cell)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(ANSWER_S)
    try:
        sock.connect(os.fspath(path))
    except PermissionError:
        sock.close()
        raise Refused(f"audit: {path}: the mode of the socket does not let us in") from None
    except OSError as error:
        sock.close()
        raise Unavailable(f"audit: {path}: {(error.strerror or str(error)).lower()}") from None
    return sock


def _hello(probe: Probe, tenant: str) -> m.Attach:
    part = Part.whole(LAYOUT)
    layout = m.Layout(
        LAYOUT.layers,
        LAYOUT.kv_heads,
        LAYOUT.head_dim,
        LAYOUT.dtype,
        LAYOUT.block_tokens,
        LAYOUT.cell_format,
        LAYOUT.kernel_block_tokens,
        LAYOUT.attention,
        LAYOUT.groups,
    )
    return m.Attach(
        m.PROTOCOL_VERSION,
        "both",
        b"",
        asdict(probe.namespace),
        layout,
        (part.layer_start, part.layers, part.head_start, part.heads),
        [tenant],
        test_vector(),
    )


def _numbers(raw: bytes) -> list[int]:
    numbers: NDArray[np.uint32] = np.frombuffer(raw, "<u4")
    return [int(number) for number in numbers]
