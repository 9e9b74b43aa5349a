"""A short run of the gRPC fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.fuzz.grpc_messages import Call, Fuzzer, batches


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    made = Fuzzer(tmp_path_factory.mktemp("z"))
    yield made
    made.close()


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(batches)
def test_no_message_breaks_anything(fuzzer: Fuzzer, batch: list[Call]) -> None:
    fuzzer.run(batch)
    assert fuzzer.faults == []
    assert (fuzzer.pins(), fuzzer.fillings()) == (0, 0)


def test_the_fuzzer_reaches_past_the_first_check(fuzzer: Fuzzer) -> None:
    """Of the calls above some succeed and some are refused, or the run would prove nothing."""
    fuzzer.run([Call("/kvstore.v1.Admin/Check", (b"",), 1000, False)])
    fuzzer.run([Call("/kvstore.v1.Store/Lookup", (b"\xff",), 1000, False)])
    assert {"OK", "INVALID_ARGUMENT"} <= set(fuzzer.seen)
