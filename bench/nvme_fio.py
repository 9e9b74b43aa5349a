"""fio as the limit of bench.nvme: what the disk gives to a program that does nothing else.

It works on files like the store's own: in the same directory, of a segment's size, written once from end to
end and then overwritten (first writes into preallocated extents are slower on ext4). Direct I/O, as many
bytes under way as the daemon lets be at most, and buffers on huge pages like the arena's: a request of 2 MiB
on small pages is cut into several, which cost fio a third of its speed here.

    read    whole blocks in random order over all files, each once: nobody can foretell which prompt comes
            next, so a store has to find blocks wherever they lie. (Ours may read neighbours of one chain
            together.)
    write   blocks one behind the other, file after file, and an fsync of everything at the end: a log writes
            like that, and what it has not synced does not count as kept.

What is timed is fio's own runtime: its start, a few tenths of a second, is not in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["ENGINES", "Fio", "FioFailed", "FioJob", "FioRun", "need_fio", "parsed"]

ENGINES = ("io_uring", "libaio", "psync")
"""In this order the first that is allowed here is used; containers often forbid io_uring."""
_ROOT = Path(__file__).parent.parent
_RUN_S = 1800.0
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # malloc asks for them; harmless where it cannot


class FioFailed(SystemExit):
    """fio did not do what it was asked; the text says why."""


@dataclass(frozen=True, slots=True)
class FioRun:
    """What fio says of a run.

    Attributes:
        bytes: moved.
        seconds: from its first to its last byte, the sync at the end included.
    """

    bytes: int
    seconds: float


def parsed(text: str, verb: Literal["read", "write"]) -> FioRun:
    """The one job (or group of jobs) of fio's JSON; what it prints before that is skipped.

    Raises:
        FioFailed: no JSON, an error of a job, or nothing moved.
    """
    _, brace, rest = text.partition("{")
    try:
        jobs: list[dict[str, Any]] = json.loads(brace + rest)["jobs"]
        (job,) = jobs
        error, moved = int(job["error"]), job[verb]
        run = FioRun(int(moved["io_bytes"]), int(moved["runtime"]) / 1000)
    except (KeyError, TypeError, ValueError) as why:
        raise FioFailed(f"fio said something else than expected ({why!r}): {text[-500:]}") from None
    if error:
        raise FioFailed(f"fio: error {error}")
    if run.bytes <= 0 or run.seconds <= 0:
        raise FioFailed(f"fio moved {run.bytes} bytes in {run.seconds} s")
    return run


def need_fio() -> str:
    """fio's version; installs it where that is possible (root on Debian).

    Raises:
        FioFailed: it is not there and cannot be installed; says how to.
    """
    if shutil.which("fio") is None:
        script = [str(_ROOT / "tools" / "system_packages.sh"), "nvme", sys.executable]
        subprocess.run(script, stdout=sys.stderr, check=False)
    found = shutil.which("fio")
    if found is None:
        raise FioFailed("fio, the limit, is not installed: sudo apt-get install fio (or make bench-nvme)")
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True, slots=True)
class FioJob:
    """One of the two jobs.

    Attributes:
        verb: read or write.
        block_bytes: of one request.
        under_way_bytes: of all requests at once.
    """

    verb: Literal["read", "write"]
    block_bytes: int
    under_way_bytes: int

    @property
    def depth(self) -> int:
        """Requests at once."""
        return max(1, self.under_way_bytes // self.block_bytes)

    def options(self) -> list[str]:
        """What makes this job."""
        if self.verb == "read":
            order = ["--rw=randread", "--randrepeat=0", "--file_service_type=random"]
        else:
            order = ["--rw=write", "--end_fsync=1", "--file_service_type=sequential"]
        return [*order, f"--bs={self.block_bytes}"]


class Fio:
    """fio over files of its own in one directory.

    Args:
        folder: an existing directory.
        files, file_bytes: how many, and how large.

    Raises:
        FioFailed: not even the plainest engine works there.
    """

    def __init__(self, folder: Path, files: int, file_bytes: int) -> None:
        self._folder, self._files, self._file_bytes = folder, files, file_bytes
        self.engine = ""
        refused = []
        for engine in ENGINES:
            trial = ["--rw=write", "--bs=4096", "--nrfiles=1", "--filesize=65536", "--filename=trial.fio"]
            try:
                self._run([*trial, f"--ioengine={engine}", "--iodepth=4"], "write")
            except FioFailed as why:
                refused.append(f"{engine}: {why}")
                continue
            self.engine = engine
            break
        (folder / "trial.fio").unlink(missing_ok=True)
        if not self.engine:
            raise FioFailed("; ".join(refused))

    @property
    def set_bytes(self) -> int:
        """Of all files."""
        return self._files * self._file_bytes

    def lay_out(self) -> None:
        """Write every file once, from end to end."""
        job = FioJob("write", 1 << 20, 16 << 20)
        self._run([*self._set_options(job), "--fallocate=posix"], "write")

    def seconds(self, job: FioJob) -> float:
        """How long all files take once.

        Raises:
            FioFailed: as it says.
        """
        run = self._run([*self._set_options(job), "--overwrite=1", "--fallocate=none"], job.verb)
        if run.bytes != self.set_bytes:
            raise FioFailed(f"fio moved {run.bytes} bytes of {self.set_bytes}")
        return run.seconds

    def describe(self, job: FioJob) -> dict[str, Any]:
        """For the result."""
        jobs = self._files if self.engine == "psync" else 1
        return {"engine": self.engine, "jobs": jobs, "depth": job.depth if jobs == 1 else 1}

    def _set_options(self, job: FioJob) -> list[str]:
        options = [*job.options(), f"--ioengine={self.engine}", f"--filesize={self._file_bytes}"]
        if self.engine == "psync":  # one request at a time each: a job a file instead of a depth
            more = [f"--numjobs={self._files}", "--nrfiles=1", "--filename_format=limit.$jobnum.fio"]
            return [*options, *more, "--group_reporting", "--thread"]
        more = [f"--nrfiles={self._files}", "--filename_format=limit.$filenum.fio", f"--iodepth={job.depth}"]
        return [*options, *more]

    def _run(self, options: list[str], verb: Literal["read", "write"]) -> FioRun:
        command = ["fio", "--name=limit", "--output-format=json", "--direct=1", "--eta=never"]
        command += [f"--directory={self._folder}", *options]
        try:
            run = subprocess.run(
                command,
                env={**os.environ, **_HUGE_PAGES},
                capture_output=True,
                text=True,
                timeout=_RUN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FioFailed(f"fio did not run: {error}") from None
        if run.returncode:
            raise FioFailed(f"fio ended with {run.returncode}: {(run.stderr or run.stdout).strip()[-400:]}")
        return parsed(run.stdout, verb)
