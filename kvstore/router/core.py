"""The core: one deployment's replicas, and which of them gets a request.

    pick       name the blocks, ask the index, let the policy choose, hint, and count
    sent       its uncached tokens wait in that replica's queue
    first_byte they are computed: the queue is shorter, and its speed is measured
    finished   what the engine says it reused is compared with what was expected

Everything runs on one event loop, in microseconds, and nothing here waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.errors import BadRequest, Unavailable
from kvstore.policy.routing.base import Ask, Choice, Fleet, Policy, random_ties
from kvstore.policy.routing.universal import UniversalPrefix
from kvstore.router.figures import Figures
from kvstore.router.heads import Heads
from kvstore.router.loads import Loads
from kvstore.router.placing import Placement, Replica, RouteRequest
from kvstore.router.prefixes import Holdings, Prefixes

__all__ = ["Member", "Router", "TierPrices"]

Names = NDArray[np.uint64]

# Of the prompt, for policies that hash it: some 64 tokens of 16.
_HEAD_BLOCKS = 4
# Tickets that were never finished: a front end that forgets is a bug, but not one that may fill memory.
TICKETS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of a deployment.

    Attributes:
        name, url: as in a placement.
        capacity_blocks: of its device.
        told: whether a feed tells what it holds.
    """

    name: str
    url: str
    capacity_blocks: int
    told: bool


@dataclass(frozen=True, slots=True)
class TierPrices:
    """Seconds to obtain a cached token from each tier below the device."""

    host_s: float = 2e-6  # 128 KiB a token at 64 GB/s
    nvme_s: float = 3e-5  # at 4 GB/s
    remote_s: float = 1e-4  # at 10 Gbit/s

    def row(self) -> list[float]:
        """In the order of the fleet's columns."""
        return [0.0, self.host_s, self.nvme_s, self.remote_s]


@dataclass(slots=True)
class _Ticket:
    place: int
    chain: Names
    expected_tokens: int
    compute_tokens: int
    tokens: int
    ahead_tokens: int = 0  # when it was sent, itself included
    sent: bool = False
    waiting: bool = True  # for its first byte


class Router:
    """A `Picker` for one deployment.

    Args:
        members: its replicas; names are distinct.
        prefixes: where their blocks are known.
        policy: how to choose.
        loads: one place for each member, in their order.
        clock: monotonic.
        random: for ties.

    Raises:
        BadRequest: no members, or two of one name.
    """

    def __init__(
        self,
        members: Sequence[Member],
        prefixes: Prefixes,
        policy: Policy,
        loads: Loads,
        clock: Clock,
        random: Random,
    ) -> None:
        self.members = tuple(members)
        if not members or len({member.name for member in members}) < len(members):
            raise BadRequest("replicas: need at least one, and no name twice")
        self.prefixes = prefixes
        self.loads = loads
        self.figures = Figures(len(members), clock)
        self.holdings: list[Holdings] = [
            prefixes.join(member.capacity_blocks, told=member.told) for member in members
        ]
        self.prices = TierPrices()
        self.heads = Heads(clock)
        self._policy = policy
        self._universal = UniversalPrefix()
        self._ties = random_ties(random)
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._capacity = np.array([member.capacity_blocks for member in members], np.int64)

    @property
    def policy(self) -> Policy:
        """How it chooses."""
        return self._policy

    def replicas(self) -> Sequence[Replica]:
        """See `Picker`."""
        up = self.loads.up()
        return [Replica(member.name, member.url, bool(up[i])) for i, member in enumerate(self.members)]

    # ---- before --------------------------------------------------------------------------------------------

    def pick(self, request: RouteRequest, avoid: frozenset[str] = frozenset()) -> Placement:
        """See `Picker`. Some 100 µs for a prompt of 1,000 blocks and 8 replicas.

        Raises:
            Unavailable: no replica may serve it.
        """
        if len(self._tickets) >= TICKETS_MAX:
            raise Unavailable(f"route: {TICKETS_MAX} requests are under way; try again later")
        chain = self.prefixes.names.of_prompt(request)
        places = self._places(avoid)
        fleet = self.fleet(chain, request, places)
        ask = self._ask(chain, request)
        choice = self._policy.pick(ask, fleet, self._ties)
        if request.exact and ask.head:
            self.heads.observe(ask.head, request.tokens, request.salt, request.model)
        return self._place(request, chain, fleet, choice, places)

    def score(self, request: RouteRequest) -> tuple[Fleet, Choice]:
        """What `pick` would do, without doing it: the policy's memory of rotations and fashions moves on."""
        chain = self.prefixes.names.of_prompt(request)
        fleet = self.fleet(chain, request, self._places(frozenset()))
        return fleet, self._policy.pick(self._ask(chain, request), fleet, self._ties)

    def fleet(self, chain: Names, request: RouteRequest, places: NDArray[np.int64]) -> Fleet:
        """What a policy sees of these places."""
        block_tokens = self.prefixes.names.block_tokens
        matched = (
            self.prefixes.matched_blocks(chain, [self.holdings[place] for place in places]) * block_tokens
        )
        loads = self.loads
        blocks = np.array([int(self.holdings[place].blocks()[0]) for place in places], np.int64)
        capacity = self._capacity[places]
        return Fleet(
            names=tuple(self.members[place].name for place in places),
            matched_tokens=np.minimum(matched, request.tokens.size),
            assigned=loads.assigned[places],
            in_flight=loads.in_flight[places],
            queue_s=loads.queue_s()[places],
            blocks=blocks,
            free_blocks=np.maximum(capacity - self._running_blocks(places), 0),
            capacity_blocks=capacity,
            prefill_tokens_per_s=loads.tokens_per_s[places],
            tier_s_per_token=np.tile(self.prices.row(), (len(places), 1)),
            block_tokens=block_tokens,
        )

    def _running_blocks(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-self.figures.running_tokens[places] // self.prefixes.names.block_tokens)

    def _places(self, avoid: frozenset[str]) -> NDArray[np.int64]:
        """Those that may serve. When none is up, all that were not tried yet: better late than an error."""
        fresh = np.array([member.name not in avoid for member in self.members])
        places = np.flatnonzero(fresh & self.loads.up())
        if not len(places):
            places = np.flatnonzero(fresh)
        if not len(places):
            raise Unavailable(f"route: none of {len(self.members)} replicas answers")
        return places

    def _ask(self, chain: Names, request: RouteRequest) -> Ask:
        universal = self._universal.leading(chain)
        # What everybody shares tells nobody apart.
        head = chain[min(len(chain), universal + _HEAD_BLOCKS) - 1].tobytes() if len(chain) else b""
        return Ask(
            tokens=max(1, request.tokens.size),
            session=request.session,
            head=head,
            slo_s=request.slo_s,
            universal_tokens=universal * self.prefixes.names.block_tokens,
        )

    def _place(
        self, request: RouteRequest, chain: Names, fleet: Fleet, choice: Choice, places: NDArray[np.int64]
    ) -> Placement:
        place = int(places[choice.replica])
        holdings = self.holdings[place]
        expected = int(fleet.longest_tokens[choice.replica])
        self._universal.observe(chain)
        self.prefixes.hint(holdings, chain)
        holdings.assume(chain)
        number = next(self._numbers)
        compute = max(1, request.tokens.size - expected)
        self._tickets[number] = _Ticket(place, chain, expected, compute, request.tokens.size)
        self.loads.begin(place, compute)
        self.figures.picked(place, request.tokens.size, expected, int(fleet.longest_tokens.max()))
        member = self.members[place]
        return Placement(member.name, member.url, expected, choice.reason, number)

    # ---- after ---------------------------------------------------------------------------------------------

    def sent(self, ticket: int) -> None:
        """See `Picker`."""
        found = self._tickets[ticket]
        found.sent = True
        found.ahead_tokens = int(self.loads.ahead_tokens[found.place])

    def first_byte(self, ticket: int, seconds: float) -> None:
        """See `Picker`."""
        found = self._tickets[ticket]
        if not found.waiting:
            return
        found.waiting = False
        self.loads.sample(found.place, found.ahead_tokens, seconds)
        self.loads.computed(found.place, found.compute_tokens)
        self.loads.answered(found.place)
        self.figures.first_byte(found.place, seconds, warm=found.expected_tokens > 0)

    def finished(
        self,
        ticket: int,
        cached_tokens: int | None,
        prompt_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> None:
        """See `Picker`."""
        found = self._tickets.pop(ticket)
        if found.waiting:
            self.loads.computed(found.place, found.compute_tokens)
        self.loads.end(found.place)
        if found.sent and not ok:
            self.loads.fail(found.place)
            self.holdings[found.place].forget()
        self.figures.finished(found.place, found.tokens, found.expected_tokens, cached_tokens, prompt_tokens)
