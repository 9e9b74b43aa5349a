"""Who may read what: salts, roots, trust groups, and reuse that is switched off."""

from __future__ import annotations

import os

import numpy as np
import pytest
from fake_engine import SMALL, FakeEngine
from raw_session import RawSession, hello
from real_daemon import RealDaemon, mapped
from scene import Scene

from kvstore.types import Reuse


def tenants(*lines: str) -> str:
    """[[tenants]] tables from 'name group reuse' each."""
    rows = [line.split() for line in lines]
    return "\n".join(
        f'[[tenants]]\nname = "{name}"\ngroup = "{group}"\nreuse = "{reuse}"' for name, group, reuse in rows
    )


TWO = tenants("a team own", "b team own")
SHARING = tenants("a team group", "b team group", "c team own", "d team none")


def engine(stage: Scene, tenant: str, reuse: Reuse = Reuse.OWN) -> FakeEngine:
    return stage.engine(tenant=tenant, reuse=reuse)


def test_a_tenant_that_knows_the_exact_prompt_learns_nothing(stage: Scene) -> None:
    """Not on HOST, not from what the save says, not from the counters of a second save."""
    daemon = stage.start_daemon(TWO)
    a, b = engine(stage, "a"), engine(stage, "b")
    chain = a.saved(1, 20)
    assert a.restored(chain) == 20
    probe = b.chain(1, 20)
    assert not (probe.keys == chain.keys).all(axis=1).any()
    assert b.matched(probe) == 0
    saved = b.save(probe)
    assert (saved.ready, saved.filled) == (20, 0), "a save must not tell what others have"
    assert b.restored(probe) == 20
    assert daemon.group("team")["host"]["ready"] == 40
    assert daemon.group("team")["counters"]["hit_blocks"] == 40


def test_one_shared_root_is_shared_by_those_who_want_it(stage: Scene) -> None:
    stage.start_daemon(SHARING)
    a, b = engine(stage, "a", Reuse.GROUP), engine(stage, "b", Reuse.GROUP)
    chain = a.saved(1, 12)
    assert b.restored(b.chain(1, 12)) == 12
    assert (b.chain(1, 12).keys == chain.keys).all()
    # Their own roots, and tenants that do not share, see nothing of it.
    b.reuse = Reuse.OWN
    assert b.matched(b.chain(1, 12)) == 0
    assert engine(stage, "c").matched(engine(stage, "c").chain(1, 12)) == 0
    assert engine(stage, "c").client.roots("c", Reuse.GROUP) is None


def test_reuse_none_neither_looks_up_nor_saves(stage: Scene) -> None:
    daemon = stage.start_daemon(SHARING)
    saver = engine(stage, "a")
    saver.saved(1, 5)
    before = daemon.group("team")["counters"]
    for tenant in ("d", "a"):
        quiet = engine(stage, tenant)
        reuses = Reuse if tenant == "d" else [Reuse.NONE]
        for reuse in reuses:
            assert quiet.client.chain(np.arange(64, dtype=np.uint32), tenant, reuse) is None
    assert daemon.group("team")["counters"] == before
    assert daemon.group("team")["host"]["ready"] == 5


def test_a_tenant_that_is_not_configured(stage: Scene) -> None:
    daemon = stage.start_daemon(TWO)
    for named in (["nobody"], ["a", "nobody"], ["default"]):
        with RawSession(daemon.socket) as raw:
            answer = raw.refused(hello(SMALL, tenants=named))
        assert answer.status == "PERMISSION_DENIED"
        assert "tenants" in answer.message
    daemon.assert_quiet("team")


def test_a_session_gets_only_the_roots_it_asked_for(stage: Scene) -> None:
    daemon = stage.start_daemon(SHARING)
    with RawSession(daemon.socket) as raw:
        raw.attach(SMALL, tenants=["a", "d"])
        assert raw.welcome is not None
        assert {name: set(by) for name, by in raw.welcome.roots.items()} == {
            "a": {"own", "group"},
            "d": set(),
        }
        roots = [root for by in raw.welcome.roots.values() for root in by.values()]
        assert len(set(roots)) == 2


def test_every_identity_field_makes_another_namespace(stage: Scene) -> None:
    daemon = stage.start_daemon()
    first = stage.engine()
    first.saved(1, 5)
    for field in ("model", "weights", "tokenizer", "adapter", "attention", "kv_dtype"):
        other = stage.engine(identity={field: "another"})
        assert other.matched(other.chain(1, 5)) == 0, field
        other.close()
    assert first.matched(first.chain(1, 5)) == 5
    assert daemon.group()["host"]["ready"] == 5


# ---- trust groups ------------------------------------------------------------------------------------------


def test_two_trust_groups_have_two_arenas(stage: Scene) -> None:
    daemon = stage.start_daemon(tenants("a vermilion own", "b cobalt own"))
    assert sorted(name.split("memfd:")[1].split(" ")[0].rstrip() for name in daemon.memfds())
    before = mapped(os.getpid())
    a, b = engine(stage, "a"), engine(stage, "b")
    a.saved(1, 20)
    assert daemon.group("vermilion")["host"]["ready"] == 20
    assert daemon.group("cobalt")["host"]["ready"] == 0
    assert b.matched(b.chain(1, 20)) == 0
    own = set(mapped(os.getpid())) - set(before)
    assert any("vermilion" in name for name in own)
    assert any("cobalt" in name for name in own)
    a.close()
    left = set(mapped(os.getpid())) - set(before)
    assert not any("vermilion" in name for name in left), "an engine maps its own group's memory only"
    with RawSession(daemon.socket) as raw:
        answer = raw.refused(hello(SMALL, tenants=["a", "b"]))
    assert answer.status == "INVALID_ARGUMENT"
    assert "trust group" in answer.message


# ---- secrets -----------------------------------------------------------------------------------------------

SECRETS = f'[tenants]\na = "{"11" * 32}"\nb = "{"22" * 32}"\n\n[groups]\nteam = "{"33" * 32}"\n'


def roots(daemon: RealDaemon) -> dict[str, dict[str, bytes]]:
    with RawSession(daemon.socket) as raw:
        raw.attach(SMALL, tenants=["a", "b"])
        assert raw.welcome is not None
        return raw.welcome.roots


@pytest.mark.parametrize("kept", [True, False])
def test_roots_are_as_stable_as_the_secrets(stage: Scene, kept: bool) -> None:
    secrets = stage.folder / "secrets.toml"
    secrets.touch(0o600)
    secrets.write_text(SECRETS)
    settings = {"daemon__secrets_file": f'"{secrets}"'} if kept else {}
    daemon = stage.start_daemon(tenants("a team group", "b team group"), **settings)
    before = roots(daemon)
    assert before["a"]["own"] != before["b"]["own"]
    assert before["a"]["group"] == before["b"]["group"]
    assert daemon.end() == 0
    daemon.start()
    assert (roots(daemon) == before) is kept
    log = daemon.log.read_text()
    assert "11" * 32 not in log
    assert ("no daemon.secrets_file" in log) is not kept


BAD_SECRETS = [
    (SECRETS, 0o644, "chmod 600"),
    (SECRETS.replace("b =", "x ="), 0o600, "no salt for b"),
    (SECRETS.replace("22" * 32, "zz"), 0o600, "hexadecimal"),
    (SECRETS.replace("22" * 32, "2222"), 0o600, "16 to 64 bytes"),
    (SECRETS.replace("22", "11"), 0o600, "same salt"),
    ("not toml at all", 0o600, "TOML"),
]


def test_bad_secrets_are_refused_before_any_memory(stage: Scene) -> None:
    daemons: list[RealDaemon] = []
    for number, (text, mode, _) in enumerate(BAD_SECRETS):
        folder = stage.folder / str(number)
        folder.mkdir()
        secrets = folder / "secrets.toml"
        secrets.write_text(text)
        secrets.chmod(mode)
        # An arena that no machine has: the secrets are read before it is begun.
        settings = {"daemon.secrets_file": f'"{secrets}"', "host.capacity_bytes": '"8TiB"'}
        daemons.append(stage.keep(RealDaemon(folder, settings, TWO)).start(wait=False))
    for daemon, (_, _, named) in zip(daemons, BAD_SECRETS, strict=True):
        assert daemon.process.wait(60) == 2
        said = daemon.said().strip()
        assert named in said
        assert "\n" not in said
        assert "11" * 32 not in said
