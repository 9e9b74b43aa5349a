"""Configuration: every source, the order they win in, and errors that name the key and the fix."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from kvstore.config import (
    Config,
    DaemonConfig,
    EventsConfig,
    HostConfig,
    IndexConfig,
    MetricsConfig,
    NvmeConfig,
    TenantConfig,
)
from kvstore.errors import ConfigError
from kvstore.types import Reuse

NO_ENV: dict[str, str] = {}


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "kvstore.toml"
        path.write_text(text)
        return path

    return write


def load(*flags: str) -> Config:
    return Config.load(None, NO_ENV, flags)


# ---- sources ----------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert load() == Config()
    assert Config().groups() == ["default"]


def test_a_file(write) -> None:
    path = write(
        """
        [daemon]
        socket = "/run/kv.sock"
        socket_mode = "0660"
        [host]
        capacity_bytes = "8GiB"
        huge_pages = false
        [index]
        nodes_max = 1000
        [[tenants]]
        name = "alice"
        group = "red"
        reuse = "group"
        [[tenants]]
        name = "bob"
        group = "blue"
        """
    )
    config = Config.load(path, NO_ENV)
    assert (config.daemon.socket, config.daemon.socket_mode) == ("/run/kv.sock", 0o660)
    assert (config.host.capacity_bytes, config.host.huge_pages) == (8 << 30, False)
    assert config.index.nodes_max == 1000
    assert config.tenants == (
        TenantConfig(name="alice", group="red", reuse=Reuse.GROUP),
        TenantConfig(name="bob", group="blue", reuse=Reuse.OWN),
    )
    assert config.groups() == ["red", "blue"]


SOURCES = ("file", "environment", "flag")


@pytest.mark.parametrize(
    "given", [c for n in (1, 2, 3) for c in itertools.combinations(SOURCES, n)], ids=" ".join
)
def test_flags_win_over_environment_over_file(given: tuple[str, ...], write) -> None:
    value = {"file": 3, "environment": 4, "flag": 5}
    file = write(f"[host]\nthreads = {value['file']}\n") if "file" in given else None
    environ = {"KVSTORE_HOST__THREADS": str(value["environment"])} if "environment" in given else {}
    flags = [f"host.threads={value['flag']}"] if "flag" in given else []
    config = Config.load(file, environ, flags)
    assert config.host.threads == value[given[-1]]


def test_sources_merge_key_by_key(write) -> None:
    config = Config.load(
        write("[host]\nthreads = 3\n"), {"KVSTORE_HOST__LOCK": "true"}, ["host.slab_bytes=4MiB"]
    )
    assert (config.host.threads, config.host.lock, config.host.slab_bytes) == (3, True, 4 << 20)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_EVENTS__LOG_MAX", "77")
    assert Config.load().events.log_max == 77


def test_other_variables_are_not_ours() -> None:
    assert Config.load(None, {"KVSTORE_HOME": "/x", "HOST__THREADS": "9", "PATH": "/bin"}) == Config()


TABLES = {
    "daemon": DaemonConfig,
    "host": HostConfig,
    "index": IndexConfig,
    "events": EventsConfig,
    "metrics": MetricsConfig,
    "nvme": NvmeConfig,
}
KEYS = [(table, field.name) for table, struct in TABLES.items() for field in msgspec.structs.fields(struct)]
ANOTHER = {
    "daemon.socket": "/run/other.sock",
    "daemon.socket_mode": "0666",
    "daemon.secrets_file": "/etc/secrets.toml",
    "daemon.log_level": "debug",
    "daemon.state_dir": "/var/lib/kvstore",
    "daemon.admins": "root,65534",
    "events.zmq": "tcp://127.0.0.1:5557",
    "events.zmq_replay": "ipc:///run/kvstore-replay.sock",
    "events.zmq_topic": "kv@node1",
    "events.zmq_form": "map",
    "events.zmq_insecure": "true",
    "metrics.listen": "127.0.0.1:9464",
    "metrics.tenants": "digests",
    "daemon.heartbeat_s": "0.5",
    "daemon.stale_after_s": "9.5",
    "daemon.keep_arena": "true",
    "host.capacity_bytes": "3GiB",
    "host.slab_bytes": "64MiB",
    "host.huge_pages": "false",
    "host.lock": "true",
    "nvme.directory": "/var/lib/kvstore/nvme",
    "nvme.capacity_bytes": "1TiB",
    "nvme.segment_bytes": "64MiB",
    "nvme.write_budget_bytes_per_day": "512GiB",
    "nvme.io": "threads",
    "nvme.direct": "false",
    "nvme.stall_s": "0.5",
    "nvme.write_queue_bytes": "64MiB",
    "nvme.limit_bytes_per_s": "5MB",
    "nvme.added_latency_s": "0.25",
}


@pytest.mark.parametrize(("table", "key"), KEYS, ids=[".".join(key) for key in KEYS])
def test_every_key_can_be_set_everywhere(table: str, key: str, write) -> None:
    default = getattr(getattr(Config(), table), key)
    text = ANOTHER.get(f"{table}.{key}", "20")
    by_flag = load(f"{table}.{key}={text}")
    by_environment = Config.load(None, {f"KVSTORE_{table}__{key}".upper(): text})
    quoted = text if text in ("true", "false") or text.replace(".", "").isdigit() else f'"{text}"'
    if key == "socket_mode":
        quoted = f'"{text}"'
    by_file = Config.load(write(f"[{table}]\n{key} = {quoted}\n"), NO_ENV)
    assert by_flag == by_environment == by_file
    assert getattr(getattr(by_flag, table), key) != default


# ---- sizes, modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2097152", 2 << 20),
        ("4MiB", 4 << 20),
        ("4 MiB", 4 << 20),
        ("4mib", 4 << 20),
        ("1.5GiB", 3 << 29),
        ("1GB", 10**9),
        ("5000000B", 5_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load(f"host.capacity_bytes={text}", "host.slab_bytes=2MiB").host.capacity_bytes == size


@pytest.mark.parametrize("text", ["", "lots", "4XiB", "-4MiB", "GiB", "4MiB!", "0x10", "1e9", "nan"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^host\.capacity_bytes: .* is not a size; write e\.g\. 4GiB"):
        load(f"host.capacity_bytes={text}")


@pytest.mark.parametrize(("text", "mode"), [("600", 0o600), ("0660", 0o660), ("0o666", 0o666)])
def test_modes_are_octal(text: str, mode: int) -> None:
    assert load(f"daemon.socket_mode={text}").daemon.socket_mode == mode


@pytest.mark.parametrize("text", ["rw", "689", "", "1777", "-1"])
def test_bad_modes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^daemon\.socket_mode: "):
        load(f"daemon.socket_mode={text}")


# ---- errors -----------------------------------------------------------------------------------------------


def test_an_unknown_key_names_its_origin_and_the_nearest(write) -> None:
    with pytest.raises(ConfigError, match=r"^host\.capacity_byte: .*did you mean capacity_bytes\?.*--set"):
        load("host.capacity_byte=4GiB")
    with pytest.raises(
        ConfigError, match=r"^daemon\.sockett: .*did you mean socket\?.*KVSTORE_DAEMON__SOCKETT"
    ):
        Config.load(None, {"KVSTORE_DAEMON__SOCKETT": "x"})
    with pytest.raises(ConfigError, match=r"^index\.node_max: .*did you mean nodes_max\?.*kvstore\.toml"):
        Config.load(write("[index]\nnode_max = 5\n"), NO_ENV)


def test_an_unknown_key_far_from_all_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"^events\.zzz: unknown key; known: log_max"):
        load("events.zzz=1")


def test_an_unknown_table(write) -> None:
    with pytest.raises(ConfigError, match=r"^hosts: unknown key; did you mean host\?"):
        Config.load(write("[hosts]\nx = 1\n"), NO_ENV)


def test_an_unknown_key_of_a_tenant(write) -> None:
    with pytest.raises(ConfigError, match=r"^tenants\[.*\]\.grup: unknown key; did you mean group\?"):
        Config.load(write('[[tenants]]\nname = "a"\ngrup = "b"\n'), NO_ENV)


@pytest.mark.parametrize("flag", ["host", "host.threads", "=3", ""])
def test_a_flag_without_value(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set "):
        load(flag)


@pytest.mark.parametrize("flag", ["threads=3", "a.b.c=3", ".x=3", "host.=3"])
def test_a_flag_that_is_no_path(flag: str) -> None:
    with pytest.raises(ConfigError):
        load(flag)


def test_tenants_come_from_the_file_only() -> None:
    with pytest.raises(ConfigError, match="tenants are set in the file only"):
        load("tenants.name=x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host\n", "not valid TOML"),
        ("host = 5\n", "^host: "),
        ("host = 5\n[[tenants]]\nname='a'\n", "^host: "),
        ("[host]\nthreads = 'many'\n", r"^host\.threads: "),
        ("[host]\nlock = 'maybe'\n", r"^host\.lock: "),
        ("[tenants]\nname = 'a'\n", "^tenants"),
        ("tenants = []\n", "^tenants: need at least one"),
        ("[[tenants]]\nname='a'\n[[tenants]]\nname='a'\n", r"^tenants\.name: a appears twice"),
        ("[[tenants]]\nname='a b'\n", r"^tenants\.name: "),
        ("[[tenants]]\nname=''\n", r"^tenants\.name: "),
        ("[[tenants]]\nname='a'\ngroup='../x'\n", r"^tenants\.group: "),
        ("[[tenants]]\nname='a'\nreuse='all'\n", r"^tenants"),
        ("[[tenants]]\ngroup='a'\n", r"^tenants"),
    ],
)
def test_bad_files(text: str, words: str, write) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load(write(text), NO_ENV)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such configuration file"):
        Config.load(tmp_path / "absent.toml", NO_ENV)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match=r"binary\.toml: "):
        Config.load(path, NO_ENV)
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path, NO_ENV)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("daemon.heartbeat_s", ["0", "61", "nan", "inf", "-1"]),
        ("daemon.stale_after_s", ["0", "3601", "1.9"]),
        ("daemon.attach_timeout_s", ["0", "601"]),
        ("daemon.stall_s", ["0", "3601"]),
        ("daemon.sessions_max", ["0", "65537", "1.5", "x"]),
        ("daemon.leases_max", ["0", "16777217"]),
        ("daemon.socket", ["", "/" + "x" * 107]),
        ("daemon.log_level", ["loud", "INFO", ""]),
        ("host.capacity_bytes", ["0", "1MiB", "17TiB"]),
        ("host.slab_bytes", ["0", "1MiB", "2GiB", "3MiB"]),
        ("host.threads", ["-1", "1025"]),
        ("index.nodes_max", ["15", "2147483649"]),
        ("events.log_max", ["0", "10000001"]),
        ("nvme.capacity_bytes", ["0", "3MiB", "65TiB", "511MiB"]),
        ("nvme.segment_bytes", ["0", "1048575", "1025MiB", "1.0001MiB"]),
        ("nvme.write_budget_bytes_per_day", ["-2", "2000TiB", "many"]),
        ("nvme.io", ["", "aio", "URING"]),
        ("nvme.depth", ["0", "1025", "x"]),
        ("nvme.threads", ["0", "65"]),
        ("nvme.stall_s", ["0", "3601", "nan"]),
        ("nvme.write_queue_bytes", ["0", "1023KiB"]),
        ("nvme.limit_bytes_per_s", ["-1", "2TiB", "fast"]),
        ("nvme.added_latency_s", ["-0.1", "61", "nan"]),
        (
            "metrics.listen",
            ["9464", ":9464", "127.0.0.1:http", "h:70000", "h:-1", "unix:", "unix:/" + "x" * 107],
        ),
    ],
)
def test_ranges(key: str, bad: list[str]) -> None:
    for text in bad:
        with pytest.raises(ConfigError, match=rf"^{key.replace('.', '[.]')}: "):
            load(f"{key}={text}")


def test_a_slab_fits_the_arena() -> None:
    with pytest.raises(ConfigError, match=r"^host\.slab_bytes: larger than host\.capacity_bytes"):
        load("host.capacity_bytes=16MiB", "host.slab_bytes=32MiB")


# ---- the NVMe tier ----------------------------------------------------------------------------------------


def test_without_a_directory_there_is_no_disk() -> None:
    assert load().nvme.directory == ""
    assert not load().salts_kept
    assert load("nvme.directory=/d").salts_kept


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ((), 16 << 30),
        (("nvme.capacity_bytes=1TiB",), 1 << 40),
        (("nvme.write_budget_bytes_per_day=-1",), 16 << 30),
        (("nvme.write_budget_bytes_per_day=0",), 0),
        (("nvme.write_budget_bytes_per_day=5GiB",), 5 << 30),
    ],
)
def test_the_write_budget(flags: tuple[str, ...], budget: int) -> None:
    assert load(*flags).nvme.budget_bytes_per_day == budget


def test_the_write_budget_in_a_file(write) -> None:
    for text, budget in (("-1", 16 << 30), ('"-1"', 16 << 30), ('"2TiB"', 2 << 40), ("4096", 4096)):
        config = Config.load(write(f"[nvme]\nwrite_budget_bytes_per_day = {text}\n"), NO_ENV)
        assert config.nvme.budget_bytes_per_day == budget


@pytest.mark.parametrize(
    ("capacity", "segment", "fix"),
    [("511MiB", "128MiB", "raise it, or lower nvme.segment_bytes"), ("1TiB", "1MiB", "lower it, or raise")],
)
def test_capacity_and_segments_fit_each_other(capacity: str, segment: str, fix: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^nvme\.capacity_bytes: .* segments of nvme\.segment_bytes"
    ) as caught:
        load(f"nvme.capacity_bytes={capacity}", f"nvme.segment_bytes={segment}")
    assert fix in str(caught.value)
    assert load("nvme.capacity_bytes=512MiB").nvme.capacity_bytes == 512 << 20


def test_a_relative_directory_lies_beside_the_file(write) -> None:
    file = write('[nvme]\ndirectory = "blocks"\n')
    assert Config.load(file, NO_ENV).nvme.directory == str(file.parent / "blocks")


@pytest.mark.parametrize("group", [".", "..", ".hidden", "secrets.toml"])
def test_a_group_is_a_directory_of_its_own(group: str, write) -> None:
    tenant = f'[[tenants]]\nname = "a"\ngroup = "{group}"\n'
    assert Config.load(write(tenant), NO_ENV).groups() == [group]
    with pytest.raises(ConfigError, match=r"^tenants\.group: .* cannot be a directory in nvme\.directory"):
        Config.load(write(f'[nvme]\ndirectory = "/d"\n{tenant}'), NO_ENV)
