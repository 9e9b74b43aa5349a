"""Prompts for the models of bench/vllm_models.py."""

from __future__ import annotations

import random

__all__ = ["prompt_of"]


def prompt_of(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """`length` token ids; equal arguments give equal prompts, another seed shares no first block."""
    source = random.Random(f"{seed}/{vocab}")
    return [source.randrange(3, vocab) for _ in range(length)]
