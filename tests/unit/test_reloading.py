"""What a reload takes over at once, and what waits for a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from kvstore.config import (
    Config,
    DaemonConfig,
    GrpcConfig,
    HostConfig,
    MetricsConfig,
    NvmeConfig,
    Salts,
    TenantConfig,
)
from kvstore.config.tokens import Tokens, digest_of
from kvstore.errors import Refused
from kvstore.reloading import LIVE_KEYS, Reloader, change
from kvstore.testing import StoreDriver
from kvstore.types import Reuse

ALICE, BOB = TenantConfig(name="alice", group="red"), TenantConfig(name="bob", group="red")
OLD = Config(tenants=(ALICE, BOB))


def test_limits_and_times_change_at_once_and_memory_does_not() -> None:
    new = Config(
        daemon=DaemonConfig(log_level="debug", sessions_max=9, socket="/elsewhere"),
        host=HostConfig(capacity_bytes=2 << 30),
        metrics=MetricsConfig(listen="127.0.0.1:1"),
        nvme=NvmeConfig(
            directory="/d",
            write_budget_bytes_per_day=0,
            stall_s=0.5,
            limit_bytes_per_s=5_000_000,
            added_latency_s=0.01,
        ),
        tenants=OLD.tenants,
    )
    got = change(OLD, new)
    live = {
        "daemon.log_level",
        "daemon.sessions_max",
        "nvme.write_budget_bytes_per_day",
        "nvme.stall_s",
        "nvme.limit_bytes_per_s",
        "nvme.added_latency_s",
    }
    assert set(got.applied) == live
    assert set(got.restart) == {"daemon.socket", "host.capacity_bytes", "metrics.listen", "nvme.directory"}
    assert got.config.nvme == msgspec.structs.replace(new.nvme, directory="")
    assert (got.config.daemon.log_level, got.config.daemon.sessions_max) == ("debug", 9)
    assert (got.config.daemon.socket, got.config.host) == (OLD.daemon.socket, OLD.host)


def test_every_live_key_exists() -> None:
    for key in LIVE_KEYS:
        table, _, name = key.partition(".")
        assert name in {field.name for field in msgspec.structs.fields(type(getattr(OLD, table)))}


@pytest.mark.parametrize(
    ("tenants", "kept", "applied", "restart"),
    [
        ((ALICE, BOB), (ALICE, BOB), (), ()),
        (
            (ALICE, BOB, TenantConfig(name="carol", group="red")),
            (ALICE, BOB, TenantConfig(name="carol", group="red")),
            ("tenants.carol",),
            (),
        ),
        ((ALICE,), (ALICE,), ("tenants.bob (no longer attaches)",), ()),
        (
            (ALICE, BOB, TenantConfig(name="dan", group="blue")),
            (ALICE, BOB),
            (),
            ("tenants.dan (its group blue has no arena yet)",),
        ),
        (
            (ALICE, TenantConfig(name="bob", group="red", reuse=Reuse.NONE)),
            (ALICE, TenantConfig(name="bob", group="red", reuse=Reuse.NONE)),
            ("tenants.bob",),
            (),
        ),
        ((ALICE, TenantConfig(name="bob", group="blue")), (ALICE, BOB), (), ("tenants.bob.group",)),
        (
            (TenantConfig(name="eve", group="blue"),),
            (ALICE,),
            ("tenants.bob (no longer attaches)",),
            ("tenants.eve (its group blue has no arena yet)", "tenants.alice (last of group red)"),
        ),
    ],
)
def test_tenants_come_and_go_within_their_groups(tenants, kept, applied, restart) -> None:
    got = change(OLD, Config(tenants=tenants))
    assert (got.config.tenants, got.applied, got.restart) == (kept, applied, restart)


@pytest.fixture(autouse=True)
def level_is_put_back() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


class Files:
    """A configuration with secrets on disk."""

    def __init__(self, folder: Path) -> None:
        self.config, self.secrets = folder / "kvstore.toml", folder / "secrets.toml"

    def write(self, salts: dict[str, str], daemon: str = "") -> Config:
        """One tenant for each salt, all of one group."""
        names = "\n".join(f'[[tenants]]\nname = "{name}"\ngroup = "red"' for name in salts)
        head = f'[daemon]\nsecrets_file = "secrets.toml"\n{daemon}\n'
        host = '[host]\ncapacity_bytes = "4MiB"\nslab_bytes = "2MiB"\nhuge_pages = false\nthreads = 1\n'
        self.config.write_text(f"{head}\n{host}\n{names}\n")
        self.secrets.write_text("[tenants]\n" + "\n".join(f'{n} = "{s}"' for n, s in salts.items()))
        self.secrets.chmod(0o600)
        return Config.load(self.config, environ={})


SALT = {name: name[0].encode().hex() * 32 for name in ("alice", "bob", "carol")}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_a_new_tenant_attaches_and_old_sessions_go_on(files: Files) -> None:
    config = files.write({"alice": SALT["alice"]})
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        session = driver.attach(("alice",))
        chain = session.chain(range(40))
        session.save(chain)
        told: list[DaemonConfig] = []
        reloader = Reloader(driver.store, salts, told.append)
        with pytest.raises(Refused, match="carol"):
            driver.attach(("carol",))
        files.write({"alice": SALT["alice"], "carol": SALT["carol"]}, "leases_max = 1")
        with capture_logs() as lines:
            await reloader.reload()
        assert lines[-1]["event"] == "configuration reloaded"
        assert set(lines[-1]["applied"]) == {"tenants.carol", "daemon.leases_max"}
        assert [daemon.leases_max for daemon in told] == [1]
        assert driver.attach(("alice",)).roots == session.roots, "salts of those who were there stay"
        assert driver.attach(("carol",)).roots != session.roots
        assert session.lookup(chain).blocks == 10
        assert driver.group("red").leases.per_session_max == 1
        driver.store.check()


async def test_tokens_are_read_again_and_a_mistake_in_them_changes_nothing(files: Files) -> None:
    path = files.config.with_name("tokens.toml")
    path.touch(mode=0o600)
    one = f'[[tokens]]\nname = "a"\nsha256 = "{digest_of("a")}"\ntenants = ["alice"]\nverbs = ["read"]\n'
    path.write_text(one)
    read = files.write({"alice": SALT["alice"]})
    config = msgspec.structs.replace(read, grpc=GrpcConfig(tokens_file=str(path)))
    msgspec.structs.force_setattr(config, "_origin", read.origin)
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        told: list[Tokens] = []
        reloader = Reloader(driver.store, salts, lambda _: None, None, told.append)
        await reloader.reload()
        assert [tokens.find("a") is not None for tokens in told] == [True]
        path.write_text(one.replace('"read"', '"fly"'))
        with capture_logs() as lines:
            await reloader.reload()
        assert len(told) == 1 and "verbs" in lines[-1]["reason"]


async def test_a_salt_that_changed_waits_for_a_restart_and_is_not_told(files: Files) -> None:
    config = files.write({"alice": SALT["alice"]})
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        roots = driver.attach(("alice",)).roots
        reloader = Reloader(driver.store, salts, lambda _: None)
        files.write({"alice": SALT["bob"]})
        with capture_logs() as lines:
            await reloader.reload()
        assert {"key": "salt of tenants.alice", "fix": "restart to apply"}.items() <= lines[0].items()
        assert SALT["bob"] not in str(lines) and SALT["alice"] not in str(lines)
        assert driver.attach(("alice",)).roots == roots


async def test_a_new_tenant_gets_a_salt_in_the_nvme_directory(tmp_path: Path) -> None:
    file, directory = tmp_path / "kvstore.toml", tmp_path / "nvme"

    def write(*names: str) -> Config:
        tenants = "\n".join(f'[[tenants]]\nname = "{name}"\ngroup = "red"' for name in names)
        host = '[host]\ncapacity_bytes = "4MiB"\nslab_bytes = "2MiB"\nhuge_pages = false\nthreads = 1\n'
        file.write_text(f'[nvme]\ndirectory = "nvme"\n{host}\n{tenants}\n')
        return Config.load(file, environ={})

    config = write("alice")
    salts = Salts.load(config)
    # The store of this test has no disk: only its salts come from there.
    bare = msgspec.structs.replace(config, nvme=NvmeConfig())
    with StoreDriver(bare, salts) as driver:
        roots = driver.attach(("alice",)).roots
        driver.store.config = config
        reloader = Reloader(driver.store, salts, lambda _: None)
        write("alice", "bob")
        with capture_logs() as lines:
            await reloader.reload()
        assert lines[-1]["applied"] == ["tenants.bob"]
        assert driver.attach(("alice",)).roots == roots
        of_bob = driver.attach(("bob",)).roots
        assert (directory / "secrets.toml").read_text().count(" = ") == 3
        (directory / "secrets.toml").write_text("")
        with capture_logs() as lines:
            await reloader.reload()
        assert "nvme.directory" in lines[-1]["reason"]
    (directory / "secrets.toml").unlink()
    with StoreDriver(bare, Salts.load(write("alice", "bob"))) as driver:
        assert driver.attach(("alice",)).roots != roots, "the file is what keeps them"
    assert of_bob != roots


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.config.write_text("[daemon"), "not valid TOML"),
        (lambda f: f.config.write_text('[daemon]\nlog_level = "loud"'), "daemon.log_level"),
        (lambda f: f.config.write_text("[demon]\n"), "demon"),
        (lambda f: f.config.write_text(f'[host]\ncapacity_bytes = "{"9" * 400}"'), "is not a size"),
        (lambda f: f.config.write_text(f"[daemon]\nsessions_max = {'9' * 5000}"), "not valid TOML"),
        (lambda f: f.config.write_text("a = " + "[" * 100_000), "not valid TOML"),
        (lambda f: f.config.unlink(), "cannot be read"),
        (lambda f: f.config.write_bytes(b"\xff\xfe"), "UTF-8"),
        (lambda f: f.config.write_bytes(b"#" * (2 << 20)), "longer than"),
        (lambda f: f.secrets.unlink(), "daemon.secrets_file: "),
        (lambda f: f.secrets.chmod(0o644), "open to others"),
        (lambda f: f.secrets.write_text('[tenants]\nalice = "zz"'), "not hexadecimal"),
        (lambda f: f.write({"alice": SALT["alice"], "bob": SALT["alice"]}), "same salt"),
        (lambda f: f.write({"alice": SALT["bob"], "bob": SALT["alice"]}), "equals one that is in use"),
    ],
)
async def test_a_mistake_changes_nothing(files: Files, damage, words: str) -> None:
    config = files.write({"alice": SALT["alice"]})
    salts = Salts.load(config)
    with StoreDriver(config, salts) as driver:
        roots = driver.attach(("alice",)).roots
        reloader = Reloader(driver.store, salts, lambda _: pytest.fail("told of a mistake"))
        damage(files)
        with capture_logs() as lines:
            await reloader.reload()
        assert lines[-1]["event"] == "configuration not reloaded; the old one goes on"
        assert words in lines[-1]["reason"]
        assert driver.store.config is config
        assert driver.attach(("alice",)).roots == roots
        files.write({"alice": SALT["alice"]}, 'log_level = "warning"')
        await Reloader(driver.store, salts, lambda _: None).reload()
        assert driver.store.config.daemon.log_level == "warning", "the next reload is fine again"


async def test_without_a_file_there_is_nothing_to_read_again(driver: StoreDriver) -> None:
    reloader = Reloader(driver.store, Salts({}, {}), lambda _: None)
    with capture_logs() as lines:
        await reloader.reload()
    assert "not loaded from a file" in lines[-1]["reason"]
