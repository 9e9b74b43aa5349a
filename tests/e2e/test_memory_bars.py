"""What memory costs: the bars of bench/memory.py, with its own measurement."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.memory import BARS, daemon_mib, node_bytes


def test_a_daemon_of_1_gib_with_100_000_blocks_costs_less_than_200_mib_beside_its_arena() -> None:
    name = "daemon_anon_and_page_tables_mib"
    assert 10 < daemon_mib()[name] <= BARS[name]


def test_a_node_costs_at_most_96_bytes() -> None:
    name = "index_bytes_per_node"
    assert 64 < node_bytes()[name] <= BARS[name]
