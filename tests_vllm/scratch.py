"""A temporary directory for the session: vLLM leaves sockets, locks and caches in it."""

from __future__ import annotations

import atexit
import shutil
import tempfile

__all__ = ["scratch"]


def scratch() -> dict[str, str]:
    """Make it, for this process and, by these variables, for its children; gone with this process."""
    folder = tempfile.mkdtemp(prefix="kvstore-vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tempfile.tempdir = folder
    return {"TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}
