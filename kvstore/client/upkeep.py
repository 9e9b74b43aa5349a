"""The life of a client, in the background: attach, heartbeats, notice a dead link, detach, try again."""

from __future__ import annotations

import random
import sys
from typing import Any

import structlog

from kvstore.client.asking import tell
from kvstore.client.attach import attach, detach
from kvstore.client.core import Attachment, Core
from kvstore.client.effects import Call, Op, Watch
from kvstore.errors import BadRequest, KVStoreError, Refused
from kvstore.rpc.messages import Heartbeat

__all__ = ["upkeep"]


def _log() -> Any:
    """The program's structlog if it configured one, else stderr: standard output belongs to the program."""
    if structlog.is_configured():
        return structlog.get_logger("kvstore.client")
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))


def upkeep(core: Core) -> Op[None]:
    """Runs until `core.closing`; the last thing it does is to detach in order."""
    limits = core.setup.limits
    pause_s = limits.retry_s
    reason = ""
    while not core.closing:
        socket_before = _identity(core)
        try:
            attachment = yield from attach(core)
        except (Refused, BadRequest) as error:
            _refuse(core, error)
            yield from _wait_for_another(core, socket_before)
            continue
        except KVStoreError as error:
            if str(error) != reason:  # said once, not at every try
                reason = str(error)
                _log().info("not attached", path=str(core.setup.path), reason=reason)
            # Jitter: the engines of a node must not all come back in the same instant.
            yield Watch(None, pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, limits.retry_max_s)
            continue
        pause_s, reason = limits.retry_s, ""
        _begin(core, attachment)
        yield from _stay(core, attachment)
        _log().info("detached", session=attachment.session, reason=attachment.link.dead or "closing")
        yield from detach(core, attachment)


def _begin(core: Core, attachment: Attachment) -> None:
    with core.lock:
        core.generation = attachment.generation
        core.engine = attachment.engine
        core.attachment = attachment
        core.void_token = attachment.token
    core.refusal = None
    core.counters.attaches += 1
    core.changed()
    _log().info(
        "attached",
        session=attachment.session,
        epoch=attachment.epoch.hex(),
        generation=attachment.generation,
        arena_bytes=attachment.pages * 4096,
    )


def _stay(core: Core, attachment: Attachment) -> Op[None]:
    """Heartbeats until the link dies or the client closes."""
    link = attachment.link
    # Half the longest silence: one late wake-up of ours does not yet look like death.
    rest_s = attachment.heartbeat_s / 2
    patience_s = max(core.setup.limits.call_s, attachment.heartbeat_s)
    next_s = core.setup.clock.now() + rest_s
    while not link.dead and not core.closing:
        wait_s = next_s - core.setup.clock.now()
        if wait_s > 0:
            yield Watch(link, wait_s)
            continue
        deadline = core.setup.clock.now() + patience_s
        if not (yield from tell(core, link, deadline)):
            try:
                yield Call(link, Heartbeat(), deadline)
            except KVStoreError as error:
                link.fail(str(error))
        next_s = core.setup.clock.now() + rest_s


def _refuse(core: Core, error: KVStoreError) -> None:
    """Remember a refusal; say it once, not at every try."""
    if core.refusal is None or str(core.refusal) != str(error):
        _log().warning("attach refused; running uncached", reason=str(error), kind=type(error).__name__)
    core.refusal = error
    core.changed()


def _wait_for_another(core: Core, before: tuple[int, int, int] | None) -> Op[None]:
    """Until `refused_s` have passed or another daemon has bound the path."""
    limits = core.setup.limits
    until = core.setup.clock.now() + limits.refused_s
    while not core.closing and core.setup.clock.now() < until:
        now = _identity(core)
        if now is not None and now != before:
            return
        yield Watch(None, min(limits.retry_max_s, until - core.setup.clock.now()))


def _identity(core: Core) -> tuple[int, int, int] | None:
    """Device, inode and birth of the socket: a daemon that restarts binds another one."""
    try:
        found = core.setup.path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
