"""Case 32: the first save of a fresh client pays for no page, in the arena or in its page tables."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from fake_engine import BIG
from scene import Scene

from kvstore import _native
from kvstore.types import SaveResult

BLOCKS = 56
PAGES = BLOCKS * BIG.slot_bytes // _native.PAGE_BYTES


def threads_of_this_process() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def minor_faults(threads: set[int]) -> int:
    """Page faults that these threads have taken so far."""
    stats = [Path(f"/proc/self/task/{thread}/stat").read_text() for thread in threads]
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


def test_case_32_the_first_save_of_a_fresh_client_takes_no_page_fault(stage: Scene) -> None:
    stage.start_daemon()
    earlier = threads_of_this_process()
    engine = stage.engine(layout=BIG, blocks=BLOCKS)
    chain = engine.chain(1, BLOCKS)
    blocks = np.arange(BLOCKS, dtype=np.uint32)
    engine.memory.fill(blocks.tolist(), chain.keys)
    copiers = threads_of_this_process() - earlier
    assert copiers, "the client copies in threads of its own"
    before = minor_faults(copiers)
    result = engine.client.save(chain, 0, BLOCKS, blocks).wait()
    assert result == SaveResult(BLOCKS, 0, 0, 0)
    assert PAGES > 3000
    assert minor_faults(copiers) - before < PAGES // 50  # stacks and queues, not the arena
    assert engine.restored(chain) == BLOCKS


def test_case_32_a_mapping_that_nobody_populated_faults_at_every_page(stage: Scene) -> None:
    """What the other test would see: the same arena through a mapping of its own, untouched."""
    daemon = stage.start_daemon()
    raw = stage.session().engine(BIG, model=stage.name)
    data, control = raw.fds
    arena = _native.Arena.attach(data, control, 16 << 20)
    me = {threading.get_native_id()}
    view = arena.view(0, 16 << 20)
    before = minor_faults(me)
    assert int(view[:: _native.PAGE_BYTES].max()) >= 0
    without = minor_faults(me) - before
    arena.populate(1)
    before = minor_faults(me)
    assert int(view[:: _native.PAGE_BYTES].max()) >= 0
    assert minor_faults(me) - before < without / 10
    assert without >= (16 << 20) // _native.PAGE_BYTES // 16  # the kernel maps up to 16 pages around a fault
    del view
    arena.close()
    assert daemon.alive
