"""The embedded engine with a small random model whose output betrays one wrong KV block (tiny.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore.connectors.embedded.attach import connect
from kvstore.connectors.embedded.engine import Engine, EngineLimits
from kvstore.connectors.embedded.model import load_model
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.tables import LocalTables
from kvstore.connectors.embedded.tiny import TINY, save_tiny
from real_daemon import eventually
from scene import Scene

from kvstore.client import Limits
from kvstore.types import Tier

__all__ = ["NEW", "TinyEngine", "TinyModel", "prompt", "tiny", "tiny_engine", "written"]

# Two layers: 2 KiB of KV a token, a few milliseconds a step.
SPEC = replace(TINY, layers=2)
NEW = 64
PATIENT = Limits(call_s=30.0, attach_s=60.0, copy_s=60.0, retry_s=0.01, retry_max_s=0.05)
GPU, HOST = Tier.GPU, Tier.HOST


def prompt(size: int, seed: int, after: Sequence[int] = ()) -> list[int]:
    """`after`, continued to `size` tokens that only this seed has."""
    random = np.random.default_rng(seed)
    return [*after, *random.integers(3, SPEC.vocab, size - len(after)).tolist()]


class TinyModel:
    """Weights on disk, and the uncached oracle over them."""

    def __init__(self, path: Path) -> None:
        self.path = save_tiny(path, SPEC)
        self._model = load_model(self.path, blocks=160, block_tokens=16)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def uncached(self, tokens: Sequence[int], new: int = NEW) -> tuple[int, ...]:
        """What the model answers when nothing is ever reused."""
        key = tuple(tokens), new
        if key not in self._known:
            engine = Engine(self._model, LocalTables(160, 16))
            request = Request("oracle", key[0], new, ignore_eos=True, reuse="none")
            self._known[key] = engine.generate([request])[0].tokens
        return self._known[key]


class TinyEngine:
    """An engine in this process.

    Args:
        blocks: of the device pool; one more is kept for the layout proof.
        options: of `attach.connect`.
    """

    def __init__(
        self,
        model: TinyModel,
        socket: Path,
        *,
        blocks: int = 160,
        block_tokens: int = 16,
        engine_limits: EngineLimits | None = None,
        limits: Limits = PATIENT,
        **options: Any,
    ) -> None:
        self.model = load_model(model.path, blocks=blocks + 1, block_tokens=block_tokens)
        memory = self.model.memory
        self.tables = connect(socket, self.model.spec, memory, model.path, limits=limits, **options)
        self.engine = Engine(self.model, self.tables, engine_limits)
        self._asked = 0

    def attached(self) -> TinyEngine:
        """Wait until the daemon has accepted us, and let the tables know."""

        def attached() -> bool:
            self.tables.poll()
            return self.tables.attached

        eventually(attached, f"attached: {self.client.refusal}")
        self.tables.poll()
        return self

    @property
    def client(self) -> Any:
        """The tables' client."""
        return self.tables._client

    def request(self, tokens: Sequence[int], new: int = NEW, reuse: Any = "own") -> Request:
        """A request with an id of its own."""
        self._asked += 1
        return Request(f"r{self._asked}", tuple(tokens), new, ignore_eos=True, reuse=reuse)

    def ask(self, tokens: Sequence[int], new: int = NEW, reuse: Any = "own") -> Report:
        """One request to its end."""
        report = self.engine.generate([self.request(tokens, new, reuse)])[0]
        assert report.prompt_tokens == report.fresh_tokens + sum(report.reused.values())
        return report

    def settle(self) -> None:
        """Every save is on HOST."""
        assert self.tables.settle(60.0)

    def close(self) -> None:
        """Leave in order."""
        self.engine.close()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny(written: TinyModel) -> Iterator[TinyModel]:
    """The model, written once. One thread: these matrices are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield written
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_engine(scene: Scene, tiny: TinyModel) -> Callable[..., TinyEngine]:
    """Makes engines on the shared daemon; they are closed with the test."""

    def make(**options: Any) -> TinyEngine:
        engine: TinyEngine = scene.keep(TinyEngine(tiny, scene.daemon.socket, **options))
        return engine.attached()

    return make
