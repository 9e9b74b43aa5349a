"""Where prompts that belong together part too early, and what that costs.

The prompts, sorted by their tokens, are the leaves of their prefix tree from left to right; the blocks that
each shares with its neighbour give every inner node. At a node where paths part, each path's first prompt is
laid beside those of others: if both texts go on alike behind a piece that differs, they are one family, and
what they have in common behind that piece would have been reused had the piece stood at the end:

    lost = ⌊(p + r) / b⌋ · b − d · b      p tokens in common before, r behind, b in a block; d blocks shared
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.router.causes import Cause, Difference, cause_of

__all__ = ["Divergence", "Findings", "Prompt", "find_divergences"]

# How far behind the parting the texts may meet again; a longer piece (a retrieved page) is rarely a mistake.
_WINDOW_CHARS = 8192
# Texts that are the same for this long have met again; then one of the pieces of half that length, at every
# such step, lies within what is the same.
_SAME_CHARS = 64
_STEP_CHARS = 32
_LEADERS_MAX = 8
# Comparisons in all: 0.1 to 0.5 ms each.
PAIRS_MAX = 20_000
_SHOWN_CHARS = 48
_EXAMPLES_MAX = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """One that was read.

    Attributes:
        line: in its file, from 1 on.
        text: as the model sees it.
        tokens: (n,) uint32 of that text.
        tools: the canonical JSON of each tool, in the order of the request.
    """

    line: int
    text: str
    tokens: NDArray[np.uint32]
    tools: tuple[str, ...] = ()


@dataclass(slots=True)
class Divergence:
    """One place where a family parts.

    Attributes:
        cause: what varies.
        block: the first that is not shared.
        token: the first that is not the same.
        line: of the first prompt that shows it.
        prompts: below this place.
        variants: different pieces found there.
        lost_tokens: that would have been reused.
        before: the text before it.
        examples: the pieces, some of them.
        after: the text behind it.
    """

    cause: Cause
    block: int
    token: int
    line: int
    prompts: int
    variants: int
    lost_tokens: int
    before: str
    after: str
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Findings:
    """About all prompts.

    Attributes:
        tokens: of all.
        reusable_tokens: in full blocks, by prompts that an unbounded cache has seen others of.
        divergences: the costliest first.
        paths_left_out: paths that were not compared because there are too many.
    """

    tokens: int
    reusable_tokens: int
    divergences: tuple[Divergence, ...]
    paths_left_out: int

    @property
    def lost_tokens(self) -> int:
        """Of all divergences."""
        return sum(divergence.lost_tokens for divergence in self.divergences)


@dataclass(frozen=True, slots=True)
class Measures:
    """How a tokenizer counts.

    Attributes:
        tokens_before: (text, character) → tokens that begin before it.
        in_order_of: (prompt, other) → tokens of the first with its tools in the other's order.
    """

    tokens_before: Callable[[str, int], int]
    in_order_of: Callable[[Prompt, Prompt], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class _Node:
    """Prompts [start, stop) of the sorted ones share `depth` blocks; a path begins at each of `paths`."""

    depth: int
    start: int
    stop: int
    paths: tuple[int, ...]


def find_divergences(prompts: Sequence[Prompt], block_tokens: int, measures: Measures) -> Findings:
    """Look at all of them.

    Cost: a sort, and up to PAIRS_MAX comparisons of texts (some seconds at the most).

    Args:
        prompts: any number.
        block_tokens: tokens per block.
        measures: of the tokenizer that they were made with.
    """
    ordered = sorted(prompts, key=lambda prompt: prompt.tokens.astype(">u4").tobytes())
    shared = [_shared_tokens(a.tokens, b.tokens) // block_tokens for a, b in itertools.pairwise(ordered)]
    search = _Search(ordered, block_tokens, measures)
    for node in _nodes(np.asarray([0, *shared], np.int64)):
        search.look_at(node)
    return Findings(
        sum(prompt.tokens.size for prompt in prompts),
        sum(shared) * block_tokens,
        tuple(sorted(search.found.values(), key=lambda d: (-d.lost_tokens, d.line))),
        search.paths_left_out,
    )


def _nodes(shared: NDArray[np.int64]) -> Iterator[_Node]:
    """Inner nodes of the prefix tree, given the blocks that each prompt shares with the one before."""
    todo = [(0, shared.size)]
    while todo:
        start, stop = todo.pop()
        if stop - start < 2:
            continue
        inner = shared[start + 1 : stop]
        depth = int(inner.min())
        cuts = [start, *(start + 1 + np.flatnonzero(inner == depth)).tolist(), stop]
        yield _Node(depth, start, stop, tuple(cuts[:-1]))
        todo += itertools.pairwise(cuts)


class _Search:
    """Compares paths, and adds up what the same piece costs at several nodes."""

    def __init__(self, ordered: Sequence[Prompt], block_tokens: int, measures: Measures) -> None:
        self._ordered = ordered
        self._block_tokens = block_tokens
        self._measures = measures
        self._pairs = 0
        self.paths_left_out = 0
        self.found: dict[tuple[Cause, str, str], Divergence] = {}

    def look_at(self, node: _Node) -> None:
        leaders: list[Prompt] = []
        at_node: dict[tuple[Cause, str, str], Divergence] = {}
        stops = (*node.paths[1:], node.stop)
        firsts = [min(self._ordered[a:b], key=_line) for a, b in zip(node.paths, stops, strict=True)]
        for prompt in sorted(firsts, key=_line):
            if prompt.tokens.size < (node.depth + 1) * self._block_tokens:
                continue  # it ends here
            if self._pairs >= PAIRS_MAX:
                self.paths_left_out += 1
                continue
            if not any(self._belong(leader, prompt, node, at_node) for leader in leaders):
                leaders = [*leaders, prompt][:_LEADERS_MAX]
        for key, divergence in at_node.items():
            known = self.found.get(key)
            if known is None:
                self.found[key] = divergence
            else:
                _add(known, divergence)

    def _belong(
        self,
        leader: Prompt,
        prompt: Prompt,
        node: _Node,
        at_node: dict[tuple[Cause, str, str], Divergence],
    ) -> bool:
        self._pairs += 1
        met = _meet(leader, prompt)
        if met is None:
            return False
        one, other, same_chars = met
        reordered = leader.tools != prompt.tools and sorted(leader.tools) == sorted(prompt.tools)
        cause = Cause.TOOL_ORDER if reordered else cause_of(one, other)
        together = self._together(leader, prompt, one, same_chars, reordered=reordered)
        lost = (together // self._block_tokens - node.depth) * self._block_tokens
        if lost <= 0:
            return False
        word = one.whole(cause)
        before = word.text[max(0, word.start - _SHOWN_CHARS) : word.start]
        after = word.text[word.stop : word.stop + _SHOWN_CHARS]
        key = (cause, before, after)
        known = at_node.get(key)
        if known is None:
            first = _shared_tokens(leader.tokens, prompt.tokens)
            prompts = node.stop - node.start
            known = Divergence(
                cause, node.depth, first, leader.line, prompts, 1, 0, before, after, [_shown(one, cause)]
            )
            at_node[key] = known
        known.variants += 1
        known.lost_tokens += lost
        if len(known.examples) < _EXAMPLES_MAX:
            known.examples.append(_shown(other, cause))
        return True

    def _together(
        self, leader: Prompt, prompt: Prompt, one: Difference, same_chars: int, *, reordered: bool
    ) -> int:
        """Tokens that both would have in common from their beginning on."""
        if reordered:
            return _shared_tokens(leader.tokens, self._measures.in_order_of(prompt, leader))
        before = self._measures.tokens_before
        behind = before(leader.text, one.stop + same_chars) - before(leader.text, one.stop)
        return _shared_tokens(leader.tokens, prompt.tokens) + behind


def _add(known: Divergence, more: Divergence) -> None:
    known.block, known.token = min((known.block, known.token), (more.block, more.token))
    known.line = min(known.line, more.line)
    known.prompts += more.prompts
    known.variants = max(known.variants, more.variants)
    known.lost_tokens += more.lost_tokens


def _line(prompt: Prompt) -> int:
    return prompt.line


def _shown(difference: Difference, cause: Cause) -> str:
    word = difference.whole(cause).span
    return word if len(word) <= _SHOWN_CHARS else word[: _SHOWN_CHARS - 1] + "…"


def _meet(a: Prompt, b: Prompt) -> tuple[Difference, Difference, int] | None:
    """Where two texts part, where they meet again, and for how many characters; None = they do not."""
    parted = _shared_chars(a.text, 0, b.text, 0)
    stop = parted + _WINDOW_CHARS
    for at in range(parted, min(len(b.text) - _STEP_CHARS, stop), _STEP_CHARS):
        found = a.text.find(b.text[at : at + _STEP_CHARS], parted, stop)
        if found < 0:
            continue
        back = 0
        while min(found, at) - back > parted and a.text[found - back - 1] == b.text[at - back - 1]:
            back += 1
        same = _shared_chars(a.text, found - back, b.text, at - back)
        if same >= _SAME_CHARS:
            return Difference(a.text, parted, found - back), Difference(b.text, parted, at - back), same
    return None


def _shared_chars(a: str, i: int, b: str, j: int) -> int:
    """Length of what a[i:] and b[j:] begin with."""
    low, step, most = 0, 64, min(len(a) - i, len(b) - j)
    while low < most and a[i + low : i + low + step] == b[j + low : j + low + step]:
        low, step = low + step, step * 2
    low, high = min(low, most), min(low + step, most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared_tokens(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    most = min(a.size, b.size)
    differ = np.flatnonzero(a[:most] != b[:most])
    return int(differ[0]) if differ.size else most
