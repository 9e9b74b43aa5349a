"""The embedded engine as a process: one line of JSON asks, one line answers.

    {"op": "generate", "prompt": [ids], "max_new_tokens": 64, "reuse": "own", "force": ""}
    {"op": "flip"}     invert one cell of the blocks that the last load restored; again: invert it back
    {"op": "forget"}   evict every idle device block
    {"op": "settle"}   wait until every save is on HOST
    {"op": "compare"}  prefill speed of this engine and of HF transformers, alternating
    {"op": "quit"}

Started by `processes.EngineProcess`; ends when its standard input closes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.types import Choice

from .attach import connect
from .engine import Engine, EngineLimits
from .model import Model, load_model
from .request import Request
from .store_tables import StoreTables

__all__ = ["Worker", "WorkerConfig", "main"]

_ATTACH_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the parent decides.

    Attributes:
        model: GGUF file or directory.
        socket: the daemon's.
        blocks: device blocks of the pool.
        block_tokens: tokens per block.
        tenant: whose roots to use.
        idle_max: most idle device blocks, -1 = all.
    """

    model: str
    socket: str
    blocks: int
    block_tokens: int = 16
    tenant: str = "default"
    idle_max: int = -1


class Worker:
    """An engine over a daemon, and the few operations that the demo needs."""

    def __init__(self, config: WorkerConfig) -> None:
        self._path = Path(config.model)
        self._model: Model = load_model(
            self._path, blocks=config.blocks + 1, block_tokens=config.block_tokens
        )
        memory = self._model.memory
        self._tables: StoreTables = connect(
            config.socket,
            self._model.spec,
            memory,
            self._path,
            idle_max=None if config.idle_max < 0 else config.idle_max,
            tenant=config.tenant,
        )
        # Chunks of 1,024: on two cores 10 % faster than 512, and a long prompt is still cut.
        self._engine = Engine(self._model, self._tables, EngineLimits(batched_tokens_max=1024))
        self._restored: list[int] = []
        self._flipped = False
        self._requests = 0
        self._tables.on_loaded = self._remember

    def wait_attached(self) -> bool:
        """Until the daemon has accepted this engine; False when it does not within a minute."""
        deadline = time.monotonic() + _ATTACH_S
        while not self._tables.attached and time.monotonic() < deadline:
            self._tables.poll()
            time.sleep(0.005)
        self._tables.poll()
        return self._tables.attached

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Run one operation."""
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "generate": self._generate,
            "flip": self._flip,
            "forget": self._forget,
            "settle": self._settle,
            "compare": self._compare,
        }
        return operations[ask["op"]](ask)

    def close(self) -> None:
        """Let saves end, then leave."""
        self._engine.close()

    def _remember(self, blocks: list[int]) -> None:
        self._restored = blocks

    def _generate(self, ask: dict[str, Any]) -> dict[str, Any]:
        self._requests += 1
        self._tables.force = Choice(ask["force"]) if ask.get("force") else None
        request = Request(
            id=f"{os.getpid()}-{self._requests}",
            prompt=tuple(ask["prompt"]),
            max_new_tokens=ask["max_new_tokens"],
            ignore_eos=True,
            reuse=ask.get("reuse", "own"),
        )
        report = self._engine.generate([request])[0]
        return {
            "tokens": list(report.tokens),
            "prompt_tokens": report.prompt_tokens,
            "reused": {str(tier): count for tier, count in report.reused.items()},
            "fresh": report.fresh_tokens,
            "ttft_s": report.ttft_s,
            "total_s": report.total_s,
            "ties": report.tied_tokens,
            "finish": report.finish_reason,
        }

    def _flip(self, _: dict[str, Any]) -> dict[str, Any]:
        """Invert every bit of one restored cell; what is computed on it is neither committed nor saved."""
        if not self._restored:
            raise RuntimeError("no block was restored from a lower tier yet")
        block, layer, head = self._restored[0], 0, 0
        cell = self._model.memory.read_cell(block, layer, head)
        self._model.memory.write_cell(block, layer, head, bytes(byte ^ 0xFF for byte in cell))
        self._flipped = not self._flipped
        self._tables.read_only = self._flipped
        return {"flipped": self._flipped, "block": block}

    def _forget(self, _: dict[str, Any]) -> dict[str, Any]:
        """A table as large as the pool makes every idle block leave (to HOST, if only the device has it)."""
        size = self._tables.capacity_blocks * self._tables.block_tokens
        table = self._tables.begin("forget", [0] * size, "none")
        if table is None:
            raise RuntimeError("blocks of the pool are in use")
        self._tables.finish(table)
        return {"blocks": self._tables.capacity_blocks}

    def _settle(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"settled": self._tables.settle(30.0), "dropped": self._tables.dropped_saves}

    def _compare(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Median prefill time of both, alternating, on the same weights, threads and prompt."""
        from .reference import load_reference

        prompt: list[int] = ask["prompt"]
        reference = load_reference(self._path)
        theirs: list[float] = []
        ours: list[float] = []
        for _ in range(ask["rounds"] + 1):
            start = time.monotonic()
            token = reference.prefill(prompt)
            theirs.append(time.monotonic() - start)
            got = self._generate({"prompt": prompt, "max_new_tokens": 1, "reuse": "none"})
            ours.append(got["ttft_s"])
            if got["tokens"][0] != token:
                raise RuntimeError(f"first token {got['tokens'][0]}, transformers computes {token}")
        # The first round of each warms caches and thread pools up.
        return {
            "ours_s": statistics.median(ours[1:]),
            "transformers_s": statistics.median(theirs[1:]),
            "ratios": [t / o for t, o in zip(theirs[1:], ours[1:], strict=True)],
        }


def main() -> None:
    """Serve standard input until it closes or says quit."""
    config = WorkerConfig(**json.loads(sys.argv[1]))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Whatever a library prints must not end up between the replies.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker(config)
    try:
        attached = worker.wait_attached()
        replies.write(
            json.dumps({"ready": attached, "pid": os.getpid(), "threads": torch.get_num_threads()}) + "\n"
        )
        for line in sys.stdin:
            ask = json.loads(line)
            if ask["op"] == "quit":
                break
            try:
                answer = worker.answer(ask)
            except (RuntimeError, ValueError, KeyError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(answer) + "\n")
    finally:
        worker.close()


if __name__ == "__main__":
    main()
