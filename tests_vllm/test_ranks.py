"""Tensor parallelism: ranks write their heads, and engines of any number of ranks share blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from daemon import Daemon, eventually
from engines import EngineProcess
from models import prompt_of

NewProcess = Callable[..., EngineProcess]


def test_two_ranks_to_one_and_back(tiny: Path, daemon: Daemon, new_process: NewProcess) -> None:
    first, second = prompt_of(700, seed=1), prompt_of(500, seed=2)
    with new_process(tiny, daemon.socket, ranks=2) as pair:
        cold = pair.generate(first, 32)
        pair.drain()
        eventually(lambda: daemon.ready() == 5, "both ranks have written")
        assert pair.forget()
        own = pair.generate(first, 32)
        assert own.external == 640
        assert own.tokens == cold.tokens
    with new_process(tiny, daemon.socket) as single:
        host = single.generate(first, 32)
        assert host.external == 640
        assert host.tokens == cold.tokens
        back = single.generate(second, 32)
        single.drain()
        eventually(lambda: daemon.ready() == 5 + 4, "the single rank has written")  # 500 + 31 tokens
    with new_process(tiny, daemon.socket, ranks=2) as pair:
        host = pair.generate(second, 32)
        assert host.external == 384
        assert host.tokens == back.tokens
        pair.drain()
    daemon.assert_quiet()
