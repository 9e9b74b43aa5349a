"""What one tenant has saved through an address of the public API, asked for by the other: by every verb that
takes a chain, with its token ids and with its keys.

Each time the tenant itself is asked the same first: a verb that does not find a chain where it is proves
nothing by not finding it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvstore.audit.calls import REFUSED
from kvstore.audit.grpc_visit import DEAF, Visit
from kvstore.audit.looks import REFUSALS, Look, judge_refusals
from kvstore.audit.probe import BLOCKS, SavedChain, fresh_tokens
from kvstore.audit.session import ToolSession
from kvstore.audit.session_door import judge_roots
from kvstore.errors import KVStoreError
from kvstore.types import Reuse
from kvstore.v1 import store_pb2 as pb

__all__ = ["judge_blocks"]

U32 = NDArray[np.uint32]


def judge_blocks(visit: Visit) -> None:
    """Save as both tenants, and try to get from one to the other."""
    door, calls, probe = visit.door, visit.calls, visit.probe
    first, second = probe.pair.names
    if probe.no_room:
        door.skip("own_blocks", probe.no_room, control=True)
        return
    tokens = _saved(visit, first)
    mine, other = (calls.plan(calls.chain(name, tokens)) for name in (first, second))
    if not mine.ok or not other.ok:
        name, answer = (second, other) if mine.ok else (first, mine)
        door.skip("roots_differ", f"a call of {name}: {answer.code} {answer.said:.160}", control=True)
        return
    judge_roots(door, probe, {f"{first} (own)": mine.reply.root, f"{second} (own)": other.reply.root})
    keys = probe.chain(mine.reply.root, tokens).keys
    proven = _own_blocks(visit, "own_blocks", calls.chain(first, tokens), calls.keyed(first, keys))
    _judge_looks(visit, "same_tokens", calls.looks(calls.chain(second, tokens)), f"the tokens of {first}")
    _judge_looks(visit, "foreign_keys", calls.looks(calls.keyed(second, keys)), f"the keys of {first}")
    _group_root(visit, tokens)
    if proven:
        _foreign_lease(visit, tokens)
    _own_blocks_of_the_other(visit)
    _foreign_saves(visit)
    if proven:
        look = calls.looks(calls.chain(first, tokens))["Lookup"]
        told = f"{first} {look.words} of its {BLOCKS} after all that"
        door.judge("own_blocks_live_on", look.blocks == BLOCKS, told)
    _foreign_events(visit)


def _saved(visit: Visit, name: str) -> U32:
    """Tokens of what a tenant has: saved here, or by its session where its token may only read."""
    probe, tokens = visit.probe, fresh_tokens()
    answer = visit.calls.save(visit.calls.chain(name, tokens))
    if answer.ok:
        ready = int(answer.reply.ready)
        probe.saved_blocks += ready
        if ready == BLOCKS:
            probe.grpc_saved.append(SavedChain(name, tokens))
        else:
            told = f"a save of {name} made {ready} of {BLOCKS} readable {answer.reply.reason}"
            visit.door.skip("save", told)
        return tokens
    visit.door.skip("save", f"a save of {name}: {answer.code}; looking for what its session saved")
    return probe.tokens[name]


def _own_blocks(visit: Visit, check: str, *forms: pb.Chain) -> bool:
    """Control: every verb finds a tenant's blocks, by their tokens and by their keys."""
    looks = {
        f"{verb} by {what}": look
        for what, chain in zip(("tokens", "keys"), forms, strict=True)
        for verb, look in visit.calls.looks(chain).items()
    }
    less = [f"{what} {look.words}" for what, look in looks.items() if look.blocks != BLOCKS]
    told = "; ".join(less) if less else f"finds {BLOCKS} blocks of its {BLOCKS} by every verb"
    return visit.door.control(check, not less, f"{forms[0].tenant} {told}")


def _own_blocks_of_the_other(visit: Visit) -> None:
    calls, probe, name = visit.calls, visit.probe, visit.probe.pair.b.name
    tokens = _saved(visit, name)
    asked = calls.plan(calls.chain(name, tokens))
    if not asked.ok:
        visit.door.control("own_blocks_of_the_other", False, f"a call of {name}: {asked.code}")
        return
    keyed = calls.keyed(name, probe.chain(asked.reply.root, tokens).keys)
    _own_blocks(visit, "own_blocks_of_the_other", calls.chain(name, tokens), keyed)


def _judge_looks(visit: Visit, what: str, looks: Mapping[str, Look], words: str) -> None:
    """Questions that must find nothing, whether they are let in or not; a Fetch is a check of its own."""
    second = visit.probe.pair.b.name
    for check, verbs in ((f"{what}_find_nothing", ("Plan", "Lookup")), (f"{what}_fetch_nothing", ("Fetch",))):
        told = "; ".join(f"{verb} {looks[verb].words}" for verb in verbs)
        detail = f"{second}, with {words}: {told}"
        found = any(looks[verb].blocks for verb in verbs)
        if not found and any(looks[verb].unanswered for verb in verbs):
            visit.door.skip(check, detail)
        else:
            visit.door.judge(check, not found, detail)


def _group_root(visit: Visit, tokens: U32) -> None:
    """What a tenant has under its own root is not shared by declaration."""
    check, b = "group_root_finds_nothing", visit.probe.pair.b
    if b.reuse is not Reuse.GROUP:
        visit.door.skip(check, f"{b.name} shares nothing with its trust group (its reuse is {b.reuse})")
        return
    looks = visit.calls.looks(visit.calls.chain(b.name, tokens, pb.REUSE_GROUP))
    told = "; ".join(f"{verb} {look.words}" for verb, look in looks.items())
    detail = f"{b.name}, under the root of group {b.group}: {told}"
    found = any(look.blocks for look in looks.values())
    if not found and any(look.unanswered for look in looks.values()):
        visit.door.skip(check, detail)
    else:
        visit.door.judge(check, not found, detail)


def _foreign_saves(visit: Visit) -> None:
    """A save says which blocks were there before it: of another tenant's it must not know."""
    check, calls, probe = "foreign_blocks_are_not_told", visit.calls, visit.probe
    first, second = probe.pair.names
    tokens = fresh_tokens()  # of its own: the other tenant saves them, too, under its root
    mine = calls.chain(first, tokens)
    saved, asked = calls.save(mine), calls.plan(mine)
    if not (saved.ok and asked.ok and saved.reply.ready == BLOCKS):
        visit.door.skip(check, f"a save of {first}: {saved.code}")
        return
    probe.saved_blocks += BLOCKS
    keys = probe.chain(asked.reply.root, tokens).keys
    told, known, odd = [], 0, False
    for what, chain in (("tokens", calls.chain(second, tokens)), ("keys", calls.keyed(second, keys))):
        answer = calls.save(chain)
        if not answer.ok:
            odd = odd or answer.code not in REFUSALS
            told.append(f"with its {what}: {answer.code}")
            continue
        probe.saved_blocks += int(answer.reply.ready)
        there = int(answer.reply.filled) + int(answer.reply.elsewhere)
        known += there
        told.append(f"with its {what}: {there} were there")
    detail = f"a save by {second} of what {first} has, {'; '.join(told)}"
    if odd and not known:
        visit.door.skip(check, detail)
    else:
        visit.door.judge(check, not known, detail)


def _foreign_lease(visit: Visit, tokens: U32) -> None:
    door, calls = visit.door, visit.calls
    first, second = visit.probe.pair.names
    if not visit.checks_tokens or visit.missing:
        why = "no token says here who calls"
        if visit.checks_tokens:
            why = f"no token of {', '.join(visit.missing)} was given"
        door.skip("foreign_lease_is_refused", f"{why}: a lease is as secret as its 16 random bytes")
        return
    granted = calls.lookup(calls.chain(first, tokens))
    if not granted.ok or not granted.reply.lease:
        door.skip("foreign_lease_is_refused", f"{first} was granted no lease: {granted.code}")
        return
    lease = granted.reply.lease
    codes = {
        "fetch": calls.fetch(lease, second).code,
        "renew": calls.renew(lease, second).code,
        "release": calls.release(lease, second).code,
    }
    words = f"with the token of {second}, on a lease of {first}: "
    judge_refusals(door, "foreign_lease_is_refused", codes, words, REFUSED)
    answer = calls.renew(lease, first)
    lives = answer.ok and lease not in answer.reply.ended
    if answer.code in DEAF:
        door.skip("foreign_lease_lives_on", f"{first} is not told: {answer.code}")
    else:
        door.judge("foreign_lease_lives_on", lives, f"{first} {'still has it' if lives else 'has lost it'}")
    calls.release(lease, first)


def _foreign_events(visit: Visit) -> None:
    """Events tell the keys of a whole trust group: no other group must hear of them, nor a single tenant."""
    door, pair, check = visit.door, visit.probe.pair, "foreign_events_are_not_told"
    if not pair.together:
        _events_of_the_other_group(visit, check)
    elif not visit.checks_tokens or visit.missing:
        why = f"both are of trust group {pair.a.group}, and no token says here who calls"
        door.skip(check, f"{why}: its events tell the keys of all its tenants")
    else:
        codes = {"its whole trust group": visit.calls.subscribe(pair.b.name).code}
        judge_refusals(door, check, codes, f"a subscription of {pair.b.name} to the keys of ", REFUSED)


def _events_of_the_other_group(visit: Visit, check: str) -> None:
    door, probe = visit.door, visit.probe
    first, second = probe.pair.names
    try:
        with ToolSession(probe) as session:
            sequence = int(session.status()["groups"][probe.pair.b.group]["events"])
    except (KVStoreError, KeyError) as error:
        door.skip(check, f"no place in the events to begin at: {error}")
        return
    told: dict[str, set[bytes]] = {}
    last = b""
    for name in (first, second):
        chain = visit.calls.chain(name, fresh_tokens())
        saved, asked = visit.calls.save(chain), visit.calls.plan(chain)
        if not (saved.ok and asked.ok and saved.reply.ready == BLOCKS):
            door.skip(check, f"a save of {name}: {saved.code}")
            return
        probe.saved_blocks += BLOCKS
        ids = np.array(chain.tokens.ids, np.uint32)
        keys = [key.tobytes() for key in probe.chain(asked.reply.root, ids).keys]
        told[name], last = set(keys), keys[-1]
    heard = visit.calls.events(second, probe.epoch, sequence, last)
    if not heard or heard[-1] != last:
        door.skip(check, f"{second} is not told of its own keys either")
        return
    foreign = told[first] & set(heard)
    door.judge(check, not foreign, f"{second} is told {len(foreign)} of the keys that {first} has just saved")
