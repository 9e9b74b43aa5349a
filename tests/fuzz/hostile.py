"""Messages made from their types: coherent ones, with hostile values here and there.

Every field is filled by its name when the name says what belongs there (a root, keys, a lease), so that a
message reaches the code behind its checks; otherwise by its type alone. A message that is added to the
protocol is thus fuzzed without a line here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec
import numpy as np

from kvstore.keys import KeyChain
from kvstore.rpc import messages as m

__all__ = ["REQUESTS", "Hostile", "Known", "damaged", "shapeless"]

# A Stop would be obeyed: any tool of the daemon's user may send it.
REQUESTS: tuple[type[msgspec.Struct], ...] = tuple(kind for kind in get_args(m.Request) if kind is not m.Stop)
_INTS = (0, 1, 2, 3, 7, -1, 64, 255, 4096, 8192, 8193, 65_536, 1 << 20, (1 << 31) - 1, 1 << 31)
_INTS += ((1 << 32) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_TEXTS = ("", "default", "friend", "none", "x" * 70_000, "\0", "é☃\U0001f600", "../../etc", "{0}%s", "A" * 64)
_LENGTHS = (0, 1, 3, 4, 5, 16, 31, 32, 33, 64, 4096)
# How often a field is not what it should be.
_HOSTILE = 0.06
_TABLE_BLOCKS = 64
_KNOWN_MAX = 16
# Whole-index checks, reads of block bytes, and what ends or empties a session: now and then.
_RARE: dict[type, float] = {m.Check: 0.02, m.Report: 0.3, m.Status: 0.1, m.Attach: 0.1, m.Quiesced: 0.05}
_RARE |= {m.Prove: 0.1, m.ProvedStore: 0.1, m.Proved: 0.1, m.Pool: 0.2, m.Heartbeat: 0.3, m.Abort: 0.3}
_RARE |= {m.Explain: 0.1}
_RARE |= {m.Flush: 0.05, m.Release: 0.5, m.Observe: 0.5, m.Publish: 2.0, m.Commit: 1.5}


@dataclass(frozen=True, slots=True)
class Subject:
    """What one message is about: blocks [start, stop) of a chain, under a lease or in a filling, if any."""

    chain: KeyChain
    start: int
    stop: int
    lease: int = 0
    token: int = 0


@dataclass(slots=True)
class Known:
    """What a client has learnt from the daemon: makes later messages refer to things that exist.

    Attributes:
        asked: by request id, what it was about.
        leases: by lease, the blocks that it or its table has.
        fillings: by token, the blocks that are to be written.
    """

    asked: dict[int, Subject] = field(default_factory=dict)
    leases: dict[int, Subject] = field(default_factory=dict)
    fillings: dict[int, Subject] = field(default_factory=dict)

    def learn(self, ident: int, body: Any) -> None:
        """Take the ids out of a reply."""
        subject = self.asked.pop(ident, None)
        if subject is None:
            return
        if isinstance(body, m.Found) and body.lease:
            self._keep(self.leases, body.lease, replace(subject, start=0, stop=body.blocks))
        elif isinstance(body, m.Acquired) and body.table:
            self._keep(self.leases, body.lease, replace(subject, start=0))
        elif isinstance(body, m.Reserved) and body.token:
            self._keep(self.fillings, body.token, replace(subject, start=0, stop=len(body.generations) // 8))
        for order in getattr(body, "demote", ()):
            self._keep(self.fillings, order.token, replace(subject, start=0, stop=len(order.slots) // 4))

    @staticmethod
    def _keep(where: dict[int, Subject], ident: int, subject: Subject) -> None:
        where[ident] = subject
        while len(where) > _KNOWN_MAX:
            del where[next(iter(where))]


class Hostile:
    """Makes messages.

    Args:
        chance: every decision.
        chains: prefixes that several sessions share.
        hello: an honest Attach, the start of hostile ones.
    """

    def __init__(self, chance: random.Random, chains: list[KeyChain], hello: m.Attach) -> None:
        self._chance = chance
        self._chains = chains
        self._hello = hello
        self._kinds = REQUESTS
        self._weights = [_RARE.get(kind, 1.0) for kind in REQUESTS]
        self._attach_fields = {f.name: f.fill for f in self._fields(m.Attach)}
        self._plans = {kind: self._plan(kind) for kind in REQUESTS}
        self._names: dict[str, Callable[[Subject, Known], Any]] = {
            "root": lambda subject, _: subject.chain.root,
            "parent": lambda subject, _: subject.chain.parent(subject.start),
            "keys": lambda subject, _: subject.chain.keys[subject.start : subject.stop].tobytes(),
            "stored": lambda subject, _: subject.chain.keys[subject.start : subject.stop].tobytes(),
            "removed": lambda subject, _: subject.chain.keys[: subject.start].tobytes(),
            "positions": lambda subject, _: _numbers(subject.start, subject.stop),
            "table": lambda subject, _: _numbers(0, subject.stop - subject.start),
            "bad": lambda subject, _: _numbers(0, subject.start % 3),
            "start": lambda subject, _: subject.start,
            "stop": lambda subject, _: subject.stop,
            "blocks": lambda subject, _: subject.stop,
            "idle_max": lambda subject, _: subject.start,
            "lease": lambda subject, _: subject.lease,
            "token": lambda subject, _: subject.token,
            "mapped": lambda _, __: chance.randrange(32),
            "idle": lambda _, __: chance.randrange(32),
            "free": lambda _, __: chance.randrange(32),
        }

    def message(self, known: Known, ident: int) -> msgspec.Struct:
        """Any request that a session may send; what it is about is remembered under its id."""
        kind = self._kind(known)
        if kind is m.Attach and self._chance.random() < 0.7:
            return self._attach()
        subject = known.asked[ident] = self._subject(kind, known)
        return kind(*[fill(subject, known) for fill in self._plans[kind]])

    def _kind(self, known: Known) -> type[msgspec.Struct]:
        """Rarely one that names a lease or a filling when there is none."""
        for _ in range(3):
            kind = self._chance.choices(self._kinds, self._weights)[0]
            fields = kind.__struct_fields__
            if "token" in fields and not known.fillings:
                continue
            if "lease" in fields and not known.leases and kind is not m.Acquire:
                continue
            break
        return kind

    def _subject(self, kind: type[msgspec.Struct], known: Known) -> Subject:
        chance, fields = self._chance, kind.__struct_fields__
        if "token" in fields and known.fillings:
            token = self._one_of(known.fillings)
            filling = known.fillings[token]
            if chance.random() < 0.7:  # the others are named again when they are over
                del known.fillings[token]
            return replace(filling, token=token)
        if "lease" in fields and known.leases and (kind is not m.Acquire or chance.random() < 0.7):
            lease = self._one_of(known.leases)
            held = known.leases[lease]
            if kind is m.Release and chance.random() < 0.7:
                del known.leases[lease]
            start = chance.randint(0, held.stop)
            stop = len(held.chain) if kind is m.Acquire else chance.randint(start, held.stop)
            return Subject(held.chain, start, stop, lease)
        chain = chance.choice(self._chains)
        start = 0 if chance.random() < 0.7 else chance.randrange(len(chain))
        return Subject(chain, start, chance.randint(start, len(chain)))

    def _one_of(self, ids: dict[int, Subject]) -> int:
        """Mostly the newest."""
        return next(reversed(ids)) if self._chance.random() < 0.6 else self._chance.choice(list(ids))

    def _attach(self) -> m.Attach:
        """An honest Attach but for one field."""
        name = self._chance.choice(m.Attach.__struct_fields__)
        value = self._attach_fields[name](self._subject(m.Attach, Known()), Known())
        return msgspec.structs.replace(self._hello, **{name: value})

    # ---- fields ------------------------------------------------------------------------------------------

    def _plan(self, kind: type[msgspec.Struct]) -> list[Callable[[Subject, Known], Any]]:
        return [self._mixed(f.name, f.fill) for f in self._fields(kind)]

    def _mixed(self, name: str, hostile: Callable[[Subject, Known], Any]) -> Callable[[Subject, Known], Any]:
        def fill(subject: Subject, known: Known) -> Any:
            honest = self._names.get(name)
            if honest is None or self._chance.random() < _HOSTILE:
                return hostile(subject, known)
            return honest(subject, known)

        return fill

    def _fields(self, kind: type[msgspec.Struct]) -> list[_Field]:
        info = msgspec.inspect.type_info(kind)
        assert isinstance(info, msgspec.inspect.StructType)
        return [_Field(f.encode_name, self._by_type(f.type)) for f in info.fields]

    def _by_type(self, kind: msgspec.inspect.Type) -> Callable[[Subject, Known], Any]:
        """A source of hostile values of one type.

        Raises:
            NotImplementedError: a type that no message has had yet.
        """
        chance, inspect = self._chance, msgspec.inspect
        if isinstance(kind, inspect.IntType):
            return lambda *_: chance.choice(_INTS) if chance.random() < 0.6 else chance.randrange(128)
        if isinstance(kind, inspect.BoolType):
            return lambda *_: chance.random() < 0.5
        if isinstance(kind, inspect.FloatType):
            return lambda *_: chance.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
        if isinstance(kind, inspect.BytesType):
            return lambda *_: chance.randbytes(chance.choice(_LENGTHS))
        if isinstance(kind, inspect.StrType):
            return lambda *_: chance.choice(_TEXTS)
        if isinstance(kind, inspect.NoneType):
            return lambda *_: None
        if isinstance(kind, inspect.LiteralType):
            return lambda *_: chance.choice(kind.values)
        if isinstance(kind, inspect.ListType):
            inner = self._by_type(kind.item_type)
            return lambda *known: [inner(*known) for _ in range(chance.choice((0, 1, 2, 40)))]
        if isinstance(kind, inspect.TupleType):
            parts = [self._by_type(item) for item in kind.item_types]
            return lambda *known: tuple(part(*known) for part in parts)
        return self._by_nested_type(kind)

    def _by_nested_type(self, kind: msgspec.inspect.Type) -> Callable[[Subject, Known], Any]:
        chance, inspect = self._chance, msgspec.inspect
        if isinstance(kind, inspect.DictType):
            key, value = self._by_type(kind.key_type), self._by_type(kind.value_type)
            return lambda *known: {key(*known): value(*known) for _ in range(chance.choice((0, 1, 8)))}
        if isinstance(kind, inspect.UnionType):
            options = [self._by_type(option) for option in kind.types]
            return lambda *known: chance.choice(options)(*known)
        if isinstance(kind, inspect.StructType):
            fills = [self._by_type(f.type) for f in kind.fields]
            return lambda *known: kind.cls(*[fill(*known) for fill in fills])
        raise NotImplementedError(f"hostile values for {kind}")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    fill: Callable[[Subject, Known], Any]


def _numbers(start: int, stop: int) -> bytes:
    return np.arange(start, stop, dtype="<u4").tobytes()


def damaged(chance: random.Random, payload: bytes) -> bytes:
    """A payload with a few bytes changed, cut, doubled or put in."""
    out = bytearray(payload)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(4):
            case 0 if out:
                out[at % len(out)] = chance.randrange(256)
            case 1:
                del out[at : at + chance.randint(1, 8)]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                out[at:at] = out[max(0, at - 16) : at]
    return bytes(out)


def shapeless(chance: random.Random, depth: int = 0) -> Any:
    """Something that msgpack can say and no message is."""
    match chance.randrange(7 if depth < 4 else 5):
        case 0:
            return chance.choice(_INTS)
        case 1:
            return chance.choice((None, True, 1.5, float("nan")))
        case 2:
            return chance.choice(_TEXTS[:4])
        case 3:
            return chance.randbytes(chance.choice(_LENGTHS))
        case 4:
            kind = chance.choice(REQUESTS)
            return [kind.__struct_config__.tag, *([0] * chance.randrange(5))]
        case 5:
            return [shapeless(chance, depth + 1) for _ in range(chance.randrange(5))]
        case _:
            return {chance.choice(_TEXTS[:4]): shapeless(chance, depth + 1) for _ in range(3)}
