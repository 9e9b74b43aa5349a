"""What a kvstore daemon holds, from its gRPC Subscribe: a snapshot, then events; resumed where that can be.

(epoch, sequence) is kept: after a hang-up the daemon is asked for what came since, and sends a snapshot by
itself when it cannot tell (its log has moved on, or it is another process). A snapshot begins a new truth,
which counts once it is complete; one that is cut off is asked for again from its beginning.

A trust group's engines each have device memory. A block counts as on GPU while any of them holds it; with
`engine` only that one's device is followed. Their keys are counted here, at most DEVICE_KEYS_MAX.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from kvstore.errors import BadRequest
from kvstore.keys import KEY_BYTES
from kvstore.router.feeding import FeedCounts, FeedTimes, Truth
from kvstore.router.kv_schema import Removed, Stored
from kvstore.router.sink import Sink
from kvstore.types import Tier
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

__all__ = ["KvstoreFeed", "KvstoreSource", "open_channel"]

log = structlog.get_logger()

DEVICE_KEYS_MAX = 1 << 20  # some 100 MB
# 8,192 keys are 256 KiB; nobody honest sends more.
_MESSAGE_BYTES_MAX = 1 << 20
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
_TIERS: dict[int, Tier] = {
    pb.TIER_GPU: Tier.GPU,
    pb.TIER_HOST: Tier.HOST,
    pb.TIER_NVME: Tier.NVME,
    pb.TIER_PEER: Tier.PEER,
    pb.TIER_REMOTE: Tier.REMOTE,
}


@dataclass(frozen=True, slots=True)
class KvstoreSource:
    """One daemon, as one tenant of it.

    Attributes:
        target: unix:/path or host:port.
        tenant: whose trust group is followed; the caller must be allowed to act for all tenants in it.
        token: bearer token, "" = none.
        tls_root: PEM of what the certificate is checked against; None = plaintext.
        server_name: that the certificate has, "" = the target's.
        engine: 16 bytes of the engine whose device is followed, b"" = of all.
    """

    target: str
    tenant: str = "default"
    token: str = ""
    tls_root: bytes | None = None
    server_name: str = ""
    engine: bytes = b""


class KvstoreFeed:
    """Follows one daemon; `run` in a task of its own, cancelled to end it.

    Args:
        source: the daemon.
        sink: told what it holds.
        times: `pause_s` to `pause_max_s` lie between two tries to connect, `answer_s` is the longest wait for
            the first message and between two of a snapshot.
    """

    def __init__(self, source: KvstoreSource, sink: Sink, times: FeedTimes | None = None) -> None:
        self._source = source
        self._sink = sink
        self._times = times or FeedTimes()
        self.counts = FeedCounts()
        self._truth = Truth(sink)
        self.epoch, self.sequence = b"", 0
        """The last position that was applied whole; the epoch is b"" while there is none."""
        self._devices = _Devices()

    @property
    def doubt(self) -> str:
        """Why what is known may be wrong, "" = it holds."""
        return self._truth.doubt

    async def run(self) -> None:
        """Until cancelled. An error of the sink ends it, nothing that a daemon sends does."""
        pause_s = self._times.pause_s
        while True:
            before = self.counts.batches
            try:
                async with open_channel(self._source) as channel:
                    await self._follow(rpc.StoreStub(channel))
            except grpc.aio.AioRpcError as error:
                self._truth.question(f"{error.code().name}: {error.details() or ''}"[:200])
            except TimeoutError:
                self._truth.question(f"nothing came for {self._times.answer_s:g} s")
            except BadRequest as error:
                self._begin_anew_later(str(error))
            if self.counts.batches > before:
                pause_s = self._times.pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(self._times.pause_max_s, 2 * pause_s)

    async def _follow(self, store: rpc.StoreStub) -> None:
        """One stream, to its end."""
        source = self._source
        request = pb.SubscribeRequest(tenant=source.tenant, epoch=self.epoch, sequence=self.sequence)
        metadata = [("authorization", f"Bearer {source.token}")] if source.token else []
        call = store.Subscribe(request, metadata=metadata)
        try:
            async with asyncio.timeout(self._times.answer_s):
                await call.initial_metadata()
            if self.epoch:  # let in; what has changed, if anything, comes now
                self._truth.hold()
            while True:
                async with asyncio.timeout(None if self.epoch else self._times.answer_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    self._truth.question("the daemon ended the stream")
                    return
                self._apply(message)
        finally:
            call.cancel()

    # ---- applying -----------------------------------------------------------------------------------------

    def _apply(self, message: pb.SubscribeResponse) -> None:
        """One message.

        Raises:
            BadRequest: it is not what this protocol says; what was known is in doubt.
        """
        item = message.WhichOneof("item")
        if item == "event":
            self._apply_event(message)
        elif item == "snapshot":
            self._apply_snapshot(message)
        else:
            raise BadRequest("subscribe: a message without an item")
        if message.last:
            self.counts.batches += 1
            self.epoch, self.sequence = message.epoch, message.sequence
            self._truth.hold()

    def _apply_snapshot(self, message: pb.SubscribeResponse) -> None:
        snapshot = message.snapshot
        if snapshot.first:
            self.epoch, self.sequence = b"", 0  # one that is cut off is asked for again, not resumed
            self._devices.clear()
            self.counts.resets += 1
            self._truth.begin()
        elif not self._truth.filling:
            raise BadRequest("subscribe: a snapshot without a beginning")
        self._store(_tier(snapshot.tier), snapshot.engine, _checked(snapshot.keys), b"")

    def _apply_event(self, message: pb.SubscribeResponse) -> None:
        event = message.event
        tier = _tier(event.tier)
        if self._truth.filling or message.epoch != self.epoch or message.sequence != self.sequence + 1:
            self.counts.gaps += 1
            raise BadRequest(f"subscribe: event {message.sequence} does not follow {self.sequence}")
        keys = _checked(event.keys)
        kind = event.kind
        if kind == pb.EVENT_KIND_STORED:
            self._store(tier, event.engine, keys, event.parent)
        elif kind == pb.EVENT_KIND_REMOVED:
            self._remove(tier, event.engine, keys)
        elif kind == pb.EVENT_KIND_CLEARED and event.engine:
            self._remove(tier, event.engine, self._devices.of(event.engine))
        elif kind == pb.EVENT_KIND_CLEARED:
            self._sink.cleared(tier)
        else:
            self.counts.skipped += 1

    def _store(self, tier: Tier, engine: bytes, keys: bytes, parent: bytes) -> None:
        if engine:
            if self._source.engine and engine != self._source.engine:
                return
            if not self._devices.hold(engine, keys):
                self.counts.skipped += 1
                return
        if keys:
            self._sink.stored(Stored(keys, KEY_BYTES, parent or None, None, 0, b"", tier))

    def _remove(self, tier: Tier, engine: bytes, keys: bytes) -> None:
        if engine:
            keys = self._devices.leave(engine, keys)
        if keys:
            self._sink.removed(Removed(keys, KEY_BYTES, tier))

    # ---- the sink -----------------------------------------------------------------------------------------

    def _begin_anew_later(self, reason: str) -> None:
        """The next stream begins with a snapshot."""
        log.warning("a stream of KV events makes no sense", target=self._source.target, reason=reason)
        self.counts.bad += 1
        self.counts.lost += 1
        self.epoch, self.sequence = b"", 0
        self._sink.lost(1)
        self._truth.question(reason)


class _Devices:
    """Which keys each engine's device holds."""

    def __init__(self) -> None:
        self._keys: dict[bytes, set[bytes]] = {}
        self._total = 0

    def clear(self) -> None:
        """Nothing is held."""
        self._keys.clear()
        self._total = 0

    def of(self, engine: bytes) -> bytes:
        """All keys of one engine."""
        return b"".join(self._keys.get(engine, ()))

    def hold(self, engine: bytes, keys: bytes) -> bool:
        """False = too many are known already; nothing was noted."""
        if self._total + len(keys) // KEY_BYTES > DEVICE_KEYS_MAX:
            return False
        mine = self._keys.setdefault(engine, set())
        before = len(mine)
        mine.update(_split(keys))
        self._total += len(mine) - before
        return True

    def leave(self, engine: bytes, keys: bytes) -> bytes:
        """Those that no engine holds any more."""
        mine = self._keys.get(engine, set())
        gone = [key for key in _split(keys) if key in mine]
        mine.difference_update(gone)
        self._total -= len(gone)
        if not mine:
            self._keys.pop(engine, None)
        return b"".join(key for key in gone if not any(key in other for other in self._keys.values()))


def _split(keys: bytes) -> Iterable[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def _checked(keys: bytes) -> bytes:
    if len(keys) % KEY_BYTES:
        raise BadRequest(f"subscribe: keys of {len(keys)} bytes, need {KEY_BYTES} each")
    return keys


def _tier(number: int) -> Tier:
    """A place that this version does not know is taken for a far one."""
    return _TIERS.get(number, Tier.REMOTE)


@contextlib.asynccontextmanager
async def open_channel(source: KvstoreSource) -> AsyncIterator[Any]:
    """To a daemon, closed at the end of the `with`."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
    ]
    if source.server_name:
        options.append(("grpc.ssl_target_name_override", source.server_name))
    if source.tls_root is None:
        channel = grpc.aio.insecure_channel(source.target, options)
    else:
        credentials = grpc.ssl_channel_credentials(source.tls_root)
        channel = grpc.aio.secure_channel(source.target, credentials, options)
    async with channel:
        yield channel
