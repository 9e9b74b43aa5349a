"""The command line. One command is one module of this package and one line of `COMMANDS`.

Answers go to stdout, complaints to stderr. With --json stdout holds exactly one JSON object a command (one an
interval for `top`), also when the command fails: then it is {"error", "fix", "status"}.

Exit status: 0 done, 1 a check failed, 2 wrong usage, wrong configuration or no daemon, 130 interrupted.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cyclopts

from kvstore import __version__
from kvstore.cli.answers import complain
from kvstore.cli.options import wants_json
from kvstore.errors import BadRequest, KVStoreError

__all__ = ["COMMANDS", "app", "main"]

# Commands in the order of the help. `a-name` lives in `kvstore/cli/a_name.py` as `a_name_command`.
COMMANDS = (
    "serve",
    "stop",
    "status",
    "top",
    "explain",
    "calibrate",
    "check",
    "flush",
    "audit-isolation",
    "route",
    "warm",
    "lint-prompts",
    "demo",
    "simulate",
    "token",
    "config",
    "version",
    "completion",
)
_EPILOGUE = """\
First steps:
  kvstore serve            run the daemon in the foreground
  kvstore status           what it holds, and what is wrong
  kvstore COMMAND --help   options and examples of a command

Exit status: 0 done, 1 a check failed, 2 wrong usage, wrong configuration or no daemon."""


def _told(command: Callable[..., Any]) -> tuple[str, str]:
    """What a command's docstring says before its sections, unwrapped, and its examples.

    cyclopts takes the Args section by itself, keeps our line breaks, and shows no Examples.
    """
    said = inspect.getdoc(command) or ""
    prose = re.split(r"^(?:Args|Examples):$", said, maxsplit=1, flags=re.MULTILINE)[0]
    _, found, examples = said.partition("\nExamples:\n")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", prose).strip(), f"Examples:\n{examples}" if found else ""


def _application() -> cyclopts.App:
    app = cyclopts.App(
        name="kvstore",
        help="Keep LLM KV-cache blocks in tiers, and reload them instead of computing them again.",
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        version=__version__,
        exit_on_error=False,
        print_error=False,
    )
    for order, name in enumerate(COMMANDS):
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"kvstore.cli.{module}"), f"{module}_command")
        prose, examples = _told(command)
        app.command(command, name=name, sort_key=order, help=prose, help_epilogue=examples)
    return app


app = _application()


def main(words: Sequence[str] | None = None) -> None:
    """Entry point: errors of ours are one line (or one JSON object), exit 2; bugs keep their traceback."""
    words = sys.argv[1:] if words is None else words
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show · or ▇ shows ? instead of a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app(list(words))
    except cyclopts.CycloptsError as error:
        command = next((word for word in words if word in COMMANDS), "")
        told = BadRequest(" ".join(str(error).split()).rstrip("."))
        fix = f"see {' '.join(filter(None, ('kvstore', command)))} --help"
        complain(told, fix, as_json=wants_json(words))
        raise SystemExit(2) from None
    except KVStoreError as error:
        complain(error, as_json=wants_json(words))
        raise SystemExit(2) from None
    except BrokenPipeError:
        # `kvstore status | head`: nobody reads any more. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
