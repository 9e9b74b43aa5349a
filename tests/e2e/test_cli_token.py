"""`kvstore token`: it makes what the daemon reads."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import kvstore

from kvstore.config.tokens import Tokens


def written(folder: Path, text: str) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_command_makes_what_the_daemon_reads(tmp_path: Path) -> None:
    done = kvstore("token", "router", "--tenants", "alice, bob", "--verbs", "read,write", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    never = json.loads(kvstore("token", "ops", "-t", "*", "-v", "admin", "-d", "0", "--json").stdout)
    tokens = Tokens.load(written(tmp_path, made["entry"] + never["entry"]))
    router, ops = tokens.find(made["token"]), tokens.find(never["token"])
    assert router is not None and ops is not None
    assert (router.name, router.tenants, router.verbs) == ("router", {"alice", "bob"}, {"read", "write"})
    assert 364 * 86_400 < router.expires_s - datetime.now(UTC).timestamp() <= 365 * 86_400
    assert (ops.tenants, ops.expires_s) == ({"*"}, math.inf)
    said = kvstore("token", "router").stdout
    assert "shown once" in said and "[[tokens]]" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["a b"], "NAME: need"),
        (["a", "--tenants", "x y"], "--tenants"),
        (["a", "--tenants", ","], "--tenants"),
        (["a", "--verbs", "fly"], "--verbs"),
        (["a", "--verbs", ""], "--verbs"),
        (["a", "--days", "-1"], "--days"),
    ],
)
def test_nonsense_is_told_by_its_name(words: list[str], why: str) -> None:
    done = kvstore("token", *words)
    assert done.returncode == 2 and why in done.stderr and not done.stdout
