"""Processes that the daemon before had handed slots: watched until they can write to none any more.

Their slots wait in quarantine (`kvstore.quarantine`). A process leaves by ending, or by attaching again and
saying `quiesced`: it is recognised by its pidfd's inode.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from kvstore import quarantine
from kvstore.keep.keeping import FormerWriter, Keeping
from kvstore.processes import process_identity
from kvstore.store import Store
from kvstore.transfers import Filling

__all__ = ["FormerWriters"]

log = structlog.get_logger()


class FormerWriters:
    """All of them.

    Args:
        keeping: where they are known from; None = there are none.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, keeping: Keeping | None) -> None:
        self.keeping = keeping
        self._store = store
        self._loop = loop
        self._watched: dict[int, FormerWriter] = {}

    def watch(self) -> None:
        """Begin; a process that has ended meanwhile is noticed at once."""
        for writer in self.keeping.former if self.keeping is not None else ():
            if not any(writer.row.number in filling.waiting for filling in self._fillings(writer)):
                self._forget(writer)  # no slot depends on it
                continue
            self._watched[writer.row.number] = writer
            if writer.pidfd >= 0:
                self._loop.add_reader(writer.pidfd, partial(self._gone, writer))
            else:
                log.warning(
                    "no pidfd: slots of an earlier session stay quarantined", session=writer.row.session
                )

    def quiesced(self, process: tuple[int, int] | None, engine: bytes) -> None:
        """A process says that all copies of this engine in it are joined."""
        if process is None:
            return
        for writer in list(self._watched.values()):
            if writer.row.engine == engine and process_identity(writer.pidfd) == process:
                self._gone(writer)

    def close(self) -> None:
        """Stop watching; who is still watched may still write."""
        for writer in self._watched.values():
            if writer.pidfd >= 0:
                self._loop.remove_reader(writer.pidfd)
        self._watched.clear()

    def _fillings(self, writer: FormerWriter) -> list[Filling]:
        former = quarantine.former_id(writer.row.engine)
        return [f for group in self._store.groups.values() for f in group.fillings.of_engine(former)]

    def _gone(self, writer: FormerWriter) -> None:
        del self._watched[writer.row.number]
        if writer.pidfd >= 0:
            self._loop.remove_reader(writer.pidfd)
        freed = 0
        for group in self._store.groups.values():
            freed += quarantine.writer_done(group, writer.row.engine, writer.row.number)
        self._forget(writer)
        if freed:
            log.info("quarantined slots freed", session=writer.row.session, slots=freed)

    def _forget(self, writer: FormerWriter) -> None:
        if self.keeping is not None:
            self.keeping.forget(writer)
