"""A policy by its name, as command lines and configurations give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.errors import BadRequest
from kvstore.policy.routing.affinity import Affinity
from kvstore.policy.routing.base import Policy
from kvstore.policy.routing.consistent_hash import ConsistentHash
from kvstore.policy.routing.hybrid import Hybrid, Skew
from kvstore.policy.routing.least import Least
from kvstore.policy.routing.power_of_two import PowerOfTwo
from kvstore.policy.routing.round_robin import RoundRobin
from kvstore.policy.routing.scored import WEIGHT, Scored
from kvstore.policy.routing.session_hash import SessionHash

__all__ = ["POLICIES", "PolicySettings", "make_policy"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What some policies can be told.

    Attributes:
        max_skew, skew_of: of hybrid.
        weight, weight_max: of scored.
    """

    max_skew: int = 1
    skew_of: Skew = Skew.ASSIGNED
    weight: float = WEIGHT
    weight_max: float | None = None


POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "round_robin": lambda settings: RoundRobin(),
    "least": lambda settings: Least(),
    "power_of_two": lambda settings: PowerOfTwo(),
    "session_hash": lambda settings: SessionHash(),
    "consistent_hash": lambda settings: ConsistentHash(),
    "affinity": lambda settings: Affinity(),
    "hybrid": lambda settings: Hybrid(settings.max_skew, settings.skew_of),
    "scored": lambda settings: Scored(settings.weight, settings.weight_max),
}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A fresh policy, which remembers nothing yet.

    Raises:
        BadRequest: no such policy, or a setting of it is out of range.
    """
    if name not in POLICIES:
        raise BadRequest(f"policy: {name!r:.80} is none; the policies are {', '.join(POLICIES)}")
    return POLICIES[name](settings or PolicySettings())
