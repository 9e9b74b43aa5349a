"""Timings of a client: noted without I/O, told in place of a heartbeat, by both drivers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from client_daemon import ScriptedDaemon, failed
from client_kit import NAMESPACE, Maker, chain_of
from client_memory import WAIT_S, Memory
from client_running import Running, fill

from kvstore.client.timings import DECODES_MAX, KEPT_MAX, Outbox
from kvstore.errors import BadRequest
from kvstore.rpc import messages as m
from kvstore.rpc.messages import TIMINGS_MAX


@pytest.fixture
def brisk(path: Path):
    """A daemon that wants to hear something twenty times a second."""
    scripted = ScriptedDaemon(path, heartbeat_s=0.1)
    yield scripted
    scripted.stop()


def test_what_was_noted_goes_in_place_of_the_next_heartbeat(make: Maker, brisk: ScriptedDaemon) -> None:
    client = make.attached()
    client.note_request("default", 0.25, 100, 96)
    client.note_prefill(512, 0.5)
    client.note_prefill(0, 0.03125, decodes=2, decode_context=300)
    client.note_prefill(64, 0.25, 64 * (1024 + 32), 3, 900)
    (told,) = brisk.await_requests(m.Timings, 1)
    steps = [(0, 0.0, 2, 300, 0.03125), (512, 131_072.0, 0, 0, 0.5), (64, 67_584.0, 3, 900, 0.25)]
    assert told == m.Timings([("default", 0.25, 100, 96)], steps, [], 0)
    beats = len(brisk.seen(m.Heartbeat))
    brisk.await_requests(m.Heartbeat, beats + 2)  # nothing new: heartbeats again
    assert brisk.seen(m.Timings) == [told]


def test_copies_are_told_by_kind_at_the_latest_when_the_client_leaves(
    make: Maker, daemon: ScriptedDaemon
) -> None:
    memory = Memory()
    client = make.attached(memory)
    fill(memory, 5)
    chain = chain_of(client, 5)
    blocks = np.arange(1, 6, dtype=np.uint32)
    assert client.save(chain, 0, 5, blocks).wait(20.0).ready == 5
    hit = client.lookup(chain)
    result = client.load(hit, blocks).wait(20.0)
    assert result.good == 5
    client.close()
    (told,) = daemon.seen(m.Timings)
    transfers = {kind: (copies, size, seconds > 0) for kind, copies, size, seconds in told.transfers}
    assert transfers == {"load": (1, result.bytes, True), "store": (1, result.bytes, True)}
    kinds = [type(request) for request in daemon.conn(0).requests]
    assert kinds[-2:] == [m.Timings, m.Quiesced]


def test_what_a_daemon_does_not_take_is_counted_as_lost(make: Maker, brisk: ScriptedDaemon) -> None:
    client = make.attached()
    brisk.handlers[m.Timings] = lambda *_: failed(BadRequest("timings: no"))
    client.note_request("default", 0.25, 100, 96)
    brisk.await_requests(m.Timings, 1)
    brisk.handlers[m.Timings] = lambda *_: m.Done()
    client.note_prefill(1, 0.1)
    seen = brisk.await_requests(m.Timings, 2)
    while not seen[-1].lost:
        seen = brisk.await_requests(m.Timings, len(seen) + 1)
    assert sum(told.lost for told in seen) == 1
    assert client.attached, "a daemon's opinion of numbers ends no session"


@pytest.mark.parametrize(
    "wrong",
    [
        ("eve", 0.1, 1, 1),
        ("default", float("nan"), 1, 1),
        ("default", float("inf"), 1, 1),
        ("default", -1.0, 1, 1),
        ("default", 0.1, 1, 2),
        ("default", 0.1, -1, -1),
    ],
)
def test_nonsense_is_the_callers_mistake(make: Maker, daemon: ScriptedDaemon, wrong) -> None:
    client = make.attached()
    with pytest.raises(BadRequest):
        client.note_request(*wrong)
    client.close()
    assert daemon.seen(m.Timings) == []


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ((-1, 0.1), "prefill_tokens"),
        ((float("inf"), 0.1), "infinity"),
        ((float("nan"), 0.1), "NaN"),
        ((1, float("nan")), "seconds"),
        ((1, float("inf")), "seconds"),
        ((1, -0.1), "seconds"),
        ((8, 0.1, 3.0), "prefill_area"),
        ((8, 0.1, float("nan")), "prefill_area"),
        ((0, 0.1, 3.0), "prefill_area"),
        ((0, 0.1, None, -1), "decodes"),
        ((0, 0.1, None, 1, -1), "decode_context"),
    ],
)
def test_a_step_that_cannot_be_is_the_callers_mistake(
    make: Maker, daemon: ScriptedDaemon, wrong, names: str
) -> None:
    client = make.attached()
    with pytest.raises(BadRequest, match=f"note_prefill: .*{names}"):
        client.note_prefill(*wrong)
    client.close()
    assert daemon.seen(m.Timings) == []


def test_the_daemon_counts_what_a_client_timed(make: Maker, running: Running) -> None:
    memory = Memory()
    client = make.attached(memory)
    fill(memory, 5)
    chain = chain_of(client, 5)
    blocks = np.arange(1, 6, dtype=np.uint32)
    client.save(chain, 0, 5, blocks).wait(20.0)
    hit = client.lookup(chain)
    size = client.load(hit, blocks).wait(20.0).bytes
    client.release(hit.lease)
    client.note_request("default", 0.25, 24, 20)
    for tokens in (64, 128, 256) * 4:
        client.note_prefill(tokens, 0.01 + 0.001 * tokens)
    client.close()
    group = running.group()
    until_s = time.monotonic() + WAIT_S
    while group.pricing.learnt < 3 * 4 - 3:  # all but the first of each size; in slices, after the reply
        assert time.monotonic() < until_s
        running.call(lambda: None)
    curve = group.pricing.curves[NAMESPACE.digest.hex()]
    assert curve.seconds(0, 200) == pytest.approx(0.21, rel=0.05)
    meters = group.meters
    assert meters.prefill_tokens == 4 * (64 + 128 + 256)
    assert meters.moved["load"].bytes == meters.moved["store"].bytes == size
    assert (meters.ttft[True].count, meters.ttft[True].sum) == (1, 0.25)
    tokens = meters.tenants["default"]
    assert (tokens.lookup, tokens.hits, tokens.saved) == (20, 20, 20)


def test_an_outbox_keeps_the_newest_and_counts_the_rest() -> None:
    outbox = Outbox()
    assert outbox.take() is None
    for number in range(KEPT_MAX + 10):
        outbox.note_request("default", float(number), 1, 0)
    messages = []
    while (message := outbox.take()) is not None:
        assert len(message.requests) <= TIMINGS_MAX
        messages.append(message)
    assert sum(len(message.requests) for message in messages) == KEPT_MAX
    assert messages[0].requests[0][1] == 10.0
    assert sum(message.lost for message in messages) == 10
    outbox.lose(messages[0])
    lost = outbox.take()
    assert lost is not None and lost.lost == TIMINGS_MAX + 10


def test_an_outbox_tells_the_latest_decodes_and_every_prefill() -> None:
    outbox = Outbox()
    for number in range(KEPT_MAX + 10):
        outbox.note_step((8, 32.0, 0, 0, float(number)))
        outbox.note_step((0, 0.0, 1, 9, float(number)))
    messages = []
    while (message := outbox.take()) is not None:
        assert len(message.steps) <= TIMINGS_MAX
        messages.append(message)
    decodes = [[step[4] for step in message.steps if not step[0]] for message in messages]
    assert decodes[0] == [float(KEPT_MAX + 10 - DECODES_MAX + number) for number in range(DECODES_MAX)]
    assert not any(decodes[1:])
    prefills = [step[4] for message in messages for step in message.steps if step[0]]
    assert prefills == [float(10 + number) for number in range(KEPT_MAX)]
    assert sum(message.lost for message in messages) == 10, "an old decode is no loss"
    outbox.lose(messages[0])
    lost = outbox.take()
    assert lost is not None and lost.lost == TIMINGS_MAX - DECODES_MAX + 10
