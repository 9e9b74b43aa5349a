"""Two vLLM servers of one node: a chat prompt that one has read, asked of the other.

Run by the interpreter of .venv-vllm. SmolLM2-135M, two `api_server` processes, one daemon. What README shows
of it is one question, asked once of each: for medians and spread see bench.vllm.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog

from bench.measure import finish, parser
from bench.paged import BenchDaemon
from bench.vllm_models import make_smollm2
from bench.vllm_server import ApiServer
from bench.vllm_settings import Settings, connector_config

__all__ = ["conversation", "main"]

_METRIC = re.compile(r"^(vllm:kvstore_load\w*_total){[^}]*} (\S+)$", re.MULTILINE)
_SAVED_S = 60.0


def conversation(rules: int = 34) -> list[dict[str, str]]:
    """A system prompt of some 40 tokens a rule, and a question."""
    text = "\n".join(
        f"Rule {i}: when a customer of branch {i} asks for {i * 7 + 3} items, offer {i % 9} percent off, "
        f"write it to ledger {i * 13 % 97} and tell the manager of floor {i % 5}."
        for i in range(rules)
    )
    return [
        {"role": "system", "content": f"You are a careful clerk.\n{text}"},
        {"role": "user", "content": "What is the capital of France?"},
    ]


def _ask(server: ApiServer) -> dict[str, Any]:
    """The question, once for the first token and once for the answer."""
    began = time.perf_counter()
    first = server.chat(conversation(), 1)
    seconds = time.perf_counter() - began
    return {
        "first_token_s": round(seconds, 3),
        "prompt_tokens": first["usage"]["prompt_tokens"],
        "hit_tokens": first["kv_transfer_params"]["kvstore"]["hit_tokens"],
        "answer": server.chat(conversation(), 16)["choices"][0]["message"]["content"],
    }


def _await_saved(server: ApiServer, blocks: int) -> None:
    until = time.monotonic() + _SAVED_S
    while time.monotonic() < until:
        found = re.search(r"^vllm:kvstore_saved_blocks_total{[^}]*} (\S+)$", server.metrics(), re.MULTILINE)
        if found and float(found[1]) >= blocks:
            return
        time.sleep(0.05)
    raise SystemExit(f"{blocks} blocks were not saved within {_SAVED_S:.0f} s")


def _two(folder: Path) -> dict[str, Any]:
    home = folder / "d"
    home.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(BenchDaemon(home, {"host.capacity_bytes": 1 << 30}))
        settings = Settings(
            str(make_smollm2(folder / "SmolLM2-135M-Instruct")),
            connector_config(daemon.socket),
            block_tokens=32,
            kv_bytes=512 << 20,
            model_len=4096,
        )
        servers = [stack.enter_context(ApiServer(folder, settings, name)) for name in ("a", "b")]
        for server in servers:
            server.wait_healthy()
            server.chat([{"role": "user", "content": "Say hello."}], 4)  # what only a first request compiles
        computed = _ask(servers[0])
        _await_saved(servers[0], computed["prompt_tokens"] // settings.block_tokens)
        loaded = _ask(servers[1])
        metrics = {name: float(value) for name, value in _METRIC.findall(servers[1].metrics())}
    return {"computed": computed, "loaded": loaded, "metrics_of_b": metrics}


def main() -> int:
    """Returns the exit status."""
    options = parser("vllm_two", __doc__).parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the result
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = name
        figures = _two(Path(name))
    return finish("vllm_two", options, figures, [])


if __name__ == "__main__":
    raise SystemExit(main())
