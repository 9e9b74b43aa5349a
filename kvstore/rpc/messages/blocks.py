"""Messages about blocks: reading (lookup, fetch, release) and writing (reserve, publish, abort)."""

from __future__ import annotations

from kvstore.rpc.messages.base import Message

__all__ = [
    "NO_INTENT",
    "Abort",
    "Demote",
    "Enough",
    "Extend",
    "Fetch",
    "Fetched",
    "Found",
    "IntentRow",
    "Lookup",
    "Progress",
    "Publish",
    "Published",
    "Release",
    "Released",
    "Report",
    "Reserve",
    "Reserved",
]

IntentRow = tuple[int, str, float, bool, int, int, int, str]
NO_INTENT: IntentRow = (0, "", 0.0, False, 0, 0, 0, "")


class Lookup(Message, tag="lookup", frozen=True):
    """How much of this chain is known? Reply: Found.

    Attributes:
        root: 32 bytes.
        blocks: length n of the chain that may be reused.
        positions: u32 ascending positions in [0, n) of the keys sent.
        keys: 32 bytes each.
        intent: of the request, for its plan: the fields of `kvstore.intent.Intent`, in their order.
    """

    root: bytes
    blocks: int
    positions: bytes
    keys: bytes
    intent: IntentRow = NO_INTENT


class Extend(Message, tag="extend", frozen=True):
    """Second trip: the keys of the gap that Found named. Reply: Found, for the whole lease."""

    lease: int
    positions: bytes
    keys: bytes


class Found(Message, tag="found", frozen=True):
    """The answer to a lookup.

    Attributes:
        lease: id, 0 when nothing matched (then there is nothing to release).
        blocks: length of the match.
        device: leading blocks of the match that the engine's own pool holds.
        known: blocks of the chain in the index (>= blocks; deeper ones are hollow).
        gap_stop: [known, gap_stop) was not asked about; send those keys with Extend if it is wider than 1.
        digest: `keys_digest` of the matched keys; the client compares it with its own.
        load: [start, stop) that the plan wants loaded.
        runs: slots of the leading part of `load` that is on HOST, packed (`_native.pack_slots`): of all
            blocks before the first that a span puts on a tier below HOST; those follow with Fetch. They stay
            where they are until the lease ends. Empty where HOST is limited: all of them follow with Fetch;
            and in the answer to a Lookup after which an Extend is due: known == blocks and gap_stop > known.
        spans: [tier, start, stop] each, ascending.
        reason: why the plan is what it is, one sentence.
        busy: nothing can be granted now, for this reason.
        plan: its id, to tell what came of it (`Timings.plans`); 0 = none was made (yet).
        choice: recompute, load or split.
        lag: of the lag rule, in seconds: `FetchPlan.lag_from_s`, `load_s`, `recompute_s`.
    """

    lease: int
    blocks: int
    device: int
    known: int
    gap_stop: int
    digest: int
    load: tuple[int, int]
    runs: bytes
    spans: list[tuple[str, int, int]]
    reason: str
    busy: str = ""
    plan: int = 0
    choice: str = "load"
    lag: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Fetch(Message, tag="fetch", frozen=True):
    """Bring blocks [start, stop) of a lease to where the engine can copy them. Reply: Fetched.

    One at a time for a lease, and none after one that the disk has stalled. It ends with its lease, and is
    never cancelled by itself: whoever does not want the rest releases the lease, or says Enough.

    Attributes:
        descending: the last blocks first, for an engine that computes the first ones meanwhile. Of these its
            lease counts as loaded what was named, as far as Enough does not take it back.
    """

    lease: int
    start: int
    stop: int
    descending: bool = False


class Fetched(Message, tag="fetched", frozen=True):
    """[start, ready) can be copied now, from these runs; the rest follows as Progress notices.

    `ready` == the `stop` that was asked for: that was all, no notice follows. Otherwise at least one does;
    only one that ends the fetch at this same `ready` may come before this reply. Descending: [ready, stop),
    and `ready` == the `start` that was asked for is the end.
    """

    ready: int
    runs: bytes


class Progress(Message, tag="progress", frozen=True):
    """Notice (id 0): how far a fetch has come, in chain order; from its last block down when descending.

    Attributes:
        lease: whose fetch.
        ready: blocks before this one can be copied; never less than before. Descending: from this one on;
            never more than before.
        stop: where the fetch will end. Lower than before when something is in the way: a block that is bad
            or gone, a disk that stalls, no room on HOST. `ready` == `stop` ends the fetch; what was named so
            far is good. Descending: the lowest block that it will bring, higher than before in that case.
        runs: slots of the blocks between the last `ready` and this one, packed, in chain order.
    """

    lease: int
    ready: int
    stop: int
    runs: bytes


class Enough(Message, tag="enough", frozen=True):
    """Of a descending fetch no block below `start` is used any more: computing has met it. Reply: Done.

    It ends there, if it has not ended before. The last one says what was loaded, for the accounts.
    """

    lease: int
    start: int


class Report(Message, tag="report", frozen=True):
    """Blocks of a lease that failed their check, u32 positions. The daemon verifies before it drops them."""

    lease: int
    bad: bytes


class Release(Message, tag="release", frozen=True):
    """End of a lease. Reply: Released."""

    lease: int


class Demote(Message, tag="demote", frozen=True):
    """An order: copy device `blocks` to `slots` (u32 each), then Publish(token), before anything else.

    `generations`: u64 of each slot, see Reserved.
    """

    token: int
    blocks: bytes
    slots: bytes
    generations: bytes


class Released(Message, tag="released", frozen=True):
    """Done; idle blocks beyond `idle_max` may have to be demoted."""

    demote: list[Demote]


class Reserve(Message, tag="reserve", frozen=True):
    """Slots for blocks that continue `parent` (a key, or the root itself). Reply: Reserved."""

    root: bytes
    parent: bytes
    keys: bytes


class Reserved(Message, tag="reserved", frozen=True):
    """Where to write.

    Attributes:
        token: names this filling; 0 = nothing to write. Tokens of one daemon grow, from a random start.
        slots: u32 per key of the first m keys, 0xFFFFFFFF = not yours to write.
        generations: u64 of each slot that is yours, in order. A slot may be written only while its control
            entry says FILLING and has this generation: otherwise it is somebody else's by now.
        filled, elsewhere, dropped: what became of the others; dropped = those beyond m.
        reason: why blocks were dropped.
        busy: nothing was reserved, for this reason.
    """

    token: int
    slots: bytes
    generations: bytes
    filled: int
    elsewhere: int
    dropped: int
    reason: str = ""
    busy: str = ""


class Publish(Message, tag="publish", frozen=True):
    """This rank's part of the first `blocks` slots that are ours to write is written. Reply: Published.

    Counted over the slots of the filling that are not 0xFFFFFFFF, in order; the others are aborted. A filling
    becomes readable when every rank's part is covered. Refused from a scheduler, and NotFound from a process
    that attached, or said Quiesced, after the slots were reserved.
    """

    token: int
    blocks: int
    checked: bool


class Published(Message, tag="published", frozen=True):
    """`ready` blocks are readable now; `dropped` were not kept; pending = waiting for other ranks."""

    ready: int
    dropped: int
    pending: bool


class Abort(Message, tag="abort", frozen=True):
    """Give a filling up: this process will not write (any more of) its part. Reply: Done.

    Nothing of it becomes readable; its slots are free once every other rank has had its say too. From a
    scheduler, which has no part: as soon as the workers are done with theirs.
    """

    token: int
