"""Both doors of a daemon ask for checks of the one store: never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from kvstore import checks, keys
from kvstore.config import Config, DaemonConfig, GrpcConfig
from kvstore.daemon import Daemon
from kvstore.group import Group
from kvstore.rpc import messages as m
from kvstore.testing import small_config
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc


def framed(number: int, body: Any) -> bytes:
    payload = msgspec.msgpack.encode(m.RequestFrame(number, body))
    return len(payload).to_bytes(4, "little") + payload


async def reply_of(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(4), "little")
    return msgspec.msgpack.decode(await reader.readexactly(length), type=m.ReplyFrame)


async def test_a_check_of_one_door_waits_for_that_of_the_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices, released = checks.in_slices, asyncio.Event()
    begun = asyncio.Queue[None]()

    def held(groups: Iterable[Group]) -> Generator[None, None, bool]:
        begun.put_nowait(None)
        while not released.is_set():
            yield
        return (yield from in_slices(groups))

    monkeypatch.setattr(checks, "in_slices", held)
    small = msgspec.structs.asdict(small_config())
    api = path.with_name("g")
    tables = {"daemon": DaemonConfig(socket=str(path)), "grpc": GrpcConfig(listen=f"unix:{api}")}
    daemon = Daemon(Config(**{**small, **tables}))
    daemon.open()
    try:
        await daemon.open_api()
        daemon.listen(asyncio.get_running_loop())
        async with asyncio.timeout(30.0), grpc.aio.insecure_channel(f"unix:{api}") as channel:
            first = asyncio.ensure_future(rpc.AdminStub(channel).Check(pb.CheckRequest()))
            await begun.get()
            reader, writer = await asyncio.open_unix_connection(path)
            hello = m.Attach(m.PROTOCOL_VERSION, "tool", b"", {}, None, (0, 0, 0, 0), [], keys.test_vector())
            for number, body in enumerate((hello, m.Check(), m.Heartbeat()), 1):
                writer.write(framed(number, body))
            assert [(await reply_of(reader)).id for _ in range(2)] == [1, 3]
            assert begun.empty(), "a second run began beside the first"
            released.set()
            assert (await first).ok
            assert '"ok": true' in (await reply_of(reader)).body.json
            assert begun.qsize() == 1
            writer.close()
    finally:
        await daemon.close_api()
        daemon.close()
