"""Where KV events go: one endpoint for each trust group, and none that other machines reach by accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.config.publishing import Outlet, outlets
from kvstore.errors import ConfigError

NO_ENV: dict[str, str] = {}


def load(*flags: str) -> Config:
    return Config.load(None, NO_ENV, flags)


@pytest.fixture
def two_groups(tmp_path: Path) -> Path:
    """A configuration with trust groups red and blue."""
    path = tmp_path / "kvstore.toml"
    path.write_text("[[tenants]]\nname='a'\ngroup='red'\n[[tenants]]\nname='b'\ngroup='blue'\n")
    return path


def test_one_group_needs_no_name() -> None:
    config = load("events.zmq=tcp://127.0.0.1:5557", "events.zmq_replay=ipc:///run/replay.sock")
    found = outlets(config.events, config.groups())
    assert found == [Outlet("default", "tcp://127.0.0.1:5557", "ipc:///run/replay.sock")]
    assert outlets(Config().events, ["default"]) == []


def test_several_groups_have_endpoints_of_their_own(two_groups: Path) -> None:
    flags = ["events.zmq=blue=tcp://[::1]:1, red=tcp://localhost:2", "events.zmq_replay=red=ipc:///r"]
    config = Config.load(two_groups, NO_ENV, flags)
    assert outlets(config.events, config.groups()) == [
        Outlet("red", "tcp://localhost:2", "ipc:///r"),
        Outlet("blue", "tcp://[::1]:1", ""),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tcp://127.0.0.1:1", "names no trust group, and there are 2; write red=tcp://127.0.0.1:1"),
        ("green=tcp://127.0.0.1:1", "no tenant is in 'green'; name one of red, blue"),
        ("red=tcp://127.0.0.1:1,red=tcp://127.0.0.1:2", "trust group red has two endpoints"),
        ("red=tcp://127.0.0.1:1,blue=tcp://127.0.0.1:1", "tcp://127.0.0.1:1 is named twice"),
    ],
)
def test_endpoints_of_groups_that_are_refused(value: str, words: str, two_groups: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^events\.zmq: .*{re.escape(words)}"):
        Config.load(two_groups, NO_ENV, [f"events.zmq={value}"])


@pytest.mark.parametrize("key", ["events.zmq", "events.zmq_replay"])
@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5557",
        "tcp://*:5557",
        "tcp://[::]:1",
        "tcp://10.0.0.1:1",
        "tcp://eth0:1",
        "tcp://node:1",
    ],
)
def test_what_other_machines_reach_needs_a_word(key: str, endpoint: str) -> None:
    fix = "--set events.zmq_insecure=true"
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: {re.escape(endpoint)} is plaintext.*{fix}"):
        load(f"{key}={endpoint}")
    assert getattr(load(f"{key}={endpoint}", "events.zmq_insecure=true").events, key[7:]) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "5557",
        "127.0.0.1:5557",
        "tcp://127.0.0.1",
        "tcp://:1",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:x",
        "udp://127.0.0.1:1",
        "inproc://x",
        "ipc://relative",
        "ipc://@abstract",
        "ipc:///" + "x" * 107,
    ],
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^events\.zmq: "):
        load(f"events.zmq={endpoint}", "events.zmq_insecure=true")


def test_the_form_and_the_topic_of_events() -> None:
    with pytest.raises(ConfigError, match=r"^events\.zmq_form: need array or map, got 'json'"):
        load("events.zmq_form=json")
    with pytest.raises(ConfigError, match=r"^events\.zmq_topic: "):
        load("events.zmq_topic=" + "x" * 65)
