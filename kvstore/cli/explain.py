"""`kvstore explain`: why a request was reloaded or recomputed, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import Tool
from kvstore.errors import BadRequest, NotFound

__all__ = ["explain_command"]

Last = Annotated[bool, Parameter(name="--last", negative=(), help="the latest request that was planned")]


class _NotRemembered(NotFound):
    """Nothing to tell, and what to do about it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def explain_command(
    request: str | None = None,
    /,
    *,
    last: Last = False,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    as_json: AsJson = False,
) -> None:
    """Tell a request's story: what was known, what was chosen and why, what each alternative was predicted to
    take, what it took, and what changed since.

    A running daemon remembers the latest requests of each trust group. Exit 2 when it remembers nothing of
    this one.

    Args:
        request: the engine's name for it, or the number of its lease.

    Examples:
        kvstore explain --last
        kvstore explain cmpl-8f14e45f
        kvstore explain --last --json | jq .predicted_s
    """
    if last == (request is not None):
        raise BadRequest("explain: name one request, or say --last for the latest")
    if request == "":
        raise BadRequest("explain: the request's name is empty; say --last for the latest")
    told = _told(Path(load(config, overrides).daemon.socket), request or "")
    if as_json:
        say_json(told)
    else:
        say_text("\n".join(told["words"]))


def _told(path: Path, request: str) -> dict[str, Any]:
    with Tool(path) as tool:
        try:
            return tool.explain(request)
        except NotFound as error:
            told = str(error)
    fix = "kvstore explain --last tells the latest; kvstore status shows whether engines ask at all"
    raise _NotRemembered(told, fix)
