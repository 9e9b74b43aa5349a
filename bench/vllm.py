"""How soon does vLLM answer when another engine of the node has computed the prompt, and what does that cost?

Run by the interpreter of .venv-vllm (make bench-vllm). A model of 246 M seeded random weights in float32, 16
KiB of KV a token, blocks of 128 tokens (2 MiB). Two engine processes share one daemon: one computes a new
prompt (cold), the other loads it (host) and then has it in its own prefix cache (own). vLLM's own hit is the
limit, and runs twice in every turn as control. Timed is from the engine's `add_request` to its first token;
copies that a save still has under way are awaited before the next request.

2k and 8k are 2,049 and 8,193 tokens: whole blocks and one token, which own and host both compute, so their
ratio is the price of the load alone. With 2,000 and 8,000 tokens 80 and 64 lie behind the last whole block:
both compute those, which hides the load and bounds what any cache of blocks can gain.

`overhead_no_reuse_p95` is what the connector costs when nothing is ever reused: CPU seconds of engine and
daemon over those of the same engine with the connector taken out, while `saved_share` of all full blocks
really came to be readable (bench/vllm_overhead.py says why it is the same process).

The rivals run the same turns: a file per block (bench/peers/vllm_files.py, in the foreground and on a
thread) and vLLM's ExampleConnector. Ratios in their rows are to their own engines, not to ours. The latter
saves what the first step computes as if it were the whole prompt, so its engines take prompts in one step
(4,096 tokens); and it looks for one token less than it saved: of 2,049 tokens it finds nothing, of 2,050
the same 2,048.

--only with --save renews those parts of the kept result and leaves the others; each says when and where.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import structlog

from bench.limits import LibcCopy, huge_memory
from bench.machine import RESULTS, where
from bench.measure import Measured, finish, parser, working_set_bytes
from bench.paged import BenchDaemon
from bench.vllm_arms import Turns, cold_over_host, identical
from bench.vllm_models import M246, kv_bytes_per_token, make_random, make_smollm2
from bench.vllm_overhead import Overhead
from bench.vllm_processes import EngineFailed, EngineProcess
from bench.vllm_settings import Settings, connector_config
from kvstore.client import Client

__all__ = ["main", "picture"]

PARTS = ("ttft", "overhead", "smollm2", "files", "example")
TOKENS = {"2k": 2_049, "8k": 8_193, "2000": 2_000, "8000": 8_000, "2050": 2_050}
ARENA_BYTES = 4 << 30
EXAMPLE = "ExampleConnector of vLLM"
_CALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        ours, smollm2, rivals: name of a length → turns.
        pairs: of runs, for the overhead.
    """

    ours: Mapping[str, int]
    smollm2: Mapping[str, int]
    rivals: Mapping[str, int]
    pairs: int


# SmolLM2 reads 8,192 tokens at most.
FULL = Plan({"2k": 9, "8k": 5, "2000": 5, "8000": 2}, {"2k": 5, "8000": 2}, {"2k": 5, "8k": 1}, 20)
QUICK = Plan({"2k": 3}, {"2k": 1}, {"2k": 1}, 4)


class Bench:
    """Everything in one folder, gone afterwards.

    Args:
        folder: for models, logs, sockets and the rivals' files.
        plan: how much.
        log: rows are printed there as they come.
    """

    def __init__(self, folder: Path, plan: Plan, log: IO[str]) -> None:
        self._folder, self._plan, self._log = folder, plan, log
        self.rows: dict[str, dict[str, Any]] = {}
        self.figures: dict[str, Any] = {
            "prompt_tokens": TOKENS,
            "kv_bytes_per_token": kv_bytes_per_token(M246),
        }
        self.voids: list[str] = []

    # ---- ours ----------------------------------------------------------------------------------------------

    def ours(self, parts: list[str]) -> None:
        """Time to first token, then the overhead, at one daemon."""
        model = make_random(self._folder / "m246", M246)
        with ExitStack() as stack:
            daemon, settings = self._daemon(stack, model, "d1")
            computing = stack.enter_context(EngineProcess(self._folder, settings, "computing"))
            if "ttft" in parts:
                self._ttft(computing, settings)
            if "overhead" in parts:
                self._overhead(stack, daemon, computing)

    def _daemon(self, stack: ExitStack, model: Path, name: str) -> tuple[BenchDaemon, Settings]:
        home = self._folder / name
        home.mkdir()
        daemon = stack.enter_context(BenchDaemon(home, {"host.capacity_bytes": ARENA_BYTES}))
        settings = Settings(str(model), connector_config(daemon.socket), kv_bytes=1 << 30)
        with Client(daemon.socket, None, role="tool") as tool:
            if not tool.wait_attached(_CALL_S):
                raise SystemExit(f"the daemon did not start; see {home}")
        return daemon, settings

    def _ttft(self, computing: EngineProcess, settings: Settings) -> None:
        # So small that two prompts have touched all of it: a load is measured, not the page faults of fresh
        # KV memory.
        small = replace(settings, kv_bytes=288 << 20, model_len=9_000)
        with EngineProcess(self._folder, small, "loading") as loading:
            for name, turns in self._plan.ours.items():
                done = self._turns(
                    "kvstore", name, turns, Turns(computing, loading, TOKENS[name], M246.vocab, 1)
                )
                self.figures[f"ttft_host_over_own_hit_{name}"] = round(done.cost("host").median, 4)
                self.figures[f"ttft_cold_over_host_{name}"] = round(cold_over_host(done).median, 2)
                if name in ("2k", "8k"):
                    self.voids.append(done.void)
            self.figures["outputs_identical"] = identical(Turns(computing, loading, 1_000, M246.vocab, 2))

    def _overhead(self, stack: ExitStack, daemon: BenchDaemon, engine: EngineProcess) -> None:
        tool = stack.enter_context(Client(daemon.socket, None, role="tool"))
        tool.wait_attached(_CALL_S)
        found = Overhead(engine, daemon.pid, tool, M246.vocab).measure(self._plan.pairs)
        self.figures.update(found)
        self._say(json.dumps(found))

    def smollm2(self) -> None:
        """The same turns with a real model: 45 KiB of KV a token in float32."""
        model = make_smollm2(self._folder / "smollm2")
        with ExitStack() as stack:
            _, settings = self._daemon(stack, model, "d2")
            # Blocks of 6 MiB: a tenth of the pool has to hold what two steps compute, or saves are dropped.
            settings = replace(settings, kv_bytes=3 << 30)
            computing = stack.enter_context(EngineProcess(self._folder, settings, "computing2"))
            loading = stack.enter_context(EngineProcess(self._folder, settings, "loading2"))
            for name, turns in self._plan.smollm2.items():
                self._turns(
                    "kvstore, SmolLM2-135M", name, turns, Turns(computing, loading, TOKENS[name], 49_152, 3)
                )

    # ---- rivals --------------------------------------------------------------------------------------------

    def files(self) -> None:
        """A file per block: two engines of its own."""
        files = {"kv_connector": "FileConnector", "kv_connector_module_path": "bench.peers.vllm_files"}
        self._rival("file per block", files, {"background": False}, self._plan.rivals)
        self._rival("file per block, on a thread", files, {"background": True}, self._plan.rivals)

    def example(self) -> None:
        """vLLM's own example: two engines, which take a prompt in one step."""
        lengths = {"2050": self._plan.rivals["2k"]}
        self._rival(EXAMPLE, {"kv_connector": "ExampleConnector"}, {}, lengths, batched_tokens=4096)

    def _rival(
        self,
        name: str,
        kind: dict[str, Any],
        options: dict[str, Any],
        lengths: Mapping[str, int],
        batched_tokens: int = 2048,
    ) -> None:
        model = make_random(self._folder / "m246", M246)
        with tempfile.TemporaryDirectory(prefix="rival-", dir=self._folder) as place, ExitStack() as stack:
            more = {**options, "folder": place, "shared_storage_path": place}
            connector = {**kind, "kv_role": "kv_both", "kv_connector_extra_config": more}
            settings = Settings(str(model), connector, kv_bytes=1 << 30, batched_tokens=batched_tokens)
            try:
                engines = [
                    stack.enter_context(EngineProcess(self._folder, settings, f"rival-{side}"))
                    for side in ("computing", "loading")
                ]
                for length, turns in lengths.items():
                    self._turns(
                        name, length, turns, Turns(engines[0], engines[1], TOKENS[length], M246.vocab, 4)
                    )
            except (EngineFailed, SystemExit) as error:
                self.rows.setdefault(name, {})["failed"] = str(error)[:300]

    # ---- all -----------------------------------------------------------------------------------------------

    def _turns(self, row: str, name: str, turns: int, arms: Turns) -> Measured:
        done = arms.measure(turns)
        seconds = {arm: round(statistics.median(done.wall_s[arm]), 5) for arm in ("cold", "own", "host")}
        self.rows.setdefault(row, {})[name] = {
            "seconds": seconds,
            "host_over_own": done.cost("host").json(),
            "cold_over_host": cold_over_host(done).json(),
            "control": done.control.json(),
            "turns": turns,
            "void": done.void,
        }
        texts = (f"{arm} {1000 * value:.1f} ms" for arm, value in seconds.items())
        ratios = f"host over own {done.cost('host').median:.2f}"
        ratios += f", cold over host {cold_over_host(done).median:.1f}"
        self._say(f"{row}, {TOKENS[name]:,} tokens: {', '.join(texts)}; {ratios} {done.void}")
        return done

    def _say(self, text: str) -> None:
        print(text, file=self._log, flush=True)

    def memcpy(self) -> None:
        """How long the bytes of a hit take at least, by the C library on one thread."""
        size = 128 * kv_bytes_per_token(M246)
        count = max(64, working_set_bytes() // 2 // size)
        source, target = huge_memory(count * size), huge_memory(count * size)
        order = np.random.default_rng(5).permutation(count)
        seconds = []
        copy = LibcCopy(self._folder)
        for _ in range(9):
            began = time.perf_counter()
            copy.load(target, order.astype(np.uint32), source, (order[::-1] * size).astype(np.uint64), size)
            seconds.append(time.perf_counter() - began)
        speed = count * size / statistics.median(seconds)
        self.figures["memcpy_bytes_per_s"] = round(speed)
        for name, cell in self.rows.get("kvstore", {}).items():
            bytes_ = TOKENS[name] // 128 * size
            more = cell["seconds"]["host"] - cell["seconds"]["own"]
            cell["load_over_memcpy"] = round(more * speed / bytes_, 2)


def picture(result: dict[str, Any], file: Path) -> None:
    """Bars: time to first token over that of vLLM's own hit in the same engines, ours and the rivals'."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("2k", "8k"), strict=True):
        bars = {}
        for row, cells in result["rows"].items():
            cell = cells.get(name) or (cells.get("2050") if name == "2k" else None)
            if cell and "SmolLM2" not in row:
                bars[row] = cell["host_over_own"]["median"]
        colors = ["#3aa17e" if row == "kvstore" else "#d9a441" for row in bars]
        drawn = axes.barh(list(bars), list(bars.values()), color=colors)
        axes.bar_label(drawn, [f"{ratio:.2f} ×" for ratio in bars.values()], padding=4, fontsize=8)
        axes.axvline(1, color="#2f6fde", linewidth=1)
        axes.set_xlim(0, max(bars.values()) * 1.2)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_title(f"{TOKENS[name]:,} tokens", fontsize=10)
        axes.set_xlabel("TTFT, vLLM's own prefix cache = 1", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def _renewed(figures: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """The kept result with these parts in place of its own; nothing is kept when all are new."""
    command = " ".join(["python -m bench.vllm", *(word for word in sys.argv[1:] if word != "--json")])
    origin = {part: {"command": command, "where": where()} for part in parts}
    kept = RESULTS / "vllm.json"
    if set(parts) == set(PARTS) or not kept.exists():
        return {**figures, "parts": origin}
    before = json.loads(kept.read_text())
    whole = {"command": before["command"], "where": before["where"]}
    origins = before.get("parts") or dict.fromkeys(PARTS, whole)
    rows = {**before["rows"], **figures["rows"]}
    return {**before, **figures, "rows": rows, "parts": {**origins, **origin}}


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return names


def main() -> int:
    """Returns the exit status."""
    command = parser("vllm", __doc__)
    command.add_argument("--quick", action="store_true", help="few turns, 2,000 tokens only")
    command.add_argument("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    options = command.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for results
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        # vLLM leaves sockets and locks in the temporary directory.
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = name
        log = sys.stderr if options.json else sys.stdout
        bench = Bench(Path(name), QUICK if options.quick else FULL, log)
        if "ttft" in options.only or "overhead" in options.only:
            bench.ours(options.only)
        if "smollm2" in options.only:
            bench.smollm2()
        if "files" in options.only:
            bench.files()
        if "example" in options.only:
            bench.example()
        if "ttft" in options.only:
            bench.memcpy()
    figures = {**bench.figures, "rows": bench.rows}
    if options.save:
        figures = _renewed(figures, options.only)
    status = finish("vllm", options, figures, bench.voids)
    if options.save and not status:
        picture(figures, RESULTS / "vllm.png")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
