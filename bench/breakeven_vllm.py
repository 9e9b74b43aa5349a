"""What bench.breakeven --engine vllm runs on: the stage of the embedded engine, with a vLLM in its place.

Run by the interpreter of .venv-vllm. Before every measured request its prompt is on NVME and nowhere else:
vLLM keeps no prefix cache of its own here, and another client fills HOST with blocks that nobody wants.
A way is asked for as any caller of vLLM may: in the request's `kv_transfer_params`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvstore.connectors.embedded.demo_disk import disk_folder, disk_settings

from bench.breakeven_daemon import Answer, LimitedDaemon
from bench.paged import PagedMemory, namespace_of
from bench.vllm_engine import Engine
from bench.vllm_models import make_smollm2
from bench.vllm_settings import Settings, connector_config
from kvstore.client import Client, Limits
from kvstore.types import BlockLayout, Reuse

__all__ = ["VllmStage", "stage"]

BLOCK_TOKENS, CHUNK_TOKENS = 128, 256
_MIB = 1 << 20
_SLAB = 32 * _MIB
# SmolLM2-135M in float32.
_LAYOUT = BlockLayout(30, 3, 64, "float32", BLOCK_TOKENS)
_VOCAB = 49_152
_REQUEST_S, _ATTACH_S = 60.0, 60.0
_BUSY_TOKENS, _BUSY_NEW = 64, 1_000
_WISHES: dict[str, Mapping[str, str]] = {
    "recompute": {"reuse": "none"},  # what vLLM without a store does
    "load": {"plan": "load"},
    "planner": {},
}


class VllmStage:
    """A vLLM engine in this process, its daemon, and prompts on the daemon's disk.

    Args:
        folder: for the daemon's socket, log and configuration, and the model.
        disk: settings of its NVME tier.
        lengths: of the prompts, in tokens.
    """

    arms: Sequence[str] = tuple(_WISHES)
    facts: Mapping[str, object] = {"block_tokens": BLOCK_TOKENS, "chunk_tokens": CHUNK_TOKENS}

    def __init__(self, folder: Path, disk: Mapping[str, object], lengths: Sequence[int]) -> None:
        self._random = np.random.default_rng(1)
        self._busy_names: list[str] = []
        self._sequences = self._busy_left = 0
        longest = max(lengths)
        size = -(-longest // BLOCK_TOKENS) * _LAYOUT.block_bytes + 2 * _LAYOUT.block_bytes
        arena = -(-size // _SLAB) * _SLAB
        with ExitStack() as ending:
            self.daemon = LimitedDaemon(folder, {**disk, "host.capacity_bytes": arena})
            ending.callback(self.daemon.end)
            self.daemon.wait_ready()
            self._engine = ending.enter_context(Engine(_settings(folder, self.daemon.socket, longest)))
            self._filler_blocks = arena // _LAYOUT.block_bytes + 1
            memory = PagedMemory(_LAYOUT, self._filler_blocks)
            patient = Limits(call_s=_REQUEST_S, attach_s=_ATTACH_S, copy_s=_REQUEST_S)
            filler = replace(namespace_of(_LAYOUT), block_tokens=str(BLOCK_TOKENS))
            self._filler = Client(self.daemon.socket, filler, memory, limits=patient)
            ending.callback(self._filler.close)
            if not self._filler.wait_attached(_ATTACH_S):
                raise self.daemon.failed("the daemon did not accept the client that fills HOST")
            self.prompts = {length: self._made(length) for length in lengths}
            self.daemon.flush()
            self._ending = ending.pop_all()

    def close(self) -> None:
        """The engine leaves, the daemon ends."""
        self._ending.close()

    def _made(self, length: int) -> list[int]:
        """A prompt of `length` tokens of which all full blocks are saved; one more token follows them."""
        prompt = self._tokens(length + 1)
        self._engine.generate(prompt, 1, timeout_s=_REQUEST_S)
        self._engine.drain()
        return prompt

    def _tokens(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, _VOCAB, count).tolist()
        return drawn

    def _fill_host(self) -> None:
        tokens = self._random.integers(0, _VOCAB, self._filler_blocks * BLOCK_TOKENS)
        chain = self._filler.chain(tokens, "default", Reuse.OWN)
        assert chain is not None, "the daemon went away"
        save = self._filler.save(chain, 0, len(chain), np.arange(len(chain), dtype=np.uint32))
        if save.wait(_REQUEST_S) is None:
            raise RuntimeError("a save did not end")

    # ---- requests ----------------------------------------------------------------------------------------

    def ask(self, arm: str, length: int, new_tokens: int = 1) -> Answer:
        """One request for the prompt of that length, which only the disk has.

        Raises:
            RuntimeError: HOST had a part of it.
        """
        self._settle()
        self._fill_host()
        self._busy_again()
        extra = {"kv_transfer_params": {"kvstore": _WISHES[arm]}}
        name = self._engine.submit(self.prompts[length], new_tokens, sampling={"extra_args": extra})
        request = self._engine.peek(name).request
        answer = self._until(name)
        plan: dict[str, Any] = {} if arm == "recompute" else self._filler.explain(request)
        if any(tier == "HOST" and blocks for tier, blocks in plan.get("blocks", {}).items()):
            raise RuntimeError(f"the prompt of {length} tokens should be on NVME alone: {plan}")
        self._busy_left -= 1
        return Answer(answer.ttft_s, tuple(answer.tokens), str(plan.get("choice", "")), answer.external, plan)

    def _until(self, name: str) -> Any:
        """Step until it has ended; the others go on."""
        deadline = time.monotonic() + _REQUEST_S
        while name not in self._engine.step():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a request took more than {_REQUEST_S} s")
        return self._engine.take(name)

    def _settle(self) -> None:
        """Copies of ended requests are through; beside sequences that decode that takes a few steps."""
        if not self._busy_names:
            self._engine.drain()
        for _ in range(5 if self._busy_names else 0):
            self._engine.step()

    @contextmanager
    def busy(self, sequences: int) -> Iterator[None]:
        """So many sequences decode in every step; others take their place before they get long."""
        self._sequences = sequences
        try:
            yield
        finally:
            self._sequences = 0
            self._busy_again()

    def _busy_again(self) -> None:
        if self._busy_names and self._sequences and self._busy_left > 0:
            return
        for name in self._busy_names:
            self._engine.abort(name)
        extra = {"kv_transfer_params": {"kvstore": {"reuse": "none"}}}
        self._busy_names = [
            self._engine.submit(self._tokens(_BUSY_TOKENS), _BUSY_NEW, sampling={"extra_args": extra})
            for _ in range(self._sequences)
        ]
        self._busy_left = 10
        for _ in range(3 if self._busy_names else 0):  # their prompts are through
            self._engine.step()


def _settings(folder: Path, socket: Path, longest: int) -> Settings:
    connector = connector_config(socket)
    # Always-load waits, whatever it takes.
    waits = {"fetch_s": 60.0, "call_s": _REQUEST_S, "attach_s": _ATTACH_S}
    connector["kv_connector_extra_config"] |= waits
    return Settings(
        str(make_smollm2(folder / "smollm2")),
        connector,
        BLOCK_TOKENS,
        blocks=2 * (longest // BLOCK_TOKENS) + 64,
        batched_tokens=CHUNK_TOKENS,
        prefix_caching=False,
    )


@contextmanager
def stage(lengths: Sequence[int]) -> Iterator[VllmStage]:
    """All of it, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvstore-breakeven-") as name, disk_folder() as disk:
        made = VllmStage(Path(name), disk_settings(disk), lengths)
        try:
            yield made
        finally:
            made.close()
