"""How fast is the router's index, and does its memory stay where its cap says?

    python -m bench.routing_index [--json] [--save] [--no-peers] [--turns N]

A million blocks of eight workers are in it: chains of 1,000 and 8,000 blocks, which grew by events of 256
blocks, all chains in turn, so that no chain lies in one piece in memory. Every lookup asks another of those
chains, and its answer is checked.

    find_N_us                leading blocks of a chain of N that each worker holds, on each tier
    matched_N_us             the same as the router asks: with hints, and by worker
    find_N_over_radixtree    over ai-dynamo-runtime's RadixTree with the same chains, turn and turn about
                             (make peers); find_over_radixtree is the worse of the two
    events_blocks_per_s_E    new blocks a second from serialised `Event` messages of E blocks to the index
    events_…_holdings        the same from the stream's messages through the router's `Holdings`
    events_…_vllm            the same from vLLM's msgpack, 16 token ids a block, which are hashed
    memory_over_cap          growth of anonymous memory while ten million blocks come, and half of them go by
                             events, over what the cap allows
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import Arm, Measured, finish, parser
from bench.measure import measure as measured
from bench.peer_process import Child, PeerError, System
from bench.peers.chains import LENGTHS, Chain, chains, events
from bench.routing_index_events import event_rates, spread
from bench.routing_index_memory import churned
from kvstore.clock import MonotonicClock
from kvstore.keys import KEY_BYTES
from kvstore.router.chain_names import KeyNames
from kvstore.router.kv_schema import Stored
from kvstore.router.prefixes import Holdings, Prefixes
from kvstore.types import Tier

__all__ = ["AT_LEAST", "AT_MOST", "main", "measure"]

AT_MOST = {"find_1000_us": 15.0, "find_8000_us": 80.0, "find_over_radixtree": 0.5, "memory_over_cap": 1.0}
# Straight into the index, and through all that the router does with an event.
AT_LEAST = {
    f"events_blocks_per_s_{count}{way}": least
    for count, least in ((256, 4e6), (1, 3e5))
    for way in ("", "_holdings")
}
ROOT = Path(__file__).parent.parent
RADIXTREE = System("dynamo", "bench.peers.dynamo", ROOT / ".venv-peers" / "dynamo" / "bin" / "python")
BLOCKS = 1_000_000
WORKERS = 8
PLANTED_BY = 256
BLOCK_TOKENS = 16
TURNS = 15
IN_A_ROW = 32  # lookups of a turn, each of another chain; the turn is their median
_SEED = 1


def measure(peers: bool, turns: int = TURNS) -> dict[str, Any]:
    """Everything.

    Args:
        peers: compare with ai-dynamo-runtime's RadixTree, too.
        turns: repetitions that count.

    Raises:
        PeerError: RadixTree was planted, and then gave a wrong answer or none.

    Returns:
        Figures; "missed" are bars that do not hold, "void" why the comparisons may not be believed.
    """
    planted = chains(BLOCKS, WORKERS, _SEED)
    table = _Planted(planted)
    figures: dict[str, Any] = {"blocks": table.prefixes.index.nodes, "workers": WORKERS}
    voids = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        peer = _peer(Path(name), figures) if peers else None
        try:
            for length in LENGTHS:
                found = _finds(table, length, peer, turns)
                figures |= _find_figures(found, length, peer is not None)
                voids.append(found.void)
        finally:
            if peer is not None:
                peer.close()
    if peer is not None:
        figures["find_over_radixtree"] = max(figures[f"find_{n}_over_radixtree"]["median"] for n in LENGTHS)
    figures |= event_rates(table.prefixes, turns)
    figures |= churned()
    figures["void"] = "; ".join(dict.fromkeys(filter(None, voids)))
    figures["bars"] = {"at_most": AT_MOST, "at_least": AT_LEAST}
    figures["missed"] = missed(figures, peers)
    return figures


def missed(figures: dict[str, Any], peers: bool) -> list[str]:
    """Bars that do not hold; without peers theirs is none."""
    out = []
    for name, most in AT_MOST.items():
        if name not in figures:
            if peers:
                out.append(f"{name}: not measured: {figures.get('radixtree_failed', '')}")
        elif figures[name] > most:
            out.append(f"{name} {figures[name]:.3g} > {most:g}")
    out += [
        f"{name} {figures[name]:.3g} < {least:g}" for name, least in AT_LEAST.items() if figures[name] < least
    ]
    return out


# ---- lookups ----------------------------------------------------------------------------------------------


class _Planted:
    """The index as a router has it, with the chains in it."""

    def __init__(self, planted: list[Chain]) -> None:
        self.prefixes = Prefixes(KeyNames(BLOCK_TOKENS, {}), 2 * BLOCKS, WORKERS + 1, MonotonicClock())
        self.holdings = _joined(self.prefixes, WORKERS)
        for event in events(planted, PLANTED_BY, mixed=True):
            self.holdings[event.worker].stored(_stored(_keys(event.hashes).tobytes()))
        self._chains = {
            length: [(np.array(c.hashes, np.uint64), c) for c in planted if len(c.hashes) == length]
            for length in LENGTHS
        }
        self._random = Random(_SEED)

    def find(self, length: int) -> float:
        """Seconds of one lookup in the index."""
        names, chain = self._random.choice(self._chains[length])
        begin = time.perf_counter()
        found = self.prefixes.index.find(names, 8)
        seconds = time.perf_counter() - begin
        self._check(found[[each.column for each in self.holdings]], chain)
        return seconds

    def matched(self, length: int) -> float:
        """Seconds of what the router asks about a prompt."""
        names, chain = self._random.choice(self._chains[length])
        begin = time.perf_counter()
        found = self.prefixes.matched_blocks(names, self.holdings)
        seconds = time.perf_counter() - begin
        self._check(found, chain)
        return seconds

    def _check(self, found: NDArray[Any], chain: Chain) -> None:
        expected = np.zeros(WORKERS, np.int64)
        expected[chain.owner], expected[chain.half_owner] = len(chain.hashes), len(chain.hashes) // 2
        if not np.array_equal(found[:, -1], expected):
            raise SystemExit(f"found {found[:, -1].tolist()}, expected {expected.tolist()}")


def _joined(prefixes: Prefixes, count: int) -> list[Holdings]:
    joined = [prefixes.join(BLOCKS, told=True) for _ in range(count)]
    for holdings in joined:
        holdings.ready()
    return joined


def _keys(hashes: list[int]) -> NDArray[np.uint64]:
    """(n, 4) keys of 32 bytes that begin with these hashes."""
    keys = np.zeros((len(hashes), KEY_BYTES // 8), np.uint64)
    keys[:, 0] = hashes
    return keys


def _stored(keys: bytes) -> Stored:
    return Stored(keys, KEY_BYTES, None, None, 0, b"", Tier.HOST)


def _peer(folder: Path, figures: dict[str, Any]) -> Child | None:
    """The RadixTree with the same chains; None, and why in the figures, where there is none."""
    child = None
    try:
        child = Child(RADIXTREE, folder)
        reply = child.ask(f"plant {BLOCKS} {WORKERS} {PLANTED_BY} {_SEED}")
    except PeerError as error:
        figures["radixtree_failed"] = str(error)
        if child is not None:
            child.close()
        return None
    figures["radixtree_version"] = reply["version"]
    return child


def _finds(table: _Planted, length: int, peer: Child | None, turns: int) -> Measured:
    def often(find: Callable[[int], float]) -> Callable[[], float]:
        return lambda: statistics.median(find(length) for _ in range(IN_A_ROW))

    # Settled, as each leaves the others cold caches.
    arms = [Arm("matched", often(table.matched), settle=True)]
    if peer is not None:
        ask = f"find {length} {IN_A_ROW}"
        arms.append(Arm("radixtree", lambda: float(peer.ask(ask)["seconds"]), settle=True))
    return measured([Arm("find", often(table.find), settle=True)], arms, turns=turns)


def _find_figures(found: Measured, length: int, peer: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        f"{name}_{length}_us": round(1e6 * statistics.median(found.wall_s[name]), 2)
        for name in ("find", "matched", *(["radixtree"] if peer else []))
    }
    made[f"find_{length}_us_spread"] = spread([1e6 * s for s in found.wall_s["find"]])
    if peer:
        # The limit is our own find: how many times as fast as it the tree is.
        made[f"find_{length}_over_radixtree"] = found.speed("radixtree").json()
    made[f"find_{length}_control"] = found.control.json()
    return made


def main() -> int:
    """Returns 1 when a bar is missed, 3 when the comparisons are void."""
    command = parser("routing_index", __doc__)
    command.add_argument("--no-peers", action="store_true", help="leave ai-dynamo-runtime out")
    command.add_argument("--turns", type=int, default=TURNS, help=f"repetitions that count ({TURNS})")
    options = command.parse_args()
    figures = measure(not options.no_peers, options.turns)
    status = finish("routing_index", options, figures, [figures["void"]])
    return status or int(bool(figures["missed"]))


if __name__ == "__main__":
    sys.exit(main())
