"""Real requests of vLLM, from values that can be changed in one place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore.connectors.vllm.binding import Bound
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstore.keys import KeyChain

BLOCK = 4
ROOT = bytes(range(32))
WIDTH = 3  # of an embedding


@dataclass(frozen=True)
class Image:
    """A feature: where it lies, what it is called, and what it is (a seed)."""

    offset: int
    length: int
    name: str
    content: int
    masked: bool = False


@dataclass(frozen=True)
class Adapter:
    """A folder (its number also says its content, except that 2 is a copy of 0) under a name."""

    name: str
    folder: int


@dataclass(frozen=True)
class Case:
    """A request as a value, so that it can be changed in one place."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: Adapter | None = None
    images: tuple[Image, ...] = ()
    rows: tuple[int, ...] = ()  # seeds of embeddings, one per token of the prompt; () = none
    mask: tuple[bool, ...] = ()  # which are tokens all the same; () = none of them
    epoch: bytes = b""


def write_adapter(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)


def make_adapters(root: Path) -> Iterator[list[Path]]:
    """Folders of three adapters, the last a copy of the first; sums are remembered below `root` meanwhile."""
    found = [root / f"a{number}" for number in range(3)]
    for folder, content in zip(found, (b"first", b"other", b"first"), strict=True):
        write_adapter(folder, content)
    init_none_hash(sha256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield found


def data_of(content: int) -> MultiModalKwargsItem:
    pixels = torch.arange(6, dtype=torch.float32).reshape(2, 3) + content
    values: dict[str, Any] = {
        "pixel_values": pixels.to(torch.bfloat16),
        "grid": [torch.tensor([1, 2, content % 2])],
    }
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in values.items()
        }
    )


def identifier_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def feature_of(image: Image, identifier: str = "") -> MultiModalFeatureSpec:
    mask = torch.arange(image.length) % 2 == 0 if image.masked else None
    return MultiModalFeatureSpec(
        data=data_of(image.content),
        modality="image",
        identifier=identifier or identifier_of(image.name),
        mm_position=PlaceholderRange(image.offset, image.length, mask),
    )


def plain(tokens: list[int] | None, **more: Any) -> Request:
    params = more.pop("sampling_params", SamplingParams(max_tokens=8))
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", tokens, params, more.pop("pooling_params", None), 0, 0.0, block_hasher=hasher, **more)


def build(case: Case, folders: list[Path]) -> Request:
    lora = case.adapter and LoRARequest(
        case.adapter.name, 1 + case.adapter.folder, str(folders[case.adapter.folder])
    )
    embeds = (
        torch.tensor(case.rows, dtype=torch.float32).reshape(-1, 1).expand(-1, WIDTH) if case.rows else None
    )
    return plain(
        None if case.rows and not case.mask else list(case.tokens),
        prompt_embeds=embeds,
        prompt_is_token_ids=list(case.mask) if case.mask else None,
        mm_features=[feature_of(image) for image in case.images],
        lora_request=lora,
        cache_salt=case.salt,
    )


def keys_of(request: Request, bound: Bound) -> list[bytes]:
    assert bound.reason == ""
    tokens = np.array(list(request.all_token_ids), np.uint32)
    return [bytes(key) for key in KeyChain.of(ROOT, tokens, BLOCK, bound.extra).keys]
