"""The scheduler's side: what to load, what to save. It runs inside vLLM's loop and never waits long.

A request's way through it:

    asked ─(courier, fetch)─▶ answered ─▶ offered ─▶ loading ─every rank done─▶ (reported) ─▶ lease ended
       └─ too late, or nothing beyond what the engine holds ─▶ computed

and after each step its new full blocks go to `saves`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np

from kvstore.client import Client
from kvstore.intent import Intent
from kvstore.types import Reuse, Tier

from .courier import Courier, is_plain
from .messages import LoadOrder, StepOrders, StepReport
from .metrics import Tally
from .options import Options, Wish
from .saves import Saves
from .steps import Steps
from .tracked import Answer, Tracked, by_tier, first_of

__all__ = ["Scheduler"]

_log = logging.getLogger("vllm.kvstore")
_RELOOKS_MAX = 3
_BUSY_SHARE = 0.25  # of the patience, in a step that computes


class Scheduler:
    """Decisions for one engine.

    Args:
        options: the user's.
        block_tokens: tokens in a block.
        banks: answers that end a save: KV groups × ranks.
        loads, saves: does this engine's kv_role include them?
        tally: counts.
    """

    def __init__(
        self, options: Options, block_tokens: int, banks: int, loads: bool, saves: bool, tally: Tally
    ) -> None:
        self._options = options
        self._block_tokens = block_tokens
        self._tally = tally
        self._loads = loads
        self._may_save = saves
        self.chunk_tokens = 0
        """Most tokens of one step; 0 = not known."""
        self._courier = Courier(block_tokens, options.tenant, options.fetch_s)
        self._saves = Saves(self._courier, options.pins_share, banks, tally)
        self.steps = Steps(options.tenant)
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[LoadOrder] = []
        self._idle = True  # the last step computed nothing
        self._patience_s = options.patience_s  # that this step has left

    def serve(self, client: Client) -> None:
        """From now on there is a client."""
        self._courier.serve(client)
        self.steps.serve(client)

    def bind(self, pool: Any, groups: int) -> None:
        """vLLM's block pool: pins, and the daemon's picture of the device."""
        self._saves.bind(pool)
        self._courier.watch(pool, pool.num_gpu_blocks, groups)

    # ---- loads -------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """vLLM has accepted a request."""
        self._courier.arrived(self._track(request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond `computed`; None: ask again."""
        tracked = self._track(request)
        if tracked.first_admission:
            tracked.device = computed
        wanted = self._loads and tracked.may_offer and tracked.reuse is not Reuse.NONE
        if not wanted or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.answer is None:
            answer = self._answer(tracked)
            if answer is None:
                if tracked.asked is not None and time.monotonic() <= tracked.asked.until:
                    return None, False
                self._tally.add("late_lookups")
                self._abandon(tracked)
                tracked.may_offer, tracked.reason = False, "the daemon's answer took too long"
                return 0, False
            self._take(tracked, answer)
        return self._offer(tracked, computed)

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            wish = Wish.of(request.kv_transfer_params, self._options.reuse)
            if request.resumable:
                wish = Wish(Reuse.NONE, reason="its prompt may still change")
            tracked = Tracked(request, wish.reuse, wish.plan, reason=wish.reason)
            self._tracked[request.request_id] = tracked
        return tracked

    def _answer(self, tracked: Tracked) -> Answer | None:
        """The lookup's answer, if it is there within what this step may still wait."""
        began = time.monotonic()
        asked = tracked.asked
        if asked is None:
            if not self._courier.epoch:
                return Answer(None, reason="no daemon is attached")
            until = began + self._options.lookup_s
            intent = self._intent(tracked)
            asked = tracked.asked = self._courier.look_up(tracked, until, intent, afresh=tracked.relooks > 0)
            self._tally.add("lookups")
        # What is being read from a disk, or hashed, is not about to come: no step that computes waits for it.
        soon = is_plain(tracked.request) and (self._idle or not asked.fetching)
        try:
            answer = asked.result(self._patience_s if soon else 0.0)
        except NotYet:
            return None
        except Exception as error:  # noqa: BLE001 the courier has logged it
            answer = Answer(None, reason=f"the lookup failed: {error!r}")
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))
        tracked.asked = None
        return answer

    def _intent(self, tracked: Tracked) -> Intent:
        """What the plan of a request depends on beside its keys."""
        decodes, context = self.steps.load
        request = tracked.request
        return Intent(
            request.num_tokens,
            request.request_id,
            decodes=decodes,
            decode_context=context,
            chunk_tokens=self.chunk_tokens,
            mode=tracked.mode,
        )

    def _take(self, tracked: Tracked, answer: Answer) -> None:
        tracked.answer = answer
        if not answer.bindable:
            tracked.closed = True
            self._tally.add("unbindable")
        tracked.reason = answer.reason
        if tracked.first_admission:
            tracked.plan, tracked.asked_s = answer.plan, answer.asked_s
        if answer.hit is not None:
            tracked.reason = answer.reason or answer.hit.plan.reason
            # What is computed although the disk has it may be saved again: HOST has not got it.
            plan, blocks = answer.hit.plan, answer.hit.blocks
            tracked.known_to(answer.epoch, blocks if plan.load_stop >= blocks else plan.load_stop)
        if answer.fetched or answer.missed:
            self._tally.add("fetches")
            self._tally.add("fetched_tokens", answer.fetched * self._block_tokens)
            self._tally.add("fetch_seconds", answer.fetch_s)
        if answer.missed:
            self._tally.add("short_fetches")
            _log.warning("kvstore: request %s: %s", tracked.request.request_id, answer.reason)

    def _offer(self, tracked: Tracked, computed: int) -> tuple[int | None, bool]:
        answer = tracked.answer
        hit = answer.hit if answer is not None else None
        if answer is None or hit is None:
            return 0, False
        own = computed // self._block_tokens
        start, stop = hit.plan.load_start, hit.plan.load_stop
        usable = (tracked.request.num_tokens - 1) // self._block_tokens  # vLLM leaves the last token out
        stale = own < min(start, usable) or answer.epoch != self._courier.epoch
        if stale and tracked.relooks < _RELOOKS_MAX:
            # The daemon counted on blocks that have left the device meanwhile, or is another one by now.
            tracked.relooks += 1
            self._drop_answer(tracked)
            return None, False
        if stale or not start <= own < stop:
            self._drop_answer(tracked)
            tracked.answer = Answer(None)  # and not asked again
            tracked.reason = answer.reason or "nothing is known beyond what the engine holds itself"
            return 0, False
        tracked.offer = (own, stop)
        return stop * self._block_tokens - computed, True

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has blocks for what was offered, or declined (external = 0)."""
        tracked = self._tracked.get(request.request_id)
        answer = tracked.answer if tracked is not None else None
        if tracked is None or answer is None or tracked.loading:
            return
        hit, chain = answer.hit, answer.chain
        if external <= 0 or hit is None or chain is None:
            self._drop_answer(tracked)
            return
        start, stop = tracked.offer
        stop = min(stop, start + external // self._block_tokens)
        tracked.offer = (start, stop)
        tables = blocks.get_block_ids()
        first = start - hit.plan.load_start
        self._orders.append(
            LoadOrder(
                request.request_id,
                answer.epoch,
                hit.slots[first : first + stop - start],
                chain.keys[start:stop],
                tuple(np.asarray(table[start:stop], np.uint32) for table in tables),
            )
        )
        tracked.loading, tracked.good, tracked.bad = True, stop - start, set()
        tracked.loads = by_tier(hit, start, stop, self._block_tokens)
        self._tally.add("hits")

    def sources(self, request: Any, external: int) -> dict[Tier, int]:
        """Where `external` tokens come from; empty if this side does not know."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or sum(tracked.loads.values()) != external:
            return {}
        return tracked.loads

    def _rank_loaded(self, request_id: str, report: StepReport) -> None:
        """A rank has ended this load, others perhaps not."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.loading:
            return
        tracked.good = min(tracked.good, report.loaded[request_id])
        tracked.bad.update(tracked.offer[0] + position for position in report.bad.get(request_id, ()))
        if request_id in report.reasons:
            tracked.reason = report.reasons[request_id]

    def _loaded(self, request_id: str) -> None:
        """Every rank has ended this load."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.loading or tracked.answer is None or tracked.answer.hit is None:
            return
        start, stop = tracked.offer
        good = tracked.good
        self._courier.finish_load(tracked.answer.hit.lease, tracked.bad)
        tracked.loading, tracked.answer = False, None
        loaded = first_of(tracked.loads, good * self._block_tokens)
        self._tally.add("loaded_tokens", good * self._block_tokens)
        self._tally.add("loaded_nvme_tokens", loaded.get(Tier.NVME, 0))
        if tracked.first_admission:
            tracked.hits = loaded
        if good < stop - start:
            # Its saves end here: what it computes from now on rests on a load that was cut short (LAWS A4).
            tracked.may_offer, tracked.closed = False, True
            self._tally.add("failed_load_tokens", (stop - start - good) * self._block_tokens)
        if good < stop - start and not tracked.ended:
            _log.warning(
                "kvstore: request %s loaded %d of %d blocks (%s); the rest is computed",
                request_id,
                good,
                stop - start,
                tracked.reason,
            )
        if tracked.ended:
            del self._tracked[request_id]

    # ---- every step --------------------------------------------------------------------------------------

    def orders(self, step: Any) -> StepOrders:
        """What the ranks are to do with this step."""
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._save(tracked, step.kv_connector_block_state, scheduled)
        loads, self._orders = self._orders, []
        if step.num_scheduled_tokens or loads:
            self._courier.stepped()
        self._idle = not step.num_scheduled_tokens
        # Requests that are being answered must not wait for one that is new.
        self._patience_s = self._options.patience_s * (1.0 if self._idle else _BUSY_SHARE)
        saves, number = self._saves.due(), self.steps.begin(step, self._tracked)
        return StepOrders(loads, saves, idle=self._idle, step=number)

    def _save(self, tracked: Tracked, blocks: Any, scheduled: int) -> None:
        request = tracked.request
        # Draft tokens may be rejected: only those that are the request's own count.
        known = min(request.num_computed_tokens + scheduled, request.num_tokens)
        full = known // self._block_tokens
        if not full or not self._keeps(tracked) or full <= tracked.planned:
            return
        if tracked.tries and time.monotonic() < tracked.not_before:
            return
        tables = blocks.get_block_ids(request.request_id)  # vLLM makes a copy: only where it is needed
        if tables is not None:
            self._saves.begin(tracked, tables, full)

    def _keeps(self, tracked: Tracked) -> bool:
        if not self._may_save or tracked.closed or tracked.reuse is Reuse.NONE:
            return False
        epoch = self._courier.epoch
        if epoch:
            tracked.known_to(epoch)
        return bool(epoch)

    def heard(self, report: StepReport | None, received: set[str]) -> None:
        """What the ranks answered with a step: reports, and requests whose load has ended on all of them."""
        report = report or StepReport()
        self.steps.end(report.step)
        for number, saved in report.saves.items():
            self._saves.answered(number, saved)
        for request_id in report.loaded:
            self._rank_loaded(request_id, report)
        for request_id in received:
            self._loaded(request_id)

    def pending(self) -> bool:
        """Must the engine go on stepping although no request needs it?"""
        return self._saves.pending()

    # ---- the end of a request ----------------------------------------------------------------------------

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """A request has ended; its blocks are freed after this. Returns what its response tells of us."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return None
        self._keep_rest(tracked, tables)
        tracked.ended = True
        self._abandon(tracked)
        if not tracked.loading:
            self._drop_answer(tracked)
            del self._tracked[request.request_id]
        hits = {"GPU": tracked.device, **{tier.value: count for tier, count in tracked.hits.items()}}
        return {"kvstore": {"hit_tokens": {k: n for k, n in hits.items() if n}, "reason": tracked.reason}}

    def _keep_rest(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> None:
        """Blocks that waited for room among the pins get a last chance; what remains is lost."""
        request = tracked.request
        computed = min(request.num_computed_tokens, request.num_tokens)
        full = min([computed // self._block_tokens, *map(len, tables)])
        if tracked.loading or not self._may_save or tracked.reuse is Reuse.NONE:
            return
        if self._keeps(tracked) and full > tracked.planned:
            self._saves.begin(tracked, tables, full)
            self._tally.add("unpinned_blocks", max(0, full - tracked.planned))
        self._tally.add("dropped_blocks", max(0, full - tracked.planned))

    def _abandon(self, tracked: Tracked) -> None:
        """Nobody waits for the lookup any more; a lease that it still brings goes back."""
        asked, tracked.asked = tracked.asked, None
        if asked is not None and not asked.drop():
            asked.add_done_callback(self._give_back)

    def _give_back(self, asked: Future[Answer]) -> None:
        hit = asked.result().hit if asked.exception() is None else None
        if hit is not None:
            self._courier.release(hit.lease)

    def _drop_answer(self, tracked: Tracked) -> None:
        answer, tracked.answer = tracked.answer, None
        if answer is not None and answer.hit is not None:
            self._courier.release(answer.hit.lease)

    # ---- the engine --------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget everything: the weights may be others now. False while blocks wait for their copy."""
        self._courier.reset()
        for tracked in self._tracked.values():
            self._abandon(tracked)
            if tracked.loading or tracked.request.num_computed_tokens:
                tracked.closed = True  # what it holds was computed by the former weights
            if not tracked.loading:
                self._drop_answer(tracked)
            tracked.planned, tracked.binding = 0, None
        return not self._saves.pending()

    def close(self) -> None:
        """The engine ends."""
        self._saves.close()
        self._courier.close()
