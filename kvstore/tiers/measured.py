"""What one promotion teaches of its disk: when it asked, when its bytes came, what else came meanwhile.

    every block that it asked for came    seconds until the last of them
    it was given up because it lagged     seconds that it would have taken, at the pace so far
    it ended early for another reason     what came, and the seconds until the last of that
    nothing came                          nothing: whoever gave it up says so to kvstore/policy/trust.py

Blocks that somebody else was bringing are not among them, nor the time until those came.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.policy.rates import Transfer

__all__ = ["SECONDS_MAX", "Measured"]

SECONDS_MAX = 1e6  # what a Transfer takes


@dataclass(slots=True)
class Measured:
    """Of one promotion. Blocks are its own.

    Attributes:
        began_s: when it asked.
        block_bytes: of one block.
        ahead_bytes: what others had to bring of the same disk when it began, as far as it is in its way.
        brought_before_bytes: that the disk had brought for anybody by then.
        blocks: that came.
        first_s, last_s: when the first and the last of these came.
        first_blocks: how many came first.
        over: it was reported, or never will be.
    """

    began_s: float
    block_bytes: int
    ahead_bytes: int
    brought_before_bytes: int
    blocks: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    first_blocks: int = 0
    over: bool = False

    def came(self, blocks: int, now_s: float) -> None:
        """So many more are there."""
        if not self.blocks:
            self.first_s, self.first_blocks = now_s, blocks
        self.blocks += blocks
        self.last_s = now_s

    def ended(self, brought_bytes: int, *, whole: bool = True) -> Transfer | None:
        """It ended, for whatever reason that is not lag; None = there is nothing to learn.

        Args:
            brought_bytes: that the disk has brought for anybody by now: others may have come after it.
            whole: all that was asked for came.
        """
        self.over = True
        if not self.blocks:
            return None
        others = brought_bytes - self.brought_before_bytes - self.blocks * self.block_bytes
        return Transfer(
            self.blocks * self.block_bytes,
            max(self.ahead_bytes, others),
            max(0.0, self.last_s - self.began_s),
            max(0.0, self.first_s - self.began_s),
            self.first_blocks * self.block_bytes,
            whole=whole,
        )

    def gave_up(self, blocks: int, brought_bytes: int, now_s: float) -> Transfer | None:
        """It lagged; None = there is nothing to learn.

        Args:
            blocks: that it had asked for or would have.
            brought_bytes: that the disk has brought for anybody by now.
        """
        self.over = True
        size, seconds = blocks * self.block_bytes, max(0.0, now_s - self.began_s, self.last_s - self.began_s)
        if not self.blocks:
            return None
        first_s, first = max(0.0, self.first_s - self.began_s), self.first_blocks * self.block_bytes
        if not self.ahead_bytes:
            arrived = self.blocks * self.block_bytes
            return Transfer.cut_short(max(size, arrived), arrived, seconds, first_s, first)
        # With others ahead the disk's pace is what it brought for all of them.
        total = size + self.ahead_bytes
        through = min(max(brought_bytes - self.brought_before_bytes, 1), total)
        whole_s = min(seconds * total / through, SECONDS_MAX)
        return Transfer(size, self.ahead_bytes, whole_s, given_up=True)
