"""Fixtures of the public API's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.register_assert_rewrite("endpoint")

from endpoint import Endpoint, Opener, configured, opened  # noqa: E402  (its assertions are rewritten first)


@pytest.fixture
def opening(socket_path: Path) -> Opener:
    """Opens an endpoint with limits of a test's choice."""

    def open_with(**limits: Any) -> AbstractAsyncContextManager[Endpoint]:
        return opened(configured(socket_path.parent, **limits))

    return open_with


@pytest_asyncio.fixture
async def endpoint(socket_path: Path) -> AsyncIterator[Endpoint]:
    """An endpoint with the default limits."""
    async with opened(configured(socket_path.parent)) as endpoint:
        yield endpoint
