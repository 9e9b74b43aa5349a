"""Where the chains of one trust group start, and whose they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvstore._native import NONE, Index
from kvstore.callers import Caller, Root
from kvstore.errors import BadRequest, LimitExceeded
from kvstore.quotas import Quotas
from kvstore.tenants import Origin
from kvstore.types import Reuse

__all__ = ["Roots"]

# A root is made per namespace and tenant, at attach or by the first saved block, and never reaped; far more
# than models × tenants on one node. One tenant that invents models stops at its own part.
ROOTS_MAX, ROOTS_PER_TENANT_MAX = 65_536, 4096


class Roots(Mapping[bytes, Root]):
    """Those that are known, by their keys.

    Args:
        index: where they stand.
        quotas: told of each: what is saved under it has an owner from then on.
    """

    def __init__(self, index: Index, quotas: Quotas) -> None:
        self._index = index
        self._quotas = quotas
        self._by_key: dict[bytes, Root] = {}
        self._of: Counter[tuple[str, Reuse]] = Counter()

    def __getitem__(self, key: bytes) -> Root:
        return self._by_key[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, origin: Origin) -> Root:
        """The root of `origin`, made on first use.

        Raises:
            LimitExceeded: too many namespaces × tenants, or too many of this one.
        """
        root = self._by_key.get(origin.key)
        if root is None:
            if len(self._by_key) >= ROOTS_MAX:
                raise LimitExceeded(
                    f"roots_max = {ROOTS_MAX} namespaces × tenants are known; restart the daemon"
                )
            if self._of[origin.owner, origin.reuse] >= ROOTS_PER_TENANT_MAX:
                raise LimitExceeded(
                    f"roots_per_tenant_max = {ROOTS_PER_TENANT_MAX} namespaces of {origin.owner} "
                    f"({origin.reuse}) are known; name the same model the same way each time, and restart "
                    "the daemon"
                )
            root = self._note(origin, self._index.root(origin.key))
        return root

    def known(self, origin: Origin) -> Root | None:
        """The root of `origin`, None where nothing was ever saved or attached; makes none.

        A kept arena brings its roots back as keys in the index, without a word on whose they are: that is
        known again when the first who may use one asks.
        """
        root = self._by_key.get(origin.key)
        if root is None and (node := self._index.find(origin.key)) != NONE:
            root = self._note(origin, node)
        return root

    def _note(self, origin: Origin, node: int) -> Root:
        self._of[origin.owner, origin.reuse] += 1
        self._quotas.claim(origin, node)
        root = self._by_key[origin.key] = Root(origin.key, origin.owner, origin.reuse, node)
        return root

    def of(self, caller: Caller, key: bytes) -> Root:
        """The root that a caller names.

        Raises:
            BadRequest: not one that was given to this session at attach.
        """
        if key not in caller.roots:
            raise BadRequest("root: not one of the roots given to this session at attach")
        return self._by_key[key]

    def tenant_of(self, caller: Caller, key: bytes) -> str:
        """Whose tokens a request under this root are, for counting.

        A shared root says nothing about who asks: then it is the session's tenant if it has just one, else
        the group's name stands for all of them.
        """
        known = self._by_key[key]
        if known.reuse is Reuse.GROUP and len(caller.tenants) == 1:
            return caller.tenants[0]
        return known.tenant

    def payer_of(self, caller: Caller, key: bytes) -> str:
        """The tenant whose rates a request under this root counts against.

        Under a shared root that is the first one that the engine named when it attached.
        """
        known = self._by_key[key]
        return caller.tenants[0] if known.reuse is Reuse.GROUP and caller.tenants else known.tenant
