"""The public API, at each address of `grpc.listen`: strangers, tokens of the wrong tenant, and what a tenant
may find of another's blocks.

Where no token is asked for, a caller may name any tenant: the socket's mode, or a certificate, is the lock
then. What is probed there is that a call in one tenant's name gets nothing of another's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.audit.calls import REFUSED, Calls
from kvstore.audit.channels import Reach, opened, plaintext, reach_of
from kvstore.audit.looks import judge_look
from kvstore.audit.modes import judge_socket
from kvstore.audit.probe import BLOCKS, Probe, fresh_tokens
from kvstore.audit.session import ToolSession
from kvstore.audit.session_door import judge_roots
from kvstore.audit.verdicts import Door
from kvstore.errors import KVStoreError
from kvstore.rpc.endpoints import Endpoint, endpoints

__all__ = ["drop", "grpc_doors"]

# What a channel says of a peer that does not speak its language, or is silent.
_DEAF = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@dataclass(frozen=True, slots=True)
class _Visit:
    """One address.

    Attributes:
        tcp: it is no Unix socket.
        asks: whether a call without a token is to be refused.
        tokens: tenant → bearer token, of those that were given.
    """

    door: Door
    probe: Probe
    calls: Calls
    tcp: bool
    asks: bool
    tokens: Mapping[str, str]

    @property
    def checks_tokens(self) -> bool:
        """A token that is shown is looked at, whether or not it is asked for."""
        return bool(self.probe.config.grpc.tokens_file)

    @property
    def missing(self) -> list[str]:
        """Tenants whose token was not given."""
        return [name for name in self.probe.pair.names if name not in self.tokens]


def grpc_doors(probe: Probe, tokens: Mapping[str, str], tls_root: Path | None) -> list[Door]:
    """One for each address. Saves a few blocks as both tenants through each.

    Args:
        tokens: tenant → bearer token; where callers need one, nothing but that can be probed without. Others
            go unused.
        tls_root: PEM file that certificates are checked against; None = `grpc.tls_certificate` itself.

    Raises:
        ConfigError: an address of `grpc.listen` that no daemon would take.
    """
    places = endpoints(probe.config)
    if not places:
        off = Door("grpc", "")
        off.skip("reached", "grpc.listen is empty: there is no such door")
        return [off]
    mine = {name: tokens[name] for name in probe.pair.names if name in tokens}
    return [_door(probe, place, mine, tls_root) for place in places]


def _door(probe: Probe, place: Endpoint, tokens: Mapping[str, str], tls_root: Path | None) -> Door:
    door = Door("grpc", place.address)
    if place.path is not None:
        judge_socket(door, "socket_mode", place.path, _need_besides(probe))
    reach = reach_of(probe.config, place, tls_root)
    if place.path is None and probe.config.grpc.tls_certificate and reach.target:
        _plaintext(door, probe, reach)
    if reach.why_not:
        door.skip("reached", reach.why_not, control=True)
        return door
    tcp, limits = place.path is None, probe.config.grpc
    asks = bool(limits.tokens_file) and (tcp or limits.tokens_on_unix)
    with opened(reach) as channel:
        visit = _Visit(door, probe, Calls(channel, probe.namespace, tokens), tcp, asks, tokens)
        _visited(visit)
    return door


def _need_besides(probe: Probe) -> str:
    """What a caller of a Unix socket needs besides its mode; "" = nothing."""
    if probe.config.grpc.tokens_on_unix:
        return "a token (grpc.tokens_on_unix)"
    bound = probe.pair.a.users and probe.pair.b.users
    return "a token, because both tenants name their users" if bound else ""


def _visited(visit: _Visit) -> None:
    door, limits = visit.door, visit.probe.config.grpc
    answer = visit.calls.plan(visit.calls.chain(visit.probe.pair.a.name, fresh_tokens()))
    if visit.tcp and limits.tls_clients:
        told = "a caller without a certificate of grpc.tls_clients"
        door.judge("no_certificate_is_refused", answer.code in _DEAF, f"{told}: {answer.code}")
        if not answer.ok:
            door.skip("own_blocks", f"callers need a certificate, and the audit is {told}", control=True)
            return
    elif answer.code in _DEAF:
        door.skip("reached", f"nobody answers: {answer.code} {answer.said:.120}", control=True)
        return
    bound = [tenant.name for tenant in (visit.probe.pair.a, visit.probe.pair.b) if tenant.users]
    if bound and not visit.tcp and not visit.asks:
        _other_users(visit, bound)
    if visit.checks_tokens:
        _strangers(visit)
        _bound(visit)
    if visit.tcp or visit.asks:
        _administration(visit)
    if visit.asks and visit.missing:
        need = " ".join(f"--token-file {name}=PATH" for name in visit.missing)
        door.skip("own_blocks", f"callers need a token here: give one of each tenant, {need}", control=True)
        return
    _keys(visit)


# ---- strangers --------------------------------------------------------------------------------------------


def _plaintext(door: Door, probe: Probe, reach: Reach) -> None:
    with plaintext(reach.target) as channel:
        calls = Calls(channel, probe.namespace, {})
        code = calls.plan(calls.chain(probe.pair.a.name, fresh_tokens())).code
    door.judge("plaintext_is_refused", code in _DEAF, f"a call without TLS: {code}")


def _other_users(visit: _Visit, names: list[str]) -> None:
    """Which user is at the other end of this socket is not known: who names its users needs a token."""
    codes = {}
    for name in names:
        answer = visit.calls.plan(visit.calls.chain(name, fresh_tokens()), "")
        codes[f"a call as {name}, which names its users, without a token"] = answer.code
    _judge_codes(visit.door, "other_users_are_refused", codes)


def _strangers(visit: _Visit) -> None:
    """Callers whom nobody knows."""
    chain = visit.calls.chain(visit.probe.pair.a.name, fresh_tokens())
    if visit.asks:
        code = visit.calls.plan(chain, "").code
        visit.door.judge("no_token_is_refused", code == "UNAUTHENTICATED", f"a call without a token: {code}")
    code = visit.calls.plan(chain, f"audit-{os.urandom(24).hex()}").code
    told = f"a call with a token that nobody knows: {code}"
    visit.door.judge("unknown_token_is_refused", code == "UNAUTHENTICATED", told)


def _bound(visit: _Visit) -> None:
    """A tenant's token opens that tenant alone."""
    check, names = "token_opens_its_tenant_alone", visit.probe.pair.names
    if visit.missing:
        visit.door.skip(check, f"no token of {', '.join(visit.missing)} was given (--token-file)")
        return
    answers = {}
    for mine, other in (names, names[::-1]):
        said = visit.calls.plan(visit.calls.chain(other, fresh_tokens()), visit.tokens[mine]).code
        answers[f"the token of {mine} for {other}"] = said
    told = "; ".join(f"{what}: {code}" for what, code in answers.items())
    if "UNAUTHENTICATED" in answers.values():
        visit.door.skip(check, f"{told}; a token that the daemon does not know says nothing")
        return
    visit.door.judge(check, all(code == "PERMISSION_DENIED" for code in answers.values()), told)


def _administration(visit: _Visit) -> None:
    """Verbs that change nothing here: a report, and dropping a namespace that there is not."""
    shown = {"no token": ""} | {f"the token of {name}": token for name, token in visit.tokens.items()}
    codes: dict[str, str] = {}
    for what, token in shown.items():
        status, drop_code = visit.calls.status(token).code, visit.calls.drop_nothing(token).code
        if status == drop_code:
            codes[f"Status and DropNamespace with {what}"] = status
        else:
            codes |= {f"Status with {what}": status, f"DropNamespace with {what}": drop_code}
    _judge_codes(visit.door, "administration_is_refused", codes)


def _judge_codes(door: Door, check: str, codes: Mapping[str, str], who: str = "") -> None:
    """Calls that must all be refused: what was asked → how it ended."""
    told = who + "; ".join(f"{what}: {code}" for what, code in codes.items())
    if any(code in _DEAF for code in codes.values()):
        door.skip(check, told)
        return
    door.judge(check, all(code in REFUSED for code in codes.values()), told)


# ---- keys -------------------------------------------------------------------------------------------------


def _keys(visit: _Visit) -> None:
    """What `a` has saved through this address, asked for by `b`."""
    door, calls, probe = visit.door, visit.calls, visit.probe
    first, second = probe.pair.names
    tokens = _saved(visit)
    own = calls.look(calls.chain(first, tokens))
    proven = door.control("own_blocks", own.blocks == BLOCKS, f"{first} {own.words} of its {BLOCKS}")
    mine, other = (calls.plan(calls.chain(name, tokens)) for name in (first, second))
    if not mine.ok or not other.ok:
        name, answer = (second, other) if mine.ok else (first, mine)
        door.skip("roots_differ", f"a call of {name}: {answer.code} {answer.said:.160}", control=True)
        return
    judge_roots(door, probe, {f"{first} (own)": mine.reply.root, f"{second} (own)": other.reply.root})
    same = calls.chain(second, tokens)
    what = f"with the tokens of {first}"
    judge_look(door, "same_tokens_find_nothing", calls.look(same), f"{second}, {what},")
    brought = calls.brought(same)
    if brought.unanswered:
        door.skip("same_tokens_fetch_nothing", f"a fetch of {second}: {brought.unanswered}")
    else:
        told = f"a fetch of {second} {what} brings {brought.blocks} bytes"
        door.judge("same_tokens_fetch_nothing", not brought.blocks, told)
    look = calls.look(calls.keyed(second, probe.chain(mine.reply.root, tokens).keys))
    judge_look(door, "foreign_keys_find_nothing", look, f"{second}, with the keys of {first},")
    if proven:
        _foreign_lease(visit, tokens)
    _foreign_events(visit)


def _saved(visit: _Visit) -> NDArray[np.uint32]:
    """Tokens of what the first tenant has: saved here, or by its session where its token may only read."""
    first, tokens = visit.probe.pair.a.name, fresh_tokens()
    answer = visit.calls.save(first, tokens)
    if answer.ok:
        ready = int(answer.reply.ready)
        visit.probe.saved_blocks += ready
        if ready < BLOCKS:
            visit.door.skip(
                "save", f"a save of {first} made {ready} of {BLOCKS} readable {answer.reply.reason}"
            )
        return tokens
    visit.door.skip("save", f"a save of {first}: {answer.code}; looking for what its session saved")
    return visit.probe.tokens[first]


def _foreign_lease(visit: _Visit, tokens: NDArray[np.uint32]) -> None:
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
    _judge_codes(
        door, "foreign_lease_is_refused", codes, f"with the token of {second}, on a lease of {first}: "
    )
    answer = calls.renew(lease, first)
    lives = answer.ok and lease not in answer.reply.ended
    door.judge("foreign_lease_lives_on", lives, f"{first} {'still has it' if lives else 'has lost it'}")
    calls.release(lease, first)


def _foreign_events(visit: _Visit) -> None:
    """Events tell the keys of a whole trust group: no other group must hear of them, nor a single tenant."""
    door, pair, check = visit.door, visit.probe.pair, "foreign_events_are_not_told"
    if not pair.together:
        _events_of_the_other_group(visit, check)
    elif not visit.checks_tokens or visit.missing:
        why = f"both are of trust group {pair.a.group}, and no token says here who calls"
        door.skip(check, f"{why}: its events tell the keys of all its tenants")
    else:
        code = visit.calls.subscribe(pair.b.name).code
        told = f"a subscription of {pair.b.name} to the keys of its whole trust group: {code}"
        if code in _DEAF:
            door.skip(check, told)
        else:
            door.judge(check, code in REFUSED, told)


def _events_of_the_other_group(visit: _Visit, check: str) -> None:
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
        tokens = fresh_tokens()
        saved, asked = visit.calls.save(name, tokens), visit.calls.plan(visit.calls.chain(name, tokens))
        if not (saved.ok and asked.ok and saved.reply.ready == BLOCKS):
            door.skip(check, f"a save of {name}: {saved.code}")
            return
        probe.saved_blocks += BLOCKS
        keys = [key.tobytes() for key in probe.chain(asked.reply.root, tokens).keys]
        told[name], last = set(keys), keys[-1]
    heard = visit.calls.events(second, probe.epoch, sequence, last)
    if not heard or heard[-1] != last:
        door.skip(check, f"{second} is not told of its own keys either")
        return
    foreign = told[first] & set(heard)
    door.judge(check, not foreign, f"{second} is told {len(foreign)} of the keys that {first} has just saved")


# ---- the end ----------------------------------------------------------------------------------------------


def drop(probe: Probe, tokens: Mapping[str, str], tls_root: Path | None) -> str:
    """Drop what the audit has saved, through the first address that lets it; what became of it, in words.

    Args:
        tokens: all that were given, that of an administrator ("*") included.
    """
    left, dropped = set(probe.pair.names), 0
    for place in endpoints(probe.config):
        reach = reach_of(probe.config, place, tls_root)
        if not left or reach.why_not:
            continue
        with opened(reach) as channel:
            calls = Calls(channel, probe.namespace, tokens)
            for name in sorted(left):
                answers = (calls.drop(name, token) for token in ("", *tokens.values()))
                done = next((answer for answer in answers if answer.ok), None)
                if done is not None:
                    left.remove(name)
                    dropped += int(done.reply.dropped_blocks)
    if left:
        return f"its {probe.saved_blocks} blocks of 4 KiB are left to eviction: no gRPC door let it drop them"
    return f"{dropped} of its {probe.saved_blocks} blocks of 4 KiB are dropped"
