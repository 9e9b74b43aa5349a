"""Does routing by prefix pay? A trace replayed over N replicas, through the router's own index.

    python -m bench.routing --trace mooncake_conversation_trace.jsonl --json

The queue model is `kvstore simulate`'s and so are the policies; what a policy sees is not: every block that a
replica stores or removes is packed as a KV event in vLLM's schema, decoded again, and kept in the native
index, which is asked about every prompt. (Queues are a model: serial prefill at one rate per replica, chosen
so that the load is 0.9. TTFTs are the model's, for comparison among policies only.)

    reuse                     of all input tokens, with w fixed on the first half and scored on the second
    ttft_…_over_round_robin   of the same requests, over round-robin's
    lag_5s_reuse_over         reuse with events 5 s late, over reuse with events at once
    wrong_entries_after_resync   a feed that loses 1 % of its messages, on real sockets: entries of its index
                              that the publisher does not have, or that it has and the index does not
    find_…, events_…          see bench.routing_index
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import finish, parser
from bench.routing_feed import IdNames, lossy_feed, packed_events
from kvstore.clock import MonotonicClock
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.router.kv_schema import Removed, Stored, decode_batch
from kvstore.router.prefixes import Prefixes
from kvstore.simulate.figures import over, run_figures
from kvstore.simulate.queueing import QueueSettings, prefill_rate, serve
from kvstore.simulate.trace_file import read_trace
from kvstore.simulate.views import ExactView
from kvstore.simulate.workload import Workload

__all__ = ["BARS", "EventView", "main"]

# reuse at least; the others at most.
BARS = {"reuse": 0.34, "ttft_p99_over_round_robin": 0.32, "ttft_p50_over_round_robin": 0.20}
WEIGHTS = (2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
LAG_S = 5.0
POLICIES = ("round_robin", "power_of_two", "session_hash", "hybrid", "affinity", "scored")


class EventView:
    """A `View` whose facts pass through serialised events into the native index.

    Args:
        replicas: n.
        capacity_blocks: of each.
        check: compare every answer with the exact view's.
    """

    def __init__(self, replicas: int, capacity_blocks: int, *, check: bool = False) -> None:
        self._prefixes = Prefixes(IdNames(), 2 * replicas * capacity_blocks, replicas, MonotonicClock())
        self._holdings = [self._prefixes.join(capacity_blocks, told=True) for _ in range(replicas)]
        for holdings in self._holdings:
            holdings.ready()
        self._exact = ExactView(replicas) if check else None
        self.events = 0
        self.event_bytes = 0

    def matched_blocks(self, ids: Sequence[int], now_s: float) -> NDArray[np.int64]:
        """See `View`."""
        chain = np.array(ids, np.uint64) + 1
        found = self._prefixes.matched_blocks(chain, self._holdings)[:, -1]
        if self._exact is not None and not np.array_equal(found, self._exact.matched_blocks(ids, now_s)):
            raise SystemExit("the index and an exact view differ")
        return found

    def routed(self, replica: int, ids: Sequence[int], at_s: float) -> None:
        """See `View`: without hints, so that lag shows what lag costs."""

    def served(self, replica: int, stored: Sequence[int], removed: Sequence[int], at_s: float) -> None:
        """See `View`."""
        payload = packed_events(list(stored), list(removed), at_s)
        self.event_bytes += len(payload)
        for event in decode_batch(payload).events:
            self.events += 1
            if isinstance(event, Stored):
                self._holdings[replica].stored(event)
            elif isinstance(event, Removed):
                self._holdings[replica].removed(event)
        if self._exact is not None:
            self._exact.served(replica, stored, removed, at_s)


def _half(workload: Workload) -> Workload:
    return workload.first(len(workload) // 2)


def _fixed_weight(workload: Workload, fleet: QueueSettings, rate: float) -> float:
    """w with the least p99 on the first half, among those that give up no reuse worth a word."""
    rows = []
    for weight in WEIGHTS:
        half = _half(workload)
        policy = make_policy("scored", PolicySettings(weight=weight, weight_max=weight))
        run = serve(half, policy, EventView(fleet.replicas, fleet.capacity_blocks), fleet, rate)
        whole = run_figures(run, half, 0)["all"]
        rows.append((whole["ttft_p99_s"] / max(whole["reuse"], 1e-9), weight))
    return min(rows)[1]


def replay(workload: Workload, fleet: QueueSettings) -> dict[str, Any]:
    """Every policy on the whole trace; figures of its second half."""
    rate = prefill_rate(workload, fleet)
    weight = _fixed_weight(workload, fleet, rate)
    rows: dict[str, dict[str, Any]] = {}
    for name in POLICIES:
        settings = PolicySettings(weight=weight, weight_max=weight)
        view = EventView(fleet.replicas, fleet.capacity_blocks, check=name == "scored")
        rows[name] = run_figures(serve(workload, make_policy(name, settings), view, fleet, rate), workload, 0)
        rows[name]["events"], rows[name]["event_bytes"] = view.events, view.event_bytes
    late = QueueSettings(fleet.replicas, fleet.capacity_blocks, fleet.load, LAG_S)
    policy = make_policy("scored", PolicySettings(weight=weight, weight_max=weight))
    lagging = run_figures(
        serve(workload, policy, EventView(fleet.replicas, fleet.capacity_blocks), late, rate), workload, 0
    )
    scored, base = rows["scored"], rows["round_robin"]
    ratios = over(scored, base, "second_half")
    assert ratios is not None, "a trace has a second half"
    return {
        "weight": weight,
        "prefill_tokens_per_s": rate,
        "reuse": scored["second_half"]["reuse"],
        "ttft_p50_over_round_robin": ratios["ttft_p50"],
        "ttft_p99_over_round_robin": ratios["ttft_p99"],
        "affinity_p50_over_round_robin": rows["affinity"]["second_half"]["ttft_p50_s"]
        / base["second_half"]["ttft_p50_s"],
        "lag_5s_reuse_over": lagging["second_half"]["reuse"] / scored["second_half"]["reuse"],
        "policies": {
            name: {
                "second_half": row["second_half"],
                "all": row["all"],
                "assigned": row["assigned"],
                "events": row["events"],
            }
            for name, row in rows.items()
        },
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """Bars that do not hold."""
    out = []
    if figures["reuse"] < BARS["reuse"]:
        out.append(f"reuse {figures['reuse']:.3f} < {BARS['reuse']}")
    ratios = ("ttft_p99_over_round_robin", "ttft_p50_over_round_robin")
    out += [f"{name} {figures[name]:.3f} > {BARS[name]}" for name in ratios if figures[name] > BARS[name]]
    if figures["lag_5s_reuse_over"] < 0.99:
        out.append("5 s of lag lose more than 1 % of reuse")
    if figures["wrong_entries_after_resync"]:
        out.append(f"{figures['wrong_entries_after_resync']} wrong entries after events were lost")
    index: list[str] = figures.get("index", {}).get("missed", [])
    return out + index


def main() -> int:
    """Returns the exit status."""
    command = parser("routing", __doc__)
    command.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's format")
    command.add_argument("--replicas", type=int, default=8)
    command.add_argument("--capacity", type=int, default=5859, help="blocks of 512 tokens in each")
    command.add_argument("--load", type=float, default=0.9)
    command.add_argument("--no-index", action="store_true", help="leave bench.routing_index out")
    command.add_argument("--no-peers", action="store_true", help="leave other indexes and routers out")
    options = command.parse_args()
    workload = read_trace(options.trace)
    fleet = QueueSettings(options.replicas, options.capacity, options.load)
    figures: dict[str, Any] = {"trace_sha256": workload.sha256, "requests": len(workload)}
    figures |= replay(workload, fleet)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        figures |= asyncio.run(lossy_feed(Path(name), workload, fleet, Random(1)))
    if not options.no_index:
        from bench.routing_index import measure

        figures["index"] = measure(peers=not options.no_peers)
    figures["missed"] = missed(figures)
    status = finish("routing", options, figures, [])
    return status or int(bool(figures["missed"]))


if __name__ == "__main__":
    raise SystemExit(main())
