"""The bars of `kvstore serve`: there while something takes long, gone when nothing does."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from kvstore.cli.arena_bar import ArenaBar
from kvstore.progress import ARENA, READING, SEGMENTS

MIB = 1 << 20


class Screen:
    """A terminal that remembers."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.console = Console(file=self.out, force_terminal=True, width=100, legacy_windows=False)

    def since(self) -> str:
        """Text that came since the last call, without colours."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.out.getvalue())
        self.out.seek(0)
        self.out.truncate()
        return text


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_each_kind_of_work_of_each_group_has_a_bar(screen: Screen) -> None:
    with ArenaBar(screen.console) as show:
        show("red", 1 * MIB, 4 * MIB)
        show("red", 2 * MIB, 8 * MIB, READING)
        show("blue", 0, 16 * MIB, SEGMENTS)
        show("red", 2 * MIB, 4 * MIB)
        assert len(threading.enumerate()) > 1
    text = screen.since()
    for words in (f"{ARENA} red", f"{READING} red", f"{SEGMENTS} blue", "2.0/8.0 MiB", "2.0/4.0 MiB"):
        assert words in text, words


def test_nothing_is_shown_when_nothing_is_under_way(screen: Screen) -> None:
    """Lines of the log come between: a bar would be in their way."""
    with ArenaBar(screen.console) as show:
        show("red", 0, 0, READING)  # nothing to read
        show("red", 4 * MIB, 4 * MIB)
        assert screen.since() == ""
        show("red", 0, 8 * MIB, READING)
        assert f"{READING} red" in screen.since()
        show("red", 8 * MIB, 8 * MIB, READING)
        screen.since()
        screen.console.print("a line of the log")
        assert screen.since() == "a line of the log\n"
        # The next group, or the same work that grew, brings the bars back.
        show("red", 8 * MIB, 16 * MIB, READING)
        assert "8.0/16.0 MiB" in screen.since()


def test_a_group_after_the_first_is_shown_too(screen: Screen) -> None:
    with ArenaBar(screen.console) as show:
        for group in ("red", "blue"):
            for done in range(5):
                show(group, done * MIB, 4 * MIB)
            text = screen.since()
            assert f"{ARENA} {group}" in text
    assert screen.since() == ""


def test_it_may_be_told_from_any_thread(screen: Screen) -> None:
    with ArenaBar(screen.console) as show:

        def tell(what: str) -> None:
            for done in range(200):
                show("red", done, 199, what)

        threads = [threading.Thread(target=tell, args=(what,)) for what in (ARENA, READING, SEGMENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        screen.since()
        show("red", 1, 2)
        assert f"{ARENA} red" in screen.since()
