"""Configuration of `kvstore route`: a file, the environment (KVSTORE_ROUTE__POLICY=…), flags; the last wins.

[route]
listen = "127.0.0.1:8080"
policy = "scored"

[[deployments]]
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = "/models/SmolLM2-135M-Instruct"

[[deployments.replicas]]
name = "a"
url = "http://10.0.0.1:8000"
events = "tcp://10.0.0.1:5557"
replay = "tcp://10.0.0.1:5558"
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvstore.config.sources import assign, explain, parse_units, read_file
from kvstore.config.tables import Table
from kvstore.config.tokens import is_name
from kvstore.errors import ConfigError
from kvstore.policy.routing.make import POLICIES
from kvstore.router.addresses import http_address, reaches_others
from kvstore.router.proxy_options import ProxyOptions

__all__ = ["DeploymentConfig", "LayoutConfig", "NamespaceConfig", "ReplicaConfig", "RouteConfig", "Settings"]

_ENV_PREFIX = "KVSTORE_"
REPLICAS_MAX = 320
_NODES_MAX = 1 << 30


class RouteConfig(Table, frozen=True):
    """[route]

    Attributes:
        listen: host:port of the HTTP front; port 0 = any free one.
        grpc: host:port or unix:/path of Score, Pick and Report; empty = not served.
        policy: see `kvstore.policy.routing.make.POLICIES`.
        weight: w of `scored`: what a second of computing is worth, in seconds of waiting.
        max_skew: of `hybrid`.
        hot_replicas: prefixes that many ask for get more replicas, on lease (affinity, hybrid, scored).
        prefill_tokens_per_s: of a replica, until it is measured.
        index_blocks_max: distinct blocks known at a time: the cap of the index's memory.
        tokens_file: bearer tokens of callers, as grpc.tokens_file; empty = everybody may ask.
        secrets_file: salts of tenants, as daemon.secrets_file; needed with tokens_file.
        tls_certificate, tls_key: PEM files; both doors speak TLS then.
        insecure: listen beyond this machine without TLS or without tokens.
        report_s: a gRPC caller that has not reported by then is taken to be gone.
        log_level: debug, info, warning or error.
    """

    listen: str = "127.0.0.1:8080"
    grpc: str = ""
    policy: str = "scored"
    weight: float = 3.5
    max_skew: int = 1
    hot_replicas: bool = True
    prefill_tokens_per_s: float = 5000.0
    index_blocks_max: int = 4 << 20
    tokens_file: str = ""
    secrets_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    insecure: bool = False
    report_s: float = 600.0
    log_level: str = "info"


class ReplicaConfig(Table, frozen=True):
    """[[deployments.replicas]]

    Attributes:
        name: for logs, metrics and hashing policies: it should outlive the machine.
        url: of its OpenAI-compatible server.
        events: ZMQ endpoint of its KV events; empty = nobody tells, what was sent there is assumed to stay.
        replay: ZMQ endpoint that repeats them.
        topic: of the events.
        daemon: host:port or unix:/path of its kvstore daemon's gRPC, for a deployment with keys = "kvstore".
        capacity_blocks: of its device; 0 = as the deployment says.
        key_env: environment variable with the bearer token that its server wants; empty = none.
    """

    name: str
    url: str
    events: str = ""
    replay: str = ""
    topic: str = ""
    daemon: str = ""
    capacity_blocks: int = 0
    key_env: str = ""


class NamespaceConfig(Table, frozen=True):
    """[deployments.namespace]: identity of the blocks, as the engine tells its daemon."""

    model: str
    weights: str
    tokenizer: str
    attention: str
    kv_dtype: str
    adapter: str = "none"


class LayoutConfig(Table, frozen=True):
    """[deployments.layout]: shape of the blocks, as in store.proto; empty and 0 = as there."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    cell_format: str = ""
    kernel_block_tokens: int = 0
    attention: str = ""
    groups: str = ""


class DeploymentConfig(Table, frozen=True):
    """[[deployments]]: replicas with the same model, tokenizer and block size.

    Attributes:
        model: as callers name it; empty = any (one deployment only).
        adapters: further names under which the same replicas serve adapters.
        tokenizer: folder with tokenizer.json; empty = text is cut into pieces instead.
        block_tokens: of the engine; 0 = as its events say.
        capacity_blocks: of one replica's device.
        keys: "tokens": engines' events name token ids; "kvstore": daemons' events name keys.
        tenant: in whose name the daemons are asked for events.
        token_env: environment variable with the bearer token that the daemons want; empty = none.
        daemon_ca: PEM of what the daemons' certificates are checked against; empty = plain text.
        namespace, layout: of the blocks, with keys = "kvstore".
    """

    model: str = ""
    adapters: tuple[str, ...] = ()
    tokenizer: str = ""
    block_tokens: int = 0
    capacity_blocks: int = 8192
    keys: str = "tokens"
    tenant: str = "default"
    token_env: str = ""
    daemon_ca: str = ""
    namespace: NamespaceConfig | None = None
    layout: LayoutConfig | None = None
    replicas: tuple[ReplicaConfig, ...] = ()


class Settings(Table, frozen=True):
    """All of it."""

    route: RouteConfig = RouteConfig()
    proxy: ProxyOptions = ProxyOptions()
    deployments: tuple[DeploymentConfig, ...] = ()

    @staticmethod
    def load(
        file: Path | None,
        flags: Sequence[str] = (),
        deployment: DeploymentConfig | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Merge and check.

        Args:
            file: TOML, or None.
            flags: `table.key=value` each.
            deployment: one more than the file has, from the command line.
            environ: None = this process's.

        Raises:
            ConfigError: names the key, where it came from and the fix.
        """
        merged: dict[str, Any] = read_file(file) if file is not None else {}
        if file is not None:
            _anchor(merged, file)
        source = {"": str(file) if file is not None else "defaults"}
        environ = os.environ if environ is None else environ
        for name in sorted(environ):
            path = name.removeprefix(_ENV_PREFIX).lower().replace("__", ".")
            if name.startswith(_ENV_PREFIX) and path.partition(".")[0] in ("route", "proxy"):
                assign(merged, path, environ[name], origin=name)
                source[path] = name
        for flag in flags:
            path, equals, value = flag.partition("=")
            if not equals:
                raise ConfigError(f"--set {flag}: need table.key=value, e.g. route.policy=hybrid")
            assign(merged, path, value, origin=f"--set {path}")
            source[path] = f"--set {path}"
        parse_units(merged)
        try:
            settings = msgspec.convert(merged, Settings, strict=False)
        except msgspec.ValidationError as error:
            tables: dict[str, type[msgspec.Struct]] = {
                "": Settings,
                "route": RouteConfig,
                "proxy": ProxyOptions,
                "deployments": DeploymentConfig,
            }
            raise ConfigError(explain(str(error), source, tables)) from None
        if deployment is not None:
            settings = msgspec.structs.replace(settings, deployments=(*settings.deployments, deployment))
        _check_route(settings.route)
        settings.proxy.check()
        _check_deployments(settings.deployments)
        return settings


def _anchor(merged: dict[str, Any], file: Path) -> None:
    """Relative paths in the file are relative to the file."""
    route = merged.get("route")
    for key in ("tokens_file", "secrets_file", "tls_certificate", "tls_key"):
        if isinstance(route, dict) and isinstance(route.get(key), str) and route[key]:
            route[key] = str(file.parent / route[key])
    deployments = merged.get("deployments")
    for deployment in deployments if isinstance(deployments, list) else ():
        if isinstance(deployment, dict) and isinstance(deployment.get("tokenizer"), str):
            deployment["tokenizer"] = (
                str(file.parent / deployment["tokenizer"]) if deployment["tokenizer"] else ""
            )


def _check_route(route: RouteConfig) -> None:
    if route.policy not in POLICIES:
        raise ConfigError(f"route.policy: {route.policy!r:.40} is none of {', '.join(POLICIES)}")
    for name, least, most in (
        ("weight", 1, 1000),
        ("max_skew", 0, 1_000_000),
        ("prefill_tokens_per_s", 1, 1e9),
        ("index_blocks_max", 1024, _NODES_MAX),
        ("report_s", 1, 86_400),
    ):
        if not least <= getattr(route, name) <= most:
            raise ConfigError(f"route.{name}: need {least:g} to {most:g}, got {getattr(route, name):g}")
    if route.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError("route.log_level: need debug, info, warning or error")
    if bool(route.tls_certificate) != bool(route.tls_key):
        raise ConfigError("route.tls_certificate, route.tls_key: both, or neither")
    if bool(route.tokens_file) != bool(route.secrets_file):
        raise ConfigError(
            "route.tokens_file, route.secrets_file: both, or neither: a token leads to a tenant, and a "
            "tenant's salt keeps its prefixes apart"
        )
    for key, address in (("listen", route.listen), ("grpc", route.grpc)):
        if key == "listen":
            http_address(address, "route.listen")
        if not address or not reaches_others(address, f"route.{key}") or route.insecure:
            continue
        if not route.tls_certificate or not route.tokens_file:
            raise ConfigError(
                f"route.{key}: {address} reaches beyond this machine; set route.tls_certificate, "
                "route.tls_key, route.tokens_file and route.secrets_file, or accept plain text from anybody "
                "with --set route.insecure=true"
            )


def _check_deployments(deployments: Sequence[DeploymentConfig]) -> None:
    if not deployments:
        raise ConfigError(
            "deployments: there is none; name replicas with --replica a=http://127.0.0.1:8001, or in the "
            "file of --config under [[deployments.replicas]]"
        )
    models = [name for each in deployments for name in (each.model, *each.adapters)]
    if len(set(models)) < len(models) or (len(deployments) > 1 and "" in models):
        raise ConfigError("deployments.model: with several deployments each needs names of its own")
    replicas = [replica for each in deployments for replica in each.replicas]
    if len({replica.name for replica in replicas}) < len(replicas):
        raise ConfigError("deployments.replicas.name: two replicas have the same name")
    for each in deployments:
        _check_deployment(each)


def _check_deployment(each: DeploymentConfig) -> None:
    where = f"deployments ({each.model or 'any model'})"
    if not 1 <= len(each.replicas) <= REPLICAS_MAX:
        raise ConfigError(f"{where}.replicas: need 1 to {REPLICAS_MAX}, got {len(each.replicas)}")
    if not 0 <= each.block_tokens <= 4096 or not 1 <= each.capacity_blocks <= _NODES_MAX:
        raise ConfigError(f"{where}: block_tokens must be 0 to 4096, capacity_blocks 1 to {_NODES_MAX}")
    if each.keys not in ("tokens", "kvstore"):
        raise ConfigError(f"{where}.keys: need tokens or kvstore, got {each.keys!r:.40}")
    if each.keys == "kvstore" and (each.namespace is None or each.layout is None):
        raise ConfigError(
            f'{where}: keys = "kvstore" needs namespace and layout: whose blocks, of which shape'
        )
    for replica in each.replicas:
        if not is_name(replica.name):
            raise ConfigError(
                f"{where}.replicas.name: need 1 to 64 of A-Z a-z 0-9 _ . -, got {replica.name!r:.80}"
            )
        url = urlsplit(replica.url)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ConfigError(
                f"{where}: replica {replica.name}: url: need http://host:port, got {replica.url!r:.120}"
            )
        if replica.daemon and each.keys != "kvstore":
            raise ConfigError(f'{where}: replica {replica.name}: daemon needs deployments.keys = "kvstore"')
        if replica.replay and not replica.events:
            raise ConfigError(f"{where}: replica {replica.name}: replay without events")
