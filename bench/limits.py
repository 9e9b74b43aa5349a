"""What the machine can do without us: memcpy over lists of blocks, and an echo over a Unix socket."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore import _native

__all__ = ["Echo", "LibcCopy", "huge_memory", "memory_of", "numpy_copy"]

HUGE_BYTES = 2 << 20
U8 = NDArray[np.uint8]

# A loop in C, so that small blocks are not slowed by the interpreter: this is the yardstick.
_SOURCE = """
#include <string.h>
#include <stddef.h>
#include <stdint.h>
void copy_blocks(uint8_t *target, const uint32_t *to, const uint8_t *source, const uint64_t *from,
                 size_t count, size_t bytes) {
  for (size_t i = 0; i < count; ++i) memcpy(target + to[i] * bytes, source + from[i], bytes);
}
void copy_blocks_out(uint8_t *target, const uint64_t *to, const uint8_t *source, const uint32_t *from,
                     size_t count, size_t bytes) {
  for (size_t i = 0; i < count; ++i) memcpy(target + to[i], source + from[i] * bytes, bytes);
}
"""


class LibcCopy:
    """memcpy of the C library, one call a block.

    Args:
        folder: where to compile the loop.

    Raises:
        SystemExit: no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        source, library = folder / "limit.c", folder / "limit.so"
        source.write_text(_SOURCE)
        # -fno-builtin: it must call memcpy, not guess at it.
        command = ["cc", "-O2", "-fno-builtin", "-fPIC", "-shared", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(f"memcpy, the limit, needs a C compiler: {error}") from None
        self._library = ctypes.CDLL(str(library))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        for function in (self._library.copy_blocks, self._library.copy_blocks_out):
            function.argtypes = [pointer, pointer, pointer, pointer, size, size]
            function.restype = None

    def load(
        self, target: U8, to: NDArray[np.uint32], source: U8, offsets: NDArray[np.uint64], bytes_: int
    ) -> None:
        """source[offsets[i] : + bytes_] → target[to[i] * bytes_ : + bytes_]."""
        self._library.copy_blocks(
            target.ctypes.data, to.ctypes.data, source.ctypes.data, offsets.ctypes.data, len(to), bytes_
        )

    def save(
        self, target: U8, offsets: NDArray[np.uint64], source: U8, of: NDArray[np.uint32], bytes_: int
    ) -> None:
        """source[of[i] * bytes_ : + bytes_] → target[offsets[i] : + bytes_]."""
        self._library.copy_blocks_out(
            target.ctypes.data, offsets.ctypes.data, source.ctypes.data, of.ctypes.data, len(of), bytes_
        )


def numpy_copy(target: U8, to: NDArray[np.integer], source: U8, of: NDArray[np.integer], bytes_: int) -> None:
    """The same by numpy: one slice assignment a block. `to` and `of` are byte offsets."""
    for there, here in zip(to.tolist(), of.tolist(), strict=True):
        target[there : there + bytes_] = source[here : here + bytes_]


def huge_memory(bytes_: int) -> U8:
    """(bytes_,) private memory on 2 MiB pages where the kernel gives them, every page touched."""
    area = mmap.mmap(-1, bytes_ + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole: U8 = np.frombuffer(area, np.uint8)
    skip = -whole.ctypes.data % HUGE_BYTES
    memory = whole[skip : skip + bytes_]
    memory[:: mmap.PAGESIZE] = 1
    return memory


def memory_of(arena: _native.Arena) -> U8:
    """(capacity_bytes,) a client's view of the arena, to copy to or from the very same pages."""
    address = arena.view(0, 1).ctypes.data
    buffer = (ctypes.c_uint8 * arena.capacity_bytes).from_address(address)
    view: U8 = np.ctypeslib.as_array(buffer)
    return view


class Echo:
    """A process that sends back what it gets, and our end of its socket.

    Args:
        folder: for the socket.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "echo.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.limits", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
        self._socket.connect(str(path))

    def ask(self, payload: bytes, into: bytearray) -> None:
        """One round trip of a length-prefixed payload.

        Args:
            into: of len(payload) + 4 bytes.
        """
        self._socket.sendall(struct.pack("<I", len(payload)) + payload)
        got, view = 0, memoryview(into)
        while got < len(into):
            got += self._socket.recv_into(view[got:])

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


class _Back(asyncio.Protocol):
    """The barest server asyncio can be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.WriteTransport)
        self._transport.write(data)


async def _serve_echo(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Back, path)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve_echo(sys.argv[1]))
