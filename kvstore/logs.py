"""Structured logs: what a line looks like, which lines there are, and how many at most.

Lines about a session carry `session`, `engine` and `tenant` as soon as they are known; at level debug every
request has a line with its number and lease. A key, a salt, a root or a token id is in none.
"""

from __future__ import annotations

import logging
import sys

import structlog

from kvstore.clock import Clock, MonotonicClock
from kvstore.log_limit import LogLimit

__all__ = ["configure_logs", "log_limit", "set_level"]


def configure_logs(level: str, clock: Clock | None = None, *, as_json: bool = False) -> None:
    """Structured logs to stderr: one JSON object a line, or (without `as_json`) text on a terminal."""
    as_text = sys.stderr.isatty() and not as_json
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            LogLimit(clock or MonotonicClock()),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    set_level(level)


def set_level(level: str) -> None:
    """From now on only lines of this level and above."""
    structlog.configure(
        **{**structlog.get_config(), "wrapper_class": structlog.make_filtering_bound_logger(_number(level))}
    )


def log_limit() -> LogLimit | None:
    """The limit that this program's logs run under, None if it configured others."""
    found = (p for p in structlog.get_config()["processors"] if isinstance(p, LogLimit))
    return next(found, None)


def _number(level: str) -> int:
    number: int = getattr(logging, level.upper())
    return number
