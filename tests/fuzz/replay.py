"""Send the pieces of a failed run again, to a fresh daemon with the same salts.

Lease ids, keys and roots are the same in every run; tokens of fillings start at random, so those that a
message names are moved by the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvstore.rpc import messages as m

from .talk import Stage, Talk, framed

__all__ = ["replay"]

# Tokens of one run lie this close behind its first.
_TOKENS_SPAN = 1 << 30
_HONEST_STEPS = m.Attach | m.Quiesced | m.Prove | m.ProvedStore | m.Proved
_decode = msgspec.msgpack.Decoder(m.RequestFrame).decode


def replay(path: Path, stage: Stage) -> None:
    """Send every piece of a failed run, whose first session that of `stage` stands for.

    The steps of an honest beginning came one by one: each one's answer is awaited, and the proof is given.
    """
    lines = path.read_bytes().splitlines()
    facts = msgspec.json.decode(lines[0])
    first, by = facts["token"], stage.token - facts["token"]
    talks: dict[int, Talk] = {}
    for line in lines[1:]:
        number, what, data = msgspec.json.decode(line, type=tuple[int, str, str])
        if number == 0:
            continue
        if what == "close":
            if number in talks:
                talks.pop(number).close()
            continue
        talk = talks[number] = talks.get(number) or Talk(stage)
        if not talk.open:
            continue
        frames = _moved(bytes.fromhex(data), first, by)
        if len(frames) != 1 or not isinstance(_body(frames[0]), _HONEST_STEPS):
            talk.send(frames)
            if talk.open:
                talk.catch_up()
            continue
        answer = talk.exchange(frames[0])
        if isinstance(answer, m.ProveSlot):
            stage.write_pattern(answer)
    for talk in talks.values():
        talk.hang_up()


def _moved(data: bytes, token: int, by: int) -> list[bytes]:
    """The same frames, with the tokens of this daemon; what is no whole frame comes last."""
    out, at = [], 0
    while len(data) - at >= 4:
        length = int.from_bytes(data[at : at + 4], "little")
        payload = data[at + 4 : at + 4 + length]
        at += 4 + length
        frame = length.to_bytes(4, "little") + payload
        body = _body(frame)
        if isinstance(body, m.Publish | m.Abort) and token <= body.token < token + _TOKENS_SPAN:
            moved = msgspec.structs.replace(body, token=body.token + by)
            frame = framed(msgspec.msgpack.encode([_decode(payload).id, moved]))
        out.append(frame)
    return [*out, data[at:]] if data[at:] else out


def _body(frame: bytes) -> Any:
    """The message in a whole frame; None for anything else."""
    if int.from_bytes(frame[:4], "little") != len(frame) - 4:
        return None
    try:
        return _decode(frame[4:]).body
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
