"""What an engine holds, in the hands of another tenant's: its lease, its reservation, its requests; and what
another tenant's keys do to one's own."""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from kvstore.audit.looks import REFUSALS, again, judge_refusals
from kvstore.audit.probe import Probe, fresh_tokens
from kvstore.audit.session import ProbeSession
from kvstore.audit.verdicts import Door
from kvstore.errors import BadRequest, KVStoreError, NotFound, Refused
from kvstore.keys import KeyChain
from kvstore.rpc import messages as m

__all__ = [
    "judge_foreign_extension",
    "judge_foreign_filling",
    "judge_foreign_lease",
    "judge_foreign_parent",
    "judge_foreign_request",
]


def judge_foreign_lease(door: Door, a: ProbeSession, b: ProbeSession, chain: KeyChain) -> None:
    """A lease of A, by its number."""
    lease = _lease(a, chain)
    if not lease:
        door.skip("foreign_lease_is_refused", f"{a.tenant} is granted no lease")
        return
    tries: dict[str, m.Request] = {
        "extend": m.Extend(lease, _positions(0, len(chain)), chain.keys.tobytes()),
        "fetch": m.Fetch(lease, 0, len(chain)),
        "report": m.Report(lease, _positions(0, len(chain))),
        "release": m.Release(lease),
    }
    ends = {what: b.refusal(body) for what, body in tries.items()}
    judge_refusals(door, "foreign_lease_is_refused", ends, f"{b.tenant}, on the lease of {a.tenant}: ")
    reply = a.ask(m.Fetch(lease, 0, len(chain)))
    lives = isinstance(reply, m.Fetched)
    told = "can still fetch under it" if lives else f"has lost it: {getattr(reply, 'message', '')}"
    door.judge("foreign_lease_lives_on", lives, f"{a.tenant} {told}")
    a.ask(m.Release(lease))


def _lease(session: ProbeSession, chain: KeyChain, more: int = 0) -> int:
    """Of what is known of a chain; 0 = none was granted."""
    found = again(lambda: session.lookup(chain, "", more), lambda reply: bool(getattr(reply, "lease", 0)))
    return int(getattr(found, "lease", 0))


def _positions(start: int, stop: int) -> bytes:
    return np.arange(start, stop, dtype="<u4").tobytes()


def judge_foreign_request(door: Door, a: ProbeSession, b: ProbeSession, chain: KeyChain) -> None:
    """What was decided for a request is told to its own tenant."""
    request = f"audit-{os.urandom(8).hex()}"
    found = again(lambda: a.lookup(chain, request), lambda reply: bool(getattr(reply, "lease", 0)))
    if getattr(found, "lease", 0):
        a.ask(m.Release(found.lease))
    if a.refusal(m.Explain(request)):
        door.skip("foreign_request_is_not_told", f"{a.tenant} itself is not told of its request")
        return
    ends = {"explain": b.refusal(m.Explain(request))}
    judge_refusals(door, "foreign_request_is_not_told", ends, f"{b.tenant}, of a request of {a.tenant}: ")


def judge_foreign_filling(door: Door, probe: Probe, a: ProbeSession, b: ProbeSession) -> None:
    """Slots that A has reserved and not written: B can neither make them readable nor take them away."""
    check, chain = "foreign_filling_is_refused", probe.chain(a.roots["own"], fresh_tokens())
    try:
        got = again(lambda: a.reserve(chain), lambda reply: bool(reply.token))
    except KVStoreError as error:
        door.skip(check, f"{a.tenant} cannot reserve: {error}")
        return
    if not got.token:
        door.skip(check, f"{a.tenant} got no slots: {got.busy or got.reason}")
        return
    tries: dict[str, m.Request] = {
        "publish": m.Publish(got.token, len(chain), True),
        "abort": m.Abort(got.token),
    }
    ends = {what: b.refusal(body) for what, body in tries.items()}
    words = f"{b.tenant}, on the reservation of {a.tenant}: "
    early = a.look(chain)
    if early.blocks:
        door.judge(check, False, f"{words}{early.blocks} unwritten blocks became readable")
    elif early.unanswered:
        door.skip(check, f"whether unwritten blocks became readable is not known: {early.unanswered}")
    else:
        judge_refusals(door, check, ends, words)
    saved = a.publish(got)
    probe.saved_blocks += saved.ready
    told = f"{a.tenant} publishes {saved.ready} of its {len(chain)} blocks {saved.reason}".rstrip()
    door.judge("foreign_filling_lives_on", saved.ready == len(chain), told)


def judge_foreign_extension(door: Door, probe: Probe, b: ProbeSession, chain: KeyChain) -> None:
    """A lease of B's own blocks, which B says go on with A's."""
    check, blocks = "foreign_keys_extend_nothing", len(chain)
    own = probe.chain(b.roots["own"], probe.tokens[b.tenant])
    lease = _lease(b, own, more=blocks)
    if not lease:
        door.skip(check, f"{b.tenant} is granted no lease on its own blocks")
        return
    reply = b.ask(m.Extend(lease, _positions(blocks, 2 * blocks), chain.keys.tobytes()))
    b.ask(m.Release(lease))
    words = f"{b.tenant}, whose lease is said to go on with the keys of the other,"
    if isinstance(reply, m.Failed):
        judge_refusals(door, check, {"extend": reply.status}, f"{words} ", REFUSALS)
        return
    found = int(getattr(reply, "blocks", 0))
    door.judge(check, found <= blocks, f"{words} has {found} blocks, {blocks} of its own")


def judge_foreign_parent(door: Door, probe: Probe, b: ProbeSession, chain: KeyChain) -> None:
    """Blocks of B that are said to continue A's; behind its own they find slots."""
    check = "foreign_parent_takes_no_save"
    own = probe.chain(b.roots["own"], probe.tokens[b.tenant])
    got: dict[str, bool] = {}
    for whose, parent in (("own", own.keys[-1].tobytes()), ("foreign", chain.keys[-1].tobytes())):
        more = probe.chain(parent, fresh_tokens())
        keys = KeyChain(b.roots["own"], more.keys)
        try:
            reply = again(partial(b.reserve, keys, parent), _settled)
        except KVStoreError as error:
            words = f"a save of {b.tenant} behind the {whose} blocks: {error}"
            if whose == "foreign" and isinstance(error, BadRequest | Refused | NotFound):
                door.judge(check, True, words)
            else:
                door.skip(check, words)
            return
        got[whose] = bool(reply.token)
        if reply.token:
            b.ask(m.Abort(reply.token))
        if whose == "own" and not reply.token:
            door.skip(check, f"{b.tenant} got no slots behind its own blocks: {reply.busy or reply.reason}")
            return
    told = "gets slots" if got["foreign"] else "gets none"
    door.judge(check, not got["foreign"], f"a save of {b.tenant} behind the blocks of the other {told}")


def _settled(reply: m.Reserved) -> bool:
    """Whether asking again would bring no more: a rate passes, an unknown parent does not."""
    return bool(reply.token) or not reply.busy
