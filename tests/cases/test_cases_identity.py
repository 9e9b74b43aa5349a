"""Cases 18–21, 27 and 31: who a block is, and what survives whom."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from children import gone
from fake_engine import SMALL
from real_daemon import eventually, mapped
from scene import Scene

from kvstore.keys import KeyChain
from kvstore.types import SaveResult

TWO = '[[tenants]]\nname = "a"\ngroup = "g"\n\n[[tenants]]\nname = "b"\ngroup = "g"\n'
_KEYS = """
import sys
from kvstore.keys import KeyChain
chain = KeyChain.of(bytes(range(32)), list(range(1000)), 16, {3: b"image"})
print(chain.keys.tobytes().hex(), chain.digest(len(chain)))
"""


def test_case_18_keys_do_not_depend_on_the_process(scene: Scene) -> None:
    """Other hash seeds, another process, another implementation: the same keys, and so a hit."""
    said = set()
    for seed in ("0", "1", "random"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _KEYS], capture_output=True, text=True, timeout=60, check=True, env=environ
        )
        said.add(done.stdout)
    assert len(said) == 1
    parent = bytes(range(32))
    expected = b""
    for block in range(1000 // 16):
        extra = b"image" if block == 3 else b""
        tokens = np.arange(16 * block, 16 * block + 16, dtype="<u4").tobytes()
        data = parent + len(extra).to_bytes(4, "little") + extra + tokens
        parent = hashlib.blake2b(data, digest_size=32, person=b"kvstore-bk-v1").digest()
        expected += parent
    assert said.pop().split()[0] == expected.hex()
    child = scene.child()
    assert child.ask("save", seed=5, blocks=7)["ready"] == 7
    engine = scene.engine()
    assert engine.restored(engine.chain(5, 7)) == 7


def test_case_19_images_and_adapters_are_part_of_who_a_block_is(scene: Scene) -> None:
    """Same tokens, another picture (or a digest that differs only at its end): nothing is shared after it."""
    engine = scene.engine()
    tokens = np.arange(40, dtype=np.uint32)

    def chain(picture: bytes) -> KeyChain:
        found = engine.client.chain(tokens, "default", engine.reuse, {4: picture})
        assert found is not None
        return found

    first = chain(hashlib.sha256(b"cat").digest())
    assert engine.save(first) == SaveResult(10, 0, 0, 0)
    assert engine.restored(chain(hashlib.sha256(b"cat").digest())) == 10
    for other in (hashlib.sha256(b"dog").digest(), hashlib.sha256(b"cat").digest()[:31] + b"?", b""):
        assert engine.matched(chain(other)) == 4
    for adapter in ("none ", "sql-v1"):
        stranger = scene.engine(identity={"adapter": adapter})
        found = stranger.client.chain(tokens, "default", stranger.reuse, {4: hashlib.sha256(b"cat").digest()})
        assert found is not None
        assert stranger.matched(found) == 0


def test_case_20_a_restarted_daemon_is_noticed(stage: Scene) -> None:
    """Another epoch, another salt: old keys are never asked for under it, and nobody restarts the engine."""
    daemon = stage.start_daemon()
    engine = stage.engine()
    old = engine.saved(1, 5)
    epochs = {engine.client.epoch}
    for generation in (2, 3):
        daemon.end(signal.SIGTERM)
        daemon.start()
        eventually(lambda g=generation: engine.client.generation >= g and engine.client.attached, "again")
        engine.client.poll()
        epochs.add(engine.client.epoch)
        assert engine.matched(old) == 0  # a root of another daemon: refused, and that is a miss
        assert engine.saved(1, 5).root != old.root
        assert engine.restored(engine.chain(1, 5)) == 5
    assert len(epochs) == 3
    engine.close()
    daemon.assert_quiet()


def test_case_21_memory_dies_with_its_holders(stage: Scene) -> None:
    """An engine, then the daemon, killed: the next ones start at once, and no arena of the dead is left."""
    daemon = stage.start_daemon()
    before = mapped(os.getpid())
    first = stage.child()
    assert first.ask("save", seed=1, blocks=5)["ready"] == 5
    assert mapped(first.pid)
    first.kill()
    second = stage.child()
    assert second.ask("restored", seed=1, blocks=5)["good"] == 5
    daemon.end(signal.SIGKILL)
    eventually(lambda: not mapped(second.pid), "the living engine let the dead daemon's arena go")
    daemon.start()
    eventually(lambda: mapped(second.pid), "and maps the new one")
    assert len({line.split("memfd:")[1] for line in mapped(second.pid)}) <= 2, "one arena: data and control"
    second.kill()
    assert gone(second.pid)
    assert mapped(os.getpid()) == before
    daemon.assert_quiet()


def test_case_27_the_salt_is_in_every_key_on_every_tier(stage: Scene) -> None:
    """Two tenants, one prompt: two blocks everywhere; a salt of one request separates it from all others."""
    daemon = stage.start_daemon(TWO)
    a, b = stage.engine(tenant="a"), stage.engine(tenant="b")
    chain = a.saved(1, 6)
    other = b.chain(1, 6)
    shared = {key.tobytes() for key in chain.keys} & {key.tobytes() for key in other.keys}
    assert not shared
    assert b.save(other) == SaveResult(6, 0, 0, 0)
    assert daemon.group("g")["host"]["ready"] == 12
    tokens = np.arange(24, dtype=np.uint32)
    plain = a.client.chain(tokens, "a", a.reuse)
    salted = a.client.chain(tokens, "a", a.reuse, {0: b"cache salt of one user"})
    assert plain is not None
    assert salted is not None
    assert a.save(salted) == SaveResult(6, 0, 0, 0)
    assert a.matched(plain) == 0
    assert a.restored(salted) == 6


def test_case_31_nothing_is_left_in_shared_memory(stage: Scene) -> None:
    """Whoever is killed, and in whichever order: no file, no segment, no mapping."""
    place = Path("/dev/shm")
    shm, own = set(place.iterdir()), mapped(os.getpid())
    for order in ("engine first", "daemon first"):
        daemon = stage.start_daemon()
        engine, child = stage.engine(), stage.child(raw=True)
        engine.saved(1, 5)
        child.ask("reserve", seed=2, blocks=3)
        victims = [child.kill, lambda d=daemon: d.end(signal.SIGKILL)]
        for kill in victims if order == "engine first" else reversed(victims):
            kill()
        eventually(lambda: mapped(os.getpid()) == own, "this process let go by itself")
        engine.close()
        assert set(place.iterdir()) == shm
        files = {"kvstore.toml", "daemon.log", "kv.sock", "kv-grpc.sock"}
        assert {entry.name for entry in daemon.folder.iterdir()} == files
    assert SMALL.block_tokens == 4
