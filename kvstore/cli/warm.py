"""`kvstore warm`: lets a fresh replica compute the prefixes that most requests begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson
from kvstore.errors import BadRequest

__all__ = ["warm_command"]

Router = Annotated[str, Parameter(help="gRPC address of the router (its route.grpc)")]
Replica = Annotated[
    str, Parameter(name=["--replica", "-r"], help="name of the replica, as the router knows it")
]
Top = Annotated[int, Parameter(help="how many of the hottest prefixes")]
TokenFile = Annotated[Path | None, Parameter(help="file with a bearer token: verb admin, all tenants")]
TlsRoot = Annotated[Path | None, Parameter(help="PEM of what the router's certificate is checked against")]


def warm_command(
    *,
    router: Router = "127.0.0.1:8081",
    replica: Replica = "",
    top: Top = 20,
    token_file: TokenFile = None,
    tls_root: TlsRoot = None,
    as_json: AsJson = False,
) -> None:
    """Let a replica compute the hottest prefixes before callers ask for them, after its start.

    The router knows which they are, and sends them itself; neither prompts nor salts leave it. Exit status 1
    when one of them failed.

    Examples:
        kvstore warm --router 127.0.0.1:8081 --replica b
        kvstore warm -r b --top 100 --json
    """
    from kvstore.router.warm_call import warm_replica

    if not replica:
        raise BadRequest("--replica: name the replica to warm, as in `kvstore route --replica NAME=…`")
    token = _text(token_file, "--token-file").strip() if token_file is not None else ""
    root = _text(tls_root, "--tls-root").encode() if tls_root is not None else None
    done: list[dict[str, Any]] = []
    for each in warm_replica(router, replica, top, token, root):
        done.append(
            {
                "prompt_tokens": each.prompt_tokens,
                "cached_tokens": each.cached_tokens,
                "seconds": round(each.seconds, 3),
                "error": each.error,
            }
        )
        if not as_json:
            told = each.error or f"{each.cached_tokens} were there, {each.seconds:.2f} s"
            say_text(f"{each.number} of {each.of}: {each.prompt_tokens} tokens: {told}")
    failed = [each for each in done if each["error"]]
    if as_json:
        say_json({"replica": replica, "prefixes": done, "failed": len(failed)})
    elif not done:
        say_text("nothing to warm: no two requests began alike so far, or the router knows no exact tokens")
    if failed:
        raise SystemExit(1)


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{option}: {path}: {error}") from None
