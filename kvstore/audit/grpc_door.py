"""The public API, at each address of `grpc.listen`: who gets in there, and with which token.

Where no token is asked for, a caller may name any tenant: the socket's mode, or a certificate, is the lock
then. What is probed there is that a call in one tenant's name gets nothing of another's (`grpc_blocks`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvstore.audit.as_configured import judge_configuration
from kvstore.audit.calls import REFUSED, Calls
from kvstore.audit.channels import Reach, opened, plaintext, reach_of, shown_out
from kvstore.audit.grpc_blocks import judge_blocks
from kvstore.audit.grpc_visit import DEAF, Visit
from kvstore.audit.looks import judge_refusals
from kvstore.audit.modes import judge_socket
from kvstore.audit.probe import Probe, fresh_tokens
from kvstore.audit.verdicts import Door
from kvstore.config.doors import GRPC_KEYS
from kvstore.config.tokens import EVERYBODY
from kvstore.rpc.endpoints import Endpoint, endpoints

__all__ = ["drop", "grpc_doors"]

_CORE = ("roots_differ", "same_tokens_find_nothing", "foreign_keys_find_nothing")
_CORE_OF_TOKENS = ("unknown_token_is_refused", "token_opens_its_tenant_alone", "foreign_lease_is_refused")
_DENIED = ("PERMISSION_DENIED",)


def grpc_doors(probe: Probe, tls_root: Path | None) -> list[Door]:
    """One for each address. Saves a few blocks as both tenants through each.

    Args:
        probe: with the bearer tokens that there are; where callers need one, nothing but that can be probed
            without.
        tls_root: PEM file that certificates are checked against; None = `grpc.tls_certificate` itself.

    Raises:
        ConfigError: an address of `grpc.listen` that no daemon would take.
    """
    places = endpoints(probe.config)
    if not places:
        off = Door("grpc", "")
        judge_configuration(off, probe, GRPC_KEYS)
        off.skip("reached", "grpc.listen is empty: there is no such door")
        return [off]
    mine = {name: probe.bearers[name] for name in probe.pair.names if name in probe.bearers}
    return [_door(probe, place, mine, tls_root) for place in places]


def _door(probe: Probe, place: Endpoint, tokens: Mapping[str, str], tls_root: Path | None) -> Door:
    door, tcp, limits = Door("grpc", place.address), place.path is None, probe.config.grpc
    judge_configuration(door, probe, GRPC_KEYS)
    if place.path is not None:
        judge_socket(door, "socket_mode", place.path, _need_besides(probe))
    reach = reach_of(probe.config, place, tls_root)
    if tcp and limits.tls_certificate and reach.target:
        _plaintext(door, probe, reach)
    if reach.why_not:
        door.skip("reached", reach.why_not, control=True)
        return door
    asks = bool(limits.tokens_file) and (tcp or limits.tokens_on_unix)
    with opened(reach) as channel:
        _visited(Visit(door, probe, Calls(channel, probe.namespace, tokens), tcp, asks, tokens), reach)
    return door


def _need_besides(probe: Probe) -> str:
    """What a caller of a Unix socket needs besides its mode; "" = nothing."""
    if probe.config.grpc.tokens_on_unix:
        return "a token (grpc.tokens_on_unix)"
    bound = probe.pair.a.users and probe.pair.b.users
    return "a token, because both tenants name their users" if bound else ""


def _visited(visit: Visit, reach: Reach) -> None:
    door, limits = visit.door, visit.probe.config.grpc
    answer = visit.calls.plan(visit.calls.chain(visit.probe.pair.a.name, fresh_tokens()))
    if visit.tcp and limits.tls_clients:
        _no_certificate(door, reach, answer.code)
        if not answer.ok:
            why = "callers need a certificate, and the audit has none"
            door.skip("own_blocks", why, control=True)
            return
    elif answer.code in DEAF:
        door.skip("reached", f"nobody answers: {answer.code} {answer.said:.120}", control=True)
        return
    door.core.update(_CORE)
    bound = [tenant.name for tenant in (visit.probe.pair.a, visit.probe.pair.b) if tenant.users]
    if bound and not visit.tcp and not visit.asks:
        _other_users(visit, bound)
    _services(visit)
    if visit.checks_tokens:
        door.core.update(_CORE_OF_TOKENS if visit.asks else ())
        _strangers(visit)
        _bound(visit)
    if visit.tcp or visit.asks:
        door.core.add("administration_is_refused")
        _administration(visit)
    if visit.asks and visit.missing:
        need = " ".join(f"--token-file {name}=PATH" for name in visit.missing)
        door.skip("own_blocks", f"callers need a token here: give one of each tenant, {need}", control=True)
        return
    judge_blocks(visit)


# ---- strangers --------------------------------------------------------------------------------------------


def _plaintext(door: Door, probe: Probe, reach: Reach) -> None:
    door.core.add("plaintext_is_refused")
    with plaintext(reach.target) as channel:
        calls = Calls(channel, probe.namespace, {})
        code = calls.plan(calls.chain(probe.pair.a.name, fresh_tokens())).code
    check, told = "plaintext_is_refused", f"a call without TLS: {code}"
    if code not in DEAF:  # a status of any other name was sent by whoever understood the call
        door.judge(check, False, told)
    elif reach.why_not or code != "UNAVAILABLE":
        door.skip(check, told + ("; nor do hands shake with TLS there" if reach.why_not else ""))
    else:
        door.judge(check, True, told)


def _no_certificate(door: Door, reach: Reach, code: str) -> None:
    check, told = "no_certificate_is_refused", f"a caller without a certificate of grpc.tls_clients: {code}"
    door.core.add(check)
    if code not in DEAF:
        door.judge(check, False, told)
        return
    how = shown_out(reach)
    if code == "UNAVAILABLE" and how:
        door.judge(check, True, f"{told}, after a handshake: {how}")
    else:
        door.skip(check, told)


def _other_users(visit: Visit, names: list[str]) -> None:
    """Which user is at the other end of this socket is not known: who names its users needs a token."""
    codes = {}
    for name in names:
        answer = visit.calls.plan(visit.calls.chain(name, fresh_tokens()), "")
        codes[f"a call as {name}, which names its users, without a token"] = answer.code
    judge_refusals(visit.door, "other_users_are_refused", codes, "", REFUSED)


def _services(visit: Visit) -> None:
    """Health and reflection answer whoever reaches the address."""
    check, told = "standard_services_name_no_tenant", visit.calls.told_to_strangers()
    mute = [f"{what}: {answer.code}" for what, answer in told.items() if not answer.ok]
    said = " ".join(str(answer.reply) for answer in told.values())
    named = [name for name in visit.probe.pair.names if f'"{name}"' in said]
    words = f"what {' and '.join(told)} tell names {', '.join(named) or 'neither tenant'}"
    if mute and not named:
        visit.door.skip(check, "; ".join(mute))
    else:
        visit.door.judge(check, not named, words)


def _strangers(visit: Visit) -> None:
    """Callers whom nobody knows."""
    chain = visit.calls.chain(visit.probe.pair.a.name, fresh_tokens())
    if visit.asks:
        visit.door.core.add("no_token_is_refused")
        codes = {"a call without a token": visit.calls.plan(chain, "").code}
        judge_refusals(visit.door, "no_token_is_refused", codes, "", REFUSED)
    codes = {
        "a call with a token that nobody knows": visit.calls.plan(chain, f"audit-{os.urandom(24).hex()}").code
    }
    judge_refusals(visit.door, "unknown_token_is_refused", codes, "", REFUSED)


def _bound(visit: Visit) -> None:
    """A tenant's token opens that tenant alone, for whatever can be asked in a tenant's name."""
    check, names = "token_opens_its_tenant_alone", visit.probe.pair.names
    if visit.missing:
        visit.door.skip(check, f"no token of {', '.join(visit.missing)} was given (--token-file)")
        return
    # A token that the daemon does not know is refused as well, and says nothing of whom it would open.
    ends = [visit.in_the_name_of(other, mine) for mine, other in (names, names[::-1])]
    words = [f"the token of {mine} for {other}: " for mine, other in (names, names[::-1])]
    if ends[0] == ends[1]:
        judge_refusals(visit.door, check, ends[0], "each one's token for the other: ", _DENIED)
        return
    for told, word in zip(ends, words, strict=True):
        judge_refusals(visit.door, check, told, word, _DENIED)


def _administration(visit: Visit) -> None:
    """Verbs that change nothing here: a report, and dropping a namespace that there is not."""
    shown = {"no token": ""} | {f"the token of {name}": token for name, token in visit.tokens.items()}
    codes: dict[str, str] = {}
    for what, token in shown.items():
        status, drop_code = visit.calls.status(token).code, visit.calls.drop_nothing(token).code
        if status == drop_code:
            codes[f"Status and DropNamespace with {what}"] = status
        else:
            codes |= {f"Status with {what}": status, f"DropNamespace with {what}": drop_code}
    judge_refusals(visit.door, "administration_is_refused", codes, "", REFUSED)


# ---- the end ----------------------------------------------------------------------------------------------


def drop(probe: Probe, tls_root: Path | None) -> str:
    """Drop what the audit has saved, through the first address that lets it; what became of it, in words.

    What is refused is a warning in the daemon's log, and may be an alarm: nothing is tried that is likely to
    be. An administrator's token ("*") is the only one that is shown if there is one.
    """
    left, dropped = set(probe.pair.names), 0
    for place in endpoints(probe.config):
        reach = reach_of(probe.config, place, tls_root)
        if not left or reach.why_not:
            continue
        with opened(reach) as channel:
            calls = Calls(channel, probe.namespace, probe.bearers)
            for name in sorted(left):
                token = _token_to_drop(probe, place, name)
                answer = calls.drop(name, token) if token is not None else None
                if answer is not None and answer.ok:
                    left.remove(name)
                    dropped += int(answer.reply.dropped_blocks)
    if left:
        return f"its {probe.saved_blocks} blocks of 4 KiB are left to eviction: no gRPC door let it drop them"
    return f"{dropped} of its {probe.saved_blocks} blocks of 4 KiB are dropped"


def _token_to_drop(probe: Probe, place: Endpoint, tenant: str) -> str | None:
    """What to show; "" = no token, None = there is nothing to try."""
    if EVERYBODY in probe.bearers:
        return probe.bearers[EVERYBODY]
    config = probe.config
    bound = config.daemon.admins or any(each.users for each in config.tenants)
    if place.path is not None and not config.grpc.tokens_on_unix and not bound:
        return ""
    return probe.bearers.get(tenant)
