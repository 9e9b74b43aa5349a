"""What a block depends on beside its tokens, as bytes for its key; or why a request has no key at all.

Keys chain, so what holds for a whole request goes into block 0 (adapter, salt, epoch), and an image into the
first block that it touches. Embeddings given instead of tokens lie in every block of the prompt.

vLLM tells images apart by an identifier, which a caller may choose, and adapters by a name and a path, whose
files may change. We go by content: digests of the *processed* data that the model is given, and of the
adapter's files. But vLLM keeps encoder outputs by identifier and adapters by number, so it may use something
older than what a request carries. Hence two tables of what each name stood for first: a name that ever stands
for something else is not believed again in this engine.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.keys import extra_of, framed, salt_piece

from .weights import adapter_files, changed_at, file_clock, fingerprint, stamp_of

__all__ = ["Binder", "Bound"]

_ADAPTERS_MAX = 4096
_MEDIA_MAX = 1 << 17  # some 30 MB
_DEPTH_MAX = 16
# Of `SamplingParams.extra_args`: for the connectors, or for processors of logits. Another one may belong to a
# plugin that changes what the model computes.
_HARMLESS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",  # looked at by itself
        "kv_cache_report_mode",
        "ngram_size",
        "window_size",
        "whitelist_token_ids",
    }
)
_HEX = frozenset("0123456789abcdef")
_DIGEST_DIGITS = (64, 128)  # blake3 and sha256; sha512
_UNREADABLE = b""  # in the table of media: stands for several contents, or for one that we cannot read


class _Unbindable(Exception):
    """Nothing of this request may be looked up or saved; the text says why."""


class _State(Protocol):
    """A hash under way."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What a request's keys bind.

    Attributes:
        extra: by number of the block; most requests have none.
        reason: why the request is neither looked up nor saved; "" = it may be.
        media: identifiers that it relies on, and
        adapter: the number of its adapter, 0 = none: see `Binder.holds`.
    """

    extra: dict[int, bytes] = field(default_factory=dict)
    reason: str = ""
    media: tuple[str, ...] = ()
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What an adapter's number stood for first.

    Attributes:
        path: as the request named it.
        stamps: of its files.
        fingerprint: "" = this number is not believed any more.
    """

    path: str
    stamps: tuple[str, ...] = ()
    fingerprint: str = ""


class Binder:
    """Binds requests of one engine. Any thread may use it; digests of media take milliseconds.

    Every request with media has to be bound before vLLM computes it, whether or not it will be looked up:
    only so a second content under one identifier is noticed before it can spoil the first.

    Args:
        media_max, adapters_max: names remembered; a full table believes no further ones, and forgets none.
        since: adapters whose files changed later than this are not bound (`weights.file_clock`, ns; default
            now): vLLM may have loaded them before the change.
    """

    def __init__(
        self, *, media_max: int = _MEDIA_MAX, adapters_max: int = _ADAPTERS_MAX, since: int | None = None
    ) -> None:
        self._media_max = media_max
        self._adapters_max = adapters_max
        self._since = file_clock() if since is None else since
        self._media: dict[str, bytes] = {}  # identifier → digest of what it stood for first
        self._adapters: dict[int, _Adapter] = {}
        self._distrusted = False
        self._lock = threading.Lock()

    def bind(self, request: Any, block_tokens: int, epoch: bytes = b"") -> Bound:
        """What the keys of a request bind.

        Args:
            request: vLLM's.
            block_tokens: tokens in a block.
            epoch: random bytes since the cache was reset, b"" before.
        """
        pieces: defaultdict[int, list[bytes]] = defaultdict(list)
        lora = request.lora_request
        identifiers: tuple[str, ...] = ()
        try:
            if lora is not None or request.mm_features:
                with self._lock:
                    identifiers = self._bind_names(request, block_tokens, pieces)
            _check_rest(request)
            if request.cache_salt:
                pieces[0].append(salt_piece(request.cache_salt))
            if epoch:
                pieces[0].append(framed(b"epoch", epoch))
            if request.prompt_embeds is not None:
                _bind_embeds(request, block_tokens, pieces)
        except _Unbindable as why:
            return Bound(reason=str(why))
        extra = {block: extra_of(parts) for block, parts in pieces.items()}
        return Bound(extra, media=identifiers, adapter=0 if lora is None else lora.lora_int_id)

    def holds(self, bound: Bound) -> bool:
        """Whether what was bound is still what vLLM computes with. Ask again before a block is saved.

        A request that came later may have brought another image under an identifier that this one relies
        on, and been computed first; an adapter may have been dropped, then loaded again from changed files.
        """
        if bound.media and self._distrusted:
            return False
        if any(self._media.get(identifier) == _UNREADABLE for identifier in bound.media):
            return False
        return not bound.adapter or self._is_unchanged(bound.adapter)

    def distrust_media(self) -> None:
        """From now on there may be media that are never shown here: no identifier can be believed."""
        self._distrusted = True

    # ---- names that vLLM goes by --------------------------------------------------------------------------

    def _bind_names(
        self, request: Any, block_tokens: int, pieces: defaultdict[int, list[bytes]]
    ) -> tuple[str, ...]:
        """Bind adapter and media; returns the identifiers. All media are noted before anything is refused."""
        refused: _Unbindable | None = None
        adapter: bytes | None = b""
        try:
            adapter = self._adapter(request.lora_request)
            if adapter:
                pieces[0].append(adapter)
        except _Unbindable as why:
            adapter, refused = None, why
        last = 0
        for feature in request.mm_features:
            place = feature.mm_position
            try:
                content = self._content(feature, request.lora_request, adapter)
                if place.offset < last:
                    raise _Unbindable("media are not in the order of their places in the prompt")
                last = place.offset
                pieces[place.offset // block_tokens].append(_media_piece(feature, content))
            except _Unbindable as why:
                refused = refused or why
        if refused is not None:
            raise refused
        return tuple(feature.identifier for feature in request.mm_features)

    def _content(self, feature: Any, lora: Any, adapter: bytes | None) -> bytes:
        """Digest of a feature's processed data, noted under its identifier."""
        if self._distrusted:
            raise _Unbindable(
                f"{feature.modality}: a streaming session of this engine may bring others unseen"
            )
        identifier = feature.identifier
        # With LoRA in the encoder, vLLM puts the adapter's name before the identifier: then outputs kept
        # under it depend on the adapter, too.
        prefix = "" if lora is None else f"{lora.lora_name}:"
        inside = bool(prefix) and identifier.startswith(prefix)
        name = identifier.removeprefix(prefix)
        if len(name) not in _DIGEST_DIGITS or not _HEX.issuperset(name):
            raise _Unbindable(f"{feature.modality} with an id of the caller's choice: {identifier!r:.80}")
        try:
            digest = _data_digest(feature.data)
        except (TypeError, ValueError, RuntimeError) as error:
            self._note(identifier, _UNREADABLE)
            raise _Unbindable(f"{feature.modality}: {error}") from None
        if inside:
            digest = _UNREADABLE if adapter is None else hashlib.sha256(framed(adapter, digest)).digest()
        first = self._note(identifier, digest)
        if first is None:
            raise _Unbindable(f"more than {self._media_max} media since this engine started")
        if first == _UNREADABLE:
            raise _Unbindable(f"{feature.modality} {identifier!r:.80} stood for several contents")
        return digest

    def _note(self, identifier: str, digest: bytes) -> bytes | None:
        """What `identifier` stands for, now that it came with `digest`; None = no room to remember it."""
        first = self._media.get(identifier)
        if first is None and len(self._media) >= self._media_max:
            return None
        if first != digest:
            self._media[identifier] = digest if first is None else _UNREADABLE
        return self._media[identifier]

    def _adapter(self, lora: Any) -> bytes:
        """What block 0 binds of an adapter, b"" without one."""
        if lora is None:
            return b""
        number, path = lora.lora_int_id, lora.lora_path
        known = self._adapters.get(number)
        if known is None and len(self._adapters) >= self._adapters_max:
            raise _Unbindable(f"more than {self._adapters_max} adapters since this engine started")
        if lora.load_inplace:
            # vLLM loads it again with every request, whenever that is computed.
            self._adapters[number] = _Adapter(path)
            raise _Unbindable(f"adapter {lora.lora_name!r}: load_inplace; give new weights a new path")
        if known is None:
            known = self._first_sight(path)
            if not known.stamps:
                raise _Unbindable(f"adapter {lora.lora_name!r}: no weights are found at {path!r}")
            self._adapters[number] = known
        elif known.path != path or not self._is_unchanged(number):
            # vLLM goes by the number: it still uses what it loaded first, or, if that had to make room, what
            # lies at the path today. We cannot tell which.
            self._adapters[number] = _Adapter(path)
        if not self._adapters[number].fingerprint:
            raise _Unbindable(f"adapter {lora.lora_name!r}: {path!r} changed since this engine started")
        flat = b"3d" if lora.is_3d_lora_weight else b"2d"
        return framed(b"adapter", _utf8(lora.lora_name), _utf8(path), known.fingerprint.encode(), flat)

    def _first_sight(self, path: str) -> _Adapter:
        """An adapter as its files are now."""
        try:
            files = adapter_files(path)
            if not files:
                return _Adapter(path)
            stamps = tuple(map(stamp_of, files))
            # It may have been loaded long ago, by a call that we do not see. If its files are older than this
            # engine they are what was loaded.
            if changed_at(files) > self._since:
                return _Adapter(path, stamps)
            digest = fingerprint(files)
            same = stamps == tuple(map(stamp_of, files))
            return _Adapter(path, stamps, digest if same else "")
        except (OSError, RuntimeError):
            return _Adapter(path)

    def _is_unchanged(self, number: int) -> bool:
        known = self._adapters.get(number)
        if known is None or not known.fingerprint:
            return False
        try:
            return known.stamps == tuple(map(stamp_of, adapter_files(known.path)))
        except (OSError, RuntimeError):
            return False


# ---- what a request carries -------------------------------------------------------------------------------


def _check_rest(request: Any) -> None:
    """Refuse what changes KV, or may, and has no place in a key."""
    if request.pooling_params is not None:
        raise _Unbindable("a pooling request")
    if request.resumable:
        raise _Unbindable("a streaming session: its prompt changes while it runs")
    if request.ec_transfer_params is not None:
        raise _Unbindable("ec_transfer_params: its encoder outputs come from another engine")
    if request.prompt_is_token_ids is not None and request.prompt_embeds is None:
        raise _Unbindable("prompt_is_token_ids without prompt_embeds")
    unknown = set(request.sampling_params.extra_args or ()) - _HARMLESS
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise _Unbindable(f"extra_args that are not known: {names:.80}")


def _bind_embeds(request: Any, block_tokens: int, pieces: defaultdict[int, list[bytes]]) -> None:
    """Bind embeddings given instead of tokens: each block its rows, and which of them count."""
    embeds, mask = request.prompt_embeds, request.prompt_is_token_ids
    try:
        rows = embeds.detach().cpu().contiguous()
        for block, start in enumerate(range(0, len(rows), block_tokens)):
            state = _new_state()
            _feed(state, rows[start : start + block_tokens])
            which = b"all" if mask is None else b"mask" + bytes(mask[start : start + block_tokens])
            pieces[block].append(framed(b"embeds", state.digest(), which))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _Unbindable(f"prompt_embeds: {error}") from None


def _media_piece(feature: Any, content: bytes) -> bytes:
    """One image, recording or video, and where its outputs go."""
    place = feature.mm_position
    mask = _new_state()
    _feed(mask, place.is_embed)
    where = framed(_number(place.offset), _number(place.length), mask.digest())
    return framed(b"media", _utf8(feature.modality), _utf8(feature.identifier), where, content)


def _data_digest(item: Any) -> bytes:
    """Digest of processed media: what the model's encoder is given.

    Raises:
        TypeError: it is not there, or holds something that we cannot read.
    """
    if not isinstance(item, Mapping):
        raise TypeError(f"its processed data is {type(item).__name__}")
    if "address" in item:  # a handle: where the data lies says nothing about what it is
        raise TypeError("its data is with another process; set mm_processor_cache_type to 'lru'")
    state = _new_state()
    for key in sorted(item):
        element = item[key]
        if element.data is None:
            raise TypeError(f"its {key!r} is not there")
        state.update(framed(_utf8(key), type(element.field).__name__.encode()))
        _feed(state, element.data)
    return state.digest()


# ---- bytes without ambiguity ------------------------------------------------------------------------------


def _feed(state: _State, value: Any, depth: int = 0) -> None:
    """Hash a value: its kind, its size, then its bytes.

    Raises:
        TypeError: of a kind that we do not know.
    """
    if depth > _DEPTH_MAX:
        raise TypeError("nested too deeply")
    if isinstance(value, torch.Tensor):
        _feed_array(state, b"tensor", str(value.dtype), value.shape, _raw(value))
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise TypeError("an array of objects")
        _feed_array(state, b"array", array.dtype.str, np.shape(value), array.reshape(-1).view(np.uint8).data)
    elif isinstance(value, (list, tuple)):
        state.update(framed(type(value).__name__.encode(), _number(len(value))))
        for item in value:
            _feed(state, item, depth + 1)
    elif value is None or isinstance(value, (bool, int, float, str)):
        state.update(framed(type(value).__name__.encode(), _utf8(repr(value))))
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")


def _feed_array(state: _State, kind: bytes, dtype: str, shape: Iterable[int], raw: memoryview) -> None:
    state.update(framed(kind, dtype.encode(), repr(tuple(shape)).encode(), _number(raw.nbytes)))
    state.update(raw)


def _raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in the order of its elements. RuntimeError for one that has no such bytes."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


def _number(value: int) -> bytes:
    return int(value).to_bytes(8, "little")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # any text has bytes, and no two the same


def _new_state() -> _State:
    return hashlib.blake2b(digest_size=32, person=b"kvstore-vd-v1")
