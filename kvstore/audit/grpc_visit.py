"""One address of the public API while it is audited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.audit.calls import Calls
from kvstore.audit.probe import BLOCKS, Probe, fresh_tokens
from kvstore.audit.verdicts import Door

__all__ = ["DEAF", "Visit"]

# What a channel says of a peer that does not speak its language, or is silent.
DEAF = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@dataclass(frozen=True, slots=True)
class Visit:
    """One address.

    Attributes:
        tcp: it is no Unix socket.
        asks: whether a call without a token is to be refused.
        tokens: tenant → bearer token, of those that were given.
    """

    door: Door
    probe: Probe
    calls: Calls
    tcp: bool
    asks: bool
    tokens: Mapping[str, str]

    @property
    def checks_tokens(self) -> bool:
        """A token that is shown is looked at, whether or not it is asked for."""
        return bool(self.probe.config.grpc.tokens_file)

    @property
    def missing(self) -> list[str]:
        """Tenants whose token was not given."""
        return [name for name in self.probe.pair.names if name not in self.tokens]

    def in_the_name_of(self, other: str, mine: str) -> dict[str, str]:
        """How every call ends that can be made in a tenant's name, with another's token: verb → status."""
        calls, token = self.calls, self.tokens[mine]
        chain = calls.chain(other, fresh_tokens())
        ends = {
            "Plan": calls.plan(chain, token).code,
            "Lookup": calls.lookup(chain, token).code,
            "Fetch": calls.fetched(chain, token).code,
            "Observe": calls.observe(other, token).code,
            "Subscribe": calls.subscribe(other, token).code,
        }
        if not self.probe.no_room:
            saved = calls.save(chain, token)
            ends["Save"] = saved.code
            self.probe.saved_blocks += min(BLOCKS, int(saved.reply.ready)) if saved.ok else 0
        if len(set(ends.values())) == 1:
            return {", ".join(ends): next(iter(ends.values()))}
        return ends
