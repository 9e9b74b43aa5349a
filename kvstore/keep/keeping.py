"""What a daemon keeps for the next one, and what it got from the one before.

open   take what is kept, compare it with the configuration, let go of what is of no use
arena  a group's descriptors, to adopt; `refuse` when that fails, `hold` when a fresh one was made instead
attached, gone   a process may write, may not any more
leave | end      the daemon ends and everything stays | and nothing stays
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Self

import structlog

from kvstore import __version__
from kvstore.config import Config, Salts
from kvstore.errors import LimitExceeded
from kvstore.keep.base import Keeper
from kvstore.keep.facts import Facts
from kvstore.keep.holding import Holding, end_leftover, holder_path
from kvstore.keep.systemd import SystemdStore, offers_store
from kvstore.keep.wire import close_all
from kvstore.keep.writers import ROWS_MAX, Row, WriterTable

__all__ = ["FormerWriter", "Keeping", "KeptArena", "let_go_of_leftovers"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeptArena:
    """Descriptors of one group's arena; whoever adopts makes its own of them."""

    data_fd: int
    ledger_fd: int


@dataclass(frozen=True, slots=True)
class FormerWriter:
    """A process that the daemon before had handed slots, or might have.

    Attributes:
        row: which.
        pidfd: readable once it is gone; -1 where nobody can tell (Linux before 6.5).
    """

    row: Row
    pidfd: int


def let_go_of_leftovers(config: Config, environ: MutableMapping[str, str]) -> None:
    """A daemon that keeps nothing starts: what an earlier one has left would only take memory.

    Raises:
        ConfigError: a daemon that runs has it.
    """
    left = (
        end_leftover(holder_path(config.daemon.socket))
        if len(config.daemon.socket.encode()) <= 102
        else False
    )
    store = SystemdStore(environ)
    found = store.take()
    close_all(list(found.values()))
    store.end()
    if left or found:
        log.info("kept arena dropped", reason="this daemon runs without daemon.keep_arena")


class Keeping:
    """See the top of this file. Made by `open`.

    Attributes:
        salts: to be used by this daemon.
        former: processes that may still write to an adopted arena.
    """

    def __init__(self, keeper: Keeper, salts: Salts, table: WriterTable, fds: dict[str, int]) -> None:
        self.salts = salts
        self.former: list[FormerWriter] = []
        self._keeper = keeper
        self._table = table
        self._fds = fds  # taken, and not yet made use of
        self._rows: dict[int, Row] = {}
        self._facts: Facts | None = None  # as they are kept now, under the name facts.{number}
        self._facts_number = 0
        self._adopted: set[str] = set()
        self._fresh: list[str] = []  # names of arenas that this daemon made itself
        self._open = True

    @classmethod
    def open(cls, config: Config, environ: MutableMapping[str, str]) -> Self:
        """Take what an earlier daemon has left for this one.

        Raises:
            ConfigError: it is another daemon's, or there can be no keeper.
        """
        fresh = Salts.load(config)
        keeper: Keeper
        if offers_store(environ):
            keeper = SystemdStore(environ)
        else:
            keeper = Holding(holder_path(config.daemon.socket), config.daemon.keep_arena_s)
        fds = keeper.take()
        number, before, reason = _newest_facts(fds)
        salts = before.salts(fresh) if before is not None and not config.salts_kept else fresh
        now = Facts.of(config, salts, __version__)
        table: WriterTable | None = None
        if before is not None:
            table, reason = _kept_table(fds)
        self = cls(keeper, salts, table or WriterTable(), fds)
        if fds and reason:
            log.warning("kept arena dropped, starting cold", reason=reason)
            self._let_go(list(fds))
        elif before is not None:
            self._drop_useless(before, now)
        self._put_facts(now, before, number)
        if table is None:
            keeper.put({"writers": self._table.fd})
        self._take_over_rows()
        return self

    def _drop_useless(self, before: Facts, now: Facts) -> None:
        for group in before.groups:
            names = [f"data.{group}", f"ledger.{group}"]
            reason = before.why_not(now, group)
            if not reason and not all(name in self._fds for name in names):
                reason = "not all of it was kept"
            if reason:
                log.warning("kept arena dropped, starting cold", group=group, reason=reason)
                self._let_go([name for name in names if name in self._fds])

    def _let_go(self, names: list[str]) -> None:
        close_all([self._fds.pop(name) for name in names])
        self._keeper.drop(names)

    def _put_facts(self, now: Facts, before: Facts | None, number: int) -> None:
        """Store changed facts under a new name before the old ones go: there is never a moment without."""
        old = [name for name in self._fds if name.startswith("facts.")]
        current = f"facts.{number}"
        if before != now or current not in old:
            current = f"facts.{number + 1}"
            fd = now.to_fd()
            self._keeper.put({current: fd})
            os.close(fd)
            number += 1
        gone = [name for name in old if name != current]
        close_all([self._fds.pop(name) for name in old])
        self._keeper.drop(gone)
        self._facts, self._facts_number = now, number

    def reconfigure(self, config: Config, salts: Salts) -> None:
        """A reload changed tenants: the next daemon must find the salts of those who came."""
        now, before, number = Facts.of(config, salts, __version__), self._facts, self._facts_number
        self.salts = salts
        if now != before:
            self._put_facts(now, before, number)
            self._keeper.drop([f"facts.{number}"])

    def _take_over_rows(self) -> None:
        adopting = any(name.startswith("data.") for name in self._fds)
        for row in self._table.rows():
            pidfd = self._fds.pop(row.name, -1)
            if adopting:
                self.former.append(FormerWriter(row, pidfd))
            else:  # they write to memory that is nobody's any more
                self.forget(FormerWriter(row, pidfd))
        strays = [name for name in self._fds if not name.startswith(("data.", "ledger."))]
        self._let_go(strays)

    # ---- arenas --------------------------------------------------------------------------------------------

    def arena(self, group: str) -> KeptArena | None:
        """What was kept of a group."""
        data, ledger = self._fds.get(f"data.{group}", -1), self._fds.get(f"ledger.{group}", -1)
        return KeptArena(data, ledger) if data >= 0 and ledger >= 0 else None

    def adopted(self, group: str) -> None:
        """It is in use again; the keeper has it already."""
        self._adopted.add(group)
        close_all([self._fds.pop(f"{kind}.{group}") for kind in ("data", "ledger")])

    def refuse(self, group: str, reason: str) -> None:
        """It cannot be adopted: its memory goes back."""
        log.warning("kept arena dropped, starting cold", group=group, reason=reason)
        self._let_go([f"{kind}.{group}" for kind in ("data", "ledger")])

    def hold(self, group: str, fds: Mapping[str, int]) -> None:
        """Keep a fresh arena: {"data": fd, "ledger": fd}."""
        named = {f"{kind}.{group}": fd for kind, fd in fds.items()}
        self._fresh += named
        self._keeper.put(named)

    def give_up_fresh(self) -> bool:
        """The daemon could not start: arenas of its own hold nothing, and are kept no longer.

        Returns:
            Whether there is something left that an earlier daemon filled: `leave` it, else `end`.
        """
        self._keeper.drop(self._fresh)
        self._fresh.clear()
        return bool(self._adopted) or any(name.startswith("data.") for name in self._fds)

    def writers(self) -> dict[bytes, list[int]]:
        """Engine id → numbers of its processes, from before, that may still write."""
        found: dict[bytes, list[int]] = {}
        for writer in self.former:
            found.setdefault(writer.row.engine, []).append(writer.row.number)
        return found

    # ---- writers -------------------------------------------------------------------------------------------

    def attached(self, session: int, engine: bytes, pidfd: int) -> None:
        """A process may be handed slots from now on. Before it is told so.

        Raises:
            LimitExceeded: the table is full. The next daemon would take its slots for nobody's (LAWS A1).
        """
        row = self._table.add(session, engine)
        if row is None:
            raise LimitExceeded(
                f"writers_max = {ROWS_MAX} processes may still write to the kept arena; "
                "end engines that are not needed, then attach again"
            )
        self._rows[session] = row
        if pidfd >= 0:
            self._keeper.put({row.name: pidfd})

    def gone(self, session: int) -> None:
        """A session's process writes no more. A no-op once the daemon leaves."""
        row = self._rows.pop(session, None)
        if row is not None and self._open:
            self._table.remove(row)
            self._keeper.drop([row.name])

    def forget(self, writer: FormerWriter) -> None:
        """A process from before writes no more, or what it writes to is nobody's."""
        if writer.pidfd >= 0:
            os.close(writer.pidfd)
        if self._open:
            self._table.remove(writer.row)
            self._keeper.drop([writer.row.name])

    # ---- life ----------------------------------------------------------------------------------------------

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work on this loop from now on."""
        self._keeper.serve(loop)

    def leave(self) -> None:
        """The daemon ends; what is kept stays as it is at this moment."""
        self._close()
        self._keeper.leave()

    def end(self) -> None:
        """The daemon ends; nothing stays. Call it when the arenas are unmapped: then their memory is free."""
        self._close()
        self._keeper.end()

    def _close(self) -> None:
        if self._open:
            self._open = False
            close_all(list(self._fds.values()))
            self._fds.clear()
            self._table.close()


def _kept_table(fds: dict[str, int]) -> tuple[WriterTable | None, str]:
    """The table of writers, taken out of `fds`, or why there is none."""
    fd = fds.get("writers", -1)
    if fd < 0:
        return None, "the table of its writers is missing"
    try:
        table = WriterTable(fd)
    except (ValueError, OSError) as error:
        return None, str(error)
    os.close(fds.pop("writers"))
    return table, ""


def _newest_facts(fds: Mapping[str, int]) -> tuple[int, Facts | None, str]:
    """Number and content of the newest facts, or why there are none."""
    numbers = [int(name[6:]) for name in fds if name.startswith("facts.") and name[6:].isdigit()]
    if not numbers:
        return 0, None, "nothing says what it depends on"
    number = max(numbers)
    try:
        return number, Facts.from_fd(fds[f"facts.{number}"]), ""
    except (ValueError, OSError) as error:
        return number, None, str(error)
