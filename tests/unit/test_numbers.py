"""README shows what bench/results say, figure by figure."""

from __future__ import annotations

from bench.numbers import README, rendered


def test_readme_shows_the_results() -> None:
    text = README.read_text()
    assert rendered(text) == text, "run make numbers"
