"""Two servers as users start them: what one has read, the other need not read again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import Daemon, eventually
from engines import ApiServer

from bench.vllm_two import conversation

NewServer = Callable[..., ApiServer]


def counter(page: str, name: str) -> float:
    """A counter of ours on a server's metrics page, all engines."""
    found = re.findall(rf"^vllm:kvstore_{name}_total{{[^}}]*}} (\S+)$", page, re.MULTILINE)
    assert found, f"no vllm:kvstore_{name}_total"
    return sum(map(float, found))


@pytest.mark.smollm2
@pytest.mark.timeout(420)
def test_a_chat_warmed_on_one_replica_is_answered_by_the_other(
    smollm2: Path, new_daemon: Callable[..., Daemon], new_server: NewServer
) -> None:
    daemon = new_daemon()
    settings = {"block_tokens": 32, "kv_bytes": 512 << 20, "model_len": 4096}
    servers = [new_server(smollm2, daemon.socket, **settings) for _ in range(2)]
    ann, bob = (server.wait_healthy() for server in servers)
    messages = conversation()
    cold = ann.chat(messages, 24)
    tokens = cold["usage"]["prompt_tokens"]
    assert 1400 <= tokens <= 1700, tokens
    eventually(lambda: daemon.ready() >= tokens // 32, "ann has saved the prompt")
    host = bob.chat(messages, 24)
    assert host["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]
    assert host["kv_transfer_params"]["kvstore"]["hit_tokens"] == {"HOST": tokens // 32 * 32}
    eventually(lambda: counter(bob.metrics(), "loaded_tokens") == tokens // 32 * 32, "bob's metrics say so")
    assert counter(bob.metrics(), "loaded_bytes") > 0
    assert counter(ann.metrics(), "saved_blocks") >= tokens // 32
    for server in servers:
        server.close()
    daemon.assert_quiet()
