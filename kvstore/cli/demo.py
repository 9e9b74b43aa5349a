"""`kvstore demo`: a real model answers from cached KV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.options import AsJson
from kvstore.errors import Unavailable

__all__ = ["demo_command"]


def demo_command(
    *,
    golden: Annotated[bool, Parameter(negative=())] = False,
    model: Path | None = None,
    block_tokens: int = 16,
    cache: bool = True,
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """A real language model answers from cached KV; prints what was saved and proves that nothing changed.

    Starts its own daemon and engines, ends them, and leaves nothing behind. Needs the extra `torch`.

    Args:
        golden: run the five-turn conversation with known counts instead.
        model: directory with safetensors or a GGUF file; without it SmolLM2-135M-Instruct is downloaded once.
        block_tokens: tokens per block.
        cache: --no-cache runs the same without reuse.
        seed: of the token ids in --golden.

    Examples:
        kvstore demo
        kvstore demo --golden --block-tokens 32
    """
    try:
        from kvstore.connectors.embedded import demo
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error}; the demo needs the extra: pip install 'kvstored[torch]'") from None
    options = demo.Options(model=model, block_tokens=block_tokens, cache=cache, seed=seed, as_json=as_json)
    try:
        raise SystemExit(demo.run_golden(options) if golden else demo.run(options))
    except demo.EXPECTED_FAILURES as error:
        raise Unavailable(f"demo: {error}") from None
