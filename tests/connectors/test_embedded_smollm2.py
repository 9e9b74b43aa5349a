"""A real model: the GGUF path against transformers' own, and sensible text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from kvstore.connectors.embedded.engine import Engine
from kvstore.connectors.embedded.model import Model, load_model
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.smollm2 import ModelUnavailable, find_smollm2
from kvstore.connectors.embedded.tables import LocalTables
from kvstore.connectors.embedded.tokenizer import CHATML, Tokenizer

# Loading dequantizes 135 M weights twice (ours and transformers'): tens of seconds on two busy cores.
pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

BLOCKS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get("KVSTORE_TEST_MODEL")
    if named:
        return Path(named)
    try:
        return find_smollm2()
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load_model(path, blocks=BLOCKS, block_tokens=16)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


def generate(model: Model, prompt: list[int], new: int) -> Report:
    engine = Engine(model, LocalTables(BLOCKS, 16))
    return engine.generate([Request("a", tuple(prompt), new, ignore_eos=True)])[0]


def test_greedy_tokens_equal_transformers(path: Path, model: Model, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompt = tokenizer.encode("The capital of France is")
    ours = generate(model, prompt, 32)
    assert tokenizer.decode(ours.tokens).startswith(" Paris")
    with torch.inference_mode():
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    expected = tuple(made[0, len(prompt) :].tolist())
    assert len(expected) > 5
    assert ours.tokens[: len(expected)] == expected  # it stops at an end token, ours goes on


def test_a_chat_continues_on_the_same_tokens(model: Model, tokenizer: Tokenizer) -> None:
    turns = [
        {"role": "system", "content": "You answer in a few words."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    prompt = tokenizer.chat(turns)
    assert tokenizer.decode(prompt).endswith("assistant\n")
    report = generate(model, prompt, 16)
    said = list(report.tokens)
    said = said[: said.index(tokenizer.eos_id)] if tokenizer.eos_id in said else said
    assert "Paris" in tokenizer.decode(said)
    longer = [*prompt, *said, *tokenizer.next_turn("And of Italy?")]
    rendered = [*turns, {"role": "assistant", "content": tokenizer.decode(said)}]
    assert longer == tokenizer.chat([*rendered, {"role": "user", "content": "And of Italy?"}])


def test_the_fixed_template_is_chatml(tokenizer: Tokenizer) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    own = tokenizer.chat(turns)
    tokenizer._inner.chat_template, template = None, tokenizer._inner.chat_template
    try:
        assert tokenizer.chat(turns) == own
    finally:
        tokenizer._inner.chat_template = template
    assert "<|im_start|>" in CHATML
