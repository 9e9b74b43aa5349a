"""Time to first token of a prompt through vLLM: computed, from its own prefix cache, by a connector.

Arms of bench.measure; vLLM's own hit is the limit (and runs twice in every turn, as control): no connector
can answer sooner than an engine that has the blocks already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.measure import Arm, Measured, Ratio, measure
from bench.vllm_processes import EngineProcess

__all__ = ["Turns", "cold_over_host", "identical"]

ANSWER_TOKENS = 64


@dataclass(slots=True)
class Turns:
    """Prompts of one length, new ones every turn.

    Attributes:
        computing: the engine that computes them.
        loading: the engine that gets them from the store, and then has them itself; may be the same one.
        length: tokens of a prompt.
        vocab: of the model.
        seed: of the prompts.
    """

    computing: EngineProcess
    loading: EngineProcess
    length: int
    vocab: int
    seed: int
    block_tokens: int = 128
    _prompt: list[int] = field(default_factory=list)
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([self.seed, self.length])

    def measure(self, turns: int) -> Measured:
        """`turns` of each, after one that does not count."""
        self._cold()
        limit = Arm("own", self._own, self._warm)
        return measure([limit], [Arm("host", self._host, self._forget), Arm("cold", self._cold)], turns=turns)

    def new_prompt(self) -> list[int]:
        """Random tokens that no engine has seen."""
        return [int(token) for token in self._random.integers(3, self.vocab, self.length)]

    def _cold(self) -> float:
        self._prompt = self.new_prompt()
        answer = self.computing.generate(self._prompt, 1)
        if answer.own or answer.external:
            raise SystemExit(f"a prompt that nobody has seen was found: {answer}")
        self.computing.drain()
        return answer.ttft_s

    def _warm(self) -> None:
        self.loading.generate(self._prompt, 1)
        self.loading.drain()

    def _own(self) -> float:
        answer = self.loading.generate(self._prompt, 1)
        whole = (self.length - 1) // self.block_tokens * self.block_tokens
        if answer.own != whole or answer.external:
            raise SystemExit(f"vLLM should have had {whole} tokens itself, not {answer.own}")
        self.loading.drain()
        return answer.ttft_s

    def _forget(self) -> None:
        self.loading.drain()
        if not self.loading.forget():
            raise SystemExit("the engine could not forget its blocks")

    def _host(self) -> float:
        answer = self.loading.generate(self._prompt, 1)
        least = (self.length - 1) // self.block_tokens * self.block_tokens
        if answer.own or answer.external < least:
            raise SystemExit(f"{least} tokens should have been loaded, {answer.external} were")
        self.loading.drain()
        return answer.ttft_s


def cold_over_host(done: Measured) -> Ratio:
    """How many times sooner the first token comes, turn by turn."""
    return Ratio.of([a / b for a, b in zip(done.wall_s["cold"], done.wall_s["host"], strict=True)])


def identical(turns: Turns, prompts: int = 2) -> bool:
    """Greedy answers of the three ways, token by token."""
    same = True
    for _ in range(prompts):
        prompt = turns.new_prompt()
        cold = turns.computing.generate(prompt, ANSWER_TOKENS)
        turns.computing.drain()
        turns.loading.forget()
        host = turns.loading.generate(prompt, ANSWER_TOKENS)
        turns.loading.drain()
        own = turns.loading.generate(prompt, ANSWER_TOKENS)
        if cold.external or cold.own or not host.external or host.own or own.external or not own.own:
            raise SystemExit(f"not the three ways: {cold}, {host}, {own}")
        same = same and cold.tokens == host.tokens == own.tokens and len(cold.tokens) == ANSWER_TOKENS
    return same
