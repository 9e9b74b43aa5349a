"""A daemon with every door that there is, and the audit of it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leaky_daemon
import pytest
import trustme
from command_line import kvstore
from nvme_kit import nvme_settings
from real_daemon import RealDaemon
from scene import Scene

__all__ = ["APART", "BOUND", "TWO", "Audited", "audited", "free_port", "street"]

TWO = '[[tenants]]\nname = "a"\ngroup = "team"\n\n[[tenants]]\nname = "b"\ngroup = "team"\n'
APART = TWO.replace("team", "blue", 1).replace("team", "red")
BOUND = TWO.replace('"team"', '"team"\nusers = [61000]')


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def street(stage: Scene) -> Iterator[Scene]:
    """A stage that every user of this machine can get to; for root only."""
    if os.geteuid() != 0:
        pytest.skip("only root can ask as another user")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        stage.folder = Path(folder)
        stage.folder.chmod(0o755)
        yield stage


@dataclass
class Audited:
    """A daemon with every door there is, and what the command needs to go through them."""

    daemon: RealDaemon
    words: tuple[str, ...]

    def checks(self, report: dict[str, Any]) -> dict[tuple[str, str], str]:
        """(door, check) → verdict; of one that was made several times the last."""
        return {(c["door"], c["check"]): c["verdict"] for door in report["doors"] for c in door["checks"]}

    def run(self, *more: str) -> tuple[int, dict[str, Any]]:
        """Exit status and report."""
        done = kvstore("audit-isolation", *self.words, *more, "--json")
        assert done.stderr == "", done.stderr
        return done.returncode, json.loads(done.stdout)

    def opened(self, *more: str) -> set[tuple[str, str]]:
        """(door, check) of what was found open; the command says so, too."""
        status, report = self.run(*more)
        found = {
            (check["door"], check["check"])
            for door in report["doors"]
            for check in door["checks"]
            if check["verdict"] == "open"
        }
        assert (status, report["ok"]) == ((1, False) if found else (0, True)), report
        assert set(report["open"]) == {door for door, _ in found}
        return found


def tokens(folder: Path) -> tuple[str, tuple[str, ...]]:
    """A file of tokens for a and b, and the options that show them."""
    entries, words = [], []
    for name in ("a", "b"):
        made = json.loads(kvstore("token", name, "-t", name, "--json").stdout)
        entries.append(made["entry"])
        (folder / name).write_text(made["token"] + "\n")
        words += ["--token-file", f"{name}={folder / name}"]
    path = folder / "tokens.toml"
    path.touch(mode=0o600)
    path.write_text("\n".join(entries))
    return str(path), tuple(words)


def audited(stage: Scene, leaks: str = "", tenants: str = TWO, **settings: str) -> Audited:
    """A daemon with two tenants, a disk, metrics, and gRPC on a socket and on TCP with TLS and tokens."""
    folder = stage.folder / f"d{len(list(stage.folder.iterdir()))}"
    folder.mkdir(mode=0o755)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made = authority.issue_cert("localhost", "127.0.0.1")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    (folder / "key.pem").touch(mode=0o600)
    made.private_key_pem.write_to_path(folder / "key.pem")
    path, words = tokens(folder)
    values = {
        **nvme_settings(folder / "nvme"),
        "metrics.listen": f'"127.0.0.1:{free_port()}"',
        "grpc.listen": f'"auto,127.0.0.1:{free_port()}"',
        "grpc.tls_certificate": f'"{folder / "cert.pem"}"',
        "grpc.tls_key": f'"{folder / "key.pem"}"',
        "grpc.tokens_file": f'"{path}"',
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    program = (leaky_daemon.__file__, leaks) if leaks else ("-m", "kvstore")
    daemon = stage.keep(RealDaemon(folder, values, tenants, program=program)).start()
    return Audited(daemon, ("--config", str(daemon.config), *words))
