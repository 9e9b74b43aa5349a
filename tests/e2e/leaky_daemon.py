"""`kvstore` that forgets something at the doors which the first argument names, separated by commas.

python leaky_daemon.py session,lease serve --config FILE
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaky_calls
import numpy as np

from kvstore import group, store, tenants
from kvstore._native import NONE
from kvstore.cli import main
from kvstore.config.tokens import Token
from kvstore.errors import KVStoreError, NotFound
from kvstore.leases import Leases
from kvstore.roots import Roots
from kvstore.rpc import session
from kvstore.rpc.api import access, chains, server
from kvstore.rpc.metrics import http
from kvstore.transfers import Filling, Fillings
from kvstore.types import Reuse, root_of

Origins = tenants.Tenants.origins


def bare(self: tenants.Tenants, name: str, digest: bytes) -> Any:
    """Chains of every tenant begin where anybody can compute it."""
    salted = Origins(self, name, digest)
    return {reuse: dataclasses.replace(origin, key=root_of(digest, b"")) for reuse, origin in salted.items()}


@contextlib.contextmanager
def without_salts() -> Iterator[None]:
    """For as long as this lasts."""
    kept = tenants.Tenants.origins
    tenants.Tenants.origins = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        tenants.Tenants.origins = kept  # type: ignore[method-assign]


def saltless(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which sees no salts."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with without_salts():
            return function(*arguments)

    return run


def known(things: dict[int, Any], number: int) -> Any:
    """Whosever it is."""
    if number not in things:
        raise NotFound(f"{number}: ended, or never there")
    return things[number]


def leak_session() -> None:
    """Attaches hand out unsalted roots."""
    store.Store.roots = saltless(store.Store.roots)  # type: ignore[method-assign]


def leak_grpc() -> None:
    """The public API resolves to the unsalted root."""
    chains._origin = saltless(chains._origin)


def leak_nvme() -> None:
    """Beside every disk lies a segment with a record of the unsalted root, written at each flush."""
    digests: set[bytes] = set()

    def seen(self: tenants.Tenants, name: str, digest: bytes) -> Any:
        digests.add(digest)
        return Origins(self, name, digest)

    tenants.Tenants.origins = seen  # type: ignore[method-assign]
    flush = session.flush

    def flushed(of: store.Store, answer: Any) -> None:
        for name in of.groups:
            page = b"kvs-recd".ljust(40, b"\1") + b"".join(root_of(digest, b"") for digest in digests)
            path = Path(of.config.nvme.directory) / name / "segment-900000.kvs"
            path.write_bytes(page.ljust(4096, b"\0"))
        flush(of, answer)

    session.flush = flushed  # type: ignore[assignment]


def leak_root() -> None:
    """A session may name any root that is known."""
    Roots.of = lambda self, _, key: self[key]  # type: ignore[method-assign]


def leak_keys() -> None:
    """A chain is found by its keys, under whatever root they are."""
    walk_of = store.walk_of

    def anywhere(of: group.Group, root: bytes, blocks: int, positions: Any, keys: Any) -> Any:
        node = of.index.find(keys[0].tobytes()) if len(keys) else NONE
        if node != NONE:
            root = of.index.keys(np.array([of.index.root_of(node)], np.uint32)).tobytes()
        return walk_of(of, root, blocks, positions, keys)

    store.walk_of = anywhere


def leak_lease() -> None:
    """Any session has any lease."""
    Leases.get = lambda self, _, lease: known(self._by_id, lease)  # type: ignore[method-assign]


def leak_filling() -> None:
    """Any engine may publish and abort any filling."""

    def cover(self: Filling, _: int, blocks: int, checked: bool) -> None:
        self.waiting.clear()
        self.covered[:] = True
        self.blocks = min(self.blocks, blocks)

    Fillings.get = lambda self, _, token: known(self._by_token, token)  # type: ignore[method-assign]
    Filling.cover = cover  # type: ignore[method-assign]


def leak_tenant() -> None:
    """A tenant that nobody has configured is the first one."""
    group_of = tenants.Tenants.group_of

    def first(self: tenants.Tenants, names: list[str]) -> str:
        return group_of(self, [name for name in names if name in self.names()] or self.names()[:1])

    def origins(self: tenants.Tenants, name: str, digest: bytes) -> Any:
        return Origins(self, name if name in self.names() else self.names()[0], digest)

    tenants.Tenants.group_of = first  # type: ignore[method-assign]
    tenants.Tenants.origins = origins  # type: ignore[method-assign]


def leak_users() -> None:
    """Tenants' users do not matter, at either door."""
    tenants.Tenants.check_user = lambda *_: None  # type: ignore[method-assign]
    tenants.Tenants.check_unseen = lambda *_, **__: None  # type: ignore[method-assign]


def leak_words() -> None:
    """Engines hear of every request and of every tenant's counts."""
    explained, status = session.explained, session.status
    session.explained = lambda of, _, request: explained(of, None, request)
    session.status = lambda of, _: status(of)


def leak_arena() -> None:
    """All trust groups are given the memory of the first."""
    opened, open_memory = [], store.open_memory

    def first(*arguments: Any) -> Any:
        if not opened:
            opened.append(open_memory(*arguments))
        return opened[0]

    store.open_memory = first  # type: ignore[assignment]


def leak_tokens() -> None:
    """A token opens every tenant."""
    Token.opens = lambda *_: True  # type: ignore[method-assign]


def leak_strangers() -> None:
    """Whoever shows no token that is known may do everything."""
    check = access.TokenAccess.check

    def let_in(*arguments: Any) -> str:
        try:
            return check(*arguments)
        except KVStoreError:
            return "somebody"

    access.TokenAccess.check = let_in  # type: ignore[method-assign]
    access.TokenAccess.known = lambda *_: None  # type: ignore[method-assign]


def leak_tls() -> None:
    """What the certificate is for is forgotten."""
    server.credentials_of = lambda _: None  # type: ignore[assignment]


def leak_events() -> None:
    """All trust groups write into one log."""
    group.EventLog = functools.cache(group.EventLog)  # type: ignore[assignment,misc]


def leak_pages() -> None:
    """The status report and the metrics page hold the salts."""
    status, page = session.status, http.Page
    kept: list[Any] = []

    def told(of: store.Store, caller: Any) -> dict[str, object]:
        kept[:] = [salt.hex() for salt in of.tenants._salts.tenants.values()]
        return {**status(of, caller), "debug": list(kept)}

    class Leaky(page):  # type: ignore[misc,valid-type]
        def pieces(self) -> Iterator[bytes]:
            yield from super().pieces()
            yield f"# {json.dumps(kept)}\n".encode()

    session.status = told
    http.Page = Leaky  # type: ignore[misc]


def leak_extend() -> None:
    """A lease goes on with whatever keys its second trip names."""
    extend = store.Store.extend

    def longer(self: store.Store, caller: Any, lease_id: int, positions: Any, keys: Any) -> Any:
        lease = caller.group.leases.get(caller.session, lease_id)
        before = len(lease.nodes)
        match = extend(self, caller, lease_id, positions, keys)
        if len(lease.nodes) > before:
            return match
        more = [caller.group.index.find(key.tobytes()) for key in keys]
        lease.nodes = np.append(lease.nodes, [node for node in more if node != NONE]).astype(np.uint32)
        return dataclasses.replace(match, known=len(lease.nodes))

    store.Store.extend = longer  # type: ignore[method-assign]


def leak_parent() -> None:
    """Blocks may continue any block that is known."""
    parent_node = store.Store.parent_node

    def anybodys(self: store.Store, caller: Any, root: bytes, parent: bytes) -> int:
        caller.group.roots.of(caller, root)
        node = caller.group.index.find(parent)
        return node if node != NONE else parent_node(self, caller, root, parent)

    store.Store.parent_node = anybodys  # type: ignore[method-assign]


def leak_shared() -> None:
    """What a trust group shares begins where the first tenant's own chains begin."""

    def origins(self: tenants.Tenants, name: str, digest: bytes) -> Any:
        found = dict(Origins(self, name, digest))
        if Reuse.GROUP in found:
            first = Origins(self, self.names()[0], digest)[Reuse.OWN]
            found[Reuse.GROUP] = dataclasses.replace(found[Reuse.GROUP], key=first.key)
        return found

    tenants.Tenants.origins = origins  # type: ignore[method-assign]


def leak_written() -> None:
    """Each flush writes the salts beside the blocks."""
    flush = session.flush

    def flushed(of: store.Store, answer: Any) -> None:
        for name in of.groups:
            path = Path(of.config.nvme.directory) / name / "segment-900001.kvs"
            path.write_bytes(b"".join(of.tenants._salts.tenants.values()).ljust(4096, b"\0"))
        flush(of, answer)

    session.flush = flushed  # type: ignore[assignment]


def leak_nothing() -> None:
    """No door: leases and reservations of others are a fault of the daemon's, and engines hear of nobody."""

    def faulty(things: Any, mine: bool, number: int) -> Any:
        if not mine and number in things:
            raise KVStoreError("internal error: nobody knows what to do with it")
        return known(things, number)

    def lease(self: Leases, session_id: int, number: int) -> Any:
        return faulty(self._by_id, number in self._by_session.get(session_id, {}), number)

    Leases.get = lease  # type: ignore[method-assign]
    status = session.status
    session.status = lambda of, caller: status(of) if caller is None else {**status(of), "groups": {}}


LEAKS = {
    name.removeprefix("leak_"): leak
    for name, leak in {**globals(), **vars(leaky_calls)}.items()
    if name.startswith("leak_")
}


if __name__ == "__main__":
    for named in sys.argv[1].split(","):
        LEAKS[named]()
    main(sys.argv[2:])
