"""KV events over ZMQ: a PUB socket, and a ROUTER socket for what a subscriber missed.

    PUB       [topic, sequence, payload]     as it happens; sequence 0, 1, 2, … of this daemon's life
    ROUTER    start (8 bytes)             →  [b"", topic, sequence, payload]… from there on, as far as the log
                                             reaches back (events.log_max), [b"", b"", END, b""]
              b"snapshot"                 →  [b"", topic, next, payload]…: everything readable,
                                             [b"", b"", next, epoch], [b"", b"", END, b""]

Numbers are 64 bits, big-endian. vLLM's protocol is the first two; a snapshot is ours: what is published from
sequence `next` on completes it, and may repeat what it says. Batch n is event n + 1 of the log: the replay
buffer is the log itself, nothing is held twice.

The daemon never waits for a peer. PUB drops what a subscriber does not read (it sees a gap, and asks); an
answer that finds its peer full is given up after STALL_S; requests are read at a limited rate. What is not
limited is how many peers connect, and how many frames one message has (libzmq has no limit for either), so
the sockets belong on loopback, or on an ipc path that only its user can open.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import zmq
from zmq.asyncio import Context

from kvstore.clock import unix_time_s
from kvstore.config.publishing import Outlet, ipc_path, outlets
from kvstore.errors import ConfigError
from kvstore.events import KVEvent
from kvstore.group import Group
from kvstore.rpc.server import free_path
from kvstore.rpc.zmq_sockets import END, keep_alive
from kvstore.rpc.zmq_wire import Schema, be64
from kvstore.snapshots import SnapshotPart, snapshot_parts
from kvstore.store import Store

__all__ = ["ZmqEvents"]

log = structlog.get_logger()

SNAPSHOT = b"snapshot"
# Batches that wait for one peer. Most are one save (some KiB), none is larger than 1.1 MiB.
PUBLISH_HWM, ANSWER_HWM = 1000, 64
REQUEST_HWM = 16
# Of a frame that a peer sends: a request has 8, a subscription is as long as its topic, and both begin with a
# handshake of some 60. Who sends more is disconnected.
FRAME_BYTES_MAX = 1024
ANSWERS_MAX = 8  # under way at once, of one trust group
REQUESTS_PER_S = 200.0
STALL_S = 5.0
FULL_S = 0.001  # libzmq cannot say when a ROUTER's peer has room again
EVENTS_PER_TURN = 64
KEYS_PER_BATCH = 2048  # of a snapshot: 70 KiB


class ZmqEvents:
    """The publishers of a daemon, on the running loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._context: Any = None
        self._publishers: list[_Publisher] = []
        self._inodes: dict[Path, int] = {}
        self.addresses: list[str] = []
        """Where they listen, with the ports that the kernel chose for port 0."""

    def open(self) -> None:
        """Bind every endpoint of `events.zmq` and `events.zmq_replay`.

        Raises:
            ConfigError: one is in use or cannot be bound; nothing is left open.
        """
        config = self._store.config
        self._context = Context()
        previous = os.umask(0o777 & ~config.daemon.socket_mode)
        try:
            for outlet in outlets(config.events, config.groups()):
                publisher = _Publisher(self._store.groups[outlet.group], self._context)
                self._publishers.append(publisher)
                self.addresses += publisher.bind(outlet)
                for path in (ipc_path(outlet.publish), ipc_path(outlet.replay)):
                    if path is not None:
                        self._inodes[path] = path.stat().st_ino
        except BaseException:  # whatever it was, no socket stays open
            self._close_sockets()
            raise
        finally:
            os.umask(previous)
        for publisher in self._publishers:
            publisher.start()

    async def close(self) -> None:
        """End every answer under way, close every socket. Idempotent."""
        publishers, self._publishers = self._publishers, []
        for publisher in publishers:
            await publisher.stop()
        self._close_sockets()

    def _close_sockets(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)
        for path, inode in self._inodes.items():  # another daemon may have taken the path over
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
        self._inodes.clear()
        self.addresses = []


@dataclass(frozen=True, slots=True)
class _Answer:
    """One batch of an answer: sequence and payload."""

    sequence: int
    payload: bytes


class _Publisher:
    """One trust group's sockets, and the tasks behind them."""

    def __init__(self, group: Group, context: Any) -> None:
        self._group = group
        self._log = group.events
        self._counts = group.events.published
        self._context = context
        self._topic = group.config.events.zmq_topic.encode()
        self._schema = Schema(group.config.events.zmq_form == "map")
        # Dates of events: of one reading, so that an event has the same in every replay.
        self._unix_s = unix_time_s() - group.clock.now()
        self._block_tokens = 0
        self._pub: Any = None
        self._router: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._answering: set[asyncio.Task[None]] = set()

    def bind(self, outlet: Outlet) -> list[str]:
        """Open the sockets; where they listen."""
        bound = []
        if outlet.publish:
            # Not an asyncio socket: PUB never waits, it drops.
            self._pub = self._context.socket(zmq.PUB, socket_class=zmq.Socket)
            self._pub.set(zmq.SNDHWM, PUBLISH_HWM)
            bound.append(_bound(self._pub, "events.zmq", outlet.publish))
        if outlet.replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set(zmq.SNDHWM, ANSWER_HWM)
            self._router.set(zmq.RCVHWM, REQUEST_HWM)
            self._router.set(zmq.ROUTER_MANDATORY, 1)  # tell us that a peer is full, drop nothing unseen
            bound.append(_bound(self._router, "events.zmq_replay", outlet.replay))
        return bound

    def start(self) -> None:
        """From now on events are told."""
        loop = asyncio.get_running_loop()
        if self._pub is not None:
            self._tasks.append(loop.create_task(self._publish_always(), name="kvstore-zmq-pub"))
        if self._router is not None:
            self._tasks.append(loop.create_task(self._hear_always(), name="kvstore-zmq-replay"))

    async def stop(self) -> None:
        """End the tasks."""
        tasks = [*self._tasks, *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- publishing ---------------------------------------------------------------------------------------

    async def _publish_always(self) -> None:
        wake = asyncio.Event()
        listener = self._log.listen(wake.set)
        sequence = 0
        try:
            while True:
                wake.clear()
                replay = self._log.since(self._log.epoch, sequence, EVENTS_PER_TURN)
                if replay.gap:  # more events in one turn of the loop than the log keeps
                    sequence = self._log.oldest - 1
                    continue
                for event in replay.events:
                    sequence = event.sequence
                    self._send((self._topic, be64(sequence - 1), self._payload(event)))
                    await asyncio.sleep(0)
                if not replay.events:
                    await wake.wait()
        finally:
            self._log.unlisten(listener)

    def _send(self, frames: tuple[bytes, ...]) -> None:
        try:
            self._pub.send_multipart(frames, zmq.DONTWAIT)
            self._counts.batches += 1
        except zmq.ZMQError as error:  # no subscriber is worth the loop; a gap tells them
            log.warning("a batch of events was not published", group=self._group.name, reason=str(error))

    def _payload(self, event: KVEvent) -> bytes:
        if event.parent in self._group.roots:
            # vLLM has no parent there; and who has a root can look for prompts that it guesses.
            event = replace(event, parent=b"")
        happened_s = self._unix_s
        if event.sequence >= self._log.oldest:  # it may have left the log while others were sent
            happened_s += self._log.happened_s(event.sequence)
        return self._schema.event(event, happened_s, self._tokens())

    def _tokens(self) -> int:
        """Tokens of a block, as far as all engines that were ever seen agree on it, else 0."""
        sizes = {engine.layout.block_tokens for engine in self._group.engines.values()}
        if self._block_tokens:
            sizes.add(self._block_tokens)
        if sizes:
            self._block_tokens = sizes.pop() if len(sizes) == 1 else -1
        return max(0, self._block_tokens)

    # ---- answering ----------------------------------------------------------------------------------------

    async def _hear_always(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            frames = await self._router.recv_multipart()
            # Without this a peer that floods would have the loop to itself; what it sends waits in its pipe.
            next_s = max(next_s + 1 / REQUESTS_PER_S, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            if len(frames) != 3 or frames[1] or len(frames[2]) != len(SNAPSHOT):
                self._counts.bad_requests += 1
            elif len(self._answering) >= ANSWERS_MAX:
                self._counts.refused += 1  # it asks again
            else:
                task = loop.create_task(self._answer(frames[0], frames[2]), name="kvstore-zmq-answer")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, peer: bytes, request: bytes) -> None:
        try:
            if request == SNAPSHOT:
                self._counts.snapshots += 1
                await self._answer_snapshot(peer)
            else:
                self._counts.replays += 1
                async for batch in self._since(int.from_bytes(request, "big")):
                    await self._reply(peer, self._topic, be64(batch.sequence), batch.payload)
            await self._reply(peer, b"", END, b"")
        except TimeoutError:
            self._counts.abandoned += 1
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._counts.abandoned += 1  # it went away

    async def _since(self, start: int) -> AsyncIterator[_Answer]:
        """Batches from `start` on, as far as there are any now; later ones are published."""
        last = self._log.sequence
        sequence = max(start, self._log.oldest - 1)
        while sequence < last:
            replay = self._log.since(self._log.epoch, sequence, EVENTS_PER_TURN)
            if replay.gap:  # the log went on meanwhile: the one who asked sees a gap, and asks again
                sequence = self._log.oldest - 1
                continue
            for event in replay.events:
                sequence = event.sequence
                yield _Answer(sequence - 1, self._payload(event))

    async def _answer_snapshot(self, peer: bytes) -> None:
        upcoming = be64(self._log.sequence)  # of the first batch that this does not include
        for part in snapshot_parts(self._group):
            for start in range(0, len(part.keys), KEYS_PER_BATCH):
                piece = SnapshotPart(part.tier, part.engine, part.keys[start : start + KEYS_PER_BATCH])
                payload = self._schema.snapshot(piece, self._unix_s + self._group.clock.now(), self._tokens())
                await self._reply(peer, self._topic, upcoming, payload)
        await self._reply(peer, b"", upcoming, self._log.epoch)

    async def _reply(self, peer: bytes, topic: bytes, sequence: bytes, payload: bytes) -> None:
        """Raises TimeoutError when the peer has no room for STALL_S, ZMQError when it is gone."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STALL_S
        while True:
            try:
                await self._router.send_multipart((peer, b"", topic, sequence, payload), zmq.DONTWAIT)
            except zmq.Again:
                if loop.time() > deadline_s:
                    raise TimeoutError from None
                await asyncio.sleep(FULL_S)
            else:
                await asyncio.sleep(0)
                return


def _bound(socket: Any, key: str, endpoint: str) -> str:
    """Bind with what every socket has; where it listens."""
    path = ipc_path(endpoint)
    if path is not None:
        free_path(path, key)  # libzmq would take the path away from whoever has it
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, "[" in endpoint)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    keep_alive(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{key}: cannot bind {endpoint}: {error.strerror.lower()}") from None
    address: str = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    return address
