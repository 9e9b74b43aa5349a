"""One vLLM engine in this process, for tests and benchmarks: scheduler and worker can be looked at.

    python -m bench.vllm_engine SETTINGS      the same behind lines of JSON (bench/vllm_processes.py)

Everything is awaited by stepping the engine here; nothing runs between two steps but what a connector starts.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.vllm_family import family, shared_memory, thread_cpu_seconds
from bench.vllm_settings import Answer, Settings, environment

__all__ = ["Engine", "main"]

_DRAIN_S = 60.0


class Engine:
    """vLLM in this process. One at a time: it keeps global state until `close`.

    Args:
        settings: what it is.
    """

    def __init__(self, settings: Settings) -> None:
        os.environ.update(environment(settings.ranks, settings.multiprocess))
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.settings = settings
        arguments = settings.arguments()
        if arguments["kv_transfer_config"] is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**arguments, disable_log_stats=True))
        self._numbers = itertools.count()
        self._answers: dict[str, Answer] = {}
        self._names: dict[str, str] = {}
        self._started: dict[str, float] = {}
        self._watch_prefills()

    def _watch_prefills(self) -> None:
        """vLLM tells its own hits and a connector's apart, but only to its statistics."""
        processor = self.llm.output_processor
        process = processor.process_outputs

        def watching(outputs: Sequence[Any], *rest: Any, **named: Any) -> Any:
            for output in outputs:
                stats, name = output.prefill_stats, self._names.get(output.request_id)
                if stats is not None and name is not None and not self._answers[name].tokens:
                    answer = self._answers[name]
                    answer.own, answer.external = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    )
            return process(outputs, *rest, **named)

        processor.process_outputs = watching

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        salt: str | None = None,
        extra: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> str:
        """Hand over a prompt; greedy, and never ended by an end token.

        Args:
            salt: its cache salt.
            extra: more keywords of `LLMEngine.add_request` (lora_request, priority).
            sampling: more keywords of SamplingParams (extra_args with kv_transfer_params).

        Returns:
            A name to ask for the answer by; vLLM's own id is `Answer.request`.
        """
        from vllm import SamplingParams

        given: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            given["cache_salt"] = salt
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **(sampling or {})
        )
        name = f"r{next(self._numbers)}"
        self._started[name] = time.perf_counter()
        request = self.llm.add_request(name, given, params, **(extra or {}))
        self._answers[name] = Answer(request)
        self._names[request] = name
        return name

    def step(self) -> list[str]:
        """One step of the engine.

        Returns:
            Requests that it ended.
        """
        ended = []
        for output in self.llm.step():
            name = output.request_id
            answer, now = self._answers[name], time.perf_counter() - self._started[name]
            if not answer.tokens and output.outputs[0].token_ids:
                answer.ttft_s = now
            answer.tokens = list(output.outputs[0].token_ids)
            answer.params = output.kv_transfer_params or answer.params
            if output.finished:
                answer.seconds, answer.reason = now, output.outputs[0].finish_reason or ""
                ended.append(name)
        return ended

    def wait(self, names: Sequence[str], timeout_s: float = 120.0) -> list[Answer]:
        """Step until all of them have ended.

        Raises:
            TimeoutError: they did not.
        """
        deadline = time.monotonic() + timeout_s
        missing = {name for name in names if not self._answers[name].reason}
        while missing:
            missing.difference_update(self.step())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} of {len(names)} requests did not end in {timeout_s} s")
        return [self.take(name) for name in names]

    def peek(self, name: str) -> Answer:
        """The answer so far."""
        return self._answers[name]

    def take(self, name: str) -> Answer:
        """The answer so far, which is then forgotten."""
        answer = self._answers.pop(name)
        del self._started[name], self._names[answer.request]
        return answer

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        salt: str | None = None,
        timeout_s: float = 120.0,
    ) -> Answer:
        """One prompt, alone."""
        return self.wait([self.submit(prompt, max_tokens, salt=salt)], timeout_s)[0]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        *,
        salt: str | None = None,
        timeout_s: float = 120.0,
    ) -> list[Answer]:
        """Several prompts at once."""
        return self.wait([self.submit(prompt, max_tokens, salt=salt) for prompt in prompts], timeout_s)

    def abort(self, name: str) -> None:
        """Forget a request in the middle."""
        self.llm.abort_request([self.take(name).request], internal=True)

    # ---- between requests ---------------------------------------------------------------------------------

    def drain(self, timeout_s: float = _DRAIN_S) -> None:
        """Step until a connector has nothing under way: an engine without requests never steps by itself.

        Raises:
            TimeoutError: it went on for so long.
        """
        if self.settings.multiprocess:
            return  # its own process steps on
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {timeout_s} s without a request")

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache, and nothing else. False: blocks are in use, it is as it was."""
        return bool(self.llm.reset_prefix_cache())

    def take_connector_out(self) -> None:
        """From now on it is the engine that it would be without; only between requests, of one rank.

        vLLM asks two places whether there is a connector, and passes every hook by when there is none.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._taken_out = (self.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT)
        self.scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None

    def put_connector_back(self) -> None:
        """Undo `take_connector_out`."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self._taken_out

    def close(self) -> None:
        """End it, its workers included. Idempotent."""
        if self.llm is None:
            return
        workers = family(os.getpid())[1:] if self.settings.ranks > 1 else []
        shared = {name for pid in workers for name in shared_memory(pid) if "/vllm_dist_" in name}
        self.llm.engine_core.shutdown()
        self.llm = None
        gc.collect()
        for name in shared:  # vLLM leaves it when it had to end a rank by a signal
            Path(name).unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a look inside (not of a multiprocess engine) -----------------------------------------------------

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's Scheduler."""
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        """vLLM's BlockPool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector; None without."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker's side of the connector (one rank)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def free_blocks(self) -> int:
        """Device blocks that no request and no pin holds."""
        return int(self.pool.get_num_free_blocks())


# ---- behind lines of JSON ---------------------------------------------------------------------------------


def main() -> int:
    """Serve until stdin ends."""
    # vLLM and its children write to stdout; the answers have it to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with Engine(Settings(**json.loads(sys.argv[1]))) as engine:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            op = request.pop("op")
            if op == "close":
                break
            try:
                reply = _OPS[op](engine, **request)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other side must see it
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=answers)
    print(json.dumps({}), file=answers)
    return 0


def _generate(engine: Engine, prompts: list[list[int]], max_tokens: int, salt: str | None) -> dict[str, Any]:
    return {
        "answers": [
            asdict(answer) for answer in engine.generate_all(prompts, max_tokens, salt=salt, timeout_s=600)
        ]
    }


def _drain(engine: Engine) -> dict[str, Any]:
    engine.drain()
    return {}


def _forget(engine: Engine) -> dict[str, Any]:
    return {"forgotten": engine.forget()}


def _connector(engine: Engine, present: bool) -> dict[str, Any]:
    (engine.put_connector_back if present else engine.take_connector_out)()
    return {}


def _connector_cpu(_: Engine) -> dict[str, Any]:
    """CPU seconds of the Python threads that belong to the connector and its client."""
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("kvstore")]
    return {"seconds": sum(thread_cpu_seconds(os.getpid(), thread) for thread in ours if thread)}


def _pool(engine: Engine) -> dict[str, Any]:
    return {"blocks": engine.pool.num_gpu_blocks, "free": engine.free_blocks}


_OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": _generate,
    "drain": _drain,
    "forget": _forget,
    "pool": _pool,
    "connector": _connector,
    "connector_cpu": _connector_cpu,
}


if __name__ == "__main__":
    raise SystemExit(main())
