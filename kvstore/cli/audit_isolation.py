"""`kvstore audit-isolation`: can one tenant get at another's blocks, through any door of a running daemon?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson, ConfigFile, SetFlags, load
from kvstore.cli.tool import ask
from kvstore.config.tokens import EVERYBODY
from kvstore.errors import BadRequest

if TYPE_CHECKING:
    from kvstore.audit import Door, Report

__all__ = ["audit_isolation_command"]

# What `kvstore token` makes has 43 letters, and a daemon takes no more than 256.
_TOKEN_BYTES_MAX = 1024
_WORDS = {"closed": "CLOSED", "open": "OPEN", "not_probed": "not probed"}

Tenants = Annotated[
    list[str] | None,
    Parameter(name="--as", negative=(), help="a tenant to ask as; twice. Default: the first two that reuse"),
]
TokenFiles = Annotated[
    list[str] | None,
    Parameter(
        name="--token-file",
        negative=(),
        help="TENANT=PATH of its bearer token for the gRPC API; *=PATH: of one that may drop what was saved",
    ),
]
TlsRoot = Annotated[
    Path | None,
    Parameter(help="PEM file of the API's authority. Default: grpc.tls_certificate itself"),
]
MayEvict = Annotated[
    bool,
    Parameter(negative=(), help="save even where no slab of the arena is free, and others' blocks leave"),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown at the gRPC API.

    Attributes:
        token_files: as the option says.
        tls_root: as the option says.
    """

    token_files: TokenFiles = None
    tls_root: TlsRoot = None


# 3: nothing is open, but the session, or a door that the daemon says it has, was not probed.
_OPEN, _UNPROBED = 1, 3


def audit_isolation_command(
    *,
    tenants: Tenants = None,
    shown: Shown | None = None,
    may_evict: MayEvict = False,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    as_json: AsJson = False,
) -> int:
    """Ask the running daemon as two of its tenants, over every door it has, and say which are closed.

    One saves a few made-up blocks, the other tries to get at them: with the same tokens, with the keys,
    roots, leases and reservations of the first; through the session socket, the gRPC API, the NVMe directory,
    the status report and the metrics page. Run it as the daemon's user with the daemon's configuration. Exit
    1 when a door is open, 3 when none is and the session could not be probed, or the daemon has doors that
    this configuration does not name; any other door that cannot be probed is listed with the reason, and is
    not closed by that.

    Examples:
        kvstore audit-isolation --config /etc/kvstore.toml
        kvstore audit-isolation --as alice --as bob
        kvstore audit-isolation --token-file alice=alice.token --token-file bob=bob.token
        kvstore audit-isolation --json | jq -e '.ok and .not_probed == []'
    """
    settings = load(config, overrides)
    # Failed handshakes are what some checks are for; the library would tell of them on stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvstore.audit import Given, audit, pick  # gRPC and the native core: not for `kvstore --help`

    pair = pick(settings, tenants or [])
    shown = shown or Shown()
    tokens = _tokens(shown.token_files or [], pair.names)
    daemon = ask(Path(settings.daemon.socket), "status")
    report = audit(settings, pair, Given(tokens, shown.tls_root), daemon, may_evict=may_evict)
    if as_json:
        say_json(report.json())
    else:
        say_text("\n".join(_lines(report)))
    if report.ok:
        return 0
    return _OPEN if report.open else _UNPROBED


def _tokens(files: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Tenant, or EVERYBODY → token.

    Raises:
        BadRequest: names the option and the fix; never holds a token.
    """
    found: dict[str, str] = {}
    for word in files:
        name, equals, path = word.partition("=")
        if not equals or name not in (*names, EVERYBODY):
            raise BadRequest(f"--token-file: need TENANT=PATH, TENANT one of {' and '.join(names)}, or *")
        try:
            with Path(path).open("rb") as file:
                token = file.read(_TOKEN_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a token"
            raise BadRequest(f"--token-file: {path}: {why}") from None
        if not token or not token.isprintable() or " " in token:
            raise BadRequest(f"--token-file: {path}: need the token alone, as `kvstore token` printed it")
        found[name] = token
    return found


def _lines(report: Report) -> Iterator[str]:
    who = " and ".join(f"{name} (group {group})" for name, group in report.tenants.items())
    yield f"as {who}, at {report.daemon['socket']} (pid {report.daemon['pid']})"
    for door in report.doors:
        yield ""
        yield from _door_lines(door)
    yield ""
    counts = {word: sum(d.verdict.value == verdict for d in report.doors) for verdict, word in _WORDS.items()}
    said = ", ".join(f"{count} {word.lower()}" for word, count in counts.items() if count)
    if report.skipped:
        yield f"not made: {', '.join(report.skipped)}"
    yield f"{said}; {report.left}"


def _door_lines(door: Door) -> Iterator[str]:
    yield f"{_WORDS[door.verdict.value]:<10}  {door.name} {door.place}".rstrip()
    for finding in door.findings:
        passed = finding.control and finding.verdict.value == "closed"
        word = "control" if passed else _WORDS[finding.verdict.value].replace("CLOSED", "closed")
        yield f"  {word:<10}  {finding.check}: {finding.detail}"
