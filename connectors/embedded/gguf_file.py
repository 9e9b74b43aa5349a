"""A GGUF file's header: scalar metadata and where each tensor lies.

The gguf package reads this too, but builds an object per vocabulary entry: seconds that an engine's restart
does not have. Here arrays are stepped over; dequantizing stays the package's work.

    "GGUF" · version u32 · tensors u64 · entries u64 · entries · tensor infos · padding · data
    entry = key · kind u32 · value      string = u64 length ‖ bytes      array = kind u32 ‖ count u64 ‖ values
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayLength", "BadGGUF", "GGUFFile", "TensorInfo", "Value"]

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_COUNT_MAX = 1 << 24  # entries of anything; the largest vocabularies have 2¹⁸
_DIMENSIONS_MAX = 4


class BadGGUF(ValueError):
    """The file is not a whole GGUF file of a known version."""


@dataclass(frozen=True, slots=True)
class ArrayLength:
    """Stands for an array value, of which only the length is kept."""

    count: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: shape as torch has it (rows first), quantization kind, where its bytes start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


Value = int | float | bool | str | ArrayLength


class GGUFFile:
    """The header of the file at `path`, mapped for as long as this object lives.

    Raises:
        BadGGUF: not GGUF, cut short, or a count out of bounds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise BadGGUF(f"{path} is empty") from error
        self._at = 0
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise BadGGUF(f"{path} is cut short or damaged in its header: {error}") from error

    def dequantized(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32 in its shape, copied out of the file.

        Raises:
            BadGGUF: its bytes are not all there, or its kind is unknown.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
        except ValueError as error:
            raise BadGGUF(f"{self._path}: {name!r} has unknown kind {info.kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = info.shape[-1] // block * block_bytes
        length = row_bytes * int(np.prod(info.shape[:-1]))
        if info.shape[-1] % block or info.start + length > len(self._data):
            raise BadGGUF(f"{self._path}: {name!r} reaches beyond the end of the file")
        raw = np.frombuffer(self._data, np.uint8, length, info.start).reshape(*info.shape[:-1], row_bytes)
        return np.array(dequantize(raw, kind), dtype=np.float32).reshape(info.shape)

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise BadGGUF(f"{self._path} does not begin with 'GGUF'")
        self._at = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise BadGGUF(f"{self._path} is GGUF version {version}; 2 and 3 are known")
        tensors, entries = self._count("tensors"), self._count("entries")
        for _ in range(entries):
            key = self._string()
            self.values[key] = self._value(int(self._scalar("<I")))
        found = [self._tensor_info() for _ in range(tensors)]
        alignment = self.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadGGUF(f"{self._path}: general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {t.name: TensorInfo(t.name, t.shape, t.kind, start + t.start) for t in found}

    def _tensor_info(self) -> TensorInfo:
        name, dimensions = self._string(), int(self._scalar("<I"))
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise BadGGUF(f"{self._path}: tensor {name!r} has {dimensions} dimensions")
        sizes = [int(self._scalar("<Q")) for _ in range(dimensions)]
        return TensorInfo(name, tuple(reversed(sizes)), int(self._scalar("<I")), int(self._scalar("<Q")))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._format(kind))
        member, count = int(self._scalar("<I")), self._count("array")
        if member == _STRING:
            for _ in range(count):
                self._skip_string()
        else:
            self._at += count * struct.calcsize(self._format(member))
        return ArrayLength(count)

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise BadGGUF(f"{self._path}: unknown value kind {kind}")
        return _SCALARS[kind]

    def _scalar(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        checked: int | float | bool = value
        return checked

    def _count(self, what: str) -> int:
        count = int(self._scalar("<Q"))
        if count > _COUNT_MAX:
            raise BadGGUF(f"{self._path}: {count} {what}; at most {_COUNT_MAX} are read")
        return count

    def _string(self) -> str:
        start = self._at + 8
        self._skip_string()
        return self._data[start : self._at].decode()

    def _skip_string(self) -> None:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8 + length
        if self._at > len(self._data):
            raise BadGGUF(f"{self._path} is cut short")
