"""Two real vLLM servers behind `kvstore route`: does a request go where its conversation was?

Run by the interpreter of .venv-vllm. SmolLM2-135M on two `api_server` processes that publish KV events; the
router listens to them. Eight conversations with long system prompts of their own, eight turns each, all
answers streamed, eight requests at a time. The same load through `scored` and through `round_robin`, turn
about, each time with conversations that nobody has seen. Then once more through `scored`, while one server is
killed and started again.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measure import finish, parser
from bench.vllm_models import make_smollm2
from bench.vllm_processes import Child
from bench.vllm_server import ApiServer, free_port
from bench.vllm_settings import Settings

__all__ = ["main"]

CONVERSATIONS, TURNS, AT_ONCE, ANSWER_TOKENS = 8, 8, 8, 16
BLOCK_TOKENS = 32
_ROUNDS = 3
_ANSWER_S, _START_S, _BACK_S = 120.0, 30.0, 300.0
_KILLED_AFTER = 16  # replies


@dataclass(frozen=True, slots=True)
class Reply:
    """To one streamed chat request.

    Attributes:
        replica: that answered.
        text: of the answer.
        ttft_s: to its first piece.
        prompt_tokens, hit_tokens: as vLLM counted.
        expected_tokens: as the router thought it would be.
        error: "" = none.
    """

    replica: str = ""
    text: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    expected_tokens: int = 0
    error: str = ""


class Route(Child):
    """`kvstore route` as a process."""

    def __init__(self, folder: Path, policy: str, replicas: Sequence[str], tokenizer: str) -> None:
        self.port = free_port()
        words = ["kvstore", "route", "--policy", policy, "--listen", f"127.0.0.1:{self.port}"]
        words += ["--tokenizer", tokenizer, "--set", "route.hot_replicas=false"]
        for replica in replicas:
            words += ["--replica", replica]
        super().__init__(words, folder / f"route-{policy}.log", {}, pipes=False)

    def wait_up(self) -> Route:
        """Until it listens."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self.alive:
            try:
                if _get(self.port, "/health")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.05)
        raise self.failed("the router does not answer")

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield json.loads(data)


def ask(port: int, model: str, messages: Sequence[dict[str, str]]) -> Reply:
    """One streamed chat request; whatever goes wrong is its `error`."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    began = time.perf_counter()
    text, first_s = "", 0.0
    usage: dict[str, Any] = {}
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            return Reply(error=f"{response.status} {response.read()[:500].decode(errors='replace')}")
        for event in _events(response):
            if "error" in event:
                return Reply(error=str(event["error"])[:500])
            usage = event.get("usage") or usage
            piece = event["choices"][0]["delta"].get("content") or "" if event.get("choices") else ""
            if piece and not text:
                first_s = time.perf_counter() - began
            text += piece
        if not usage:
            return Reply(error="the stream ended without its usage")
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            response.headers.get("x-kvstore-replica", ""),
            text,
            first_s,
            usage["prompt_tokens"],
            int(details.get("cached_tokens") or 0),
            int(response.headers.get("x-kvstore-expected-tokens", "0")),
        )
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


@dataclass(slots=True)
class Talk:
    """One conversation; its turns come one after the other."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = " ".join(
            f"Rule {i} of house {self.name}: guests of floor {i * 7 % 31} get {i % 9} percent off and a note "
            f"in ledger {i * 13 % 97}."
            for i in range(22)
        )
        self.messages.append({"role": "system", "content": f"You are the clerk of {self.name}. {rules}"})

    def question(self, turn: int) -> list[dict[str, str]]:
        """The messages of the next turn."""
        self.messages.append(
            {"role": "user", "content": f"Question {turn}: what does rule {turn * 3 % 22} say?"}
        )
        return self.messages

    def answered(self, text: str) -> None:
        """The answer is part of the conversation from now on."""
        self.messages.append({"role": "assistant", "content": text or "."})


def load(
    port: int, model: str, mark: str, turns: int = TURNS, after: Callable[[], None] = lambda: None
) -> list[Reply]:
    """All conversations side by side; `after` is called when each reply is there."""
    replies: list[Reply] = []
    lock = threading.Lock()

    def talk(number: int) -> None:
        mine = Talk(f"{mark}-{number}")
        for turn in range(turns):
            reply = ask(port, model, mine.question(turn))
            mine.answered(reply.text)
            with lock:
                replies.append(reply)
            after()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(talk, range(CONVERSATIONS)))
    return replies


def told(replies: Sequence[Reply]) -> dict[str, Any]:
    """Figures of one load."""
    good = [reply for reply in replies if not reply.error]
    ttft_s = sorted(reply.ttft_s for reply in good)
    tokens = sum(reply.prompt_tokens for reply in good)
    hits = sum(reply.hit_tokens for reply in good)
    return {
        "requests": len(replies),
        "errors": [reply.error for reply in replies if reply.error][:5],
        "prompt_tokens": tokens,
        "hit_tokens": hits,
        "hit_share": round(hits / max(1, tokens), 3),
        "expected_over_hit_tokens": round(sum(r.expected_tokens for r in good) / max(1, hits), 3),
        "ttft_p50_s": round(statistics.median(ttft_s), 3) if ttft_s else None,
        "ttft_p95_s": round(ttft_s[int(0.95 * (len(ttft_s) - 1))], 3) if ttft_s else None,
        "by_replica": {
            name: sum(r.replica == name for r in good) for name in sorted({r.replica for r in good})
        },
    }


class Fleet:
    """Two servers with their event sockets; one of them can be killed and comes back on its ports."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.model = str(make_smollm2(folder / "SmolLM2-135M-Instruct"))
        self.ports = {
            name: (free_port(), f"ipc://{folder}/{name}.events", f"ipc://{folder}/{name}.replay")
            for name in ("a", "b")
        }
        self._stack = stack
        self.servers = {name: self._start(name) for name in self.ports}
        for server in self.servers.values():
            server.wait_healthy()
            server.chat([{"role": "user", "content": "Say hello."}], 4)  # what only a first request compiles

    def _start(self, name: str) -> ApiServer:
        http_port, events, replay = self.ports[name]
        extra = {
            "enable_prompt_tokens_details": True,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                # Not tcp://127.0.0.1:port: there vLLM would connect instead of listening.
                "endpoint": events,
                "replay_endpoint": replay,
            },
        }
        settings = Settings(
            self.model, block_tokens=BLOCK_TOKENS, kv_bytes=512 << 20, model_len=4096, extra=extra
        )
        return self._stack.enter_context(ApiServer(self.folder, settings, name, http_port))

    def replicas(self) -> list[str]:
        """As --replica takes them."""
        return [
            f"{name}=http://127.0.0.1:{port},events={events},replay={replay}"
            for name, (port, events, replay) in self.ports.items()
        ]

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.servers[name].kill()

    def start_again(self, name: str) -> None:
        """On the same ports; healthy when this returns."""
        self.servers[name] = self._start(name).wait_healthy()


def _compare(fleet: Fleet, rounds: int) -> dict[str, Any]:
    """Both policies, turn about; medians over the rounds."""
    runs: dict[str, list[dict[str, Any]]] = {"round_robin": [], "scored": []}
    with ExitStack() as stack:
        routers = {
            policy: stack.enter_context(Route(fleet.folder, policy, fleet.replicas(), fleet.model)).wait_up()
            for policy in runs
        }
        for number in range(rounds):
            for policy, router in routers.items():
                runs[policy].append(told(load(router.port, fleet.model, f"{policy}{number}")))
        alarm = [
            line for line in _get(routers["scored"].port, "/metrics")[1].splitlines() if "_alarm{" in line
        ]
    middle = {
        policy: {
            key: statistics.median(run[key] for run in of)
            for key in ("hit_share", "ttft_p50_s", "ttft_p95_s")
        }
        for policy, of in runs.items()
    }
    return {
        "runs": runs,
        "medians": middle,
        "ttft_p50_over_round_robin": round(
            middle["scored"]["ttft_p50_s"] / middle["round_robin"]["ttft_p50_s"], 3
        ),
        "errors": sum(len(run["errors"]) for of in runs.values() for run in of),
        "alarms": [line for line in alarm if not line.endswith(" 0.0")],
    }


def _killed(fleet: Fleet) -> dict[str, Any]:
    """Replica b dies in the middle of the load, and the load goes on until b is back and has answered.

    Servers are started by this thread: they end with the thread that started them.
    """
    replies: list[Reply] = []
    back, enough = threading.Event(), threading.Event()
    half = threading.Semaphore(0)

    def work(port: int) -> None:
        replies.extend(load(port, fleet.model, "killed", after=half.release))
        since, rounds = len(replies), 0
        until = time.monotonic() + _BACK_S
        while time.monotonic() < until and not enough.is_set():
            since = since if back.is_set() else len(replies)
            replies.extend(load(port, fleet.model, f"killed-{rounds}", turns=2))
            rounds += 1
            if back.is_set() and any(reply.replica == "b" for reply in replies[since:]):
                enough.set()

    with Route(fleet.folder, "scored", fleet.replicas(), fleet.model).wait_up() as router:
        thread = threading.Thread(target=work, args=(router.port,))
        thread.start()
        for _ in range(_KILLED_AFTER):
            half.acquire()
        at_s = time.monotonic()
        fleet.kill("b")
        fleet.start_again("b")
        down_s = time.monotonic() - at_s
        before = len(replies)
        back.set()
        thread.join()
    figures = told(replies)
    figures["killed_after"] = _KILLED_AFTER
    figures["down_s"] = round(down_s, 1)
    figures["answered_by_b_after_it_came_back"] = sum(reply.replica == "b" for reply in replies[before:])
    return figures


def main() -> int:
    """Returns the exit status."""
    command = parser("routing_vllm", __doc__)
    command.add_argument("--rounds", type=int, default=_ROUNDS, help="of each policy")
    options = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name, ExitStack() as stack:
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = name
        fleet = Fleet(Path(name), stack)
        figures = _compare(fleet, options.rounds)
        figures["killed"] = _killed(fleet)
    voids = ["errors without a kill"] if figures["errors"] else []
    return finish("routing_vllm", options, figures, voids)


if __name__ == "__main__":
    raise SystemExit(main())
