"""gRPC Routing: Pick, Score and Report, for gateways that forward requests themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from kvstore.errors import STATUS, BadRequest, KVStoreError, LimitExceeded, NotFound
from kvstore.router.core import Member, Router
from kvstore.router.deployments import Deployments
from kvstore.router.front import Front
from kvstore.router.heads import HEADS_MAX
from kvstore.router.placing import RouteRequest
from kvstore.router.warming import warm
from kvstore.v1 import routing_pb2 as pb
from kvstore.v1 import routing_pb2_grpc

__all__ = ["RoutingService"]

TOKENS_MAX = 1 << 20
REPORTS_MAX = 1024
AVOID_MAX = 64
NAME_CHARS_MAX = 256
TICKETS_MAX = 1 << 15
_SWEEP_S = 1.0


@dataclass(slots=True)
class _Out:
    heard_s: float  # when its caller last said something of it


class RoutingService(routing_pb2_grpc.RoutingServicer):  # type: ignore[misc] # generated, without types
    """On the loop of the core.

    Args:
        front: who may ask (shown the `authorization` metadata), the clock, and the replicas' keys.
        deployments: the core.
        report_s: a caller that is silent for so long is taken to be gone, and its requests with it.
    """

    def __init__(self, front: Front, deployments: Deployments, report_s: float) -> None:
        self._front = front
        self._deployments = deployments
        self._report_s = report_s
        self._out: dict[int, _Out] = {}

    async def Pick(self, request: pb.PickRequest, context: Any) -> pb.PickResponse:  # noqa: N802
        """See routing.proto."""
        try:
            if len(self._out) >= TICKETS_MAX:
                raise LimitExceeded(f"tickets: {TICKETS_MAX} are out; report those that are over")
            if len(request.avoid) > AVOID_MAX:
                raise BadRequest(f"avoid: at most {AVOID_MAX} names, got {len(request.avoid)}")
            asked = self._asked(request.prompt, context)
            found = self._deployments.pick(asked, frozenset(request.avoid))
            self._deployments.sent(found.ticket)
            self._out[found.ticket] = _Out(self._front.clock.now())
        except KVStoreError as error:
            await _abort(context, error)
        return pb.PickResponse(
            ticket=found.ticket,
            replica=found.replica,
            url=found.url,
            expected_tokens=found.expected_tokens,
            reason=found.reason,
            cache_salt=asked.salt,
        )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:  # noqa: N802
        """See routing.proto."""
        try:
            asked = self._asked(request.prompt, context)
            router = self._deployments.all[self._deployments.find(asked.model)].router
            fleet, choice = router.score(asked)
        except KVStoreError as error:
            await _abort(context, error)
        urls = {member.name: member.url for member in router.members}
        answer = pb.ScoreResponse(chosen=fleet.names[choice.replica], reason=choice.reason)
        for i, name in enumerate(fleet.names):
            gpu, host, nvme, matched = (int(tokens) for tokens in fleet.matched_tokens[i])
            standing = answer.replicas.add(
                replica=name,
                url=urls[name],
                gpu_tokens=gpu,
                host_tokens=host,
                nvme_tokens=nvme,
                matched_tokens=matched,
                in_flight=int(fleet.in_flight[i]),
                queue_s=float(fleet.queue_s[i]),
                prefill_tokens_per_s=float(fleet.prefill_tokens_per_s[i]),
            )
            if choice.score_s is not None:
                standing.score_s = float(choice.score_s[i])
        return answer

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:  # noqa: N802
        """See routing.proto."""
        try:
            self._admit(context, "")
            if len(request.reports) > REPORTS_MAX:
                raise BadRequest(f"reports: at most {REPORTS_MAX}, got {len(request.reports)}")
            for number, report in enumerate(request.reports):
                if report.WhichOneof("what") is None:
                    raise BadRequest(f"reports[{number}].what: need first_byte or finished")
        except KVStoreError as error:
            await _abort(context, error)
        return pb.ReportResponse(
            unknown=[each.ticket for each in request.reports if not self._reported(each)]
        )

    async def Warm(self, request: pb.WarmRequest, context: Any) -> AsyncIterator[pb.WarmResponse]:  # noqa: N802
        """See routing.proto."""
        try:
            self._front.door.administer(_authorization(context))
            if not 1 <= request.top <= HEADS_MAX:
                raise BadRequest(f"top: need 1 to {HEADS_MAX}, got {request.top}")
            model, router, member = self._member(request.replica)
        except KVStoreError as error:
            await _abort(context, error)
        heads = router.heads.top(request.top)
        key, number = self._front.keys.get(member.name, ""), 0
        async for done in warm(self._front.clock, member.url, key, model, heads):
            number += 1
            yield pb.WarmResponse(
                number=number,
                of=len(heads),
                prompt_tokens=done.prompt_tokens,
                cached_tokens=done.cached_tokens,
                seconds=done.seconds,
                error=done.error,
            )

    def _member(self, name: str) -> tuple[str, Router, Member]:
        for each in self._deployments.all:
            for member in each.router.members:
                if member.name == name:
                    return each.model, each.router, member
        known = [member.name for each in self._deployments.all for member in each.router.members]
        raise NotFound(f"replica: {name!r:.80} is none of {', '.join(known)}")

    def _reported(self, report: pb.TicketReport) -> bool:
        out = self._out.get(report.ticket)
        if out is None:
            return False
        out.heard_s = self._front.clock.now()
        if report.WhichOneof("what") == "first_byte":
            self._deployments.first_byte(report.ticket, report.first_byte.seconds)
            return True
        del self._out[report.ticket]
        told = report.finished
        self._deployments.finished(
            report.ticket,
            told.cached_tokens if told.HasField("cached_tokens") else None,
            told.prompt_tokens if told.HasField("prompt_tokens") else None,
            told.output_tokens if told.HasField("output_tokens") else None,
            not told.failed,
        )
        return True

    async def sweep(self) -> None:
        """Until cancelled: lets go of what belongs to callers that are gone."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.let_go()

    def let_go(self) -> int:
        """Of what has been silent for too long; how many tickets."""
        until_s = self._front.clock.now() - self._report_s
        gone = [ticket for ticket, out in self._out.items() if out.heard_s < until_s]
        for ticket in gone:
            del self._out[ticket]
            self._deployments.finished(ticket, None, None, None, ok=True)
        return len(gone)

    def _asked(self, prompt: pb.Prompt, context: Any) -> RouteRequest:
        caller = self._admit(context, prompt.tenant)
        for name in ("model", "session", "tenant"):
            if len(getattr(prompt, name)) > NAME_CHARS_MAX:
                raise BadRequest(f"prompt.{name}: at most {NAME_CHARS_MAX} characters")
        if len(prompt.tokens) > TOKENS_MAX:
            raise BadRequest(f"prompt.tokens: at most {TOKENS_MAX}, got {len(prompt.tokens)}")
        if not prompt.slo_s >= 0:
            raise BadRequest(f"prompt.slo_s: need seconds of 0 at least, got {prompt.slo_s}")
        return RouteRequest(
            model=prompt.model,
            tokens=np.fromiter(prompt.tokens, np.uint32, len(prompt.tokens)),
            exact=True,
            session=prompt.session,
            tenant=caller.tenant,
            salt=caller.salt,
            slo_s=prompt.slo_s or None,
        )

    def _admit(self, context: Any, tenant: str) -> Any:
        return self._front.door.admit(_authorization(context), tenant)


def _authorization(context: Any) -> str:
    return str(dict(context.invocation_metadata() or ()).get("authorization", ""))


async def _abort(context: Any, error: KVStoreError) -> None:
    await context.abort(grpc.StatusCode[STATUS[type(error)]], str(error)[:1000])
