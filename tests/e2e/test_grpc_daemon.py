"""The gRPC API of a daemon process: the examples run as they stand, and nothing is left when callers die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from command_line import kvstore
from fake_engine import SMALL
from google.protobuf import json_format
from real_daemon import WAIT_S, RealDaemon, eventually
from scene import Scene

from kvstore.testing import cell_pattern
from kvstore.testing.driver import namespace_of
from kvstore.v1 import store_pb2 as pb
from kvstore.v1 import store_pb2_grpc as rpc

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples/grpc_client.py"


def address_of(daemon: RealDaemon) -> str:
    """Where it listens."""
    return f"unix:{daemon.socket.with_name('kv-grpc.sock')}"


def example(daemon: RealDaemon, *arguments: str) -> str:
    """What the example prints; it finds the daemon as any tool does, by the configuration."""
    environ = {**os.environ, "KVSTORE_DAEMON__SOCKET": str(daemon.socket)}
    command = [sys.executable, str(EXAMPLE), *arguments]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=WAIT_S, cwd=daemon.folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_run_as_they_stand(scene: Scene) -> None:
    daemon = scene.start_daemon()
    assert example(daemon, "lookup").startswith("0 of 6 blocks")
    assert example(daemon, "save") == "6 blocks saved, 0 were there, 0 dropped\n"
    assert example(daemon, "save") == "0 blocks saved, 6 were there, 0 dropped\n"
    looked = example(daemon, "lookup")
    assert "6 of 6 blocks are known" in looked
    assert "blocks 0 to 6 on TIER_HOST" in looked
    out = daemon.folder / "kv.bin"
    assert "blocks up to 6" in example(daemon, "fetch", "--out", str(out))
    block_bytes = 30 * 3 * 4096
    assert out.read_bytes() == b"".join(bytes([block]) * block_bytes for block in range(6))
    followed = example(daemon, "subscribe", "--items", "1").splitlines()
    assert sum(int(line.split()[2]) for line in followed) == 6
    daemon.assert_quiet()
    assert daemon.end() == 0
    assert not list(daemon.folder.glob("*.sock"))


def test_the_grpcurl_request_is_a_lookup(scene: Scene) -> None:
    """grpcurl itself may not be here; what it sends is this JSON in protobuf's own mapping."""
    daemon = scene.start_daemon()
    example(daemon, "save")
    request = json_format.Parse((ROOT / "examples/lookup.json").read_text(), pb.LookupRequest())
    with grpc.insecure_channel(address_of(daemon)) as channel:
        found = rpc.StoreStub(channel).Lookup(request)
        assert (found.blocks, found.asked_blocks) == (1, 1)
        rpc.StoreStub(channel).Release(pb.ReleaseRequest(lease=found.lease))
    daemon.assert_quiet()


def test_an_engine_and_a_grpc_caller_share_blocks(scene: Scene) -> None:
    daemon = scene.start_daemon()
    saved = scene.engine().saved(7, 4)
    fields = namespace_of(SMALL, scene.name)
    fields.pop("block_tokens")
    tokens = np.random.default_rng(7).integers(0, 1 << 32, 4 * SMALL.block_tokens, dtype=np.uint32)
    chain = pb.Chain(
        tenant="default",
        namespace=pb.Namespace(**fields),
        layout=pb.Layout(
            layers=SMALL.layers,
            kv_heads=SMALL.kv_heads,
            head_dim=SMALL.head_dim,
            dtype=SMALL.dtype,
            block_tokens=SMALL.block_tokens,
        ),
        tokens=pb.Tokens(ids=tokens.tolist()),
    )
    with grpc.insecure_channel(address_of(daemon)) as channel:
        stream = rpc.StoreStub(channel).Fetch(pb.FetchRequest(chain=chain))
        data = b"".join(message.data.data for message in stream)
    cells = [
        cell_pattern(key.tobytes(), layer, head, SMALL.cell_bytes).tobytes()
        for key in saved.keys
        for layer in range(SMALL.layers)
        for head in range(SMALL.kv_heads)
    ]
    assert data == b"".join(cells)
    daemon.assert_sound()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_caller_that_dies_in_the_middle_leaves_nothing(scene: Scene, number: int) -> None:
    daemon = scene.start_daemon()
    example(daemon, "save", "--tokens", "400")
    environ = {**os.environ, "KVSTORE_DAEMON__SOCKET": str(daemon.socket)}
    follower = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "subscribe"], env=environ, stdout=subprocess.PIPE, cwd=daemon.folder
    )
    assert follower.stdout is not None
    assert follower.stdout.readline()
    with grpc.insecure_channel(address_of(daemon)) as channel:
        admin = rpc.AdminStub(channel)

        def subscribers() -> float:
            return float(admin.Status(pb.StatusRequest()).report["grpc"]["subscribers"])

        assert subscribers() == 1
        follower.send_signal(number)
        follower.wait(WAIT_S)
        follower.stdout.close()
        eventually(lambda: not subscribers(), "the subscriber is gone")
    daemon.assert_quiet()


def test_a_plaintext_port_is_refused_with_the_words_to_type(scene: Scene) -> None:
    daemon = scene.keep(RealDaemon(scene.folder, {"grpc.listen": '"127.0.0.1:0"'}))
    daemon.start(wait=False)
    assert daemon.process.wait(WAIT_S) == 2
    assert "--set grpc.insecure_tcp=true" in daemon.said().replace("\n", " ")


def test_tokens_over_tls_come_and_go_while_it_runs(scene: Scene, tmp_path: Path) -> None:
    """As README has it: certificates, `kvstore token`, an entry in the file, SIGHUP."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tokens = tmp_path / "tokens.toml"
    for path in (tmp_path / "key.pem", tokens):
        path.touch(mode=0o600)
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    daemon = scene.start_daemon(
        grpc__listen='"auto,127.0.0.1:0"',
        grpc__tls_certificate=f'"{tmp_path / "cert.pem"}"',
        grpc__tls_key=f'"{tmp_path / "key.pem"}"',
        grpc__tokens_file=f'"{tokens}"',
    )

    def serves() -> list[str]:
        return [line for line in daemon.log.read_text().splitlines() if '"kvstore serves"' in line]

    (said,) = eventually(serves, "it says where it listens")
    port = json.loads(said)["grpc"][1]
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    made_now = json.loads(kvstore("token", "ops", "-t", "*", "-v", "admin", "--json").stdout)
    metadata = (("authorization", f"Bearer {made_now['token']}"),)
    with grpc.secure_channel(port, credentials) as channel:

        def code() -> grpc.StatusCode:
            try:
                rpc.AdminStub(channel).Check(pb.CheckRequest(), metadata=metadata, timeout=WAIT_S)
            except grpc.RpcError as error:
                found: grpc.StatusCode = error.code()
                return found
            return grpc.StatusCode.OK

        def reloaded(times: int) -> None:
            daemon.send(signal.SIGHUP)
            eventually(lambda: daemon.log.read_text().count("configuration reloaded") == times, "reloaded")

        assert code() is grpc.StatusCode.UNAUTHENTICATED
        tokens.write_text(made_now["entry"])
        reloaded(1)
        assert code() is grpc.StatusCode.OK
        tokens.write_text("")
        reloaded(2)
        assert code() is grpc.StatusCode.UNAUTHENTICATED
    log = daemon.log.read_text()
    assert '"administration"' in log and '"administration refused"' in log and '"who": "ops"' in log
    assert made_now["token"] not in log
    daemon.assert_quiet()
