"""What a daemon that keeps its arena asks of those who attach."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import keys
from kvstore.config import Config, DaemonConfig, Salts
from kvstore.keep import writers
from kvstore.keep.keeping import Keeping
from kvstore.keep.nothing import KeepNothing
from kvstore.keep.writers import WriterTable
from kvstore.rpc import messages as m
from kvstore.rpc.server import SessionServer
from kvstore.store import Store
from kvstore.testing import SimClock, small_config, small_layout
from kvstore.testing.driver import namespace_of, wire_layout


async def attach(path: Path, role: str, engine: bytes) -> tuple[Any, asyncio.StreamWriter]:
    layout = small_layout()
    part = (0, layout.layers, 0, layout.kv_heads)
    names, shape = namespace_of(layout, "model"), wire_layout(layout)
    ask = m.Attach(
        m.PROTOCOL_VERSION,
        role,
        engine,
        names,
        shape,
        part,
        ["default"],
        keys.test_vector(),  # type: ignore[arg-type]
    )
    reader, writer = await asyncio.open_unix_connection(path)
    payload = msgspec.msgpack.encode(m.RequestFrame(1, ask))
    writer.write(len(payload).to_bytes(4, "little") + payload)
    async with asyncio.timeout(20.0):
        length = int.from_bytes(await reader.readexactly(4), "little")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=m.ReplyFrame).body, writer


async def test_who_cannot_be_written_down_as_a_writer_may_not_attach(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next daemon would free slots that a living process writes to (LAWS A1)."""
    monkeypatch.setattr(writers, "ROWS_MAX", 1)
    small = msgspec.structs.asdict(small_config())
    config = Config(**{**small, "daemon": DaemonConfig(socket=str(path))})
    salts = Salts.load(config)
    keeping = Keeping(KeepNothing(), salts, WriterTable(), {})
    store = Store(config, salts, SimClock())
    store.open()
    server = SessionServer(store, asyncio.get_running_loop(), keeping)
    server.open()
    streams = []
    try:
        group = store.groups["default"]
        for role, engine, welcome in (
            ("both", b"a" * 16, True),
            ("worker", b"b" * 16, False),
            ("scheduler", b"c" * 16, True),  # it writes nothing
        ):
            reply, stream = await attach(path, role, engine)
            streams.append(stream)
            if welcome:
                assert isinstance(reply, m.Attached)
            else:
                assert isinstance(reply, m.Failed)
                assert "writers_max" in reply.message
            assert (engine in group.engines) is welcome
        assert len(group.callers) == 2
        store.check()
    finally:
        for stream in streams:
            stream.close()
        server.close()
        store.close()
        keeping.end()
