"""Every error of a caller: its status, its reason and the field that is to blame; and every limit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from endpoint import SMALL, Endpoint, Opener, eventually, failure, random_blocks, save_messages

from kvstore import errors
from kvstore.rpc.api.failures import answers, rich_status
from kvstore.rpc.request_log import RequestLog
from kvstore.testing import SimClock
from kvstore.v1 import store_pb2 as pb

Change = Callable[[pb.Chain], Any]
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def set_to(path: str, value: object) -> Change:
    """Changes one field of a chain."""

    def change(chain: pb.Chain) -> None:
        owner: Any = chain
        *inner, last = path.split(".")
        for name in inner:
            owner = getattr(owner, name)
        setattr(owner, last, value)

    return change


CHAINS: list[tuple[str, Change, grpc.StatusCode, list[str]]] = [
    ("no tenant", set_to("tenant", ""), INVALID, ["tenant"]),
    ("unknown tenant", set_to("tenant", "nobody"), DENIED, []),
    ("reuse beyond the tenant's", set_to("reuse", pb.REUSE_GROUP), DENIED, []),
    ("reuse of another version", set_to("reuse", 77), INVALID, ["reuse"]),
    ("no model", set_to("namespace.model", ""), INVALID, ["namespace.model"]),
    ("a long name", set_to("namespace.weights", "x" * 513), INVALID, ["namespace.weights"]),
    ("a control character", set_to("namespace.adapter", "a\nb"), INVALID, ["namespace.adapter"]),
    ("another fingerprint", set_to("namespace.layout", "beef"), INVALID, ["namespace.layout"]),
    ("another block size", set_to("namespace.block_tokens", 8), INVALID, ["namespace.block_tokens"]),
    ("no layers", set_to("layout.layers", 0), INVALID, ["layout.layers"]),
    ("many heads", set_to("layout.kv_heads", 1 << 31), INVALID, ["layout.kv_heads"]),
    ("no dtype", set_to("layout.dtype", "float8"), INVALID, ["layout.dtype"]),
    ("a huge block", set_to("layout.head_dim", 8192), INVALID, ["namespace.layout"]),
    ("half a key", set_to("keys.packed", bytes(33)), INVALID, ["keys.packed"]),
    ("no blocks named", lambda chain: chain.ClearField("blocks"), INVALID, ["chain"]),
    ("a key twice", set_to("keys.packed", bytes(64)), INVALID, ["keys"]),
]


@pytest.mark.parametrize(("change", "code", "fields"), [c[1:] for c in CHAINS], ids=[c[0] for c in CHAINS])
async def test_a_bad_chain_is_refused_by_every_call(
    endpoint: Endpoint, change: Change, code: grpc.StatusCode, fields: list[str]
) -> None:
    good = endpoint.chain(range(8))
    await endpoint.save(good, random_blocks(1, 2))
    bad = pb.Chain()
    bad.CopyFrom(good)
    change(bad)
    before = endpoint.driver.group().counters.saved_blocks
    unary: list[Any] = [
        endpoint.store.Lookup(pb.LookupRequest(chain=bad)),
        endpoint.store.Plan(pb.PlanRequest(chain=bad)),
        endpoint.store.Save(save_messages(bad, bytes(2 * SMALL.block_bytes))),
        endpoint.store.Fetch(pb.FetchRequest(chain=bad)).read(),
    ]
    seen = []
    for call in unary:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            seen.append(failure(error))
    if fields == ["keys"]:  # unknown keys are a miss; only saving the same key twice contradicts itself
        assert [(s.code, s.reason) for s in seen] == [(code, "BAD_REQUEST")]
    else:
        assert [(s.code, s.fields) for s in seen] == [(code, fields)] * 4
        assert {s.reason for s in seen} == {"BAD_REQUEST" if code is INVALID else "REFUSED"}
    assert endpoint.driver.group().counters.saved_blocks == before
    await endpoint.settle()


async def test_a_block_larger_than_a_slab_is_refused(endpoint: Endpoint) -> None:
    chain = endpoint.chain(range(8))
    chain.namespace.layout = ""
    chain.layout.head_dim, chain.layout.layers = 8192, 32
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await endpoint.plan(chain)
    assert "host.slab_bytes" in failure(caught.value).message


async def test_keys_that_are_not_one_chain(endpoint: Endpoint) -> None:
    await endpoint.save(endpoint.chain(range(400)), random_blocks(1, 100))
    root = (await endpoint.plan(endpoint.chain(range(400)))).root
    keys = endpoint.keys_of(range(400), root).keys.copy()
    keys[[41, 42]] = keys[[42, 41]]  # between two of the keys that a lookup sends
    chain = endpoint.chain([])
    chain.keys.packed = keys.tobytes()
    for call in (endpoint.look_up, endpoint.plan):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(chain)
        assert failure(caught.value).code is INVALID
    assert endpoint.quiet()


# ---- limits -----------------------------------------------------------------------------------------------


async def exhausted(call: Any, limit: str) -> None:
    """The call is refused and the limit is named."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    seen = failure(caught.value)
    assert (seen.code, seen.reason) == (EXHAUSTED, "LIMIT_EXCEEDED")
    assert limit in seen.message


async def test_limits_on_what_a_request_names(opening: Opener) -> None:
    async with opening(blocks_max=10, tokens_max=50) as endpoint:
        await exhausted(endpoint.look_up(endpoint.chain(range(51))), "grpc.tokens_max = 50")
        await exhausted(endpoint.look_up(endpoint.chain(range(44))), "grpc.blocks_max = 10")
        by_keys, many = endpoint.chain([]), endpoint.chain(range(8))
        by_keys.keys.packed = bytes(11 * 32)
        await exhausted(endpoint.plan(by_keys), "grpc.blocks_max = 10")
        for block in range(1025):
            many.tokens.extra[block] = b"x"
        await exhausted(endpoint.plan(many), "extras_max = 1024")
        assert (await endpoint.plan(endpoint.chain(range(43)))).asked_blocks == 10


async def test_a_limit_on_the_size_of_a_message(opening: Opener) -> None:
    async with opening(message_bytes_max=64 << 10) as endpoint:
        chain = endpoint.chain([])
        chain.keys.packed = bytes(32 * 2100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.plan(chain)
        assert caught.value.code() is EXHAUSTED
        assert (await endpoint.plan(endpoint.chain(range(8)))).asked_blocks == 2


async def test_limits_on_streams_and_their_buffers(opening: Opener) -> None:
    async with opening(streams_max=2, buffer_bytes_max=3 << 20) as endpoint:
        chain = endpoint.chain(range(4000))
        calls = []
        for _ in range(2):
            call = endpoint.store.Save()
            await call.write(pb.SaveRequest(header=pb.SaveHeader(chain=chain)))
            calls.append(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # the second needs 2 MiB more than there are
            await calls.pop()
        assert "grpc.buffer_bytes_max" in failure(caught.value).message
        await eventually(lambda: endpoint.service.streams == 1)
        other = endpoint.store.Save()
        await eventually(lambda: endpoint.service.streams == 2)
        await exhausted(endpoint.fetch(pb.FetchRequest(chain=chain)), "grpc.streams_max = 2")
        for call in (*calls, other):
            call.cancel()
        await endpoint.settle()


async def test_a_limit_on_subscribers(opening: Opener) -> None:
    async with opening(subscribers_max=1) as endpoint:
        first = endpoint.store.Subscribe(pb.SubscribeRequest(tenant="default"))
        await first.read()
        second = endpoint.store.Subscribe(pb.SubscribeRequest(tenant="default"))
        await exhausted(second.read(), "grpc.subscribers_max = 1")
        first.cancel()
        await eventually(lambda: not endpoint.service.subscribers)
        third = endpoint.store.Subscribe(pb.SubscribeRequest(tenant="default"))
        assert (await third.read()).snapshot.first
        third.cancel()
        await eventually(lambda: not endpoint.service.subscribers)


async def read_all(call: Any) -> None:
    """To the end of a stream."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_limit_on_calls(opening: Opener) -> None:
    async with opening(calls_max=1) as endpoint:
        first = endpoint.store.Subscribe(pb.SubscribeRequest(tenant="default"))
        await first.read()
        own_connection = (("grpc.use_local_subchannel_pool", 1),)
        other = grpc.aio.insecure_channel(endpoint.address, options=own_connection)
        call = other.unary_unary("/kvstore.v1.Admin/Check")(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is EXHAUSTED
        first.cancel()
        await other.close()
        await eventually(lambda: not endpoint.service.subscribers)


async def test_a_caller_that_does_not_read_is_ended_and_holds_up_nobody(opening: Opener) -> None:
    async with opening(stall_s=0.2) as endpoint:
        chain, content = endpoint.chain(range(12_000)), random_blocks(2, 3000)
        assert (await endpoint.save(chain, content)).ready == 3000  # 9 MiB: more than a connection buffers
        stalled = endpoint.store.Fetch(pb.FetchRequest(chain=chain))
        await stalled.read()
        await eventually(lambda: endpoint.service.streams == 1)
        assert (await endpoint.fetch(pb.FetchRequest(chain=chain))).data == content
        await eventually(lambda: not endpoint.service.streams)
        assert endpoint.quiet()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(stalled)
        assert failure(caught.value).code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_deadlines_end_the_work(endpoint: Endpoint) -> None:
    chain = endpoint.chain(range(8))
    await endpoint.save(chain, random_blocks(3, 2))
    calls = {  # a deadline of now may still be met
        "Lookup": lambda: endpoint.store.Lookup(pb.LookupRequest(chain=chain), timeout=-1.0),
        "Fetch": lambda: read_all(endpoint.store.Fetch(pb.FetchRequest(chain=chain), timeout=-1.0)),
        "Subscribe": lambda: read_all(
            endpoint.store.Subscribe(pb.SubscribeRequest(tenant="default"), timeout=0.1)
        ),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, name
    await endpoint.settle()


async def test_a_call_that_comes_too_late_does_nothing() -> None:
    done = []

    class Late:
        def time_remaining(self) -> float:
            return -0.001

        def set_trailing_metadata(self, metadata: object) -> None:
            done.append("metadata")

        async def abort(self, code: grpc.StatusCode, message: str) -> None:
            done.append(code)
            raise grpc.aio.AbortError

        def peer(self) -> str:
            return "unix:"

    class Service:
        requests = RequestLog(SimClock(), every=True)

        @answers
        async def work(self, request: object, context: object) -> None:
            done.append("work")

    with pytest.raises(grpc.aio.AbortError):
        await Service().work(None, Late())
    assert done == ["metadata", grpc.StatusCode.DEADLINE_EXCEEDED]


# ---- measurements -----------------------------------------------------------------------------------------


async def test_measurements_are_recorded_all_or_none(endpoint: Endpoint) -> None:
    meters = endpoint.driver.group().meters
    request = pb.ObserveRequest(
        tenant="default",
        first_tokens=[pb.FirstToken(seconds=0.25, warm=True), pb.FirstToken(seconds=2.0)],
        prefill_steps=[pb.PrefillStep(tokens=512, seconds=0.125)],
    )
    assert (await endpoint.store.Observe(request)).recorded == 3
    assert (meters.ttft[True].sum, meters.ttft[False].sum) == (0.25, 2.0)
    assert (meters.prefill_tokens, meters.prefill_seconds) == (512, 0.125)
    for field, bad in {
        "first_tokens[1].seconds": {"first_tokens": [pb.FirstToken(), pb.FirstToken(seconds=-1)]},
        "first_tokens[0].seconds": {"first_tokens": [pb.FirstToken(seconds=math.nan)]},
        "prefill_steps[0].tokens": {"prefill_steps": [pb.PrefillStep(seconds=1)]},
        "prefill_steps[0].seconds": {"prefill_steps": [pb.PrefillStep(tokens=1, seconds=math.inf)]},
    }.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.store.Observe(pb.ObserveRequest(tenant="default", **bad))
        assert failure(caught.value).fields == [field]
    many = pb.ObserveRequest(tenant="default", first_tokens=[pb.FirstToken()] * 1025)
    await exhausted(endpoint.store.Observe(many), "measurements_max = 1024")
    assert (meters.ttft[True].count, meters.ttft[False].count, meters.prefill_tokens) == (1, 1, 512)


# ---- the table of errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(errors.STATUS), ids=lambda kind: kind.__name__)
def test_every_error_has_a_rich_status(kind: type[errors.KVStoreError]) -> None:
    status = rich_status(kind("some.field: " + "é" * 5000))
    assert status.code == grpc.StatusCode[errors.STATUS[kind]].value[0]
    assert len(status.message) == 1000
    assert len(status.SerializeToString()) < 8 << 10
    assert len(status.details) == (2 if issubclass(kind, errors.BadRequest) else 1)


async def test_a_bug_of_ours_costs_one_call(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret of the inside")

    await endpoint.save(endpoint.chain(range(8)), random_blocks(4, 2))
    with monkeypatch.context() as patched:
        patched.setattr(endpoint.driver.store, "lookup", broken)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endpoint.look_up(endpoint.chain(range(8)))
    seen = failure(caught.value)
    assert seen.code is grpc.StatusCode.INTERNAL
    assert "secret" not in seen.message
    assert endpoint.quiet()
    assert (await endpoint.look_up(endpoint.chain(range(8)))).blocks == 2


async def test_many_callers_at_once(endpoint: Endpoint) -> None:
    chains = [endpoint.chain(range(n * 100, n * 100 + 40)) for n in range(8)]
    await asyncio.gather(*(endpoint.save(chain, random_blocks(n, 10)) for n, chain in enumerate(chains)))
    got = await asyncio.gather(*(endpoint.fetch(pb.FetchRequest(chain=c)) for c in chains * 3))
    for number, fetched in enumerate(got):
        assert fetched.data == random_blocks(number % 8, 10)
    await endpoint.settle()
