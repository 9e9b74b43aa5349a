"""What must not be shared is not: salts, weights, requests that stay out, a cache that was reset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from daemon import Daemon
from engines import Engine
from models import prompt_of

NewEngine = Callable[..., Engine]


def test_cache_salts_isolate(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(400)
    tokens = engine.generate(prompt, 8, salt="ann").tokens
    engine.drain()
    assert engine.forget()
    for salt in ("bob", None):
        assert engine.generate(prompt, 8, salt=salt).external == 0
        engine.drain()
        assert engine.forget()
    again = engine.generate(prompt, 8, salt="ann")
    assert again.external == 384
    assert again.tokens == tokens


def test_other_weights_never_share(
    tiny: Path, other_tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    prompt = prompt_of(400)
    with new_engine(tiny, daemon.socket) as engine:
        engine.generate(prompt, 8)
        engine.drain()
    with new_engine(other_tiny, daemon.socket) as engine:
        assert engine.generate(prompt, 8).external == 0
        engine.drain()
    with new_engine(tiny, daemon.socket) as engine:
        assert engine.generate(prompt, 8).external == 384


def test_a_request_may_stay_out(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(400)

    def ask(reuse: object, **more: object) -> int:
        params = {"kv_transfer_params": {"kvstore": {"reuse": reuse, **more}}}
        answer = engine.wait([engine.submit(prompt, 4, sampling={"extra_args": params})])[0]
        engine.drain()
        assert engine.forget()
        return answer.external

    for reuse in ("none", "everybody"):  # a mistake must not share more than was meant
        assert ask(reuse) == 0
        assert daemon.ready() == 0
    assert ask("own", plan="perhaps") == 0 and daemon.ready() == 0
    assert [ask("own"), ask("own")] == [0, 384]
    assert ask("none") == 0


def test_after_a_reset_nothing_old_is_used(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    """vLLM resets its connector when weights change: what was stored before belongs to the old ones."""
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(400)
    engine.generate(prompt, 4)
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.generate(prompt, 4).external == 0
    engine.drain()
    assert engine.forget()
    assert engine.generate(prompt, 4).external == 384, "what was saved since is good"


def test_a_reset_waits_for_copies(tiny: Path, daemon: Daemon, new_engine: NewEngine) -> None:
    engine = new_engine(tiny, daemon.socket)
    engine.generate(prompt_of(400), 1)
    assert engine.connector.has_pending_push_work()
    assert engine.connector.reset_cache() is False
    engine.drain()
    assert engine.connector.reset_cache() is True
    assert engine.generate(prompt_of(400), 1).external == 0


def test_a_request_that_lives_through_a_reset_saves_nothing(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    """Its KV is of the former weights, whatever vLLM does with the request."""
    engine = new_engine(tiny, daemon.socket, block_tokens=32)
    prompt = prompt_of(200)
    name = engine.submit(prompt, 60)
    while len(engine.peek(name).tokens) < 10:
        engine.step()
    before = daemon.ready()
    engine.connector.reset_cache()  # vLLM's own reset fails now, and calls ours all the same
    engine.wait([name])
    engine.drain()
    assert daemon.ready() == before
    assert engine.forget()
    assert engine.generate(prompt, 4).external == 0
