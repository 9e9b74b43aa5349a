"""openlake-vllm: its daemon, its shared slab, and the native client that its vLLM connector uses."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.serve import Blocks, Chain, Store, end, free_port, serve, start, wait_until

__all__ = ["OpenLake"]

KEY_BYTES = 54  # as its connector makes them: 32 of hash, 12 of model, five 16-bit numbers
CLIENT_ID = 2048  # the first that its connector gives out
_CONFIG = """
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{port}"
kv_agents = ["127.0.0.1:{port}"]
s3_addr = "127.0.0.1:{s3_port}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "openlake"
secret_key = "openlake"
[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{port}"
disk_count = 0
[kv_slab]
capacity_gb = {capacity_gib}
reserve_ttl_secs = 60
"""


class OpenLake(Store):
    """A fresh daemon with room for an eighth more than asked; it evicts the oldest by itself.

    Args:
        folder: for its configuration and log.
        block_bytes, blocks: the engine's memory.
        capacity_blocks: what it must hold.
    """

    def __init__(self, folder: Path, block_bytes: int, blocks: int, capacity_blocks: int) -> None:
        import openlake_client

        self.version = version("openlake-vllm")
        self.blocks = Blocks(block_bytes, blocks)
        slot_bytes = KEY_BYTES + block_bytes
        gib = -(-slot_bytes * capacity_blocks * 9 // 8 >> 30)
        self.note = f'device "local" (shared slab of {gib} GiB), one put_batch / get_batch per 256 MiB'
        port = free_port(2)  # its telemetry takes the next one
        config = folder / "openlake.toml"
        config.write_text(_CONFIG.format(port=port, s3_port=free_port(), capacity_gib=gib))
        binary = Path(openlake_client.__file__).parent / "openlaked"
        binary.chmod(0o755)
        with (folder / "openlaked.log").open("ab") as log:
            self._daemon = start([str(binary), "--config", str(config)], log)
        self.leaves = (f"/dev/shm/openlake_kv_{self._daemon.pid}_*",)
        self._client = openlake_client.Client(device="local", client_id=CLIENT_ID)
        self._client.register_memory(self.blocks.address, block_bytes * blocks)

        def attached() -> bool:
            try:
                self._client.attach(f"127.0.0.1:{port}", 0, slot_bytes)
            except Exception:  # noqa: BLE001 whatever it says until its socket listens; wait_until ends it
                return False
            return True

        wait_until(attached, self._daemon)

    def key_of(self, chain: Chain) -> list[bytes]:
        """A key a block, as long as the connector's."""
        return [_hash(number) + bytes(KEY_BYTES - 32) for number in chain]

    def put(self, key: list[bytes], places: Sequence[int]) -> float:
        """One put_batch."""
        addresses, sizes = self._lists(places)
        begin = time.perf_counter()
        done = self._client.put_batch(key, addresses, sizes)
        seconds = time.perf_counter() - begin
        _all_done("put_batch", done)
        return seconds

    def get(self, key: list[bytes], places: Sequence[int]) -> float:
        """One get_batch."""
        addresses, sizes = self._lists(places)
        begin = time.perf_counter()
        done = self._client.get_batch(key, addresses, sizes)
        seconds = time.perf_counter() - begin
        _all_done("get_batch", done)
        return seconds

    def lookup(self, key: list[bytes]) -> tuple[float, int]:
        """One batch_is_exist of all keys, as its scheduler does; the prefix is counted untimed."""
        begin = time.perf_counter()
        exists = self._client.batch_is_exist(key)
        seconds = time.perf_counter() - begin
        return seconds, next((i for i, one in enumerate(exists) if one != 1), len(exists))

    def close(self) -> None:
        """The daemon leaves its slab behind: remove it."""
        self._client.close()
        end(self._daemon)
        for slab in Path("/dev/shm").glob(f"openlake_kv_{self._daemon.pid}_*"):
            slab.unlink()

    def _lists(self, places: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        size = self.blocks.block_bytes
        return [[self.blocks.address + place * size] for place in places], [[size]] * len(places)


def _hash(number: int) -> bytes:
    """32 bytes that look like a hash."""
    return struct.pack("<4Q", *(random.Random(number).getrandbits(64) for _ in range(4)))


def _all_done(call: str, done: list[int]) -> None:
    failed = sum(one < 0 for one in done)
    if failed:
        raise RuntimeError(f"{call} failed for {failed} of {len(done)} blocks")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    serve(OpenLake)
