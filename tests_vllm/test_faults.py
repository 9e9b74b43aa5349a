"""Daemons and engines that come and go: no request fails for it, and nothing is left of the dead."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from daemon import Daemon, eventually
from engines import Engine, EngineProcess, connector_config
from models import prompt_of

NewEngine = Callable[..., Engine]
NewProcess = Callable[..., EngineProcess]


def test_an_absent_daemon_costs_nothing_but_the_cache(
    tiny: Path, tmp_path: Path, new_daemon: Callable[..., Daemon], new_engine: NewEngine
) -> None:
    daemon = new_daemon()
    daemon.end()
    began = time.monotonic()
    engine = new_engine(tiny, daemon.socket)
    prompt = prompt_of(400)
    cold = engine.generate(prompt, 16)
    assert cold.external == 0
    assert cold.params is not None
    assert "no daemon" in cold.params["kvstore"]["reason"]
    assert time.monotonic() - began < 60
    assert engine.forget()
    daemon.start()  # later
    scheduler = engine.connector._scheduler
    eventually(lambda: scheduler._courier.epoch, "the scheduler found it")
    eventually(lambda: engine.worker_connector._clients[0].attached, "the rank found it")
    engine.generate(prompt, 16)
    engine.drain()
    assert engine.forget()
    host = engine.generate(prompt, 16)
    assert host.external == 384
    assert host.tokens == cold.tokens


def test_a_daemon_is_killed_and_restarted_under_load(
    tiny: Path, daemon: Daemon, new_process: NewProcess
) -> None:
    engine = new_process(tiny, daemon.socket, blocks=200)
    prompts = [prompt_of(260 + 20 * i, seed=i % 6) for i in range(12)]
    expected = [answer.tokens for answer in engine.generate_all(prompts, 24)]
    stop = threading.Event()
    lives = 0

    def killer() -> None:
        nonlocal lives
        while not stop.wait(1.0):
            daemon.kill()
            stop.wait(0.3)
            daemon.start()
            lives += 1

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        until = time.monotonic() + 120
        while lives < 5 and time.monotonic() < until:
            answers = engine.generate_all(prompts, 24)
            assert [answer.tokens for answer in answers] == expected
            assert {answer.reason for answer in answers} == {"length"}
            engine.forget()
    finally:
        stop.set()
        thread.join()
    assert lives >= 5
    # And the store works again. (A daemon ends with the thread that started it.)
    daemon.end()
    daemon.start()
    seeds = itertools.count(100)

    def saves() -> bool:
        engine.generate(prompt_of(400, seed=next(seeds)), 4)
        engine.drain()
        return daemon.ready() > 0

    eventually(saves, "something is saved again, once scheduler and rank are back")
    engine.close()
    daemon.assert_quiet()


def test_a_daemon_that_hangs_delays_a_request_by_a_moment(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    engine = new_engine(tiny, connector=connector_config(daemon.socket))  # as impatient as it is by default
    prompt = prompt_of(400)
    cold = engine.generate(prompt, 16)
    engine.drain()
    assert engine.forget()
    daemon.stopped()
    try:
        began = time.monotonic()
        answer = engine.generate(prompt, 16)
        assert time.monotonic() - began < 10
        assert answer.tokens == cold.tokens
        assert answer.external == 0
        assert answer.params is not None
        assert "too long" in answer.params["kvstore"]["reason"]
    finally:
        daemon.send(signal.SIGCONT)
    engine.drain()

    def again() -> bool:
        engine.forget()
        answer = engine.generate(prompt, 16)
        engine.drain()
        return answer.external == 384 and answer.tokens == cold.tokens

    eventually(again, "it is used again once it answers")


def test_an_engine_is_killed(tiny: Path, daemon: Daemon, new_process: NewProcess) -> None:
    """In the middle of saves and loads; what it held is given back, what it saved stays."""
    engine = new_process(tiny, daemon.socket)
    prompts = [prompt_of(900, seed=i) for i in range(4)]
    engine.generate_all(prompts, 1)
    engine.drain()
    eventually(lambda: daemon.ready() == 28, "all is saved")
    engine.forget()
    engine.begin([*prompts, *[prompt_of(2000, seed=10 + i) for i in range(4)]], 200)
    time.sleep(1.0)
    engine.kill()
    daemon.assert_quiet()
    with new_process(tiny, daemon.socket) as other:
        assert other.generate(prompts[0], 1).external == 896
    daemon.assert_quiet()


def test_two_engines_share_one_daemon_at_the_same_time(
    tiny: Path, daemon: Daemon, new_process: NewProcess
) -> None:
    ann, bob = new_process(tiny, daemon.socket), new_process(tiny, daemon.socket)
    prompts = [prompt_of(400 + 13 * i, seed=i) for i in range(6)]
    cold = [ann.generate(prompt, 24).tokens for prompt in prompts]
    ann.drain()
    eventually(lambda: daemon.ready() >= 18, "all is saved")
    # Both at once, each loading what the other saved, while each saves something of its own.
    more = [prompt_of(500, seed=50 + i) for i in range(6)]
    ann.begin(more, 24)
    host = bob.generate_all(prompts, 24)
    assert [answer.tokens for answer in host] == cold
    assert all(answer.external > 0 for answer in host)
    fresh = [answer.tokens for answer in ann.finish()]
    ann.drain()
    eventually(lambda: bob.generate(more[0], 1).external == 384, "it is there for the other")
    assert bob.generate(more[1], 24).tokens == fresh[1]
    status = daemon.group()
    assert len(status["engines"]) == 2


def test_a_running_request_is_saved_to_the_daemon_that_comes_next(
    tiny: Path, daemon: Daemon, new_engine: NewEngine
) -> None:
    engine = new_engine(tiny, daemon.socket, block_tokens=32)
    name = engine.submit(prompt_of(200), 400)
    while daemon.ready() < 6:
        engine.step()
    daemon.kill()
    daemon.start()
    courier, rank = engine.connector._scheduler._courier, engine.worker_connector._clients[0]

    def attached() -> bool:
        engine.step()
        return bool(courier.epoch) and rank.attached

    eventually(attached, "both are back")
    engine.wait([name])
    engine.drain()
    assert daemon.ready() == (200 + 399) // 32
