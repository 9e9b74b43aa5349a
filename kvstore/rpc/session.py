"""The session protocol, daemon side: one object per connection, one method per message.

A method runs to its end inside one wake-up of the event loop; none waits. Check and ProvedStore, which are
done in slices, and Flush, which waits for the disk, are answered later; what a Fetch has to wait for follows
as notices. A KVStoreError becomes a `Failed` reply and the connection lives on; bytes that are not the
protocol end it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from kvstore import _native, block_tables, engines
from kvstore.callers import Caller
from kvstore.checks import Checks
from kvstore.disks import FlushReport, flush
from kvstore.errors import BadRequest, KVStoreError, LayoutRefused, Refused
from kvstore.fetching import Fetching
from kvstore.intent import Intent
from kvstore.rpc import messages as m
from kvstore.rpc.attach import Proof, caller_of, check_hello
from kvstore.rpc.connection import Connection, framed
from kvstore.rpc.replies import acquired, as_keys, as_numbers, explained, failed, found, held_s, orders
from kvstore.rpc.request_log import RequestLog
from kvstore.rpc.timings import record
from kvstore.status import status
from kvstore.store import Store
from kvstore.tiers.gpu import BorrowedPool, OwnedPool

if TYPE_CHECKING:
    from kvstore.rpc.server import Peer

__all__ = ["Session"]

log = structlog.get_logger()

_decode = msgspec.msgpack.Decoder(m.RequestFrame).decode
_encode_into = msgspec.msgpack.Encoder().encode_into


class Session:
    """One attached (or attaching) client.

    Args:
        number: for logs and ownership.
        requests: told of every message.

    Attributes:
        connection: where replies go; set by the server right after construction.
        on_stop: called when this session's tool asks the daemon to end; set by the server too.
        who: what every log line about this session carries.
    """

    def __init__(self, store: Store, checks: Checks, number: int, peer: Peer, requests: RequestLog) -> None:
        self.store = store
        self.checks = checks
        self.requests = requests
        self.who: dict[str, object] = {"session": number}
        self.number = number
        self.peer = peer
        self.on_stop: Callable[[bool], None] | None = None
        self.caller: Caller | None = None
        self.tool = False
        self.proven = False
        self._proof: Proof | None = None
        self._frame = bytearray()  # of a reply: the connection keeps what the socket does not take
        self.connection: Connection | None = None

    # ---- frames ------------------------------------------------------------------------------------------

    def on_frame(self, payload: memoryview) -> None:
        """Answer one frame."""
        try:
            frame = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._refuse(0, BadRequest(f"frame: {error}"))
            return
        fds: tuple[int, ...] = ()
        body: m.Reply | None
        began_s = self.requests.clock.now()
        try:
            if isinstance(frame.body, m.Attach):
                body, fds = self._attach(frame.body)
            else:
                body = self._answer(frame)
                if body is None:
                    return
        except LayoutRefused as error:
            self._refuse(frame.id, error)
            return
        except KVStoreError as error:
            if self.caller is None and not self.tool:
                self._refuse(frame.id, error)
                return
            body = failed(error)
        except Exception as error:  # a bug of ours costs one session, not the daemon
            log.exception("bug", **self.who, request=frame.id, message=type(frame.body).__name__)
            self._refuse(
                frame.id, KVStoreError(f"internal error: {type(error).__name__}; see the daemon's log")
            )
            return
        self.requests.ended(self.who, frame.id, frame.body, body, began_s)
        if (wait_s := held_s(self.store, body, began_s)) > 0 and self.connection is not None:
            self.connection.later(wait_s, partial(self._reply, frame.id, body))
        else:
            self._reply(frame.id, body, fds)

    def _answer(self, frame: m.RequestFrame) -> m.Reply | None:
        """The reply, or None when it comes later."""
        body: Any = frame.body
        if self.caller is not None:
            self.caller.heard_s = self.store.clock.now()
        kind = type(body)
        if self.caller is not None or self.tool:
            if kind in _LATER:
                self.store.tenants.check_admin(self.peer.uid)
                _LATER[kind](self, frame.id)
                return None
            if kind in _FOR_ALL:
                return _FOR_ALL[kind](self, body)
        if self.caller is None:
            raise Refused(
                "attach: must come first" if not self.tool else "role: a tool may only ask for status"
            )
        if kind is m.ProvedStore:
            self._proved_store(self.caller, frame.id)
            return None
        if kind in _PROVING:
            return _PROVING[kind](self, self.caller, body)
        if not self.proven:
            raise Refused("proof: send Prove and pass the layout proof first")
        return _ATTACHED[kind](self, self.caller, body)

    def _reply(self, request: int, body: m.Reply | m.Notice, fds: tuple[int, ...] = ()) -> None:
        if self.connection is not None:
            framed(_encode_into, m.ReplyFrame(request, body), self._frame)
            self.connection.send(self._frame, fds)

    def _refuse(self, request: int, error: KVStoreError) -> None:
        """Say why, then hang up."""
        log.warning("session refused", **self.who, pid=self.peer.pid, request=request, reason=str(error))
        self._reply(request, failed(error))
        if self.connection is not None:
            self.connection.close(str(error), after_sending=True)

    def on_closed(self, reason: str) -> None:
        """The connection is gone: pins end, fillings wait for the process (LAWS A1)."""
        self.connection = None
        self._end_proof()
        if self.caller is not None:
            caller, self.caller = self.caller, None
            engines.detach(caller)
            log.info("session closed", **self.who, reason=reason)

    # ---- attach ------------------------------------------------------------------------------------------

    def _attach(self, ask: m.Attach) -> tuple[m.Attached, tuple[int, ...]]:
        if self.caller is not None or self.tool:
            raise BadRequest("attach: this session is attached")
        check_hello(ask)
        daemon = self.store.config.daemon
        if ask.role == "tool":
            self.store.tenants.check_admin(self.peer.uid)
            self.tool = True
            return m.Attached(
                self.store.epoch, self.number, b"", {}, 0, _native.KEYS_MAX, daemon.heartbeat_s, 0
            ), ()
        self.store.tenants.check_user(ask.tenants, self.peer.uid)
        caller, roots = caller_of(self.store, ask, self.number)
        self.peer.attached(caller)  # first: it may refuse
        engines.attach(caller)
        self.caller = caller
        # A scheduler copies nothing: there is no layout of its own to prove.
        self.proven = ask.role == "scheduler"
        arena = caller.group.arena
        self.who |= {"engine": caller.engine.id.hex(), "tenant": ",".join(caller.tenants)}
        log.info("session attached", **self.who, pid=self.peer.pid, role=ask.role)
        reply = m.Attached(
            self.store.epoch,
            self.number,
            caller.engine.id,
            roots,
            arena.capacity_bytes,
            _native.KEYS_MAX,
            daemon.heartbeat_s,
            caller.group.fillings.last_token,
        )
        return reply, (arena.data_fd, arena.control_fd)

    def _prove(self, caller: Caller, _: m.Prove) -> m.ProveSlot:
        if self._proof is not None or self.proven:
            raise BadRequest("prove: the proof has begun or is done")
        proof = self._proof = Proof.begin(self.store, caller)
        return m.ProveSlot(proof.slot, proof.generation, proof.key, proof.seed)

    def _proved_store(self, caller: Caller, request: int) -> None:
        if self._proof is None or self._proof.stored:
            raise BadRequest("proved_store: no proof waits for a store")
        caller.group.later(self._compare(self._proof, request))

    def _compare(self, proof: Proof, request: int) -> Iterator[None]:
        """The middle of a layout proof, in slices; the reply comes at its end."""
        try:
            seed = yield from proof.check_store()
        except LayoutRefused as error:
            self._refuse(request, error)
        else:
            given_up = failed(BadRequest("proved_store: the proof was given up meanwhile"))
            self._reply(request, m.ProveLoad(seed) if seed else given_up)

    def _proved(self, caller: Caller, body: m.Proved) -> m.Done:
        if self._proof is None or not self._proof.published:
            raise BadRequest("proved: no proof waits for its end")
        self._end_proof()
        self.proven = body.ok
        if not body.ok:
            fix = "the engine's paged memory is not what its layout says; until then it runs uncached"
            log.warning("layout proof failed on load", **self.who, fix=fix)
            raise LayoutRefused("layout proof: the loaded pattern differs; this engine must run uncached")
        return m.Done()

    def _end_proof(self) -> None:
        if self._proof is not None:
            self._proof.end()
            self._proof = None

    def _pool(self, caller: Caller, body: m.Pool) -> m.Done:
        index, host = caller.group.index, caller.group.host.pool
        if body.kind == "owned":
            engines.set_pool(caller, OwnedPool(index, host, body.blocks, body.idle_max))
        else:
            engines.set_pool(caller, BorrowedPool(index, body.blocks))
        return m.Done()

    # ---- reading -----------------------------------------------------------------------------------------

    def _lookup(self, caller: Caller, body: m.Lookup) -> m.Found:
        positions, keys = as_numbers(body.positions, "positions"), as_keys(body.keys)
        intent = Intent(*body.intent)
        return found(self.store.lookup(caller, body.root, body.blocks, positions, keys, intent))

    def _extend(self, caller: Caller, body: m.Extend) -> m.Found:
        positions, keys = as_numbers(body.positions, "positions"), as_keys(body.keys)
        return found(self.store.extend(caller, body.lease, positions, keys))

    def _fetch(self, caller: Caller, body: m.Fetch) -> m.Fetched:
        first, last = (body.stop, body.start) if body.descending else (body.start, body.stop)
        told = first

        def tell(fetching: Fetching) -> None:
            nonlocal told
            runs = fetching.news(told)
            told = fetching.ready
            self._reply(0, m.Progress(body.lease, fetching.ready, fetching.end, runs))
            if fetching.reason and fetching.over:
                log.info("fetch ended short", **self.who, lease=body.lease, reason=fetching.reason)

        begin = self.store.fetch_tail if body.descending else self.store.fetch
        fetching = begin(caller, body.lease, body.start, body.stop, tell)
        told = fetching.ready
        if fetching.over and told != last:  # ended short already: the client hears that before the reply
            self._reply(0, m.Progress(body.lease, told, told, b""))
        return m.Fetched(told, fetching.news(first))

    def _enough(self, caller: Caller, body: m.Enough) -> m.Done:
        caller.group.fetches.enough(caller.group.leases.get(caller.session, body.lease), body.start)
        return m.Done()

    def _report(self, caller: Caller, body: m.Report) -> m.Done:
        dropped = self.store.report(caller, body.lease, as_numbers(body.bad, "bad"))
        if dropped:
            fix = "check this machine's memory, and processes that write to the arena"
            log.error("corrupt blocks dropped", **self.who, lease=body.lease, blocks=dropped, fix=fix)
        return m.Done()

    def _release(self, caller: Caller, body: m.Release) -> m.Released:
        return m.Released(orders(block_tables.release(caller, body.lease)))

    # ---- writing -----------------------------------------------------------------------------------------

    def _reserve(self, caller: Caller, body: m.Reserve) -> m.Reserved:
        got = self.store.reserve(caller, body.root, body.parent, as_keys(body.keys))
        token = got.filling.token if got.filling is not None else 0
        slots = got.slots.tobytes()
        generations = got.filling.generations.tobytes() if got.filling is not None else b""
        return m.Reserved(
            token, slots, generations, got.filled, got.elsewhere, got.dropped, got.reason, got.busy
        )

    def _publish(self, caller: Caller, body: m.Publish) -> m.Published:
        done = self.store.publish(caller, body.token, body.blocks, body.checked)
        return m.Published(done.ready, done.dropped, done.pending)

    def _abort(self, caller: Caller, body: m.Abort) -> m.Done:
        self.store.abort(caller, body.token)
        return m.Done()

    # ---- device pool -------------------------------------------------------------------------------------

    def _acquire(self, caller: Caller, body: m.Acquire) -> m.Acquired:
        return acquired(block_tables.acquire(caller, body.lease, body.blocks), body.lease)

    def _commit(self, caller: Caller, body: m.Commit) -> m.Committed:
        keys = as_keys(body.keys)
        return m.Committed(
            block_tables.commit(self.store, caller, body.lease, body.root, body.start, body.parent, keys)
        )

    def _adopt(self, caller: Caller, body: m.Adopt) -> m.Acquired:
        table = as_numbers(body.table, "table")
        lease = block_tables.adopt(self.store, caller, body.root, table, as_keys(body.keys))
        return m.Acquired(lease.id, b"", 0, (0, 0), b"", [])

    def _observe(self, caller: Caller, body: m.Observe) -> m.Done:
        pool = caller.engine.device
        if not isinstance(pool, BorrowedPool):
            raise BadRequest("observe: this engine has no borrowed pool; send Pool(kind=borrowed) first")
        counts = {"mapped": body.mapped, "idle": body.idle, "free": body.free}
        pool.observe(counts, as_keys(body.stored), as_keys(body.removed))
        caller.group.record_changes(caller.engine)
        return m.Done()

    # ---- the session itself ------------------------------------------------------------------------------

    def _heartbeat(self, _: m.Heartbeat) -> m.Done:
        return m.Done()

    def _timings(self, caller: Caller, body: m.Timings) -> m.Done:
        record(caller, body)
        return m.Done()

    def _quiesced(self, caller: Caller, _: m.Quiesced) -> m.Quieted:
        self._end_proof()
        self.peer.quiesced(caller)
        return m.Quieted(caller.group.fillings.last_token)

    def _status(self, _: m.Status) -> m.StatusReport:
        return m.StatusReport(json.dumps(status(self.store, self.caller)))

    def _explain(self, body: m.Explain) -> m.Explained:
        return explained(self.store, self.caller, body.request)

    def _check(self, request: int) -> None:
        self.checks.ask(lambda report: self._reply(request, m.StatusReport(json.dumps(report.answer()))))

    def _flush(self, request: int) -> None:
        def answer(report: FlushReport) -> None:
            done = m.Flushed(report.blocks, report.bytes, report.refused, report.seconds, report.error)
            self._reply(request, done)

        flush(self.store, answer)

    def _stop(self, body: m.Stop) -> m.Done:
        if not self.tool or self.peer.uid not in (0, os.geteuid()):
            raise Refused("stop: only a tool of the daemon's own user, or of root, may end it")
        if self.on_stop is None:
            raise Refused("stop: this daemon is part of a program that ends it")
        if body.keep and not self.store.config.daemon.keep_arena:
            raise BadRequest("stop.keep: the daemon runs without daemon.keep_arena (serve --keep-arena)")
        log.info("asked to stop", keep=body.keep, pid=self.peer.pid)
        self.on_stop(body.keep)
        return m.Done()


_LATER: dict[type, Callable[[Session, int], None]] = {m.Check: Session._check, m.Flush: Session._flush}
_FOR_ALL: dict[type, Callable[[Session, Any], m.Reply]] = {
    m.Heartbeat: Session._heartbeat,
    m.Status: Session._status,
    m.Explain: Session._explain,
    m.Stop: Session._stop,
}
_PROVING: dict[type, Callable[[Session, Caller, Any], m.Reply]] = {
    m.Prove: Session._prove,
    m.Proved: Session._proved,
    m.Quiesced: Session._quiesced,
}
_ATTACHED: dict[type, Callable[[Session, Caller, Any], m.Reply]] = {
    m.Pool: Session._pool,
    m.Lookup: Session._lookup,
    m.Extend: Session._extend,
    m.Fetch: Session._fetch,
    m.Enough: Session._enough,
    m.Report: Session._report,
    m.Release: Session._release,
    m.Reserve: Session._reserve,
    m.Publish: Session._publish,
    m.Abort: Session._abort,
    m.Acquire: Session._acquire,
    m.Commit: Session._commit,
    m.Adopt: Session._adopt,
    m.Observe: Session._observe,
    m.Timings: Session._timings,
}
