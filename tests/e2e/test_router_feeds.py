"""The feed of a vLLM engine: sequence-gap detection and recovery that cannot loop, whatever it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from fake_vllm import FakeVllm, TruthSink

from kvstore.router.feeding import FeedTimes
from kvstore.router.vllm_feed import REPLAYS_MAX, VllmFeed

WAIT_S = 30.0
# Beside the one question a second after a connection nothing is asked unless something happens.
CALM = FeedTimes(probe_s=math.inf, answer_s=0.2, attempts=3, retry_s=0.01, pause_s=0.02, pause_max_s=0.1)
PROBING = replace(CALM, probe_s=0.05)


class Follower:
    """A feed that runs, and the sink that it tells."""

    def __init__(self, vllm: FakeVllm, times: FeedTimes = CALM, *, replays: bool = True) -> None:
        source = vllm.source if replays else replace(vllm.source, replay="")
        self.vllm, self.sink = vllm, TruthSink()
        self.feed = VllmFeed(source, self.sink, times)
        self.counts = self.feed.counts
        self.task = asyncio.get_running_loop().create_task(self.feed.run())

    async def until(self, reached: Callable[[], bool], what: str = "") -> None:
        """Wait for something; the feed must not end meanwhile."""
        async with asyncio.timeout(WAIT_S):
            while not reached():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.001)

    async def follows(self) -> None:
        """Until it knows exactly what the publisher holds."""
        await self.until(lambda: not self.sink.doubt and self.sink.known == self.vllm.truth)

    async def joined(self) -> None:
        """Until the subscription is in effect."""
        await self.until(lambda: not self.sink.doubt)
        before = self.counts.batches
        async with asyncio.timeout(WAIT_S):
            while (
                self.counts.batches == before
            ):  # what is published before it is, is replayed by the first gap
                self.vllm.publish()
                await asyncio.sleep(0.005)
        await self.until(lambda: self.feed.applied == self.vllm.sequence - 1)

    async def close(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeVllm]:
    """A publisher with three batches behind it."""
    vllm = FakeVllm(tmp_path_factory.mktemp("v"))
    vllm.start()
    vllm.store(1, 2)
    vllm.store(3)
    vllm.remove(2)
    yield vllm
    await vllm.stop()


@pytest.fixture
async def follower(vllm: FakeVllm) -> AsyncIterator[Follower]:
    """One that has caught up, and hears what is published."""
    follower = Follower(vllm)
    await follower.joined()
    yield follower
    await follower.close()


# ---- in order ---------------------------------------------------------------------------------------------


async def test_who_joins_late_hears_of_everything_before(follower: Follower, vllm: FakeVllm) -> None:
    assert follower.sink.known == vllm.truth == {1, 3}
    assert follower.sink.diary[:2] == ["reset", "ready"]
    vllm.store(4)
    vllm.remove(1)
    await follower.follows()
    assert (follower.counts.resets, follower.counts.lost, follower.sink.lost_batches) == (1, 0, 0)


async def test_all_blocks_cleared_really_clears(follower: Follower, vllm: FakeVllm) -> None:
    vllm.clear()
    await follower.until(lambda: follower.sink.known == set())
    vllm.store(9)
    await follower.follows()
    assert follower.sink.known == {9}
    assert follower.sink.diary.count("cleared") == 1


async def test_duplicates_change_nothing(follower: Follower, vllm: FakeVllm) -> None:
    vllm.store(7, lose=True)
    vllm.store(8)  # a gap: both are replayed, and 8 is heard again or was heard before
    await follower.follows()
    applied = follower.counts.batches
    vllm.store(10)
    await follower.follows()
    assert follower.counts.batches == applied + 1
    assert follower.counts.resets == 1


async def test_layers_with_a_window_do_not_speak_for_a_prefix(follower: Follower, vllm: FakeVllm) -> None:
    def group(block: int, index: int, kind: str) -> list[object]:
        return ["BlockStored", [block], None, [1] * 4, 4, None, "GPU", None, None, index, kind]

    vllm.publish(
        group(50, 0, "full_attention"), group(50, 1, "sliding_window"), group(51, 1, "sliding_window")
    )
    vllm.publish(["BlockRemoved", [50], "GPU", 1])
    vllm.store(52)
    await follower.until(lambda: 52 in follower.sink.known)
    assert follower.sink.known == {1, 3, 50, 52}


# ---- gaps -------------------------------------------------------------------------------------------------


async def test_a_gap_is_replayed_from_the_last_batch_on(follower: Follower, vllm: FakeVllm) -> None:
    last = vllm.sequence - 1
    vllm.asked.clear()
    for block in range(100, 150):
        vllm.store(block, lose=True)
    vllm.store(150)
    await follower.follows()
    assert vllm.asked[0] == last
    assert (follower.counts.resets, follower.counts.lost, follower.counts.gaps) == (1, 0, 1)


async def test_what_was_lost_at_the_end_of_a_burst_is_found_by_asking(vllm: FakeVllm) -> None:
    follower = Follower(vllm, PROBING)
    await follower.joined()
    vllm.store(60, lose=True)
    vllm.remove(1, lose=True)
    await follower.follows()
    assert follower.counts.resets == 1
    await follower.close()


async def test_a_replay_with_holes_that_close_is_put_together(follower: Follower, vllm: FakeVllm) -> None:
    start = vllm.sequence
    for block in range(200, 210):
        vllm.store(block, lose=True)
    vllm.hide = {start + 5}
    vllm.store(210)
    await follower.until(lambda: follower.feed.applied in (start + 4, None))
    vllm.hide = set()
    await follower.follows()
    assert follower.counts.lost == 0


async def test_out_of_reach_begins_a_new_truth_of_what_there_is(tmp_path: Path) -> None:
    vllm = FakeVllm(tmp_path, buffer=5)
    vllm.start()
    follower = Follower(vllm)
    await follower.joined()
    vllm.store(1)
    await follower.follows()
    for block in range(2, 22):
        vllm.store(block, lose=True)
    vllm.remove(1, lose=True)
    vllm.store(22)
    held = {19, 20, 21, 22}  # the last five batches, one of which removes
    await follower.until(lambda: follower.sink.known == held)
    assert (follower.counts.lost, follower.sink.lost_batches) == (17, 17)
    assert follower.counts.resets == 2
    await follower.close()
    await vllm.stop()


async def test_a_batch_that_cannot_be_read_is_lost_once(follower: Follower, vllm: FakeVllm) -> None:
    vllm.publish_raw(b"\xc1garbage")
    vllm.store(70)
    await follower.follows()
    asked = len(vllm.asked)
    vllm.store(71)
    await follower.follows()
    assert (follower.counts.bad, follower.counts.lost, follower.sink.lost_batches) == (1, 1, 1)
    assert (len(vllm.asked), follower.counts.resets) == (asked, 1)


async def test_messages_that_are_none_are_counted(follower: Follower, vllm: FakeVllm) -> None:
    for frames in ((b"",), (b"", b"1234567", b""), (b"", b"x" * 8, b"", b"")):
        vllm._pub.send_multipart(frames)
    vllm.store(72)
    await follower.follows()
    assert (follower.counts.bad, follower.counts.gaps) == (3, 0)


# ---- restarts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", ["behind", "just as far", "further"])
async def test_a_publisher_that_was_started_anew_begins_a_new_truth(
    follower: Follower, vllm: FakeVllm, ahead: str
) -> None:
    counted = vllm.sequence
    await vllm.stop()
    await follower.until(lambda: bool(follower.sink.doubt))
    vllm.start()
    batches = {"behind": 1, "just as far": counted, "further": counted + 3}[ahead]
    for block in range(1000, 1000 + batches):
        vllm.store(block)
    await follower.follows()
    assert follower.counts.resets == 2
    vllm.store(2000)
    await follower.follows()


async def test_a_publisher_that_comes_back_is_taken_up_where_it_was(
    follower: Follower, vllm: FakeVllm
) -> None:
    await vllm.stop()
    await follower.until(lambda: bool(follower.sink.doubt))
    assert follower.sink.known == {1, 3}  # in doubt, but better than nothing
    vllm.start(forget=False)
    await follower.follows()
    vllm.store(5)
    await follower.follows()
    assert (follower.counts.resets, follower.counts.lost) == (1, 0)


async def test_a_feed_that_is_there_first_waits_for_the_publisher(tmp_path: Path) -> None:
    vllm = FakeVllm(tmp_path)
    follower = Follower(vllm)
    await asyncio.sleep(0)
    assert follower.sink.doubt
    vllm.start()
    vllm.store(1)
    await follower.follows()
    await follower.close()
    await vllm.stop()


async def test_what_an_old_process_said_last_is_not_taken_for_the_new_one(
    follower: Follower, vllm: FakeVllm
) -> None:
    """It waits in the socket while the feed is busy with a gap, and is read after the restart."""
    vllm.mute = True
    vllm.asked.clear()
    vllm.store(30, lose=True)
    vllm.store(31)
    await follower.until(lambda: bool(vllm.asked))
    for block in range(32, 40):
        vllm.store(block)
    sent = vllm.sequence
    await asyncio.sleep(0.01)
    await vllm.stop()
    vllm.mute = False
    vllm.start()
    vllm.store(1000)
    await follower.follows()
    assert vllm.sequence < sent
    vllm.store(1001)
    await follower.follows()
    assert (follower.counts.resets, follower.counts.lost) == (2, 0)


# ---- recovery that cannot loop ----------------------------------------------------------------------------


async def test_a_replay_socket_that_is_silent_is_asked_so_often_and_then_events_must_come(
    follower: Follower, vllm: FakeVllm
) -> None:
    vllm.mute = True
    vllm.asked.clear()
    vllm.store(80, lose=True)
    vllm.store(81)
    await follower.until(lambda: follower.feed.applied is None)
    assert follower.sink.doubt == "the replay socket does not give what is missing"
    assert len(vllm.asked) == follower.feed._times.attempts
    vllm.store(82)  # a new truth, of what comes from here on
    await follower.until(lambda: not follower.sink.doubt)
    assert follower.sink.known == {82}
    vllm.store(83)
    await follower.until(lambda: follower.sink.known == {82, 83})
    assert len(vllm.asked) == follower.feed._times.attempts


async def test_a_hole_that_every_replay_has_is_not_asked_for_for_ever(
    follower: Follower, vllm: FakeVllm
) -> None:
    vllm.hide = {vllm.sequence}
    vllm.asked.clear()
    vllm.store(84, lose=True)
    vllm.store(85)
    await follower.until(lambda: follower.feed.applied is None)
    assert len(vllm.asked) == follower.feed._times.attempts
    vllm.store(86)
    await follower.until(lambda: follower.sink.known == {86})


async def test_two_publishers_on_one_address_do_not_keep_the_feed_busy(vllm: FakeVllm) -> None:
    """Each message of one looks like a restart of the other. Replays that bring nothing become rarer."""
    pause_s = 0.1
    follower = Follower(vllm, replace(CALM, pause_s=pause_s, pause_max_s=5.0))
    await follower.joined()
    clock_s = asyncio.get_running_loop().time
    began_s = clock_s()
    vllm.asked.clear()
    for number in range(200):
        vllm.publish_raw(b"\x92\x00\x90", sequence=number % 2)
        await asyncio.sleep(0.001)
    vllm.store(300)
    assert len(vllm.asked) <= 3 + (clock_s() - began_s) / pause_s
    await follower.follows()
    assert follower.counts.gaps >= 1
    assert follower.counts.resets == 1
    await follower.close()


async def test_a_recovery_has_an_end_even_if_each_replay_brings_something(
    follower: Follower, vllm: FakeVllm
) -> None:
    start = vllm.sequence
    for block in range(400, 400 + 4 * REPLAYS_MAX):
        vllm.store(block, lose=True)
    vllm.hide = set(range(start + 1, vllm.sequence, 2))
    vllm.asked.clear()
    vllm.store(5000)
    await follower.until(lambda: follower.feed.applied is None)
    assert len(vllm.asked) <= REPLAYS_MAX


async def test_without_a_replay_socket_a_gap_begins_a_new_truth(vllm: FakeVllm) -> None:
    follower = Follower(vllm, replays=False)
    await follower.until(lambda: not follower.sink.doubt)
    async with asyncio.timeout(WAIT_S):
        while not follower.sink.known:
            vllm.store(vllm.sequence)
            await asyncio.sleep(0.005)
    await follower.until(lambda: follower.feed.applied == vllm.sequence - 1)
    vllm.store(90, lose=True)
    vllm.store(91)
    async with asyncio.timeout(WAIT_S):
        while not follower.sink.known or min(follower.sink.known) < 91:
            vllm.store(92)
            await asyncio.sleep(0.005)
    assert not follower.sink.doubt
    assert follower.counts.replays == 0
    assert follower.counts.lost >= 1
    await follower.close()


# ---- all at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_after_lost_events_and_restarts_the_sink_knows_the_truth(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    vllm = FakeVllm(tmp_path)
    vllm.start()
    follower = Follower(vllm, PROBING)
    for _ in range(400):
        lose = random.random() < 0.2
        block = random.randrange(60)
        choice = random.random()
        if choice < 0.6:
            vllm.store(block, lose=lose)
        elif choice < 0.97:
            vllm.remove(block, lose=lose)
        elif choice < 0.98:
            vllm.clear()
        else:
            await vllm.stop()
            vllm.start(forget=random.random() < 0.7)
        if random.random() < 0.3:
            await asyncio.sleep(0)
    await follower.follows()
    await follower.close()
    await vllm.stop()
    assert follower.counts.lost == 0  # the buffer reached back every time
