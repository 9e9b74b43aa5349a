"""`kvstore token`: a new bearer token for a gRPC caller, and the entry that makes a daemon know it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson
from kvstore.clock import unix_time_s
from kvstore.config.tokens import EVERYBODY, TOKEN_VERBS, digest_of, is_name
from kvstore.errors import BadRequest

__all__ = ["token_command"]

_DAYS_MAX = 36_500

Tenants = Annotated[
    str, Parameter(name=["--tenants", "-t"], help="in whose name it may act, separated by commas; * = any")
]
Verbs = Annotated[
    str,
    Parameter(name=["--verbs", "-v"], help=f"what it may do: {', '.join(TOKEN_VERBS)}, separated by commas"),
]
Days = Annotated[int, Parameter(name=["--days", "-d"], help="until it expires; 0 = never")]


def token_command(
    name: str,
    /,
    *,
    tenants: Tenants = "default",
    verbs: Verbs = "read,write",
    days: Days = 365,
    as_json: AsJson = False,
) -> None:
    """Make a token for a caller of the gRPC API, and print the entry for the daemon's grpc.tokens_file.

    The file holds only a hash of it: the token itself is printed here, once. Give it to the caller, which
    sends it as the metadata 'authorization: Bearer TOKEN'; add the entry to the file (mode 0600), and send
    SIGHUP to the daemon. To take a token away, remove its entry and do the same.

    Args:
        name: of the caller, for the daemon's log.

    Examples:
        kvstore token router --verbs read
        kvstore token ops --tenants '*' --verbs admin --days 30
        kvstore token writer --tenants alice,bob --json | jq -r .entry >> tokens.toml
    """
    whose = [one.strip() for one in tenants.split(",") if one.strip()]
    what = [one.strip() for one in verbs.split(",") if one.strip()]
    if not is_name(name):
        raise BadRequest(f"NAME: need 1 to 64 of A-Z a-z 0-9 _ . -, got {name!r:.80}")
    for tenant in whose:
        if tenant != EVERYBODY and not is_name(tenant):
            raise BadRequest(f"--tenants: {tenant!r:.80} is neither a tenant's name nor {EVERYBODY}")
    if not whose:
        raise BadRequest(f"--tenants: name at least one, or {EVERYBODY} for any")
    unknown = [verb for verb in what if verb not in TOKEN_VERBS]
    if unknown or not what:
        raise BadRequest(f"--verbs: need some of {', '.join(TOKEN_VERBS)}, got {verbs!r:.80}")
    if not 0 <= days <= _DAYS_MAX:
        raise BadRequest(f"--days: need 0 to {_DAYS_MAX}, got {days}")
    token = secrets.token_urlsafe(32)
    entry = _entry(name, token, whose, what, days)
    if as_json:
        say_json({"token": token, "entry": entry})
        return
    say_text(f"token, for {name} alone (it is shown once):\n\n    {token}\n")
    say_text(f"entry for grpc.tokens_file of the daemon:\n\n{entry}")


def _listed(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def _entry(name: str, token: str, tenants: list[str], verbs: list[str], days: int) -> str:
    lines = [
        "[[tokens]]",
        f'name = "{name}"',
        f'sha256 = "{digest_of(token)}"',
        f"tenants = {_listed(tenants)}",
        f"verbs = {_listed(verbs)}",
    ]
    if days:
        until = datetime.fromtimestamp(int(unix_time_s()), UTC) + timedelta(days=days)
        lines.append(f"expires = {until.isoformat().replace('+00:00', 'Z')}")
    return "\n".join(lines) + "\n"
