"""What an engine tells of a request beside its keys."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import BadRequest

__all__ = ["MODES", "Intent"]

# Names of vLLM have 40; a caller that takes its clients' own may cut them.
REQUEST_CHARS_MAX = 1024
MODES = ("decide", "load", "recompute")
"""Of `plan.mode`."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What an engine tells of a request when it looks its KV up, so that the daemon can plan it.

    Attributes:
        prompt_tokens: of the whole request; 0 = as many as the blocks that are asked about hold.
        request: the engine's name for it, for `kvstore explain`; "" = none.
        queued_s: until the engine could begin to compute it.
        can_split: the engine can compute a head while a tail is loading.
        decodes, decode_context: sequences that decode meanwhile, and the tokens of their contexts.
        chunk_tokens: most prompt tokens of one step; 0 = as many as the largest step that was seen.
        mode: as `plan.mode`, for this request alone; "" = what the daemon's says. For experiments.

    Raises:
        BadRequest: names the field.
    """

    prompt_tokens: int = 0
    request: str = ""
    queued_s: float = 0.0
    can_split: bool = False
    decodes: int = 0
    decode_context: int = 0
    chunk_tokens: int = 0
    mode: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "decodes", "decode_context", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < 1 << 31:
                raise BadRequest(f"intent.{name}: need 0 to 2^31 - 1, got {value!r:.80}")
        if not 0.0 <= self.queued_s <= 86_400.0:  # NaN too
            raise BadRequest(f"intent.queued_s: need 0 to 86400 seconds, got {self.queued_s!r:.80}")
        if not isinstance(self.request, str) or len(self.request) > REQUEST_CHARS_MAX:
            raise BadRequest(
                f"intent.request: need at most {REQUEST_CHARS_MAX} characters, got {self.request!r:.80}"
            )
        if self.mode and self.mode not in MODES:
            raise BadRequest(f"intent.mode: need one of {', '.join(MODES)} or nothing, got {self.mode!r:.80}")
