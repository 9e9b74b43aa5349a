"""`kvstore route`: the router in the foreground."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvstore.cli.options import AsJson, ConfigFile, SetFlags
from kvstore.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from kvstore.router.settings import ReplicaConfig

__all__ = ["route_command"]

_REPLICA_KEYS = ("events", "replay", "topic", "daemon", "capacity_blocks", "key_env")

Replica = Annotated[
    list[str] | None,
    Parameter(
        name=["--replica", "-r"],
        negative=(),
        help="NAME=URL[,events=tcp://…][,replay=tcp://…][,capacity_blocks=N][,key_env=VARIABLE]; repeat it",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DeploymentFlags:
    """What the replicas of the command line serve.

    Attributes:
        model: name under which they serve it; empty = any
        tokenizer: folder of the model's tokenizer.json and chat template
        block_tokens: tokens of a block; 0 = as the events say
        capacity_blocks: blocks that a replica's device holds
    """

    model: str = ""
    tokenizer: Path | None = None
    block_tokens: int = 0
    capacity_blocks: int = 8192


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RouteFlags:
    """The router.

    Attributes:
        policy: how to choose: scored (default), hybrid, affinity, session_hash, …
        listen: host:port of the HTTP front. Default: 127.0.0.1:8080
    """

    policy: str = ""
    listen: str = ""


def route_command(
    *,
    replica: Replica = None,
    deployment: DeploymentFlags | None = None,
    router: RouteFlags | None = None,
    config: ConfigFile = None,
    overrides: SetFlags = None,
    as_json: AsJson = False,
) -> None:
    """Send each request to the replica that holds its prefix: an OpenAI-compatible front for several engines.

    Without `events` nobody tells what a replica holds, and what was sent there is assumed to stay: good
    enough, as long as everything passes through one router. Without --tokenizer text is cut into pieces of
    4 bytes: fine for choosing, but it cannot meet the engines' events.

    Examples:
        kvstore route --replica a=http://127.0.0.1:8001 --replica b=http://127.0.0.1:8002
        kvstore route --tokenizer /models/m -r a=http://10.0.0.1:8000,events=tcp://10.0.0.1:5557
        kvstore route --config /etc/kvstore-route.toml --policy hybrid --listen 127.0.0.1:9000
    """
    from kvstore.logs import configure_logs
    from kvstore.router.settings import DeploymentConfig, Settings

    told, here = deployment or DeploymentFlags(), router or RouteFlags()
    flags = list(overrides or [])
    flags += [f"route.policy={here.policy}"] if here.policy else []
    flags += [f"route.listen={here.listen}"] if here.listen else []
    named = None
    if replica:
        named = DeploymentConfig(
            model=told.model,
            tokenizer=str(told.tokenizer) if told.tokenizer is not None else "",
            block_tokens=told.block_tokens,
            capacity_blocks=told.capacity_blocks,
            replicas=tuple(_replica(text) for text in replica),
        )
    elif told != DeploymentFlags():
        raise BadRequest(
            "--replica: --model, --tokenizer and --block-tokens describe the replicas named by it"
        )
    settings = Settings.load(config, flags, named)
    configure_logs(settings.route.log_level, as_json=as_json)
    try:
        from kvstore.router.serving import route
    except ImportError as error:
        raise ConfigError(f"route: {error.name} is not installed; pip install 'kvstored[router]'") from None

    def ready(http: str, grpc: str) -> None:
        scheme = "https" if settings.route.tls_certificate else "http"
        sys.stderr.write(f"kvstore route: {scheme}://{http}/v1" + (f", gRPC {grpc}\n" if grpc else "\n"))

    asyncio.run(route(settings, ready))


def _replica(text: str) -> ReplicaConfig:
    """A ReplicaConfig from NAME=URL,key=value…"""
    from kvstore.router.settings import ReplicaConfig

    head, *parts = text.split(",")
    name, equals, url = head.partition("=")
    if not equals or not name or not url:
        raise BadRequest(f"--replica: need NAME=URL, e.g. a=http://127.0.0.1:8001, got {text!r:.120}")
    values: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in _REPLICA_KEYS:
            raise BadRequest(
                f"--replica: {part!r:.80} is none of {', '.join(f'{k}=…' for k in _REPLICA_KEYS)}"
            )
        values[key] = value
    capacity = values.pop("capacity_blocks", "0")
    if not capacity.isascii() or not capacity.isdigit():
        raise BadRequest(f"--replica: capacity_blocks: need a number, got {capacity!r:.40}")
    return ReplicaConfig(name=name, url=url, capacity_blocks=int(capacity), **values)
