"""Metrics, logs and reloads of the real daemon, as an operator sees them."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections import Counter
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from fake_engine import SMALL
from kvstore.connectors.embedded.engine import EngineLimits
from prometheus_client.parser import text_string_to_metric_families
from raw_session import RawSession, hello
from real_daemon import RealDaemon, eventually
from scene import Scene
from tiny_engines import TinyEngine, TinyModel, prompt, tiny, written

from kvstore.rpc import messages as m

__all__ = ["tiny", "written"]
SERVED = {"metrics__listen": '"127.0.0.1:0"'}
SALTS = {"a": "a1" * 32, "b": "b2" * 32, "team": "7e" * 32}
TENANTS = """
[[tenants]]
name = "a"
group = "team"
reuse = "group"
[[tenants]]
name = "b"
group = "team"
"""


def said(daemon: RealDaemon, event: str) -> list[dict[str, Any]]:
    """Log lines of one kind."""
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def scrape(daemon: RealDaemon, path: str = "/metrics") -> str:
    address = eventually(lambda: said(daemon, "metrics served"), "metrics are served")[-1]["address"]
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60.0) as answer:
        text: str = answer.read().decode()
    return text


def value(daemon: RealDaemon, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(scrape(daemon))
    found = [s.value for f in families for s in f.samples if (s.name, s.labels) == (name, labels)]
    assert len(found) == 1, (name, labels)
    return found[0]


def secret_tenants(stage: Scene, **settings: str) -> RealDaemon:
    """A daemon with tenants a and b of one group and known salts."""
    secrets = stage.folder / "secrets.toml"
    tenants = "\n".join(f'{name} = "{SALTS[name]}"' for name in ("a", "b"))
    secrets.write_text(f'[tenants]\n{tenants}\n[groups]\nteam = "{SALTS["team"]}"\n')
    secrets.chmod(0o600)
    return stage.start_daemon(TENANTS, daemon__secrets_file=f'"{secrets}"', **settings)


def test_an_engine_shows_in_the_metrics(stage: Scene, tiny: TinyModel) -> None:
    """Cold, warm from the device, warm from HOST: tokens by tier, TTFT by temperature, copies, prefill."""
    daemon = stage.start_daemon(**SERVED, daemon__heartbeat_s="0.1")

    def engine() -> TinyEngine:
        limits = EngineLimits(batched_tokens_max=64)
        return stage.keep(TinyEngine(tiny, daemon.socket, engine_limits=limits)).attached()  # type: ignore[no-any-return]

    first, asked = engine(), prompt(100, 1)
    first.ask(asked, 4)
    first.ask(asked, 4)
    first.settle()
    first.close()
    second = engine()
    reports = [second.ask(asked, 4)]
    second.close()
    assert value(daemon, "kvstore_lookup_tokens_total", tenant="default") == 3 * 96
    hit = [value(daemon, "kvstore_hit_tokens_total", tenant="default", tier=tier) for tier in ("GPU", "HOST")]
    assert hit == [96, 96]
    assert value(daemon, "kvstore_saved_prefill_tokens_total", tenant="default") == sum(hit)
    assert value(daemon, "kvstore_ttft_seconds_count", temperature="cold") == 1
    assert value(daemon, "kvstore_ttft_seconds_count", temperature="warm") == 2
    assert value(daemon, "kvstore_ttft_seconds_sum", temperature="warm") >= reports[0].ttft_s > 0
    # 100 tokens in chunks of at most 64; what is left of a warm prompt is 4 tokens.
    assert value(daemon, "kvstore_prefill_tokens_total", group="default") == 108
    block = first.client._core.format
    stored = value(daemon, "kvstore_transfer_bytes_total", group="default", kind="store")
    loaded = value(daemon, "kvstore_transfer_bytes_total", group="default", kind="load")
    cells = block.layers * block.heads * block.cell_bytes
    assert (stored, loaded) == (6 * cells, 6 * cells)
    assert value(daemon, "kvstore_transfer_seconds_total", group="default", kind="load") > 0
    assert value(daemon, "kvstore_loop_lag_seconds_count") > 0
    assert scrape(daemon, "/healthz") == "ok\n"
    daemon.assert_quiet()


def test_rot_and_refusals_are_counted(stage: Scene) -> None:
    daemon = stage.start_daemon(**SERVED, host__capacity_bytes='"2MiB"')
    engine = stage.engine(blocks=512)
    chain = engine.saved(1, 9)
    hit = engine.hit(chain)
    engine.flip(int(hit.slots[4]))
    assert engine.load(hit, chain).good == 4
    assert value(daemon, "kvstore_corrupt_blocks_total", group="default", tier="HOST") == 1
    assert value(daemon, "kvstore_dropped_blocks_total", group="default", reason="rot") == 1
    assert value(daemon, "kvstore_transfers_total", group="default", kind="verify") == 1
    most = 2 * daemon.group()["host"]["free"]
    dropped = engine.save(engine.chain(2, most)).dropped
    assert dropped > 0  # the lease keeps its blocks, and the rest is not enough
    assert value(daemon, "kvstore_refused_save_blocks_total", group="default") == dropped
    engine.client.release(hit.lease)


def test_no_secret_is_in_a_debug_log(stage: Scene) -> None:
    daemon = secret_tenants(stage, daemon__log_level='"debug"')
    secrets = set(SALTS.values())
    for tenant in ("a", "b"):
        engine = stage.engine(tenant=tenant)
        chain = engine.saved(7, 9)
        assert engine.restored(chain) == 9
        secrets |= {chain.root.hex(), *(key.tobytes().hex() for key in chain.keys)}
        engine.close()
    with RawSession(daemon.socket) as raw:
        raw.engine(SMALL, model=stage.name, tenants=["a", "b"])
        chain = raw.chain(8, 3, "a", "group")
        secrets |= {chain.root.hex(), *(key.tobytes().hex() for key in chain.keys)}
        twice = np.concatenate([chain.keys, chain.keys]).tobytes()
        raw.failure(m.Reserve(chain.root, chain.root, twice))
        raw.failure(m.Reserve(b"?" * 32, chain.root, twice))
        raw.failure(m.Lookup(chain.root, 3, b"\0" * 12, chain.keys.tobytes()))
        raw.failure(m.Commit(1, chain.root, 0, chain.root, chain.keys.tobytes()))
        raw.send(m.Lookup(chain.root, 3, b"\0" * 4, chain.keys[:1].tobytes()))
        raw.sock.sendall((32).to_bytes(4, "little") + chain.keys[0].tobytes())  # no frame at all
        raw.receive()
    daemon.end()
    log = daemon.log.read_bytes()
    for secret in secrets:
        raw_bytes = bytes.fromhex(secret)
        assert secret.encode() not in log.lower()
        assert raw_bytes not in log and repr(raw_bytes)[2:-1].encode() not in log
    requests = said(daemon, "request")
    assert {"lookup", "reserve", "publish", "release"} <= {line["message"] for line in requests}
    attached = {line["session"]: line for line in said(daemon, "session attached")}
    for line in requests:
        if line["message"] in ("lookup", "reserve", "release"):
            owner = attached[line["session"]]
            assert (line["engine"], line["tenant"]) == (owner["engine"], owner["tenant"])
            assert line["request"] > 0
    leases = {line["lease"] for line in requests if line["message"] == "lookup"} - {0}
    assert leases == {line["lease"] for line in requests if line["message"] == "release"} != set()


def test_a_hostile_client_writes_few_lines(stage: Scene) -> None:
    daemon = stage.start_daemon(**SERVED)
    for _ in range(300):
        with RawSession(daemon.socket) as raw:
            raw.refused(hello(SMALL, tenants=["nobody"]))
    lines = said(daemon, "session refused")
    assert 0 < len(lines) < 300
    suppressed = value(daemon, "kvstore_suppressed_log_lines_total")
    assert suppressed + len(said(daemon, "session refused")) == 300
    assert {line["reason"] for line in lines} == {"tenants: 'nobody' is not configured on this daemon"}
    daemon.assert_quiet()


def change(daemon: RealDaemon, old: str, new: str) -> None:
    """Edit the configuration file and tell the daemon."""
    text = daemon.config.read_text()
    assert old in text
    daemon.config.write_text(text.replace(old, new))
    daemon.send(signal.SIGHUP)


def test_sighup_applies_what_it_can_and_names_what_it_cannot(stage: Scene) -> None:
    daemon = secret_tenants(stage, daemon__sessions_max="100")
    engine = stage.engine(tenant="a")
    chain = engine.saved(1, 9)
    newcomer = stage.engine(tenant="c", attach=False)
    eventually(lambda: newcomer.client.refusal, "a tenant that nobody knows is refused")
    secrets = stage.folder / "secrets.toml"
    secrets.write_text(secrets.read_text().replace("[groups]", f'c = "{"c3" * 32}"\n[groups]'))
    with daemon.config.open("a") as file:
        file.write('[[tenants]]\nname = "c"\ngroup = "team"\n')
    daemon.send(signal.SIGHUP)
    eventually(lambda: said(daemon, "configuration reloaded"), "reloaded")
    assert said(daemon, "configuration reloaded")[-1]["applied"] == ["tenants.c"]
    other = stage.engine(tenant="c")
    assert other.saved(1, 3) and other.restored(other.chain(1, 3)) == 3
    assert engine.restored(chain) == 9, "who was there goes on"

    change(daemon, "sessions_max = 100", "sessions_max = 1")
    eventually(lambda: len(said(daemon, "configuration reloaded")) == 2, "reloaded again")
    with RawSession(daemon.socket) as one_too_many:
        assert one_too_many.receive() is None
    refused = eventually(lambda: said(daemon, "session refused"), "the limit is named")[-1]
    assert "daemon.sessions_max = 1" in refused["reason"] and "raise daemon.sessions_max" in refused["reason"]

    change(daemon, '"16MiB"', '"32MiB"')
    told = eventually(lambda: said(daemon, "configuration key not applied"), "what waits is named")
    assert (told[-1]["key"], told[-1]["fix"]) == ("host.capacity_bytes", "restart to apply")

    change(daemon, "[daemon]", "[demon]")
    why = eventually(lambda: said(daemon, "configuration not reloaded; the old one goes on"), "refused")
    assert "demon" in why[-1]["reason"]
    assert engine.restored(chain) == 9
    assert not [salt for salt in (*SALTS.values(), "c3" * 32) if salt in daemon.log.read_text()]


def test_what_was_learnt_outlives_the_daemon(stage: Scene, tiny: TinyModel) -> None:
    daemon = stage.start_daemon(**SERVED, daemon__state_dir='"state"')
    engine = stage.keep(TinyEngine(tiny, daemon.socket)).attached()
    for seed in range(6):
        engine.ask(prompt(100, seed), 2)
    engine.close()
    speed = daemon.group()["prefill_tokens_per_s"]
    assert speed > 0
    curves = daemon.group()["pricing"]["curves"]
    (curve,) = curves.values()
    assert curve["seconds"]["1000"] > 0
    assert daemon.end() == 0
    state = daemon.folder / "state" / "learnt.json"  # relative to the configuration file
    assert json.loads(state.read_text())["version"] == 2
    daemon.start()
    assert daemon.group()["prefill_tokens_per_s"] == pytest.approx(speed)
    (kept,) = daemon.group()["pricing"]["curves"].values()
    assert kept == {**curve, "seconds": pytest.approx(curve["seconds"], rel=0.2)}
    assert value(daemon, "kvstore_prefill_tokens_per_second", group="default") == pytest.approx(speed)
    daemon.end(signal.SIGKILL)
    state.write_text(state.read_text()[:40])  # as a disk may leave it that lies about syncs
    daemon.start()
    assert daemon.group()["prefill_tokens_per_s"] == 0
    told = said(daemon, "learnt state not used; it starts empty")[-1]
    assert told["aside"] == str(state.with_suffix(".bad")) and state.with_suffix(".bad").exists()
    assert daemon.end() == 0


def test_every_step_of_an_engine_reaches_the_curve_of_its_namespace(stage: Scene, tiny: TinyModel) -> None:
    daemon = stage.start_daemon(**SERVED, daemon__state_dir='"state"')
    engine = stage.keep(TinyEngine(tiny, daemon.socket)).attached()
    requests = [engine.request(prompt(100 + seed, seed), 12) for seed in range(6)]
    engine.engine.generate(requests)
    for seed in range(10, 14):
        engine.ask(prompt(90, seed), 2)
    ran = [astuple(step) for step in engine.engine.step_times]
    engine.close()
    assert daemon.end() == 0
    learnt = json.loads((daemon.folder / "state" / "learnt.json").read_text())
    (curve,) = learnt["groups"]["default"]["pricing"]["curves"].values()
    kept = [tuple(row[1:]) for row in curve["steps"]]
    of_use = [step for step in ran if not 0 < step[0] < step[2]]  # mostly decodes tell nothing
    sizes = {(tokens.bit_length(), decodes.bit_length()) for tokens, _, decodes, _, _ in of_use}
    assert len(kept) == len(of_use) - len(sizes), "all but the first of each size"
    assert Counter(kept) <= Counter(of_use)
    assert any(not tokens and decodes > 1 and context for tokens, _, decodes, context, _ in kept)


def test_an_address_in_use_stops_the_start_and_names_the_key(stage: Scene) -> None:
    first = stage.start_daemon(**SERVED)
    scrape(first)
    address = said(first, "metrics served")[-1]["address"]
    second = stage.folder / "second"
    second.mkdir()
    daemon = RealDaemon(second, {"metrics.listen": f'"{address}"'})
    stage.keep(daemon).start(wait=False)
    assert daemon.process.wait(60.0) == 2
    assert f"metrics.listen: cannot bind {address}" in daemon.said()
    assert not daemon.socket.exists(), "what could not start leaves nothing"


def test_a_state_directory_in_use_stops_the_second_daemon(stage: Scene) -> None:
    state = stage.folder / "state"
    stage.start_daemon(daemon__state_dir=f'"{state}"')
    second = stage.folder / "second"
    second.mkdir()
    daemon = RealDaemon(second, {"daemon.state_dir": f'"{state}"'})
    stage.keep(daemon).start(wait=False)
    assert daemon.process.wait(60.0) == 2
    assert "daemon.state_dir: another daemon uses" in daemon.said()
