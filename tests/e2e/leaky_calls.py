"""What `leaky_daemon` may forget at the public API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore import group, store
from kvstore._native import NONE
from kvstore.config.tokens import Token
from kvstore.errors import Unavailable
from kvstore.rpc.api import access, admin, asking, chains, holding, saving, server, service
from kvstore.rpc.metrics import http


def anywhere_known(of: group.Group, key: bytes) -> bytes | None:
    """The root under which a key is known, whosever it is."""
    node = of.index.find(key)
    return of.index.keys(np.array([of.index.root_of(node)], np.uint32)).tobytes() if node != NONE else None


def moved(asked: chains.Asked) -> chains.Asked:
    """The same question under the root where its first key is known."""
    root = anywhere_known(asked.group, asked.chain.keys[0].tobytes()) if len(asked) else None
    if root is None or asked.origin is None:
        return asked
    return dataclasses.replace(
        asked,
        origin=dataclasses.replace(asked.origin, key=root),
        chain=dataclasses.replace(asked.chain, root=root),
    )


def leak_plan() -> None:
    """A plan finds a chain by its keys, under whatever root they are; all other calls do not."""
    planned = asking.planned
    asking.planned = lambda epoch, asked, intent: planned(epoch, moved(asked), intent)


def leak_fetch() -> None:
    """A fetch of a chain does."""
    hold, grant = service.StoreService._hold, holding.Holdings.grant
    fetching: list[bool] = []

    async def held(self: service.StoreService, request: Any, context: Any) -> Any:
        fetching.append(True)
        try:
            return await hold(self, request, context)
        finally:
            fetching.pop()

    def granted(self: holding.Holdings, asked: chains.Asked, *more: Any) -> Any:
        return grant(self, moved(asked) if fetching else asked, *more)

    service.StoreService._hold = held  # type: ignore[method-assign]
    holding.Holdings.grant = granted  # type: ignore[method-assign]


def leak_verbs() -> None:
    """Whoever may do it at all may save and observe in anybody's name."""
    opens, check = Token.opens, access.TokenAccess.check

    def let_in(self: access.TokenAccess, peer: Any, verb: access.Verb, tenant: str) -> str:
        any_tenant = verb in (access.Verb.SAVE, access.Verb.OBSERVE)
        Token.opens = (lambda *_: True) if any_tenant else opens  # type: ignore[method-assign]
        return check(self, peer, verb, tenant)

    access.TokenAccess.check = let_in  # type: ignore[method-assign]


def leak_admin() -> None:
    """Whoever calls may drop, and nobody is told how the daemon is."""
    check = admin.AdminService._check

    def let_in(self: admin.AdminService, context: Any, what: str, tenant: str = "") -> None:
        if what == "Status":
            raise Unavailable("status: later")
        if what != "DropNamespace":
            check(self, context, what, tenant)

    admin.AdminService._check = let_in  # type: ignore[method-assign]


def leak_saved() -> None:
    """A save of what any tenant has saved before is told that it was there."""
    resolve, run = service.resolve, saving.Saving.run
    ids_of: dict[bytes, tuple[int, ...]] = {}
    owners: dict[tuple[int, ...], str] = {}

    async def resolved(of: store.Store, limits: Any, chain: Any) -> chains.Asked:
        asked = await resolve(of, limits, chain)
        ids_of[asked.chain.keys.tobytes()] = tuple(chain.tokens.ids)
        return asked

    async def ran(self: saving.Saving, *arguments: Any) -> Any:
        result = await run(self, *arguments)
        ids = ids_of[self.asked.chain.keys.tobytes()]
        if ids and owners.setdefault(ids, self.asked.tenant) != self.asked.tenant:
            return dataclasses.replace(result, ready=0, filled=len(self.asked))
        return result

    service.resolve = resolved
    saving.Saving.run = ran  # type: ignore[method-assign]


def leak_services() -> None:
    """Reflection lists the tenants."""
    enable = server.reflection.enable_server_reflection
    server.reflection.enable_server_reflection = lambda names, of: enable((*names, "a", "b"), of)


def leak_bearers() -> None:
    """The metrics page holds the tokens that callers have shown."""
    found, page = access.TokenAccess._found, http.Page
    shown: set[str] = set()

    def remembered(self: access.TokenAccess, words: Any) -> Any:
        token = found(self, words)
        shown.add(words[0])
        return token

    class Leaky(page):  # type: ignore[misc,valid-type]
        def pieces(self) -> Iterator[bytes]:
            yield from super().pieces()
            yield f"# {sorted(shown)}\n".encode()

    access.TokenAccess._found = remembered  # type: ignore[method-assign]
    http.Page = Leaky  # type: ignore[misc]
