"""The Unix socket of engines: two of them, each of another tenant, and all that one may try with the other's.

Whoever may open this socket may name any configured tenant: its mode is the lock. What is probed here is that
an engine which named one tenant gets nothing of another's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from kvstore.audit.looks import judge_look, judge_refusals
from kvstore.audit.modes import judge_socket, user_of
from kvstore.audit.probe import LAYOUT, Probe, fresh_tokens
from kvstore.audit.session import ProbeSession
from kvstore.audit.session_holdings import (
    judge_foreign_extension,
    judge_foreign_filling,
    judge_foreign_lease,
    judge_foreign_parent,
    judge_foreign_request,
)
from kvstore.audit.verdicts import Door
from kvstore.config import TenantConfig, user_ids
from kvstore.errors import KVStoreError, Refused
from kvstore.keys import KeyChain
from kvstore.rpc import messages as m

__all__ = ["judge_roots", "session_door"]

_NOBODY = 65_534
_CORE = (
    "same_tokens_find_nothing",
    "roots_differ",
    "foreign_root_is_refused",
    "foreign_keys_find_nothing",
    "foreign_lease_is_refused",
    "foreign_filling_is_refused",
    "unknown_tenant_is_refused",
)


def session_door(probe: Probe) -> Door:
    """Save as both tenants, and try to get from one to the other.

    Sets the probe's roots, tokens and the daemon's user. Takes one page of the arena a block, unless the
    probe says that there is no room: then all is left out that needs blocks.

    Raises:
        KVStoreError: a tenant cannot attach: then there is nothing to audit as.
    """
    door, pair = Door("session", f"unix:{probe.socket}", core=set(_CORE)), probe.pair
    users = all(tenant.users for tenant in (pair.a, pair.b))
    judge_socket(door, "socket_mode", probe.socket, "to be one of the tenants' users" if users else "")
    prove = not probe.no_room
    with (
        ProbeSession(probe, pair.a.name, prove=prove) as a,
        ProbeSession(probe, pair.b.name, prove=prove) as b,
    ):
        for session in (a, b):
            if "own" not in session.roots:
                raise Refused(
                    f"tenants: {session.tenant} reuses nothing on this daemon; use its own --config"
                )
        probe.daemon_uid = a.daemon_uid
        probe.roots = {session.tenant: session.roots["own"] for session in (a, b)}
        if probe.no_room:
            door.skip("own_blocks", probe.no_room, control=True)
        else:
            probe.tokens = {session.tenant: fresh_tokens() for session in (a, b)}
            _blocks(door, probe, a, b)
            _foreign_counts(door, a, b)
        given = {f"{s.tenant} ({reuse})": root for s in (a, b) for reuse, root in s.roots.items()}
        judge_roots(door, probe, given)
        _arenas(door, probe, a, b)
    _unknown_tenant(door, probe)
    _other_users(door, probe)
    return door


def _blocks(door: Door, probe: Probe, a: ProbeSession, b: ProbeSession) -> None:
    chain = probe.chain(probe.roots[a.tenant], probe.tokens[a.tenant])
    found = _own_blocks(door, "own_blocks", probe, a)
    _nothing_found(door, probe, b, chain)
    _foreign_root(door, b, chain)
    look = b.look(KeyChain(b.roots["own"], chain.keys))
    what = f"{b.tenant}, with the keys of {a.tenant} under its own root,"
    judge_look(door, "foreign_keys_find_nothing", look, what)
    _group_root(door, probe, b)
    if found:
        judge_foreign_lease(door, a, b, chain)
        judge_foreign_request(door, a, b, chain)
    judge_foreign_filling(door, probe, a, b)
    if _own_blocks(door, "own_blocks_of_the_other", probe, b):
        judge_foreign_extension(door, probe, b, chain)
        judge_foreign_parent(door, probe, b, chain)


def judge_roots(door: Door, probe: Probe, given: dict[str, bytes]) -> None:
    """Roots as a door gave them: no two tenants have the same, and nobody can compute one without its salt.

    Args:
        given: "NAME (own)" or "NAME (group)" → root.
    """
    first, second = (given.get(f"{name} (own)") for name in probe.pair.names)
    told = "are the same" if first == second else "differ"
    door.judge("roots_differ", first != second, f"the roots of {' and '.join(probe.pair.names)} {told}")
    bare = [name for name, root in given.items() if root == probe.unsalted]
    told = f"none of {len(given)} roots is the unsalted one" if not bare else f"unsalted: {', '.join(bare)}"
    door.judge("roots_are_salted", not bare, told)
    names = [name for name in probe.pair.names if name in probe.salts and f"{name} (own)" in given]
    if not names:
        door.skip("roots_are_of_the_salts", probe.salts_unread or "their file has no salt of these tenants")
        return
    other = [name for name in names if given[f"{name} (own)"] != probe.namespace.root(probe.salts[name])]
    told = f"as computed from {probe.salts_place}"
    if other:
        told = (
            f"of {', '.join(other)} not what the salt in {probe.salts_place} makes: if that file was changed "
            "since the daemon started, restart it and audit again"
        )
    door.judge("roots_are_of_the_salts", not other, told)


def _own_blocks(door: Door, check: str, probe: Probe, session: ProbeSession) -> bool:
    """Control: a tenant saves its tokens and finds them, so that finding nothing means something."""
    chain = probe.chain(session.roots["own"], probe.tokens[session.tenant])
    saved = session.save(chain)
    probe.saved_blocks += saved.ready
    look = session.look(chain)
    told = f"{session.tenant} {look.words} of its {len(chain)}"
    if look.blocks < len(chain):
        told += f"; its save made {saved.ready} readable {saved.reason}".rstrip()
    return door.control(check, look.blocks == len(chain), told)


def _nothing_found(door: Door, probe: Probe, b: ProbeSession, chain: KeyChain) -> None:
    """The same tokens in the same namespace, asked by the other tenant."""
    look = b.look(probe.chain(b.roots["own"], probe.tokens[probe.pair.a.name]))
    what = f"{b.tenant}, with the {len(chain) * LAYOUT.block_tokens} tokens of {probe.pair.a.name},"
    if look.refused:
        door.skip("same_tokens_find_nothing", f"{what} may not even ask under its own root")
    else:
        judge_look(door, "same_tokens_find_nothing", look, what)


def _group_root(door: Door, probe: Probe, b: ProbeSession) -> None:
    """What a tenant has under its own root is not shared by declaration."""
    check = "group_root_finds_nothing"
    if "group" not in b.roots:
        door.skip(check, f"{b.tenant} shares nothing with its trust group (its reuse is own)")
        return
    look = b.look(probe.chain(b.roots["group"], probe.tokens[probe.pair.a.name]))
    what = f"{b.tenant}, with the tokens of {probe.pair.a.name} under the root of their group,"
    judge_look(door, check, look, what)


def _foreign_root(door: Door, b: ProbeSession, chain: KeyChain) -> None:
    look = b.look(chain)
    what = f"a lookup of {b.tenant} under the other's root"
    if look.unanswered:
        door.skip("foreign_root_is_refused", f"{what} {look.words}")
    else:
        told = look.words if look.refused else f"is let in, and {look.words}"
        door.judge("foreign_root_is_refused", bool(look.refused), f"{what} {told}")
    ends = {"a save under it": b.refusal(m.Reserve(chain.root, chain.root, chain.keys.tobytes()))}
    judge_refusals(door, "foreign_root_takes_no_save", ends, f"{b.tenant}, ")


def _foreign_counts(door: Door, a: ProbeSession, b: ProbeSession) -> None:
    """What an engine may ask of the daemon's state tells of its own tenants."""
    check, groups = "foreign_counts_are_not_told", b.status()["groups"]

    def told(tenant: str) -> list[str]:
        return [
            f"{name}.{what}"
            for name, group in groups.items()
            for what in ("tokens", "quotas")
            if tenant in group.get(what, {})
        ]

    if not told(b.tenant):
        door.skip(check, f"the status that an engine of {b.tenant} gets does not even name {b.tenant}")
        return
    found = told(a.tenant)
    said = f"holds {', '.join(found)} of {a.tenant}" if found else f"does not name {a.tenant}"
    door.judge(check, not found, f"the status that an engine of {b.tenant} gets {said}")


def _arenas(door: Door, probe: Probe, a: ProbeSession, b: ProbeSession) -> None:
    if probe.pair.together:
        door.skip(
            "arenas_differ",
            f"both are of trust group {probe.pair.a.group}, which has one arena: what either maps holds the "
            "other's bytes, too; tenants that do not trust each other's processes need groups of their own",
        )
        return
    shared = set(a.memory) & set(b.memory)
    told = f"{len(shared)} of the descriptors are the same memory" if shared else "no memory is in both"
    door.judge("arenas_differ", not shared, f"groups {probe.pair.a.group} and {probe.pair.b.group}: {told}")


def _unknown_tenant(door: Door, probe: Probe) -> None:
    name = f"audit-{os.urandom(8).hex()}"
    check, what = "unknown_tenant_is_refused", "an attach as a tenant that is not configured"
    try:
        ProbeSession(probe, name, prove=False).close()
    except Refused as error:
        door.judge(check, True, f"{what} is refused: {str(error).replace(name, '…')}")
    except KVStoreError as error:
        door.skip(check, f"{what} ended otherwise: {error}")
    else:
        door.judge(check, False, f"{what} is let in")


def _other_users(door: Door, probe: Probe) -> None:
    """A tenant that names its users is theirs alone; the kernel says who connects."""
    check = "other_users_are_refused"
    bound = [tenant for tenant in (probe.pair.a, probe.pair.b) if tenant.users]
    if not bound:
        door.skip(check, "neither tenant names its users (tenants.users): whoever opens the socket may be it")
        return
    if os.geteuid() != 0:
        door.skip(check, "only root can ask as another user of this machine; run as root")
        return
    let_in, refusals = [], []
    for tenant in bound:
        user = _stranger(tenant, probe)
        try:
            with _as_user(user):
                ProbeSession(probe, tenant.name, prove=False).close()
            let_in.append(f"{user_of(user)} as {tenant.name}")
        except Refused as error:  # by the daemon, or by the socket's mode
            refusals.append(str(error))
        except KVStoreError as error:
            door.skip(check, f"an attach as {user_of(user)} ended otherwise: {error}")
            return
    told = f"let in: {', '.join(let_in)}" if let_in else "; ".join(dict.fromkeys(refusals))
    door.judge(check, not let_in, told)


def _stranger(tenant: TenantConfig, probe: Probe) -> int:
    """A user who is none of the tenant's."""
    taken = user_ids(tenant.users, "tenants.users") | {0, probe.daemon_uid}
    return next(user for user in range(_NOBODY, 0, -1) if user not in taken)


@contextlib.contextmanager
def _as_user(user: int) -> Iterator[None]:
    """Until its end this process is another user to whoever it connects to."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
