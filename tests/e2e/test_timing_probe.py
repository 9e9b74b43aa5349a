"""Time tells a tenant nothing of what another one has asked, and would tell if they shared their root."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scene import Scene

from bench.timing_probe import (
    SEPARATE,
    SHARED_MIN,
    TOKENS,
    Probed,
    auc_of,
    probe,
    settings,
    tenants,
    write_model,
)

# The AUC of equal times has a standard deviation of 0.027 then: both bars are more than three of them away.
N = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("probe") / "model")


def probed(stage: Scene, model: Path, reuse: str) -> Probed:
    """A probe on a daemon of its own, from which nothing left meanwhile."""
    sizes = {key.replace(".", "__"): value for key, value in settings(N).items()}
    daemon = stage.start_daemon(tenants(reuse), **sizes)
    seen = probe(daemon.socket, model, reuse, N)
    assert not any(daemon.group("team")["host"]["dropped"].values())
    daemon.assert_quiet("team")
    return seen


def test_the_auc_is_what_it_says() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        known, new = (random.integers(0, 6, random.integers(1, 9)).astype(np.float64) for _ in range(2))
        pairs = [float(b > a) + 0.5 * float(b == a) for a in known for b in new]
        assert auc_of(known, new) == pytest.approx(np.mean(pairs))


def test_time_does_not_tell_what_another_tenant_has_asked(stage: Scene, model: Path) -> None:
    seen = probed(stage, model, "own")
    low, high = SEPARATE
    assert low <= seen.auc <= high, (seen.auc, seen.control, seen.json())
    assert (seen.known_reused, seen.new_reused) == (0, 0)


def test_the_probe_sees_a_hit_where_tenants_share(stage: Scene, model: Path) -> None:
    """Positive control: the same two tenants, the same prompts, under one root."""
    seen = probed(stage, model, "group")
    assert (seen.known_reused, seen.new_reused) == (N * (TOKENS - 1), 0), "every hit, and nothing else"
    assert seen.auc > SHARED_MIN, (seen.auc, seen.control, seen.json())
