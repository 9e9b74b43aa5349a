"""The transformer against HF's, and against itself: chunked, batched, over any block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore.connectors.embedded.batch import Segment, flatten
from kvstore.connectors.embedded.kv_memory import KVMemory
from kvstore.connectors.embedded.model import Model, load_model
from kvstore.connectors.embedded.spec import ModelSpec, RopeScaling
from kvstore.connectors.embedded.tiny import TINY, save_tiny, tiny_weights

BLOCKS = 64
# Float32 logits of the tiny model spread by 2 and differ from HF's by about 1e-5.
CLOSE = {"atol": 2e-4, "rtol": 0.0}
VARIANTS = {
    "llama": TINY,
    "llama3-rope": replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), rope_theta=500_000.0),
    "tied": replace(TINY, tied_embeddings=True),
    "mistral": replace(TINY, architecture="mistral", heads=8, kv_heads=2, head_dim=32),
    "qwen2": replace(TINY, architecture="qwen2", qkv_bias=True),
}


def prompt(size: int, seed: int = 1) -> list[int]:
    return torch.randint(3, TINY.vocab, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def table(size: int, seed: int = 2) -> list[int]:
    """Shuffled block ids, so that an index that ignores the table cannot be right."""
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()[:size]


def build(spec: ModelSpec = TINY, block_tokens: int = 16) -> Model:
    memory = KVMemory(spec, BLOCKS, block_tokens)
    memory.tensor.fill_(float("nan"))  # whatever is read without having been written shows
    return Model(spec, tiny_weights(spec), memory)


def chunked(model: Model, tokens: Sequence[int], blocks: Sequence[int], size: int) -> torch.Tensor:
    out = torch.empty(0)
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        out = model.forward([Segment(part, start, blocks, start + len(part) == len(tokens))])
    return out[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = save_tiny(tmp_path, VARIANTS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = load_model(directory, blocks=BLOCKS, block_tokens=16)
    assert model.spec == VARIANTS[name]
    tokens = prompt(400)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert expected.std() > 1.0
    for size in (64, 400):
        torch.testing.assert_close(chunked(model, tokens, table(25), size), expected[-1], **CLOSE)
    model.forward([Segment(tokens[:100], 0, table(25), False)])
    for at in range(100, 150):
        got = model.forward([Segment(tokens[at : at + 1], at, table(25))])[0]
        torch.testing.assert_close(got, expected[at], **CLOSE)


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_every_prompt_length_modulo_the_block(block_tokens: int) -> None:
    model, oracle = build(block_tokens=block_tokens), build(block_tokens=128)
    tokens = prompt(2 * block_tokens + 2)
    for size in range(1, len(tokens) + 1):
        whole = oracle.forward([Segment(tokens[:size], 0, [3])])[0]
        paged = chunked(model, tokens[:size], table(3, seed=size), block_tokens)
        torch.testing.assert_close(paged, whole, **CLOSE)


@pytest.mark.parametrize("size", [1, 16, 255, 256, 257, 300, 600, 601])
def test_chunks_of_any_size(size: int) -> None:
    """Also longer than a piece (256), at starts that are no multiple of anything."""
    tokens = prompt(601)
    whole = chunked(build(), tokens, table(38), 100)
    torch.testing.assert_close(chunked(build(), tokens, table(38, seed=9), size), whole, **CLOSE)


def test_a_batch_of_everything_equals_each_alone() -> None:
    """Chunks at several starts, decodes of very different lengths, in mixed order; NaN everywhere else."""
    lengths = [1, 5, 16, 17, 33, 40, 64, 90, 200]
    pending = [1, 5, 1, 17, 1, 8, 1, 90, 1]
    tokens = [prompt(length, seed=length) for length in lengths]
    ids = iter(block for block in table(BLOCKS) if block)  # block 0 stays unwritten
    tables = [[next(ids) for _ in range(-(-length // 16))] for length in lengths]
    model = build()
    segments = []
    for text, blocks, count in zip(tokens, tables, pending, strict=True):
        start = len(text) - count
        if start:
            model.forward([Segment(text[:start], 0, blocks, False)])
        segments.append(Segment(text[start:], start, blocks))
    together = model.forward(segments)
    for row, text in enumerate(tokens):
        alone = build().forward([Segment(text, 0, table(13, seed=row))])[0]
        torch.testing.assert_close(together[row], alone, **CLOSE)


def test_logits_only_where_wanted_in_the_order_of_segments() -> None:
    model = build()
    tables = [[0, 1, 2], [3], [4, 5]]
    texts = [prompt(40, 1), prompt(1, 2), prompt(20, 3)]
    wants = [True, True, False]
    segments = [Segment(t, 0, b, w) for t, b, w in zip(texts, tables, wants, strict=True)]
    got = model.forward(segments)
    assert got.shape == (2, TINY.vocab)
    assert got.dtype == torch.float32
    for row in (0, 1):
        alone = build().forward([Segment(texts[row], 0, [7, 8, 9])])[0]
        torch.testing.assert_close(got[row], alone, **CLOSE)
    assert model.forward([Segment(texts[2], 0, [6, 7], False)]).shape == (0, TINY.vocab)


@pytest.mark.parametrize("plane", ["K", "V"])
def test_one_wrong_cell_changes_the_output(plane: str) -> None:
    """Negative control: what the equality tests compare really depends on every cell."""
    model = build()
    tokens, blocks = prompt(100), table(7)
    model.forward([Segment(tokens[:-1], 0, blocks, False)])
    last = Segment(tokens[-1:], 99, blocks)
    right = model.forward([last])[0]
    half = model.memory.cell_bytes // 2
    for block in blocks[:6]:
        cell = model.memory.read_cell(block, 1, 1)
        other = model.memory.read_cell(blocks[(blocks.index(block) + 1) % 6], 1, 1)
        wrong = other[:half] + cell[half:] if plane == "K" else cell[:half] + other[half:]
        model.memory.write_cell(block, 1, 1, wrong)
        assert (model.forward([last])[0] - right).abs().max() > 20 * CLOSE["atol"]
        model.memory.write_cell(block, 1, 1, cell)
        assert torch.equal(model.forward([last])[0], right)


def test_bfloat16_runs_and_is_near() -> None:
    weights = {name: tensor.bfloat16() for name, tensor in tiny_weights().items()}
    model = Model(TINY, weights, KVMemory(TINY, BLOCKS, 16, torch.bfloat16))
    rounded = Model(TINY, {n: t.float() for n, t in weights.items()}, KVMemory(TINY, BLOCKS, 16))
    tokens, blocks = prompt(60), table(4)
    got = [chunked(each, tokens, blocks, 25) for each in (model, rounded)]
    assert got[0].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got[0], got[1], dim=0) > 0.99


def test_a_model_refuses_another_memory() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        Model(TINY, tiny_weights(), KVMemory(replace(TINY, kv_heads=4), 4, 16))
    with pytest.raises(ValueError, match="bfloat16"):
        Model(TINY, tiny_weights(), KVMemory(TINY, 4, 16, torch.bfloat16))


def test_flatten_refuses_what_does_not_fit() -> None:
    memory = KVMemory(TINY, 4, 16)
    with pytest.raises(ValueError, match="empty"):
        flatten([], memory)
    with pytest.raises(ValueError, match="does not fit"):
        flatten([Segment([5], 16, [0])], memory)
    with pytest.raises(ValueError, match="does not fit"):
        flatten([Segment([], 0, [0])], memory)
