"""Reuse with real keys: a conversation that grows, and tenants that must not find each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadRequest
from kvstore.keys import KeyChain
from kvstore.types import Namespace

__all__ = ["KeyedReplica", "Probe", "Turns", "converse", "isolation_probes"]

_ROOT = bytes(32)


class KeyedReplica:
    """One replica that never evicts and knows blocks by their keys alone.

    Args:
        block_tokens: tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: set[bytes] = set()

    def save(self, root: bytes, tokens: NDArray[np.uint32]) -> None:
        """Keep the full blocks of these tokens."""
        self._keys.update(self._chain(root, tokens))

    def match(self, root: bytes, tokens: NDArray[np.uint32]) -> int:
        """Tokens of the longest prefix that is there, in full blocks."""
        count = 0
        for key in self._chain(root, tokens):
            if key not in self._keys:
                break
            count += self._block_tokens
        return count

    def _chain(self, root: bytes, tokens: NDArray[np.uint32]) -> list[bytes]:
        return [key.tobytes() for key in KeyChain.of(root, tokens, self._block_tokens).keys]


@dataclass(frozen=True, slots=True)
class Turns:
    """Tokens by turn.

    Attributes:
        reused: found in full blocks.
        fresh: computed.
        ideal: of the whole conversation, if every token that was ever seen could be found.
    """

    reused: tuple[int, ...]
    fresh: tuple[int, ...]
    ideal: int


def converse(inputs: Sequence[int], prior_outputs: Sequence[int], block_tokens: int = 16) -> Turns:
    """Hold a conversation: each prompt is the one before, its answer, and something new.

    The last token of an answer was sampled and never run through the model, so it has no KV yet.

    Args:
        inputs: tokens of each prompt.
        prior_outputs: tokens of the answer before each prompt; 0 before the first.

    Raises:
        BadRequest: a prompt is shorter than what was said before it.
    """
    if len(inputs) != len(prior_outputs):
        raise BadRequest("prior_outputs: need one for each input")
    replica = KeyedReplica(block_tokens)
    said = np.empty(0, np.uint32)
    ids = iter(range(1 << 32))
    reused, ideal = [], 0
    for length, answer in zip(inputs, prior_outputs, strict=True):
        if len(said):
            said = _longer(said, len(said) + answer, ids)
            replica.save(_ROOT, said[: len(said) - 1])
        if length < len(said):
            raise BadRequest(f"inputs: {length} tokens are fewer than the {len(said)} said before")
        ideal += len(said)
        said = _longer(said, length, ids)
        reused.append(replica.match(_ROOT, said))
    fresh = (length - found for length, found in zip(inputs, reused, strict=True))
    return Turns(tuple(reused), tuple(fresh), ideal)


def _longer(tokens: NDArray[np.uint32], length: int, ids: Iterator[int]) -> NDArray[np.uint32]:
    """Up to a length, with token ids that were never used."""
    new = np.fromiter(ids, np.uint32, length - len(tokens))
    return np.concatenate([tokens, new])


@dataclass(frozen=True, slots=True)
class Probe:
    """Somebody asks for what somebody else saved.

    Attributes:
        what: in words.
        hit: whether it was found.
    """

    what: str
    hit: bool


def isolation_probes() -> list[Probe]:
    """Save a prompt as one tenant, ask for the same tokens as others do.

    Without salts the second tenant finds it; with salts of their own, under another revision of the model or
    under another adapter nobody does.
    """
    tokens = np.arange(1000, 1256, dtype=np.uint32)
    base = _namespace()
    salts = [bytes([number]) * 32 for number in (1, 2)]
    cases = [
        ("another tenant, no salts", base.root(b""), base.root(b"")),
        ("another tenant, each with a salt", base.root(salts[0]), base.root(salts[1])),
        ("the same tenant again", base.root(salts[0]), base.root(salts[0])),
        ("another revision of the model", base.root(salts[0]), _namespace(weights="r2").root(salts[0])),
        ("another adapter", base.root(salts[0]), _namespace(adapter="lora-7").root(salts[0])),
    ]
    probes = []
    for what, owner, caller in cases:
        replica = KeyedReplica(16)
        replica.save(owner, tokens)
        probes.append(Probe(what, replica.match(caller, tokens) > 0))
    return probes


def _namespace(weights: str = "r1", adapter: str = "none") -> Namespace:
    return Namespace("simulated", weights, "t1", adapter, "full", "float16", "simulated", "16")
