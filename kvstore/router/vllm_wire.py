"""The two sockets of a vLLM publisher, as a subscriber sees them: what is published, and what is replayed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.asyncio import Context

from kvstore.router.kv_schema import PAYLOAD_BYTES_MAX
from kvstore.rpc.zmq_sockets import END, keep_alive

__all__ = ["Silent", "VllmSource", "WireBatch", "batch_of", "replayed", "subscribed"]

_SEQUENCE_BYTES = 8
# Batches that wait here while a replay is applied; what comes beyond is a gap, and replayed in its turn.
_WAITING_MAX = 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5_000
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True, slots=True)
class VllmSource:
    """Where one engine publishes (vLLM's --kv-events-config, one for each data-parallel rank).

    Attributes:
        publish: endpoint of its PUB socket, tcp://host:port or ipc:///path.
        replay: endpoint of its ROUTER socket, "" = it has none: what is missed is lost.
        topic: of its messages, b"" = any.
    """

    publish: str
    replay: str = ""
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class WireBatch:
    """One message."""

    sequence: int
    payload: bytes


class Silent(Exception):
    """The replay socket does not answer."""


def subscribed(context: Context, source: VllmSource) -> tuple[Any, Any]:
    """A SUB socket that connects, and goes on connecting; and the socket that tells when it has."""
    sub = context.socket(zmq.SUB)
    _prepare(sub)
    sub.set(zmq.RCVHWM, _WAITING_MAX)
    sub.set(zmq.SUBSCRIBE, source.topic)
    monitor = sub.get_monitor_socket(_EVENTS)
    sub.connect(source.publish)
    return sub, monitor


def batch_of(frames: list[bytes], topic: bytes) -> WireBatch | None:
    """None for what is no message of this topic. A subscription also lets longer topics through."""
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES or (topic and frames[0] != topic):
        return None
    return WireBatch(int.from_bytes(frames[1], "big"), frames[2])


async def replayed(
    context: Context, source: VllmSource, start: int, answer_s: float
) -> AsyncGenerator[WireBatch]:
    """Batches from `start` on, to the publisher's last.

    Every call has a socket, and thereby a name, of its own: what an earlier one was too impatient for cannot
    be taken for an answer to this one.

    Raises:
        Silent: nothing came for answer_s, and the end has not.
    """
    dealer = context.socket(zmq.DEALER)
    try:
        _prepare(dealer)
        dealer.connect(source.replay)
        await dealer.send_multipart((b"", start.to_bytes(_SEQUENCE_BYTES, "big")))  # the socket is empty
        while True:
            if not await dealer.poll(round(answer_s * 1000)):
                raise Silent
            frames = await dealer.recv_multipart()
            if len(frames) == 4 and frames[2] == END:
                return
            batch = batch_of(frames[1:], source.topic)
            if batch is not None:
                yield batch
    finally:
        dealer.close(linger=0)


def _prepare(socket: Any) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    keep_alive(socket)
