"""Block bytes that belong to a key: written into slots by tests, recognised when read back."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from kvstore import _native
from kvstore._native import Arena, SlotFormat
from kvstore.types import Part

__all__ = ["cell_pattern", "slot_fault", "write_slot"]


def cell_pattern(key: bytes, layer: int, head: int, length: int) -> NDArray[np.uint8]:
    """(length,) bytes that only this cell of this block may hold.

    The digest of (key, layer, head) over and over, with the number of the repetition in its first 4 bytes.
    """
    digest = hashlib.blake2b(key + layer.to_bytes(4, "little") + head.to_bytes(4, "little")).digest()
    rows = -(-length // len(digest))
    out = np.empty((rows, len(digest)), np.uint8)
    out[:] = np.frombuffer(digest, np.uint8)
    out[:, :4] = np.arange(rows, dtype="<u4").reshape(-1, 1).view(np.uint8)
    return out.reshape(-1)[:length]


def write_slot(arena: Arena, shape: SlotFormat, slot: int, key: bytes, part: Part | None = None) -> None:
    """Fill a FILLING slot as an engine's copy would: the cells of `part` (None = all), and their sums."""
    view = arena.view(slot, shape.length)
    table = view[shape.table_offset :].view("<u4")
    for number in range(shape.layers * shape.heads):
        layer, head = divmod(number, shape.heads)
        if part is not None and not part.holds(layer, head):
            continue
        cell = cell_pattern(key, layer, head, shape.cell_bytes)
        start = number * shape.cell_stride
        view[start : start + shape.cell_bytes] = cell
        table[number] = _native.crc32c(cell.tobytes())


def slot_fault(arena: Arena, shape: SlotFormat, slot: int, key: bytes) -> str:
    """What is wrong with a READY slot that should hold `key`; "" when nothing is."""
    control = arena.control(slot)
    if control.state != _native.READY:
        return f"slot {slot}: state {control.state}, not READY"
    if bytes(control.fingerprint) != key[:16]:
        return f"slot {slot}: fingerprint of another key"
    if control.length != shape.length:
        return f"slot {slot}: length {control.length}, not {shape.length}"
    view = arena.view(slot, shape.length)
    for number in range(shape.layers * shape.heads):
        layer, head = divmod(number, shape.heads)
        start = number * shape.cell_stride
        cell = view[start : start + shape.cell_bytes]
        if not np.array_equal(cell, cell_pattern(key, layer, head, shape.cell_bytes)):
            return f"slot {slot}: cell (layer {layer}, head {head}) holds other bytes"
    if control.crc != _native.crc32c(view[shape.table_offset :].tobytes()):
        return f"slot {slot}: the sum of its table differs"
    return ""
