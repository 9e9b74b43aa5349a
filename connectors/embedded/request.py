"""What a caller asks of the engine and what it is told: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .spec import ModelSpec
from .tables import Reuse, blocks_for

__all__ = ["FinishReason", "InvalidRequest", "Output", "Report", "Request", "StepTime", "check_request"]

FinishReason = Literal["stop", "length", "abort", "no_room"]
"""stop: an end token · length: max_new_tokens · abort: the caller · no_room: no blocks, for too long."""

_REUSES = ("none", "own", "group")
_SEED_MAX = 2**63 - 1


class InvalidRequest(ValueError):
    """A request that can never be served. `field` names the part of it that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        id: unique among the engine's unfinished requests.
        prompt: token ids.
        max_new_tokens: at most this many tokens are generated.
        temperature: 0 is greedy.
        top_p: nucleus, used when temperature > 0.
        seed: for temperature > 0; None draws one.
        stop_ids: tokens that end the output besides the model's own; the ending token is part of the output.
        ignore_eos: go on after the model's end tokens (not after `stop_ids`).
        reuse: whose KV may be reused: none | own | group.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    reuse: Reuse = "group"


@dataclass(frozen=True, slots=True)
class Report:
    """The account of one request. `prompt_tokens == fresh_tokens + Σ reused`, once there was a first token.

    Attributes:
        reused: prompt tokens by tier whose KV was brought in and that this request never computed itself.
        fresh_tokens: prompt tokens that this request computed itself, each counted once.
        recomputed_tokens: tokens computed once more after a preemption (prompt and output).
        ttft_s: from `add` to the first token; None when there was none.
        total_s: from `add` to the end.
        tied_tokens: greedy choices between two logits so close that rounding decides.
        prefill_s: from its admission to the first token; None when there was none, or it was preempted.
    """

    request_id: str
    prompt_tokens: int
    reused: Mapping[str, int]
    fresh_tokens: int
    recomputed_tokens: int
    ttft_s: float | None
    total_s: float
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    preemptions: int
    tied_tokens: int
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of a request, or its end. `report` is set once per request, in its last output."""

    request_id: str
    token: int | None
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's work and duration: what a prefill curve is fitted to.

    Attributes:
        prefill_tokens: P, tokens of prefill chunks.
        prefill_area: Σ p · (start + p / 2) over the chunks: pairs of tokens that attention visits.
        decodes: sequences that got one token.
        decode_context: Σ context length over the decodes.
        seconds: forward and sampling.
    """

    prefill_tokens: int
    prefill_area: float
    decodes: int
    decode_context: int
    seconds: float


def check_request(request: Request, spec: ModelSpec, block_tokens: int, capacity_blocks: int) -> None:
    """Refuse what can never be served, before it costs anything.

    Raises:
        InvalidRequest: names the field, its value, the limit.
    """
    size = len(request.prompt)
    if not request.id:
        raise InvalidRequest("id", "is empty; name the request")
    if not size:
        raise InvalidRequest("prompt", "is empty; at least one token is needed")
    if size >= spec.positions_max:
        raise InvalidRequest("prompt", f"has {size} tokens; the model has {spec.positions_max} positions")
    for index, token in enumerate(request.prompt):
        if not 0 <= token < spec.vocab:
            raise InvalidRequest("prompt", f"token {token} at {index} is outside of [0, {spec.vocab})")
    wanted = request.max_new_tokens
    if wanted < 1:
        raise InvalidRequest("max_new_tokens", f"is {wanted}; at least 1 is needed")
    if size + wanted > spec.positions_max:
        most = spec.positions_max - size
        raise InvalidRequest("max_new_tokens", f"is {wanted}; the model has {most} positions left")
    # The last token is never fed back, so no KV exists for it.
    room = capacity_blocks * block_tokens
    if blocks_for(size, block_tokens) > capacity_blocks:
        raise InvalidRequest("prompt", f"has {size} tokens; the KV pool holds {room} in all")
    if blocks_for(size + wanted - 1, block_tokens) > capacity_blocks:
        most = room - size + 1
        raise InvalidRequest("max_new_tokens", f"is {wanted}; after this prompt the KV pool holds {most}")
    _check_sampling(request, spec)


def _check_sampling(request: Request, spec: ModelSpec) -> None:
    if not 0.0 <= request.temperature < float("inf"):
        raise InvalidRequest("temperature", f"is {request.temperature}; it must be 0 (greedy) or positive")
    if not 0.0 < request.top_p <= 1.0:
        raise InvalidRequest("top_p", f"is {request.top_p}; it must be in (0, 1]")
    if request.seed is not None and not 0 <= request.seed <= _SEED_MAX:
        raise InvalidRequest("seed", f"is {request.seed}; it must be in [0, 2**63)")
    if request.reuse not in _REUSES:
        raise InvalidRequest("reuse", f"is {request.reuse!r}; it must be one of {', '.join(_REUSES)}")
    for token in request.stop_ids:
        if not 0 <= token < spec.vocab:
            raise InvalidRequest("stop_ids", f"token {token} is outside of [0, {spec.vocab})")
