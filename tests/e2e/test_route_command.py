"""`kvstore route`, the command: conversations stay where they are, and everything about it is told."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_engine import SMALL
from real_daemon import RealDaemon, eventually
from route_command import CachingEngine, RouteCommand
from scene import Scene

from kvstore.config.tokens import digest_of
from kvstore.testing.driver import namespace_of
from kvstore.v1 import routing_pb2 as pb
from kvstore.v1 import routing_pb2_grpc as rpc

TOKEN = '[[tokens]]\nname = "{0}"\nsha256 = "{1}"\ntenants = ["{0}"]\nverbs = ["read"]\n'


def words(name: object, count: int = 150) -> str:
    """Some 1,000 characters that no other name has."""
    return " ".join(f"{name}.{i}" for i in range(count))


@pytest.fixture
def engines() -> Iterator[list[CachingEngine]]:
    made = [CachingEngine() for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


def replicas(engines: list[CachingEngine]) -> list[str]:
    return [
        word for name, engine in zip("ab", engines, strict=True) for word in ("-r", f"{name}={engine.url}")
    ]


def test_conversations_go_where_they_were(tmp_path: Path, engines: list[CachingEngine]) -> None:
    with RouteCommand(tmp_path, replicas(engines)).wait_up() as router:
        homes: dict[int, str] = {}
        for turn in range(3):
            for talk in range(6):
                text = words(f"talk{talk}") + "".join(f" turn {i}" for i in range(turn))
                reply = router.ask(text)
                assert reply.status == 200
                home = homes.setdefault(talk, reply.replica)
                assert reply.replica == home
                assert bool(reply.cached_tokens) is bool(turn)
        assert set(homes.values()) == {"a", "b"}, "new ones are spread"
        assert router.metric("kvstore_route_requests_total") == 18
        told = router.metric("kvstore_route_cached_tokens_total")
        assert 0.8 < router.metric("kvstore_route_expected_tokens_total") / told < 1.2
        assert router.metric("kvstore_route_alarm") == 0
        assert router.end() == 0, "SIGTERM is no failure"


def test_a_dead_replica_costs_nobody_an_answer(tmp_path: Path, engines: list[CachingEngine]) -> None:
    with RouteCommand(tmp_path, [*replicas(engines), "--policy", "round_robin"]).wait_up() as router:
        assert {router.ask(words(i)).replica for i in range(4)} == {"a", "b"}
        engines[1].close()
        replies = [router.ask(words(i)) for i in range(10, 20)]
        assert {(reply.status, reply.replica) for reply in replies} == {(200, "a")}
        assert router.metric("kvstore_route_failures_total", 'replica="b"') >= 1
        assert router.metric("kvstore_route_up", 'replica="b"') == 0
        assert router.metric("kvstore_route_in_flight") == 0


def test_gateways_ask_over_grpc_and_count_in_the_same_queues(
    tmp_path: Path, engines: list[CachingEngine]
) -> None:
    listen = ["--set", "route.grpc=127.0.0.1:0", "--policy", "least"]
    with RouteCommand(tmp_path, [*replicas(engines), *listen]).wait_up() as router:
        stub = rpc.RoutingStub(grpc.insecure_channel(router.grpc))
        prompt = pb.Prompt(tokens=range(320))
        first = stub.Pick(pb.PickRequest(prompt=prompt))
        assert router.metric("kvstore_route_in_flight", f'replica="{first.replica}"') == 1
        second = stub.Pick(pb.PickRequest(prompt=prompt))
        assert {first.replica, second.replica} == {"a", "b"}
        third = stub.Pick(pb.PickRequest(prompt=prompt, avoid=["a"]))
        assert third.replica == "b"
        assert third.expected_tokens == 320
        score = stub.Score(pb.ScoreRequest(prompt=prompt))
        assert score.chosen == "a"
        assert [(each.replica, each.in_flight, each.matched_tokens) for each in score.replicas] == [
            ("a", 1, 320),
            ("b", 2, 320),
        ]
        done = [
            pb.TicketReport(ticket=each.ticket, finished=pb.Finished()) for each in (first, second, third)
        ]
        byte = pb.TicketReport(ticket=first.ticket, first_byte=pb.FirstByte(seconds=0.1))
        assert not stub.Report(pb.ReportRequest(reports=[byte, *done])).unknown
        assert list(stub.Report(pb.ReportRequest(reports=done)).unknown) == [
            e.ticket for e in (first, second, third)
        ]
        assert router.metric("kvstore_route_in_flight") == 0
        for request, status in (
            (
                pb.PickRequest(prompt=pb.Prompt(tokens=range(16)), avoid=["a", "b"]),
                grpc.StatusCode.UNAVAILABLE,
            ),
            (pb.PickRequest(prompt=pb.Prompt(session="x" * 300)), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.PickRequest(prompt=pb.Prompt(slo_s=-1)), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Pick(request)
            assert refused.value.code() is status


def test_tenants_are_known_by_their_tokens_and_keep_their_prefixes_apart(
    tmp_path: Path, engines: list[CachingEngine]
) -> None:
    tokens, secrets = tmp_path / "tokens.toml", tmp_path / "secrets.toml"
    tokens.write_text("".join(TOKEN.format(name, digest_of(name * 20)) for name in ("alice", "bob")))
    secrets.write_text(f'[tenants]\nalice = "{"11" * 32}"\nbob = "{"22" * 32}"\n')
    for path in (tokens, secrets):
        path.chmod(0o600)
    files = ["--set", f"route.tokens_file={tokens}", "--set", f"route.secrets_file={secrets}"]
    with RouteCommand(tmp_path, [*replicas(engines), *files]).wait_up() as router:
        assert router.ask("hello").status == 401
        assert router.ask("hello", token="guess").status == 401
        text = words("prompt")
        assert router.ask(text, token="alice" * 20).cached_tokens == 0
        again = router.ask(text, token="alice" * 20)
        assert again.cached_tokens > 0
        assert again.expected_tokens > 0
        others = router.ask(text, token="bob" * 20, cache_salt="stolen")
        assert (others.cached_tokens, others.expected_tokens) == (0, 0)
        salts = {body["cache_salt"] for engine in engines for body in engine.bodies}
        assert len(salts) == 2
        assert "stolen" not in salts
        log = (tmp_path / "route.log").read_text()
        assert not any(secret in log for secret in (*salts, "1111111111", "alicealice"))


def test_who_looks_at_times_learns_nothing_of_other_tenants_through_the_router(tmp_path: Path) -> None:
    """The timing probe: bob asks what alice has asked, and what nobody has; with one tenant it would show."""
    tokens, secrets = tmp_path / "tokens.toml", tmp_path / "secrets.toml"
    tokens.write_text("".join(TOKEN.format(name, digest_of(name * 20)) for name in ("alice", "bob")))
    secrets.write_text(f'[tenants]\nalice = "{"11" * 32}"\nbob = "{"22" * 32}"\n')
    tokens.chmod(0o600)
    secrets.chmod(0o600)
    files = ["--set", f"route.tokens_file={tokens}", "--set", f"route.secrets_file={secrets}"]
    engine = CachingEngine(delay_s=0.01)
    try:
        with RouteCommand(tmp_path, ["-r", f"a={engine.url}", *files]).wait_up() as router:
            n = 20
            for i in range(n):
                router.ask(words(f"cached{i}", 60), token="alice" * 20)
            order = [(f"cached{i}", True) for i in range(n)] + [(f"fresh{i}", False) for i in range(n)]
            random.Random(1).shuffle(order)
            seen: dict[str, dict[bool, list[int]]] = {
                "bob": {True: [], False: []},
                "alice": {True: [], False: []},
            }
            for who in seen:
                for name, cached in order:
                    own = name if cached else f"{who}-{name}"
                    reply = router.ask(words(own, 60), token=who * 20)
                    seen[who][cached].append(reply.cached_tokens + reply.expected_tokens)
            # 16: the first block, with which everything of bob's own begins.
            assert max(seen["bob"][True]) <= 16
            assert max(seen["bob"][False]) <= 16
            assert min(seen["alice"][True]) > 100, "within one tenant the same probe sees everything"
    finally:
        engine.close()


def by_key(daemons: list[RealDaemon], model: str) -> str:
    """A deployment whose replicas are told apart by what their daemons hold of the fake engine's model."""
    space = namespace_of(SMALL, model)
    fields = ("model", "weights", "tokenizer", "adapter", "attention", "kv_dtype")
    return (
        '[[deployments]]\nkeys = "kvstore"\n[deployments.namespace]\n'
        + "".join(f'{name} = "{space[name]}"\n' for name in fields)
        + f"[deployments.layout]\nlayers = {SMALL.layers}\nkv_heads = {SMALL.kv_heads}\n"
        + f'head_dim = {SMALL.head_dim}\ndtype = "{SMALL.dtype}"\nblock_tokens = {SMALL.block_tokens}\n'
        + "".join(
            f'[[deployments.replicas]]\nname = "{name}"\nurl = "http://127.0.0.1:1"\n'
            f'daemon = "unix:{daemon.socket.with_name(daemon.socket.stem + "-grpc.sock")}"\n'
            for name, daemon in zip("ab", daemons, strict=True)
        )
    )


def test_daemons_tell_by_key_what_lies_on_their_tiers(stage: Scene, tmp_path: Path) -> None:
    """A deployment with keys = "kvstore": two daemons, one of which has the prompt on HOST."""
    secrets = tmp_path / "secrets.toml"
    secrets.write_text(f'[tenants]\ndefault = "{"33" * 32}"\n')
    secrets.chmod(0o600)
    settings = {"grpc__listen": '"auto"', "daemon__secrets_file": f'"{secrets}"'}
    daemons = [stage.start_daemon(**settings) for _ in range(2)]
    engine = stage.engine()  # of the daemon that was started last
    ids = np.arange(70_000, 70_000 + 10 * SMALL.block_tokens, dtype=np.uint32)
    chain = engine.client.chain(ids, engine.tenant, engine.reuse)
    assert chain is not None
    assert engine.save(chain).ready == 10
    config = tmp_path / "route.toml"
    config.write_text(by_key(daemons, stage.name))
    listen = ["--config", str(config), "--set", "route.grpc=127.0.0.1:0"]
    with RouteCommand(tmp_path, listen).wait_up() as router:
        stub = rpc.RoutingStub(grpc.insecure_channel(router.grpc))
        asked = pb.ScoreRequest(prompt=pb.Prompt(tokens=ids.tolist(), tenant="default"))

        def known() -> bool:
            found = {each.replica: each for each in stub.Score(asked).replicas}
            return found["b"].host_tokens == 40 and found["a"].matched_tokens == 0

        eventually(known, "the router has heard what the daemon holds")
        answer = stub.Score(asked)
        assert answer.chosen == "b"
        assert {each.replica: each.gpu_tokens for each in answer.replicas} == {"a": 0, "b": 0}
        assert not any("salts" in line["event"] for line in router.said())


def test_daemons_with_different_salts_are_told_of(stage: Scene, tmp_path: Path) -> None:
    daemons = [stage.start_daemon(grpc__listen='"auto"') for _ in range(2)]
    config = tmp_path / "route.toml"
    config.write_text(by_key(daemons, stage.name))
    with RouteCommand(tmp_path, ["--config", str(config)]).wait_up() as router:
        warned = eventually(
            lambda: [line for line in router.said() if line["event"] == "a daemon has other salts"],
            "the router warns",
        )
        assert "secrets_file" in warned[0]["fix"]


def test_warm_lets_a_fresh_replica_compute_what_most_begin_with(
    tmp_path: Path, engines: list[CachingEngine]
) -> None:
    shared = list(range(1000, 1256))
    listen = ["--set", "route.grpc=127.0.0.1:0", "--policy", "affinity"]
    with RouteCommand(tmp_path, [*replicas(engines), *listen]).wait_up() as router:
        for number in range(6):
            assert router.complete([*shared, *range(number * 100, number * 100 + 60)]).status == 200
        router.complete(list(range(5000, 5100)))  # only once: nothing to warm
        fresh = next(name for name, engine in zip("ab", engines, strict=True) if len(engine.bodies) < 2)
        before = len(engines["ab".index(fresh)].bodies)
        command = [sys.executable, "-m", "kvstore", "warm", "--router", router.grpc, "--json"]
        done = subprocess.run(
            [*command, "-r", fresh], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert [each["prompt_tokens"] for each in told["prefixes"]] == [256]
        bodies = engines["ab".index(fresh)].bodies[before:]
        assert [(body["prompt"], body["max_tokens"]) for body in bodies] == [(shared, 1)]
        again = subprocess.run(
            [*command, "-r", fresh], capture_output=True, text=True, timeout=60, check=False
        )
        assert json.loads(again.stdout)["prefixes"][0]["cached_tokens"] > 200
        wrong = subprocess.run(
            [*command, "-r", "zzz"], capture_output=True, text=True, timeout=60, check=False
        )
        assert wrong.returncode == 2
        assert "replica: 'zzz' is none of a, b" in wrong.stdout
