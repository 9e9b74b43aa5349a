"""How fuzzed conversations go, and their ends: each end sends something that closes the connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.rpc import messages as m

from .hostile import damaged, shapeless
from .talk import ENGINES, Stage, Talk, encode, framed

__all__ = ["conversation"]

_BATCH_MAX = 32


def _polite(talk: Talk) -> None:
    talk.hang_up()


def _rude(talk: Talk) -> None:
    talk.close()


def _noise(talk: Talk) -> None:
    talk.send([talk.stage.chance.randbytes(talk.stage.chance.choice((1, 3, 4, 5, 64, 4096)))])
    talk.hang_up()


def _bad_length(talk: Talk) -> None:
    chance = talk.stage.chance
    length = chance.choice((0, m.FRAME_BYTES_MAX + 1, 1 << 31, (1 << 32) - 1, chance.getrandbits(32)))
    talk.send([length.to_bytes(4, "little") + chance.randbytes(chance.randrange(200))])
    talk.hang_up()


def _wrong_length(talk: Talk) -> None:
    """A good payload under a length that is a little off: the rest is read as frames."""
    payload = talk.honest_payload()
    length = max(0, len(payload) + talk.stage.chance.randint(-6, 6))
    talk.send([length.to_bytes(4, "little") + payload] * 2)
    talk.hang_up()


def _truncated(talk: Talk) -> None:
    data = framed(talk.honest_payload())
    talk.send([data[: talk.stage.chance.randrange(len(data))]])
    (_polite if talk.stage.chance.random() < 0.5 else _rude)(talk)


def _shapeless(talk: Talk) -> None:
    chance = talk.stage.chance
    body = shapeless(chance)
    talk.send([framed(encode(body if chance.random() < 0.3 else [1, body]))])
    talk.hang_up()


def _damaged(talk: Talk) -> None:
    chance = talk.stage.chance
    talk.send([framed(damaged(chance, talk.honest_payload())) for _ in range(chance.randint(1, 4))])
    talk.hang_up()


def _descriptors(talk: Talk) -> None:
    talk.send_with_fds(framed(talk.honest_payload()), talk.stage.chance.randint(1, 8))
    talk.hang_up()


def _deaf(talk: Talk) -> None:
    """Asks and asks and never reads; the daemon must give up, not grow."""
    questions = framed(encode([1, m.Status()])) * 256
    while talk.open:
        talk.send([questions])  # counted as one: the daemon does not read them all
    talk.close()


_ENDS: dict[Callable[[Talk], None], float] = {
    _polite: 2,
    _rude: 1,
    _noise: 1,
    _bad_length: 1,
    _wrong_length: 1,
    _truncated: 1,
    _shapeless: 2,
    _damaged: 3,
    _descriptors: 0.5,
}
# (role, weight): most sessions are attached, for the code behind the door is where the bugs are.
_ROLES = {"both": 4.0, "scheduler": 3.0, "worker": 1.0, "tool": 0.5, "": 8.0}


def conversation(stage: Stage, *, deaf: bool = False) -> Iterator[None]:
    """One connection from open to end; yields between its batches so that others get a word in."""
    chance = stage.chance
    role = "tool" if deaf else chance.choices(list(_ROLES), list(_ROLES.values()))[0]
    with Talk(stage, role, chance.choice(ENGINES)) as talk:
        if role not in ("", "tool") and not deaf:
            if chance.random() < 0.6:
                kind = chance.choice(("owned", "owned", "borrowed"))
                talk.tell(m.Pool(kind, 96, chance.choice((0, 16, 96))))
            for _ in range(chance.choice((1, 3, 8, 16))):
                if not talk.open:
                    break
                talk.batch(chance.randint(1, _BATCH_MAX))
                yield
        if talk.open:
            end = _deaf if deaf else chance.choices(list(_ENDS), list(_ENDS.values()))[0]
            stage.tally.endings[end.__name__.lstrip("_")] += 1
            end(talk)
