"""The router's parts, put together from its settings: the only wiring of `kvstore route`."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvstore.clock import Clock
from kvstore.config.salts import tenant_salts
from kvstore.config.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.policy.routing.base import Policy
from kvstore.policy.routing.hot import HotReplicas
from kvstore.policy.routing.make import PolicySettings, make_policy
from kvstore.router.chain_names import BLOCK_TOKENS, ChainNames, KeyNames, TokenNames
from kvstore.router.core import Member, Router
from kvstore.router.deployments import Deployment, Deployments
from kvstore.router.door import Door, OpenDoor, TokenDoor
from kvstore.router.kvstore_feed import KvstoreFeed, KvstoreSource
from kvstore.router.loads import Loads
from kvstore.router.prefixes import Prefixes
from kvstore.router.roots import learn_roots
from kvstore.router.settings import DeploymentConfig, ReplicaConfig, Settings
from kvstore.router.tokens import ByteChunks, ModelTokens, PromptTokens, Tokenizers

__all__ = ["Parts", "assemble"]

# Policies that look at where prefixes are.
_BY_PREFIX = ("affinity", "hybrid", "scored")


@dataclass(frozen=True, slots=True)
class Parts:
    """A router that nobody runs yet.

    Attributes:
        deployments: the core.
        tokenizers: of its models.
        door: who is let in.
        keys: replica → bearer token that it wants.
        follow: tasks that keep what is known of replicas true; to be run as long as the router.
    """

    deployments: Deployments
    tokenizers: Tokenizers
    door: Door
    keys: Mapping[str, str] = field(repr=False)
    follow: list[Coroutine[Any, Any, None]] = field(default_factory=list)


def assemble(settings: Settings, clock: Clock, random: Random) -> Parts:
    """Read what the settings name, and build everything; nothing listens yet.

    Raises:
        ConfigError: a file is absent, too open or malformed; a variable with a key is not set.
    """
    follow: list[Coroutine[Any, Any, None]] = []
    salts = (
        tenant_salts(Path(settings.route.secrets_file), "route.secrets_file")
        if settings.route.secrets_file
        else {}
    )
    door: Door = OpenDoor()
    if settings.route.tokens_file:
        door = TokenDoor(Tokens.load(Path(settings.route.tokens_file)), salts)
    found = [
        Deployment(
            each.model,
            frozenset((each.model, *each.adapters)),
            _router(settings, each, list(salts) or [each.tenant], clock, random, follow),
        )
        for each in settings.deployments
    ]
    by_model: dict[str, PromptTokens] = {}
    for each in settings.deployments:
        tokens: PromptTokens = ModelTokens(Path(each.tokenizer)) if each.tokenizer else ByteChunks()
        by_model |= dict.fromkeys((each.model, *each.adapters), tokens)
    tokenizers = Tokenizers(by_model, by_model.get("", next(iter(by_model.values()))))
    return Parts(Deployments(found), tokenizers, door, _keys(settings), follow)


def _router(
    settings: Settings,
    each: DeploymentConfig,
    tenants: list[str],
    clock: Clock,
    random: Random,
    follow: list[Coroutine[Any, Any, None]],
) -> Router:
    members = [
        Member(
            replica.name,
            replica.url.rstrip("/"),
            replica.capacity_blocks or each.capacity_blocks,
            told=bool(replica.events or replica.daemon),
        )
        for replica in each.replicas
    ]
    sources = {replica.name: _source(each, replica) for replica in each.replicas if replica.daemon}
    names: ChainNames
    if each.keys == "kvstore":
        assert each.layout is not None
        roots: dict[str, bytes] = {}
        names = KeyNames(each.layout.block_tokens, roots, each.tenant)
        follow.append(learn_roots(each, list(sources.values()), tenants, roots))
    else:
        names = TokenNames(
            each.block_tokens if _told(each) else each.block_tokens or BLOCK_TOKENS, each.adapters, random
        )
    prefixes = Prefixes(names, settings.route.index_blocks_max, len(members), clock)
    loads = Loads(len(members), settings.route.prefill_tokens_per_s, clock)
    router = Router(members, prefixes, _policy(settings, clock), loads, clock, random)
    for replica, holdings in zip(each.replicas, router.holdings, strict=True):
        if replica.daemon:
            follow.append(KvstoreFeed(sources[replica.name], holdings).run())
        elif replica.events:
            follow.append(_vllm_feed(replica, holdings, clock).run())
    return router


def _told(each: DeploymentConfig) -> bool:
    return any(replica.events for replica in each.replicas)


def _vllm_feed(replica: ReplicaConfig, holdings: Any, clock: Clock) -> Any:
    try:
        from kvstore.router.vllm_feed import VllmFeed
        from kvstore.router.vllm_wire import VllmSource
    except ImportError:
        raise ConfigError("deployments.replicas.events: needs `pip install 'kvstored[router]'`") from None
    source = VllmSource(replica.events, replica.replay, replica.topic.encode())
    return VllmFeed(source, holdings, clock=clock)


def _source(each: DeploymentConfig, replica: ReplicaConfig) -> KvstoreSource:
    return KvstoreSource(
        replica.daemon,
        each.tenant,
        _from_environment(each.token_env, "deployments.token_env"),
        Path(each.daemon_ca).read_bytes() if each.daemon_ca else None,
    )


def _policy(settings: Settings, clock: Clock) -> Policy:
    route = settings.route
    policy = make_policy(route.policy, PolicySettings(max_skew=route.max_skew, weight=route.weight))
    return HotReplicas(policy, clock) if route.hot_replicas and route.policy in _BY_PREFIX else policy


def _keys(settings: Settings) -> dict[str, str]:
    return {
        replica.name: _from_environment(replica.key_env, f"replica {replica.name}: key_env")
        for each in settings.deployments
        for replica in each.replicas
        if replica.key_env
    }


def _from_environment(name: str, key: str) -> str:
    if not name:
        return ""
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{key}: the environment variable {name} is not set")
    return value
