"""The table of processes that may write: what a next daemon reads, wherever this one was cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.keep import writers
from kvstore.keep.writers import WriterTable

ENGINE, OTHER = bytes(range(16)), bytes(16)


@pytest.fixture
def table() -> Iterator[WriterTable]:
    table = WriterTable()
    yield table
    table.close()


def read(table: WriterTable) -> set[tuple[int, int, bytes]]:
    """What the next daemon finds."""
    again = WriterTable(table.fd)
    try:
        return {(row.boot, row.session, row.engine) for row in again.rows()}
    finally:
        again.close()


def test_rows_are_there_for_the_next_daemon_until_removed(table: WriterTable) -> None:
    first, second = table.add(1, ENGINE), table.add(2, OTHER)
    assert first is not None
    assert second is not None
    assert read(table) == {(table.boot, 1, ENGINE), (table.boot, 2, OTHER)}
    assert first.name == f"peer.{table.boot:016x}.1"
    table.remove(first)
    table.remove(first)
    assert read(table) == {(table.boot, 2, OTHER)}


def test_rows_of_several_boots_live_side_by_side(table: WriterTable) -> None:
    table.add(1, ENGINE)
    again = WriterTable(table.fd)
    try:
        assert again.boot != table.boot
        new = again.add(1, ENGINE)
        assert new is not None
        (old,) = [row for row in again.rows() if row != new]
        assert old.name != new.name
        again.remove(old)
        assert read(table) == {(again.boot, 1, ENGINE)}
        # A row of before whose place was given to another since is not removed in its stead.
        replaced = again.add(2, OTHER)
        assert replaced is not None
        assert replaced.number == old.number
        again.remove(old)
        assert (again.boot, 2, OTHER) in read(table)
    finally:
        again.close()


def test_a_row_that_was_cut_short_is_no_row(table: WriterTable) -> None:
    row = table.add(1, ENGINE)
    assert row is not None
    os.pwrite(table.fd, bytes(8), row.number * 32 + 8)  # the session is written last, and as a whole
    assert read(table) == set()


def test_it_has_a_limit(table: WriterTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "ROWS_MAX", 3)
    rows = [table.add(session, ENGINE) for session in range(1, 5)]
    assert [row is not None for row in rows] == [True, True, True, False]
    assert rows[1] is not None
    table.remove(rows[1])
    assert table.add(9, OTHER) is not None
    assert table.add(10, OTHER) is None


def test_what_is_no_table_is_refused() -> None:
    for size in (0, 100, writers.ROWS_MAX * 32):
        fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)  # the right size, but not sealed: it could be cut under our mapping
            with pytest.raises(ValueError, match="not a table"):
                WriterTable(fd)
        finally:
            os.close(fd)
