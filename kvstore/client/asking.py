"""Status, self-check, explanations, heartbeat, quiesce and timings: small things that all may ask or say."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.client.core import Core, ask
from kvstore.client.effects import Link, Op, Work
from kvstore.errors import BadRequest, KVStoreError, Refused
from kvstore.rpc.messages import (
    Check,
    Done,
    Explain,
    Explained,
    Heartbeat,
    Quiesced,
    Quieted,
    Status,
    StatusReport,
)

__all__ = ["explained", "heartbeat", "quiesced", "report_of", "tell"]


def report_of(core: Core, message: Status | Check) -> Op[dict[str, Any]]:
    """The daemon's answer as a dict; {"attached": False, "reason": …} when there is none."""
    attachment = core.attachment
    if attachment is None:
        return {"attached": False, "reason": str(core.refusal or "no daemon is attached")}
    try:
        # A daemon checks itself in slices, after others' requests: that may take seconds.
        limits, now = core.setup.limits, core.setup.clock.now()
        deadline = now + (limits.attach_s if isinstance(message, Check) else limits.call_s)
        answer = yield from ask(core, attachment.link, message, StatusReport, deadline)
        content = msgspec.json.decode(answer.json, type=dict[str, Any])
    except KVStoreError as error:
        return {"attached": False, "reason": str(error)}
    except msgspec.MsgspecError as error:
        return {"attached": False, "reason": str(core.broken(attachment.link, f"status report: {error}"))}
    return {"attached": True, **content}


def explained(core: Core, request: str) -> Op[dict[str, Any]]:
    """What the daemon decided for a request, as a dict; {"known": False, "reason": …} when it cannot."""
    attachment = core.attachment
    if attachment is None:
        return {"known": False, "reason": str(core.refusal or "no daemon is attached")}
    try:
        answer = yield from ask(core, attachment.link, Explain(request), Explained, core.call_deadline())
        content = msgspec.json.decode(answer.json, type=dict[str, Any])
    except KVStoreError as error:
        return {"known": False, "reason": str(error)}
    except msgspec.MsgspecError as error:
        return {"known": False, "reason": str(core.broken(attachment.link, f"explanation: {error}"))}
    return {"known": True, **content}


def heartbeat(core: Core) -> Op[bool]:
    """Say that we are alive, and hear whether the daemon is."""
    attachment = core.attachment
    if attachment is None:
        return False
    try:
        yield from ask(core, attachment.link, Heartbeat(), Done, core.call_deadline())
    except KVStoreError:
        return False
    return True


def quiesced(core: Core) -> Op[bool]:
    """Join every copy of this process, then say so: the daemon aborts what it was filling.

    No store begins until the daemon has answered, and none into slots that were reserved before that.
    """
    attachment = core.attachment
    copier = core.copier
    with core.quiescing():
        if copier is not None and not (yield Work(lambda: copier.quiesce(core.setup.limits.copy_s))):
            return False
        if attachment is None:
            return True
        try:
            done = yield from ask(core, attachment.link, Quiesced(), Quieted, core.call_deadline())
        except KVStoreError:
            return False
        core.give_up(attachment, done.token)
    return True


def tell(core: Core, link: Link, deadline: float) -> Op[bool]:
    """Send what was timed here, which is a sign of life too; False: there was nothing to send.

    What does not arrive is counted as lost and not sent again: it may have arrived.
    """
    timings = core.timings.take() if not link.dead else None
    if timings is None:
        return False
    try:
        yield from ask(core, link, timings, Done, deadline)
    except (BadRequest, Refused):  # the link is well; this one was not to the daemon's liking
        core.timings.lose(timings)
    except KVStoreError as error:
        link.fail(str(error))
        core.timings.lose(timings)
    return True
