"""What an engine is told when it starts: refused with the line to type, or served uncached, with why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon import Daemon
from engines import Engine, EngineProcess, connector_config, settings_of
from models import prompt_of

NewEngine = Callable[..., Engine]


def test_the_default_policy_is_refused_with_the_line_to_type(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    with pytest.raises(Exception, match="kv_load_failure_policy") as refused:
        new_engine(tiny, connector=connector_config(daemon.socket, policy="fail"))
    assert '"kv_load_failure_policy":"recompute"' in str(refused.value)
    assert '"kv_connector_module_path":"kvstore.connectors.vllm"' in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"sokcet": "/x"}, "kv_connector_extra_config.sokcet: unknown; the fields are socket, tenant"),
        ({"copy_threads": 0}, "kv_connector_extra_config.copy_threads: need 1 to 64, got 0"),
        ({"copy_threads": "2"}, "kv_connector_extra_config.copy_threads: need int, got '2'"),
        ({"reuse": "all"}, 'kv_connector_extra_config.reuse: need "none", "own", "group", got \'all\''),
        ({"socket": "/" + "x" * 200}, "kv_connector_extra_config.socket: need a path of 1 to 107 bytes"),
        ({"fetch_s": -1}, "kv_connector_extra_config.fetch_s: need 0.0 to 60.0, got -1.0"),
        ({"call_s": 0}, "kv_connector_extra_config.call_s: need 0.01 to 600.0, got 0.0"),
        ({"patience_s": True}, "kv_connector_extra_config.patience_s: need float, got True"),
    ],
)
def test_mistakes_in_the_extra_config_name_the_field(extra: dict[str, Any], message: str) -> None:
    from kvstore.connectors.vllm.options import Options

    with pytest.raises(ValueError) as refused:
        Options.parse(extra)
    assert message in str(refused.value)


def test_the_defaults_are_fine() -> None:
    from kvstore.connectors.vllm.options import Options

    from kvstore.client import default_socket

    assert Options.parse({}).socket == default_socket()
    assert Options.parse({"patience_s": 1}).patience_s == 1.0


def test_what_cannot_be_kept_is_said_and_the_engine_serves(
    tiny: Path, daemon: Daemon, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Weights that come from nowhere have no fingerprint."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        engine = new_engine(tiny, daemon.socket, extra={"load_format": "dummy"})
    assert "this engine runs without the store: load_format='dummy' reads no weights" in caplog.text
    assert "set kv_connector_extra_config.weights" in caplog.text
    prompt = prompt_of(300)
    tokens = engine.generate(prompt, 8).tokens
    assert engine.generate(prompt, 8).tokens == tokens
    engine.drain()
    assert not daemon.group()["engines"]


def test_what_has_no_fingerprint_may_be_named(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    """And then it is kept, under that name."""
    config = connector_config(daemon.socket)
    config["kv_connector_extra_config"]["weights"] = "dummy, seed 0"
    engine = new_engine(tiny, connector=config, extra={"load_format": "dummy"})
    prompt = prompt_of(300)
    engine.generate(prompt, 8)
    engine.drain()
    assert engine.forget()
    assert engine.generate(prompt, 8).external == 256


def test_roles_of_one_direction(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    prompt = prompt_of(400)
    config = connector_config(daemon.socket)
    with new_engine(tiny, connector={**config, "kv_role": "kv_consumer"}) as consumer:
        consumer.generate(prompt, 4)
        consumer.drain()
        assert daemon.ready() == 0
    with new_engine(tiny, connector={**config, "kv_role": "kv_producer"}) as producer:
        producer.generate(prompt, 4)
        producer.drain()
        assert daemon.ready() == 3
        assert producer.forget()
        assert producer.generate(prompt, 4).external == 0
        producer.drain()
    with new_engine(tiny, connector={**config, "kv_role": "kv_consumer"}) as consumer:
        assert consumer.generate(prompt, 4).external == 384


def test_without_vllms_own_prefix_cache(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket, prefix_caching=False)
    prompt = prompt_of(400)
    cold = engine.generate(prompt, 16)
    engine.drain()
    host = engine.generate(prompt, 16)
    assert (host.own, host.external) == (0, 384)
    assert host.tokens == cold.tokens


def test_speculative_tokens_are_never_saved(
    tiny: Path, daemon: Daemon, new_process: Callable[..., EngineProcess]
) -> None:
    """Drafts from the prompt itself: some are taken, most are not; only what was taken is stored.

    In processes of their own: once numba is loaded, vLLM makes no second engine in a process.
    """
    repeated = prompt_of(40, seed=3) * 8
    speculative = {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    }
    with new_process(tiny, daemon.socket, block_tokens=32, extra=speculative) as engine:
        first = engine.generate(repeated, 100)
        engine.drain()
        assert engine.forget()
        host = engine.generate(repeated, 100)
        assert host.external == 320
        assert host.tokens == first.tokens
        engine.drain()
        assert engine.forget()
        turn = repeated + first.tokens
        again = engine.generate(turn, 20)
        assert again.external == (len(turn) - 1) // 32 * 32
        engine.drain()
    with new_process(tiny, None, block_tokens=32) as plain:
        assert plain.generate(repeated, 100).tokens == first.tokens
        assert plain.generate(turn, 20).tokens == again.tokens


def test_settings_reach_vllm(tiny: Path) -> None:
    assert settings_of(tiny, Path("/s")).arguments()["kv_transfer_config"]["kv_role"] == "kv_both"


@pytest.mark.parametrize(("ranks", "shortened"), [(1, False), (2, True)])
def test_an_engine_of_several_ranks_lets_other_threads_have_their_turns(ranks: int, shortened: bool) -> None:
    from kvstore.connectors.vllm import start

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        start.share_interpreter(SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks)))
        assert (sys.getswitchinterval() < 0.005) == shortened
    finally:
        sys.setswitchinterval(before)
