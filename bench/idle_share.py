"""How much of the device pool should idle prefixes (L2) get?

Idle blocks answer the next turn at once, and leave when a running request needs room. Leaving is free when
HOST has the bytes already, and costs a copy when it has not. This sweeps `idle_max` (the `l2_blocks_max` of
an engine) on the embedded engine under more conversations than the device holds, once with a HOST arena that
keeps everything and once with one that keeps next to nothing, and shows the hit rate by tier, the largest
batch, the throughput, and the crossover: the share from which on idle prefixes cost more than they save.

The limit of every turn is `idle_max = 0` (no idle block is ever kept); it also runs again, as control.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kvstore.connectors.embedded.attach import connect
from kvstore.connectors.embedded.engine import Engine, EngineLimits
from kvstore.connectors.embedded.model import Model, load_model
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.tiny import TINY, save_tiny

from bench.machine import RESULTS
from bench.measure import CONTROL_BOUND, Arm, Measured, finish, measure, parser
from bench.paged import BenchDaemon
from kvstore.client import Limits

__all__ = ["main", "picture"]

BLOCK_TOKENS = 16
POOL_BLOCKS = 320
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
# Together they want about 2.5 × the device pool, and up to 16 run at once.
CONVERSATIONS, TURNS, BATCH = 24, 3, 16
SYSTEM_TOKENS, ASK_TOKENS, ANSWER_TOKENS = 128, 128, 24
# The model needs 4 KiB of KV a token: everything is about 50 MiB.
HOSTS = {"large": "256MiB", "small": "8MiB"}
_ATTACH_S = 60.0
_PATIENT = Limits(call_s=30.0, attach_s=60.0, copy_s=60.0)


@dataclass(slots=True)
class Tally:
    """What one run of the load showed.

    Attributes:
        reports: of every request.
        batch: most sequences that got a token in one step.
        seconds: of the whole run.
    """

    reports: list[Report]
    batch: int
    seconds: float

    def json(self) -> dict[str, Any]:
        """Shares of the prompt tokens by where they came from, and the rest."""
        prompt = sum(report.prompt_tokens for report in self.reports)
        tiers: dict[str, int] = {}
        for report in self.reports:
            for tier, count in report.reused.items():
                tiers[str(tier)] = tiers.get(str(tier), 0) + count
        new = sum(len(report.tokens) for report in self.reports)
        waits = sorted(report.ttft_s for report in self.reports if report.ttft_s is not None)
        return {
            "hit_rate": {tier: round(count / prompt, 4) for tier, count in sorted(tiers.items())},
            "largest_batch": self.batch,
            "preemptions": sum(report.preemptions for report in self.reports),
            "tokens_per_s": round((prompt + new) / self.seconds),
            "ttft_p50_s": round(waits[len(waits) // 2], 4),
            "ttft_p95_s": round(waits[int(len(waits) * 0.95)], 4),
        }


class Load:
    """The same conversations for every arm, with token ids that no other run has used.

    Args:
        seed: of arrival order and tokens.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        system = self._tokens(SYSTEM_TOKENS)
        self._talks = [list(system) for _ in range(CONVERSATIONS)]
        # Every conversation speaks TURNS times; who is next is random, as users are.
        order = np.repeat(np.arange(CONVERSATIONS), TURNS)
        np.random.default_rng(1).shuffle(order)
        self._order = deque(order.tolist())
        self._busy: set[int] = set()
        self._number = 0

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(3, TINY.vocab, count)]

    def next_request(self) -> Request | None:
        """The next turn of a conversation whose last turn is answered; None: nobody can speak now."""
        for at, talk in enumerate(self._order):
            if talk not in self._busy:
                del self._order[at]
                self._busy.add(talk)
                self._talks[talk] += self._tokens(ASK_TOKENS)
                self._number += 1
                ident = f"{talk}/{self._number}"
                return Request(ident, tuple(self._talks[talk]), ANSWER_TOKENS, ignore_eos=True, reuse="own")
        return None

    def answered(self, report: Report) -> None:
        """The conversation goes on from here."""
        talk = int(report.request_id.partition("/")[0])
        self._busy.discard(talk)
        self._talks[talk] += report.tokens

    def __len__(self) -> int:
        return len(self._order)


def run(engine: Engine, load: Load) -> Tally:
    """Speak, answer, until all is said."""
    reports: list[Report] = []
    batch, started = 0, time.perf_counter()
    while len(load) or engine.unfinished:
        while engine.unfinished < BATCH:
            request = load.next_request()
            if request is None or not engine.add(request):
                break
        steps = engine.steps
        for output in engine.step():
            if output.report is not None:
                reports.append(output.report)
                load.answered(output.report)
        if engine.steps == steps:
            time.sleep(0.0002)
        else:
            batch = max(batch, engine.step_times[-1].decodes)
    return Tally(reports, batch, time.perf_counter() - started)


class Bench:
    """One daemon and one model; every run gets a fresh engine over the same memory.

    Args:
        socket: of the daemon.
        model: loaded, with one block more than the pool.
        path: its folder, for the identity.
    """

    def __init__(self, socket: Path, model: Model, path: Path) -> None:
        self._socket, self._model, self._path = socket, model, path
        self._runs = 0
        self.tallies: dict[int, Tally] = {}

    def arm(self, name: str, idle_max: int) -> Arm:
        """One run of the load with that many idle blocks at most."""
        return Arm(name, lambda: self._run(idle_max))

    def _run(self, idle_max: int) -> float:
        self._runs += 1
        tables = connect(
            self._socket, self._model.spec, self._model.memory, self._path, idle_max=idle_max, limits=_PATIENT
        )
        engine = Engine(self._model, tables, EngineLimits(batch_max=BATCH, batched_tokens_max=256))
        try:
            until = time.monotonic() + _ATTACH_S
            while not tables.attached:
                tables.poll()
                if time.monotonic() > until:
                    raise SystemExit("the daemon did not accept the engine")
                time.sleep(0.001)
            tables.poll()
            tally = run(engine, Load(self._runs))
        finally:
            engine.close()
        self.tallies[idle_max] = tally
        return tally.seconds


def sweep(model: Model, path: Path, host: str, turns: int) -> tuple[dict[str, Any], Measured]:
    """Every idle share against none.

    Returns:
        Points in the order of the sweep with the crossover, and what was measured.
    """
    shares = [round(POOL_BLOCKS * share) for share in SHARES]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        settings = {"host.capacity_bytes": HOSTS[host], "host.slab_bytes": "2MiB"}
        with BenchDaemon(Path(folder), settings) as daemon:
            bench = Bench(daemon.socket, model, path)
            limit = bench.arm("idle 0", 0)
            arms = [bench.arm(f"idle {blocks}", blocks) for blocks in shares]
            done = measure([limit], arms, turns=turns)
    points = []
    for blocks in [0, *shares]:
        speed = done.speed(f"idle {blocks}")
        points.append({"l2_blocks_max": blocks, "speed": speed.json(), **bench.tallies[blocks].json()})
    return {"points": points, "crossover_blocks": crossover(points), "measured": done.json()}, done


def crossover(points: list[dict[str, Any]]) -> int | None:
    """The share from which on all are slower than the best by more than the noise; None: there is none."""
    speeds = [point["speed"]["median"] for point in points]
    at = len(points)
    while at > 0 and speeds[at - 1] < max(speeds) * (1 - CONTROL_BOUND):
        at -= 1
    return int(points[at]["l2_blocks_max"]) if at < len(points) else None


def picture(result: dict[str, Any], file: Path) -> None:
    """Hit rate by tier and throughput over the idle share, one column per HOST arena."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    grid = figure.subplots(2, len(HOSTS), sharex=True, sharey="row")
    for column, host in enumerate(HOSTS):
        points = result["hosts"][host]["points"]
        idle = [point["l2_blocks_max"] for point in points]
        device = [point["hit_rate"].get("GPU", 0.0) for point in points]
        both = [on + point["hit_rate"].get("HOST", 0.0) for on, point in zip(device, points, strict=True)]
        top, bottom = grid[0][column], grid[1][column]
        top.fill_between(idle, 0, device, color="#2f6fde", label="L2 (device)")
        top.fill_between(idle, device, both, color="#3aa17e", label="HOST")
        top.set_title(f"HOST arena of {HOSTS[host]}", fontsize=10)
        low, high = ([point["speed"][end] for point in points] for end in ("low", "high"))
        bottom.fill_between(idle, low, high, color="#d5dbe5")
        bottom.plot(idle, [point["speed"]["median"] for point in points], "o-", color="#333a45")
        bottom.axhline(1.0, color="#b0b7c3", linewidth=0.8)
        at = result["hosts"][host]["crossover_blocks"]
        if at is not None:
            bottom.axvline(at, color="#c0392b", linestyle="--", label="crossover")
            bottom.legend(frameon=False, fontsize=8)
        bottom.set_xlabel(f"most idle blocks kept, of {POOL_BLOCKS}")
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("prompt tokens reused")
    grid[0][-1].legend(frameon=False, fontsize=8, loc="upper right")
    grid[1][0].set_ylabel("throughput over\nno idle blocks")
    figure.savefig(file, dpi=150)


def main() -> int:
    """Returns the exit status."""
    command = parser("idle_share", __doc__)
    command.add_argument("--turns", type=int, default=5, help="repetitions that count (5)")
    options = command.parse_args()
    hosts: dict[str, Any] = {}
    voids = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = save_tiny(Path(folder))
        model = load_model(path, blocks=POOL_BLOCKS + 1, block_tokens=BLOCK_TOKENS)
        for host in HOSTS:
            hosts[host], done = sweep(model, path, host, options.turns)
            voids.append(done.void)
            if not options.json:
                _show(host, hosts[host])
    figures = {
        "pool_blocks": POOL_BLOCKS,
        "conversations": CONVERSATIONS,
        "turns_each": TURNS,
        **{f"crossover_blocks_{host}": hosts[host]["crossover_blocks"] for host in hosts},
        "hosts": hosts,
    }
    status = finish("idle_share", options, figures, voids)
    if options.save and not status:
        picture(figures, RESULTS / "idle_share.png")
    return status


def _show(host: str, swept: dict[str, Any]) -> None:
    print(f"HOST arena {HOSTS[host]}")
    for point in swept["points"]:
        rates = " ".join(f"{tier} {rate:.0%}" for tier, rate in point["hit_rate"].items())
        print(
            f"  idle {point['l2_blocks_max']:4} · speed {point['speed']['median']:.3f} "
            f"({point['speed']['low']:.3f} … {point['speed']['high']:.3f}) · {rates or 'no hits'} · batch "
            f"{point['largest_batch']} · preempted {point['preemptions']} · {point['tokens_per_s']} tokens/s",
            flush=True,
        )
    print(f"  crossover: {swept['crossover_blocks'] or 'none'}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
