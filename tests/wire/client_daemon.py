"""For the client's tests: a daemon that speaks the real messages and does what a test wants of it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from client_memory import LAYOUT, ROOT, WAIT_S

from kvstore import _native
from kvstore._native import NONE, Arena, HostPool, Index, SlotFormat
from kvstore.errors import STATUS, KVStoreError
from kvstore.rpc import messages as m


class HangUp:
    """Handler result: close the connection instead of answering."""


@dataclass
class Raw:
    """Handler result: these bytes, whatever they are."""

    data: bytes


@dataclass
class Conn:
    """One accepted connection."""

    sock: socket.socket
    requests: list[Any] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    slot: int = 0
    node: int = 0
    key: bytes = b""
    seed: bytes = b""

    def send(self, ident: int, body: Any, fds: tuple[int, ...] = ()) -> None:
        frame = encode(ident, body)
        socket.send_fds(self.sock, [frame], list(fds))


def encode(ident: int, body: Any) -> bytes:
    payload = msgspec.msgpack.encode(m.ReplyFrame(ident, body))
    return struct.pack("<I", len(payload)) + payload


def failed(error: KVStoreError) -> m.Failed:
    return m.Failed(STATUS[type(error)], str(error))


Handler = Callable[[Conn, Any], Any]


class ScriptedDaemon:
    """Answers the real messages from a table of handlers that a test replaces one by one.

    The default attach, proof, saves and lookups (of chains that are sent whole) are honest and use a real
    arena; nothing is ever evicted.
    """

    def __init__(self, path: Path, heartbeat_s: float = 600.0, keys_max: int = 8192) -> None:
        self.path = path
        self.epoch = os.urandom(16)
        self.heartbeat_s = heartbeat_s
        self.keys_max = keys_max
        self.arena = Arena.create("scripted", 8 << 20)
        self.index = Index(1 << 16)
        self.host = HostPool(self.index, self.arena, 2 << 20)
        self.format = SlotFormat(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.cell_bytes)
        self.handlers: dict[type, Handler] = {}
        self.roots = {"default": {"own": ROOT}}
        self.conns: list[Conn] = []
        self.accepted = threading.Condition()
        self.slots: dict[bytes, int] = {}
        self.fillings: dict[int, tuple[np.ndarray, np.ndarray, list[bytes]]] = {}
        self.released: list[int] = []
        self.reported: list[list[int]] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._lease = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._spawn(self._accept)

    def _spawn(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="scripted-daemon", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self, number: int) -> None:
        """Wait until nothing of the n-th connection is left on our side."""
        assert self.conn(number).closed.wait(WAIT_S)
        thread = self.conn(number).thread
        assert thread is not None
        thread.join(WAIT_S)

    def stop(self) -> None:
        """As if killed, except that the socket file goes too."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for conn in self.conns:
            hang_up(conn.sock)
        for thread in self._threads:
            thread.join(WAIT_S)
        self.arena.close()

    def conn(self, number: int) -> Conn:
        """The n-th connection ever accepted (0 = first), once it is there."""
        with self.accepted:
            assert self.accepted.wait_for(lambda: len(self.conns) > number, WAIT_S)
            return self.conns[number]

    def seen(self, kind: type) -> list[Any]:
        """Requests of one kind on all connections."""
        return [request for conn in self.conns for request in conn.requests if isinstance(request, kind)]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            conn = Conn(sock)
            with self.accepted:
                self.conns.append(conn)
                self.accepted.notify_all()
            conn.thread = self._spawn(self._serve, conn)

    def _serve(self, conn: Conn) -> None:
        decode = msgspec.msgpack.Decoder(m.RequestFrame).decode
        with contextlib.suppress(OSError), conn.sock:
            while True:
                head = read_exactly(conn.sock, 4)
                body = read_exactly(conn.sock, struct.unpack("<I", head)[0]) if head else b""
                if not body:
                    break
                frame = decode(body)
                conn.requests.append(frame.body)
                with self.accepted:
                    self.accepted.notify_all()
                if not self._answer(conn, frame.id, frame.body):
                    break
        conn.closed.set()

    def _answer(self, conn: Conn, ident: int, body: Any) -> bool:
        handler = self.handlers.get(type(body)) or getattr(self, "on_" + type(body).__name__.lower())
        result = handler(conn, body)
        if isinstance(result, HangUp):
            return False
        if isinstance(result, Raw):
            conn.sock.sendall(result.data)
        elif isinstance(result, m.Attached) and body.role != "tool":
            conn.send(ident, result, (self.arena.data_fd, self.arena.control_fd))
        elif result is not None:
            conn.send(ident, result)
        return True

    def await_requests(self, kind: type, count: int) -> list[Any]:
        with self.accepted:
            assert self.accepted.wait_for(lambda: len(self.seen(kind)) >= count, WAIT_S), kind
        return self.seen(kind)

    # ---- honest handlers -------------------------------------------------------------------------------

    def on_attach(self, _: Conn, body: m.Attach) -> Any:
        engine = body.engine or b"e" * 16
        if body.role == "tool":
            engine = b""
        capacity = self.arena.capacity_bytes
        beat, last = self.heartbeat_s, len(self.fillings)
        return m.Attached(self.epoch, 7, engine, self.roots, capacity, self.keys_max, beat, last)

    def on_prove(self, conn: Conn, _: m.Prove) -> Any:
        conn.key, conn.seed = os.urandom(32), os.urandom(16)
        root = self.index.root(os.urandom(32))
        got = self.host.reserve(
            root, np.frombuffer(conn.key, np.uint8).reshape(1, 32), self.format, 0.0, 60.0
        )
        conn.node, conn.slot = int(got.nodes[0]), int(got.slots[0])
        return m.ProveSlot(conn.slot, self.arena.control(conn.slot).generation, conn.key, conn.seed)

    def on_provedstore(self, conn: Conn, _: m.ProvedStore) -> Any:
        view = self.arena.view(conn.slot, self.format.length)
        table = view[self.format.table_offset :].view(np.uint32)
        seed = os.urandom(16)
        wrong = 0
        for layer in range(LAYOUT.layers):
            for head in range(LAYOUT.kv_heads):
                number = layer * LAYOUT.kv_heads + head
                cell = view[number * self.format.cell_stride :][: LAYOUT.cell_bytes]
                wrong += cell.tobytes() != m.pattern(conn.seed, layer, head, LAYOUT.cell_bytes)
                fresh = m.pattern(seed, layer, head, LAYOUT.cell_bytes)
                cell[:] = np.frombuffer(fresh, np.uint8)
                table[number] = _native.crc32c(fresh)
        if wrong:
            return m.Failed("FAILED_PRECONDITION", f"{wrong} cells are not where the layout says")
        slots = np.array([conn.slot], np.uint32)
        crcs = _native.table_crcs(self.arena, self.format, slots)
        self.host.publish(np.array([conn.node], np.uint32), slots, crcs, self.format.length, 1)
        return m.ProveLoad(seed)

    def on_proved(self, _: Conn, body: m.Proved) -> Any:
        return m.Done() if body.ok else m.Failed("FAILED_PRECONDITION", "the loaded pattern differs")

    def on_pool(self, *_: Any) -> Any:
        return m.Done()

    def on_heartbeat(self, *_: Any) -> Any:
        return m.Done()

    def on_timings(self, *_: Any) -> Any:
        return m.Done()

    def on_quiesced(self, *_: Any) -> Any:
        return m.Quieted(len(self.fillings))

    def on_report(self, _: Conn, body: m.Report) -> Any:
        self.reported.append(np.frombuffer(body.bad, np.uint32).tolist())
        return m.Done()

    def on_release(self, _: Conn, body: m.Release) -> Any:
        self.released.append(body.lease)
        return m.Released([])

    def on_status(self, *_: Any) -> Any:
        return m.StatusReport('{"tiers": {}}')

    def on_check(self, *_: Any) -> Any:
        return m.StatusReport('{"ok": true}')

    def on_reserve(self, _: Conn, body: m.Reserve) -> Any:
        keys = [body.keys[at : at + 32] for at in range(0, len(body.keys), 32)]
        news = [key for key in keys if key not in self.slots]
        slots = np.full(len(keys), NONE, np.uint32)
        if not news:
            return m.Reserved(0, slots.tobytes(), b"", len(keys), 0, 0)
        root = self.index.root(os.urandom(32))
        array = np.frombuffer(b"".join(news), np.uint8).reshape(-1, 32)
        got = self.host.reserve(root, array, self.format, 0.0, 60.0)
        slots[[key not in self.slots for key in keys]] = got.slots
        token = len(self.fillings) + 1
        self.fillings[token] = (got.nodes, got.slots, news)
        generations = _native.slot_generations(self.arena, got.slots).tobytes()
        return m.Reserved(token, slots.tobytes(), generations, len(keys) - len(news), 0, 0)

    def on_publish(self, _: Conn, body: m.Publish) -> Any:
        nodes, slots, keys = self.fillings[body.token]
        crcs = _native.table_crcs(self.arena, self.format, slots)
        self.host.publish(nodes, slots, crcs, self.format.length, int(body.checked))
        self.slots.update(zip(keys, slots.tolist(), strict=True))
        return m.Published(len(slots), 0, False)

    def on_observe(self, *_: Any) -> Any:
        return m.Done()

    def on_abort(self, *_: Any) -> Any:
        return m.Done()

    def on_lookup(self, _: Conn, body: m.Lookup) -> Any:
        keys = [body.keys[at : at + 32] for at in range(0, len(body.keys), 32)]
        known = 0
        while known < len(keys) and keys[known] in self.slots:
            known += 1
        if not known:
            return m.Found(0, 0, 0, 0, 0, 0, (0, 0), b"", [], "nothing is known")
        self._lease += 1
        matched = np.frombuffer(b"".join(keys[:known]), np.uint8).reshape(-1, 32)
        slots = np.array([self.slots[key] for key in keys[:known]], np.uint32)
        runs = _native.pack_slots(slots, self.format.slot_bytes // _native.PAGE_BYTES)
        digest = _native.keys_digest(matched)
        spans = [("HOST", 0, known)]
        return m.Found(self._lease, known, 0, known, known, digest, (0, known), runs, spans, "all on HOST")


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


def hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
