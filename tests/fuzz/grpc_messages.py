"""Hostile messages to every method of the gRPC API of a real store, over a real socket.

Two kinds: well-formed messages whose contents are lies (made from the descriptors and from honest messages
with some fields changed), and bytes that are no message at all. Calls are cut off at any point. After each
batch the store must be whole: every conservation law, no pin, no filling, no stream, no engine left.

    python -m tests.fuzz.grpc_messages --messages 100000 [--seed 1]

prints one JSON object and exits 1 if anything broke.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import gc
import itertools
import json
import logging
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import structlog
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "api"))

from endpoint import SMALL, Endpoint, configured, opened, random_blocks

from kvstore.v1 import store_pb2 as pb

__all__ = ["Call", "Fuzzer", "batches"]

CALL_S = 20.0
LEASE_S = 30.0
BLOCK = SMALL.block_bytes
# What a call may end with; anything else is a fault of ours.
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


# What our own client calls a write into a call that the server has ended.
CUT_OFF = "Internal error from Core"


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        path: of the method.
        messages: requests, as bytes.
        reads: replies that are read before the caller leaves.
        leaves: the caller leaves without closing its stream.
    """

    path: str
    messages: tuple[bytes, ...]
    reads: int
    leaves: bool


# ---- contents ---------------------------------------------------------------------------------------------

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
MODELS = ["a", "b", "c"]
# Prompts that share their beginnings, so that saves meet saves and lookups meet what was saved.
TOKENS = st.integers(0, 80).map(lambda length: list(range(length)))
NUMBERS = st.one_of(st.integers(0, 12), st.sampled_from([16, 4095, 4096, 4097, 1 << 31, (1 << 32) - 1]))
TEXTS = st.one_of(
    st.sampled_from(
        ["", "default", "model", "r1", "float32", "none", "causal", "x" * 513, "\0", "../..", "ü"]
    ),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
)
BLOBS = st.one_of(
    st.sampled_from([b"", bytes(16), bytes(31), bytes(32), bytes(64), bytes(BLOCK), b"\xff" * 33]),
    st.sampled_from([b"lease:%d" % number for number in range(4)]),
    st.binary(max_size=70),
)
DOUBLES = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e308, -1.0]))


@functools.cache  # making a strategy costs more than drawing from it
def values(field: Any) -> st.SearchStrategy[Any]:
    """Values of one field, honest and not."""
    if field.message_type is not None:
        return messages(field.message_type)
    kinds = {
        field.TYPE_STRING: TEXTS,
        field.TYPE_BYTES: BLOBS,
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_DOUBLE: DOUBLES,
        field.TYPE_ENUM: st.sampled_from([0, 1, 2, 99]),
        field.TYPE_UINT64: st.one_of(NUMBERS, st.just((1 << 64) - 1)),
    }
    found: st.SearchStrategy[Any] = kinds.get(field.type, NUMBERS)
    return found


@functools.cache
def messages(descriptor: Any) -> st.SearchStrategy[Any]:
    """Well-formed messages of a type, any of its fields set to anything."""

    @st.composite
    def build(draw: Any) -> Any:
        message = descriptor._concrete_class()
        for field in descriptor.fields:
            if not draw(st.booleans()):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                extra = draw(EXTRAS)
                for key, value in extra.items():
                    getattr(message, field.name)[key] = value
            elif field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(values(field), max_size=4)))
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(values(field)))
            else:
                setattr(message, field.name, draw(values(field)))
        return message

    return build()


def honest_chain(tokens: list[int], model: str) -> pb.Chain:
    """A prompt that the store understands."""
    maker: Any = Endpoint.chain
    return maker(_Namespaces(), tokens, model=model)


class _Namespaces:
    namespace = Endpoint.namespace


@st.composite
def chains(draw: Any) -> pb.Chain:
    """A prompt, often with one part of it exchanged for a lie."""
    chain = honest_chain(draw(TOKENS), draw(st.sampled_from(MODELS)))
    lie = draw(st.sampled_from([""] * 8 + ["layout", "namespace", "keys", "extra", "reuse", "tenant"]))
    if lie in ("layout", "namespace"):
        part = getattr(chain, lie)
        field = draw(st.sampled_from(list(part.DESCRIPTOR.fields)))
        setattr(part, field.name, draw(values(field)))
    elif lie == "keys":
        chain.keys.packed = draw(st.one_of(BLOBS, st.binary(max_size=4).map(lambda b: b.ljust(32, b"k") * 5)))
    elif lie == "extra":
        chain.tokens.extra[draw(NUMBERS)] = draw(BLOBS)
    elif lie == "reuse":
        chain.reuse = draw(st.sampled_from([1, 2, 3, 99]))
    elif lie == "tenant":
        chain.tenant = draw(TEXTS)
    return chain


CHAINS = chains()
EXTRAS = st.dictionaries(NUMBERS, BLOBS, max_size=3)
ANY_SAVE = messages(pb.SaveRequest.DESCRIPTOR)


@functools.cache
def requests(path: str) -> st.SearchStrategy[tuple[bytes, ...]]:
    """The messages of one call."""
    return _requests(path)


@st.composite
def _requests(draw: Any, path: str) -> tuple[bytes, ...]:
    method = METHODS[path]
    name = method.input_type.name
    if method.client_streaming:
        chain = draw(CHAINS)
        header = pb.SaveRequest(
            header=pb.SaveHeader(chain=chain, start=draw(st.sampled_from([0] * 8 + [1, 9])))
        )
        content = random_blocks(draw(st.integers(0, 3)), max(1, len(chain.tokens.ids) // 4))
        sent = draw(st.sampled_from([content] * 8 + [content[:-1], content + b"x", b""]))
        cut = draw(st.sampled_from([len(sent) or 1, 1 + len(sent) // 3]))
        pieces = [sent[at : at + cut] for at in range(0, len(sent), cut)]
        stream = [header, *(pb.SaveRequest(data=pb.SaveData(data=piece)) for piece in pieces)]
        if not draw(st.integers(0, 4)):
            stream.insert(draw(st.integers(0, len(stream))), draw(ANY_SAVE))
        honest = [message.SerializeToString() for message in stream]
    elif "chain" in method.input_type.fields_by_name and draw(st.integers(0, 3)):
        request = method.input_type._concrete_class(chain=draw(CHAINS))
        if name == "FetchRequest":
            request.lease, request.start = draw(BLOBS), draw(st.sampled_from([0, 0, 1, 5, 1 << 31]))
        honest = [request.SerializeToString()]
    elif name == "DropNamespaceRequest" and draw(st.booleans()):
        known = Endpoint.namespace(_Namespaces(), model=draw(st.sampled_from(MODELS)))  # type: ignore[arg-type]
        honest = [pb.DropNamespaceRequest(namespace=known).SerializeToString()]
    else:
        honest = [draw(messages(method.input_type)).SerializeToString()]
    if draw(st.integers(0, 6)):
        return tuple(honest)
    number = draw(st.integers(0, len(honest) - 1))  # and now no message at all
    raw = bytearray(honest[number])
    if raw and draw(st.booleans()):
        raw[draw(st.integers(0, len(raw) - 1))] ^= draw(st.integers(1, 255))
        raw = raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw
    else:
        raw = bytearray(draw(st.binary(max_size=60)))
    honest[number] = bytes(raw)
    return tuple(honest)


# The calls that make and use state come more often.
PATHS = (
    sorted(METHODS) + ["/kvstore.v1.Store/Save", "/kvstore.v1.Store/Lookup", "/kvstore.v1.Store/Fetch"] * 3
)


@st.composite
def calls(draw: Any) -> Call:
    """One call to any method."""
    path = draw(st.sampled_from(PATHS))
    reads = draw(st.sampled_from([1000] * 8 + [0, 1, 2]))
    return Call(path, draw(requests(path)), reads, draw(st.integers(0, 9)) == 0)


batches = st.lists(calls(), min_size=4, max_size=16)


# ---- the run ----------------------------------------------------------------------------------------------


class Fuzzer:
    """An endpoint on a loop of its own, and what it was told so far.

    Attributes:
        messages: sent.
        faults: what went wrong, in words.
        seen: statuses → how often.
    """

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.messages = 0
        self.faults: list[str] = []
        self.seen: dict[str, int] = {}
        self._stack = AsyncExitStack()
        limits = {"leases_max": 20, "lease_s": LEASE_S, "blocks_max": 64, "tokens_max": 400, "stop_s": 0.2}
        opening = opened(configured(folder, log_max=50, **limits))
        self.endpoint = self.loop.run_until_complete(self._stack.enter_async_context(opening))
        self._leases: list[bytes] = []

    def close(self) -> None:
        """End the server and the loop."""
        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()

    def run(self, batch: list[Call]) -> None:
        """Make all calls of a batch at once, then look whether the store is whole."""
        self.loop.run_until_complete(self._run(batch))

    async def _run(self, batch: list[Call]) -> None:
        await asyncio.gather(*(self._call(call) for call in batch))
        self.messages += sum(len(call.messages) for call in batch)
        self.endpoint.sound()
        self.endpoint.driver.clock.advance(LEASE_S + 1)
        self.endpoint.service.holdings.sweep()
        self._leases.clear()
        await self.endpoint.settle()

    async def _call(self, call: Call) -> None:
        rpc = self.endpoint.channel.stream_stream(call.path)(timeout=CALL_S)
        try:
            for message in call.messages:
                await rpc.write(self._with_leases(message))
            if not call.leaves:
                await rpc.done_writing()
            for _ in range(0 if call.leaves else call.reads):
                reply = await rpc.read()
                if reply is grpc.aio.EOF or call.path.endswith("/Subscribe"):
                    break
                if call.path.endswith("/Lookup"):
                    self._leases.append(pb.LookupResponse.FromString(reply).lease)
            if call.leaves or call.reads < 1000 or call.path.endswith("/Subscribe"):
                rpc.cancel()
            code = await rpc.code()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            code = await rpc.code()
        details = await rpc.details()
        if details == CUT_OFF:
            code = grpc.StatusCode.CANCELLED
        self.seen[code.name] = self.seen.get(code.name, 0) + 1
        if code not in EXPECTED:
            self.faults.append(f"{call.path}: {code} {details} for {call.messages!r:.500}")

    def _with_leases(self, message: bytes) -> bytes:
        """`lease:N` becomes a lease that was really granted, which has another length: 16 bytes."""
        for number, lease in enumerate(self._leases[:4]):
            name = b"lease:%d" % number
            message = message.replace(bytes([len(name)]) + name, bytes([len(lease)]) + lease)
        return message

    def pins(self) -> int:
        """Pins in all indexes."""
        return sum(group.index.pins() for group in self.endpoint.driver.store.groups.values())

    def fillings(self) -> int:
        """Fillings that are open."""
        return sum(len(group.fillings) for group in self.endpoint.driver.store.groups.values())


def resident_bytes() -> int:
    """RSS of this process after everything that can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def fuzz(total: int, seed: int) -> dict[str, Any]:
    """Send at least `total` messages; what came of it."""
    with tempfile.TemporaryDirectory(prefix="kvfuzz-") as folder:
        fuzzer = Fuzzer(Path(folder))
        crashes: list[str] = []
        sizes: list[int] = []
        try:
            for number in itertools.takewhile(lambda _: fuzzer.messages < total, itertools.count()):
                try:
                    _round(fuzzer, total, seed + number)
                except Exception as error:  # noqa: BLE001  (whatever broke is the finding)
                    crashes.append(f"{type(error).__name__}: {error}")
                sizes.append(resident_bytes())
            fuzzer.endpoint.sound()
            # The first rounds fill what has a bound: the event log, the index, the allocator's arenas.
            growth = max(0, sizes[-1] - sizes[len(sizes) // 4])
            return {
                "messages": fuzzer.messages,
                "crashes": len(crashes) + len(fuzzer.faults),
                "pins_left": fuzzer.pins(),
                "fillings_left": fuzzer.fillings(),
                "rss_growth_bytes": growth,
                "saved_blocks": fuzzer.endpoint.driver.group().counters.saved_blocks,
                "hit_blocks": fuzzer.endpoint.driver.group().counters.hit_blocks,
                "statuses": dict(sorted(fuzzer.seen.items())),
                "faults": (crashes + fuzzer.faults)[:10],
            }
        finally:
            fuzzer.close()


BATCHES_PER_ROUND = 200


def _round(fuzzer: Fuzzer, total: int, seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=BATCHES_PER_ROUND,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(batches)
    def send(batch: list[Call]) -> None:
        if fuzzer.messages < total:
            fuzzer.run(batch)

    send()


def main() -> None:
    """Entry point of `make fuzz`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    result = fuzz(options.messages, options.seed)
    print(json.dumps(result))
    broken = result["crashes"] or result["pins_left"] or result["fillings_left"]
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
