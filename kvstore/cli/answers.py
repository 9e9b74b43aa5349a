"""What a command prints: answers to stdout, complaints to stderr; with --json both as an object on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstore.errors import STATUS, KVStoreError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["complain", "console", "failure", "say", "say_json", "say_text"]


def console(*, stderr: bool = False) -> Console:
    """Obeys COLUMNS, NO_COLOR and TERM=dumb, and writes no colour into a pipe.

    Nothing is guessed from the text: a number is not coloured for being one, a [ is not markup.
    """
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(*parts: RenderableType) -> None:
    """Print rich text, tables and the like."""
    screen = console()
    for part in parts:
        screen.print(part)


def say_text(text: str) -> None:
    """Print a text as it is, whatever the width of the terminal."""
    print(text)


def say_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, at once."""
    print(json.dumps(value), flush=True)


def failure(error: KVStoreError, fix: str = "") -> dict[str, str]:
    """An error as values: error, fix, status (a name of `errors.STATUS`) and, where known, cause."""
    kind = next(cls for cls in type(error).__mro__ if cls in STATUS)
    facts = {"error": str(error), "fix": fix or getattr(error, "fix", ""), "status": STATUS[kind]}
    cause = getattr(error, "cause", "")
    return {**facts, "cause": cause} if cause else facts


def complain(error: KVStoreError, fix: str = "", *, as_json: bool) -> None:
    """Say what is wrong and what to do: one line, or one object."""
    if as_json:
        say_json(failure(error, fix))
        return
    fix = failure(error, fix)["fix"]
    line = f"kvstore: {error}" + (f"; {fix}" if fix else "")
    console(stderr=True).print(line, style="red", soft_wrap=True)
    sys.stderr.flush()
