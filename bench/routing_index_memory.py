"""Memory of the router's index while ten million blocks come and half of them go, for bench.routing_index.

python -m bench.routing_index_memory BLOCKS     prints the figures
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory import memory_kib
from kvstore.clock import MonotonicClock
from kvstore.keys import KEY_BYTES
from kvstore.router.chain_names import KeyNames
from kvstore.router.kv_schema import Removed, Stored
from kvstore.router.prefixes import Prefixes
from kvstore.types import Tier

__all__ = ["churned"]

ROOT = Path(__file__).parent.parent
WORKERS = 8
BATCH = 256
CHURN_BLOCKS = 10_000_000
NODES_MAX = 1_000_000
# A row with up to 64 columns, its place in the order, and its share of the table, which is 13/16 full when it
# grows by a quarter: 8 / 0.65, should it then stay as full (native/src/router_index.h, tag_table.h).
ROW_BYTES = 8 + 32 + 8 + 8 / 0.65
# Of the old table, while it moves.
MOVING_BYTES = 256 << 10


def churned() -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, "-m", "bench.routing_index_memory", str(CHURN_BLOCKS)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def _churn(blocks: int) -> dict[str, Any]:
    """Stores and half as many removals by eight workers; the index must let go of the rest by itself.

    A batch's keys come from its number, so that nothing has to remember what is to be removed.
    """

    def keys_of(number: int) -> bytes:
        return np.random.Generator(np.random.Philox(number)).bytes(KEY_BYTES * BATCH)

    keys_of(0)
    before = _anonymous_bytes()
    prefixes = Prefixes(KeyNames(16, {}), NODES_MAX, WORKERS, MonotonicClock())
    workers = [prefixes.join(NODES_MAX, told=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.ready()
    behind = NODES_MAX // BATCH // 2
    most, full = before, 0
    for number in range(-(-blocks // BATCH)):
        workers[number % WORKERS].stored(Stored(keys_of(number), KEY_BYTES, None, None, 0, b"", Tier.HOST))
        gone = number - behind
        if gone >= 0 and gone % 2 == 0:
            workers[gone % WORKERS].removed(Removed(keys_of(gone), KEY_BYTES, Tier.HOST))
        if number % 256 == 0:
            most = max(most, _anonymous_bytes())
            if not full and prefixes.index.evicted:
                full = most
    most = max(most, _anonymous_bytes())
    prefixes.index.check()
    cap = round(ROW_BYTES * NODES_MAX) + MOVING_BYTES
    return {
        "memory_churn_blocks": blocks,
        "memory_nodes_max": NODES_MAX,
        "memory_nodes": prefixes.index.nodes,
        "memory_evicted": prefixes.index.evicted,
        "memory_grown_bytes": most - before,
        "memory_grown_once_full_bytes": most - full if full else None,
        "memory_index_says_bytes": prefixes.index.memory_bytes,
        "memory_cap_bytes": cap,
        "memory_over_cap": round((most - before) / cap, 3),
    }


def _anonymous_bytes() -> int:
    return 1024 * memory_kib("self")["RssAnon"]


if __name__ == "__main__":
    print(json.dumps(_churn(int(sys.argv[1]))))
