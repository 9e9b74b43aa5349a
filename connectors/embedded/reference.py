"""HF transformers on the same weights: the oracle of answers and the yardstick of prefill speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .spec import resolve_model

__all__ = ["Reference", "load_reference"]


class Reference:
    """A transformers model in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompt: Sequence[int]) -> int:
        """The greedy next token: one forward over the prompt with a KV cache, last logits only."""
        with torch.inference_mode():
            out = self._model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


def load_reference(path: str | Path) -> Reference:
    """Load the model at `path` (GGUF file or directory) through transformers, attention by SDPA."""
    from transformers import AutoModelForCausalLM

    path = resolve_model(path)
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, **options
    )
    return Reference(model.eval())
