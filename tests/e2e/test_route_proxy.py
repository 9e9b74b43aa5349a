"""The proxy between real sockets: what passes, what does not, and what the core hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from route_scene import CHAT, DONE, Peer, answers, chat, error_of, event, replica, route, usage_event

from kvstore.config.tokens import Token, Tokens, digest_of
from kvstore.router.door import TokenDoor, cache_salt
from kvstore.router.placing import Replica
from kvstore.router.proxy_options import ProxyOptions

# ---- what passes ------------------------------------------------------------------------------------------


async def test_a_stream_passes_chunk_by_chunk() -> None:
    go_on = asyncio.Event()

    async def act(peer: Peer) -> None:
        await peer.head()
        await peer.chunk(event("first"))
        await go_on.wait()
        await peer.chunk(event("second") + DONE)
        await peer.end()

    async with replica("a", act) as a, route(a.known()) as s:
        async with s.client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == event("first")  # the replica still waits
            assert answer.headers["content-type"] == "text/event-stream"
            go_on.set()
            assert b"".join([c async for c in chunks]) == event("second") + DONE
        (ticket,) = await s.picker.settled(1)
        assert ticket.said == ["sent", "first_byte", "finished"] and ticket.ok


async def test_an_answer_in_one_piece_passes_and_its_usage_is_heard() -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        answer = await s.post(chat(), headers={"X-Session-Id": "s1", "X-Kvstore-Slo-S": "2.5"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        assert answer.headers["x-kvstore-replica"] == "a"
        assert answer.headers["x-kvstore-expected-tokens"] == "32"
        (ticket,) = await s.picker.settled(1)
        assert (ticket.cached_tokens, ticket.prompt_tokens, ticket.output_tokens) == (32, 48, 2)
        assert ticket.request.session == "s1" and ticket.request.slo_s == 2.5
        assert not ticket.request.exact and ticket.request.tokens.size > 0


async def test_completions_pass_too() -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        answer = await s.client.post("/v1/completions", json={"model": "m", "prompt": [5, 6, 7]})
        assert answer.status_code == 200 and a.asked[0].path == "/v1/completions"
        (ticket,) = await s.picker.settled(1)
        assert ticket.request.exact and ticket.request.tokens.tolist() == [5, 6, 7]


async def test_the_usage_we_asked_for_is_not_the_callers() -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        options = {"include_usage": False, "continuous_usage_stats": True}
        silent = await s.post(chat(stream=True, stream_options=options))
        assert silent.content == event("a") + event("b") + DONE
        assert a.asked[0].body["stream_options"] == {"include_usage": True}
        asked = await s.post(chat(stream=True, stream_options={"include_usage": True}))
        assert asked.content == event("a") + event("b") + usage_event() + DONE
        tickets = await s.picker.settled(2)
        assert [t.cached_tokens for t in tickets] == [32, 32]


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_an_event_cut_anywhere_is_whole_again(size: int) -> None:
    stream = event("a") + event('says "usage"') + usage_event() + DONE

    async def act(peer: Peer) -> None:
        await peer.head()
        for at in range(0, len(stream), size):
            await peer.chunk(stream[at : at + size])
        await peer.end()

    async with replica("a", act) as a, route(a.known()) as s:
        answer = await s.post(chat(stream=True))
        assert answer.content == event("a") + event('says "usage"') + DONE
        assert (await s.picker.settled(1))[0].cached_tokens == 32


async def test_models_of_all_replicas_are_one_list() -> None:
    async def other(peer: Peer) -> None:
        await peer.whole(200, b'{"data": [{"id": "m"}, {"id": "n"}, {"noid": 1}, 7]}')

    async def broken(peer: Peer) -> None:
        await peer.whole(200, b"[[[")

    async with (
        replica("a", answers) as a,
        replica("b", other) as b,
        replica("c", broken) as c,
        route(a.known(), b.known(), c.known(), Replica("d", "http://127.0.0.1:1", True)) as s,
    ):
        answer = await s.client.get("/v1/models")
        assert [m["id"] for m in answer.json()["data"]] == ["m", "n"]
        assert answer.json()["data"][0]["object"] == "model"  # the first that has it
        await s.client.get("/v1/models")
        assert len(a.asked) == 1  # believed for a while


async def test_health_and_metrics() -> None:
    page = b"kvstore_route_up 1\n"
    async with route(Replica("a", "http://127.0.0.1:1", True), metrics=lambda: page) as s:
        assert (await s.client.get("/health")).json() == {"status": "ok", "replicas": 1, "up": 1}
        assert (await s.client.get("/metrics")).content == b"kvstore_route_up 1\n"
        s.picker.known = [Replica("a", "http://127.0.0.1:1", False)]
        down = await s.client.get("/health")
        assert down.status_code == 503 and error_of(down)["code"] == "no_replica"


# ---- what does not pass -----------------------------------------------------------------------------------


async def test_what_would_reach_another_tenants_prefix_is_taken_out() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://x/y.png", "uuid": "u2"}, "uuid": "u1"}
    body = chat(
        cache_salt="mine",
        kv_transfer_params={"do_remote_prefill": True},
        ec_transfer_params={"a": 1},
        mm_processor_kwargs={"max_pixels": 1},
        multi_modal_uuids={"image": ["u"]},
        vllm_xargs={"kv_transfer_params": "x", "cache_salt": "y", "kept": 1},
        temperature=0.1,
        seed=2**63 - 1,
    )
    body["messages"].append({"role": "user", "content": [part, {"type": "text", "text": "ü\u2028"}]})
    headers = {
        "X-Cache-Salt": "s",
        "X-My-SALT-y": "s",
        "X-Data-Parallel-Rank": "3",
        "Connection": "x-gone, keep-alive",
        "X-Gone": "1",
        "X-Kvstore-Tenant": "t",
        "Cookie": "c",
        "X-Kept": "yes",
        "Authorization": "Bearer upstream-key",
    }
    async with replica("a", answers) as a, route(a.known()) as s:
        answer = await s.post(body, headers=headers)
        assert answer.status_code == 200
        removed = answer.headers["x-kvstore-removed"].split(", ")
        assert {"cache_salt", "vllm_xargs.kv_transfer_params", "messages.content.uuid"} <= set(removed)
    (got,) = a.asked
    assert got.body["vllm_xargs"] == {"kept": 1}
    assert got.body["temperature"] == 0.1 and got.body["seed"] == 2**63 - 1
    kept = [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "text", "text": "ü\u2028"},
    ]
    assert got.body["messages"][1]["content"] == kept
    assert got.body.keys() == {"model", "messages", "vllm_xargs", "temperature", "seed"}
    hidden = {"x-cache-salt", "x-my-salt-y", "x-data-parallel-rank", "x-gone", "x-kvstore-tenant", "cookie"}
    assert not hidden & got.headers.keys()
    assert got.headers["x-kept"] == "yes" and got.headers["accept-encoding"] == "identity"
    assert got.headers["authorization"] == "Bearer upstream-key"  # an open door: it is the replicas'


async def test_a_key_that_is_there_twice_reaches_nobody_unseen() -> None:
    raw = b'{"cache_salt": "one", "model": "m", "messages": [], "cache_salt": null, "model": "n"}'
    async with replica("a", answers) as a, route(a.known()) as s:
        await s.client.post(CHAT, content=raw)
    assert a.asked[0].raw == b'{"model":"n","messages":[]}'


def door() -> TokenDoor:
    def entry(name: str, *tenants: str, verbs: str = "read", expires_s: float = float("inf")) -> Token:
        return Token(name, frozenset(tenants), frozenset(verbs.split(",")), expires_s)

    tokens = {
        "alice-token": entry("a", "alice"),
        "both-token": entry("b", "alice", "bob"),
        "admin-token": entry("c", "alice", verbs="admin"),
        "old-token": entry("d", "alice", expires_s=1.0),
    }
    by_digest = {digest_of(token): found for token, found in tokens.items()}
    return TokenDoor(Tokens(by_digest), {"alice": b"a" * 32, "bob": b"b" * 32})


async def test_a_tenants_salt_comes_from_its_token() -> None:
    keys = {"a": "replica-key"}
    async with replica("a", answers) as a, route(a.known(), keys=keys, door=door()) as s:
        for token, tenant in (("alice-token", ""), ("both-token", "bob"), ("both-token", "alice")):
            headers = {"Authorization": f"Bearer {token}"} | ({"X-Kvstore-Tenant": tenant} if tenant else {})
            assert (await s.post(chat(cache_salt="bob's"), headers=headers)).status_code == 200
        salts = [asked.body["cache_salt"] for asked in a.asked]
        assert salts == [cache_salt(b"a" * 32), cache_salt(b"b" * 32), cache_salt(b"a" * 32)]
        assert all(len(salt) == 43 for salt in salts) and salts[0] != salts[1]
        assert {asked.headers["authorization"] for asked in a.asked} == {"Bearer replica-key"}
        tickets = await s.picker.settled(3)
        assert [t.request.tenant for t in tickets] == ["alice", "bob", "alice"]
        assert [t.request.salt for t in tickets] == salts
        assert tickets[0].request.session == tickets[2].request.session != tickets[1].request.session
        assert salts[0] not in repr(tickets[0].request)


@pytest.mark.parametrize(
    ("authorization", "tenant", "status"),
    [
        ("", "", 401),
        ("Basic alice-token", "", 401),
        ("Bearer unknown", "", 401),
        ("Bearer old-token", "", 401),
        ("Bearer admin-token", "", 403),
        ("Bearer both-token", "", 403),
        ("Bearer alice-token", "bob", 403),
    ],
)
async def test_strangers_are_not_let_in(authorization: str, tenant: str, status: int) -> None:
    headers = {"Authorization": authorization, "X-Kvstore-Tenant": tenant}
    async with replica("a", answers) as a, route(a.known(), door=door()) as s:
        for answer in (
            await s.post(chat(), headers=headers),
            await s.client.get("/v1/models", headers=headers),
        ):
            assert answer.status_code == status
            assert error_of(answer)["type"] in ("authentication_error", "permission_error")
    assert not a.asked and not s.picker.tickets


async def test_without_a_key_of_the_replica_a_token_of_ours_stays_here() -> None:
    async with replica("a", answers) as a, route(a.known(), door=door()) as s:
        await s.post(chat(), headers={"Authorization": "Bearer alice-token"})
    assert "authorization" not in a.asked[0].headers


# ---- limits and shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"messages": [NaN]}', b'{"a":' * 5000),
        *(b'{"model": 7}', b'{"stream": "yes"}', b'{"stream_options": 1}'),
        b'{"model": "' + b"m" * 300 + b'"}',
    ],
)
async def test_a_malformed_body_is_refused_in_the_apis_shape(raw: bytes) -> None:
    async with replica("a", answers) as a, route(a.known()) as s:
        answer = await s.client.post(CHAT, content=raw)
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"
    assert not a.asked and not s.picker.tickets


async def test_what_only_a_replica_can_judge_reaches_it() -> None:
    odd: list[dict[str, Any]] = [{}, {"messages": 7}, {"messages": [7, {"role": 1, "content": [None, {}]}]}]
    async with replica("a", answers) as a, route(a.known()) as s:
        for body in odd:
            assert (await s.post(body)).status_code == 200
            assert (await s.client.post("/v1/completions", json=body)).status_code == 200
    assert [asked.body for asked in a.asked] == [body for body in odd for _ in range(2)]


async def test_paths_that_are_not_served() -> None:
    async with route() as s:
        unknown = await s.client.post("/v1/embeddings", json={})
        assert unknown.status_code == 404 and "/v1/chat/completions" in error_of(unknown)["message"]
        other = await s.client.get(CHAT)
        assert other.status_code == 405 and error_of(other)["code"] == "method_not_allowed"
        assert (await s.client.get("/metrics")).status_code == 404


async def parts(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 1024


async def test_limits() -> None:
    options = ProxyOptions(body_bytes_max=4096, headers_max=20, body_s=0.3)
    async with replica("a", answers) as a, route(a.known(), options=options) as s:
        assert (await s.post(chat("x" * 5000))).status_code == 413
        chunked = await s.client.post(CHAT, content=parts(8))
        assert chunked.status_code == 413 and error_of(chunked)["code"] == "body_too_long"
        many = await s.post(chat(), headers={f"x-{n}": "1" for n in range(30)})
        assert many.status_code == 431
        packed = await s.client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
        assert packed.status_code == 415
        slo = await s.post(chat(), headers={"X-Kvstore-Slo-S": "nan"})
        assert slo.status_code == 400 and "x-kvstore-slo-s" in error_of(slo)["message"]
        reader, writer = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")
        writer.close()
    assert not a.asked and not s.picker.tickets


async def test_more_requests_than_may_run_are_told_to_wait() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def act(peer: Peer) -> None:
        asked.set()
        await go_on.wait()
        await answers(peer)

    async with replica("a", act) as a, route(a.known(), options=ProxyOptions(requests_max=1)) as s:
        first = asyncio.create_task(s.post(chat()))
        await asked.wait()
        second = await s.post(chat())
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        assert error_of(second)["type"] == "rate_limit_error"
        go_on.set()
        assert (await first).status_code == 200
        assert (await s.post(chat())).status_code == 200  # its place is free again
