"""Cases of cases.md about who may do what: 33, and what it stands on."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import raw_session
from fake_engine import SMALL, FakeEngine
from raw_session import RawSession, frame, hello
from real_daemon import RealDaemon, live_with_parent
from scene import Scene

from kvstore.rpc import messages as m

ROOT = Path(__file__).resolve().parent.parent.parent
# What turns bytes from somewhere into code or objects.
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}
LOADERS = {"yaml.load", "yaml.unsafe_load", "torch.load", "joblib.load", "np.load", "numpy.load"}


class Bomb:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


# ---- 33: unauthenticated admin, pickle on the wire --------------------------------------------------------


def test_case_33_no_admin_by_the_session_socket(scene: Scene) -> None:
    """A tool may look. Of every message that exists only the five that change nothing are for it."""
    engine: FakeEngine = scene.engine()
    chain = engine.saved(1, 5)
    before = scene.daemon.group()
    # A flush drops nothing: it makes durable.
    harmless = {m.Heartbeat, m.Status, m.Check, m.Flush, m.Explain}
    kinds = set(get_args(m.Request)) - {m.Stop}  # for the daemon's own user only: the test after next
    samples: dict[type, Any] = {kind: _sample(kind, chain.root) for kind in kinds}
    for kind, message in samples.items():
        tool = scene.session().tool()
        answer = tool.ask(message)
        if kind in harmless:
            none = kind is m.Explain and isinstance(answer, m.Failed) and answer.status == "NOT_FOUND"
            assert none or isinstance(answer, m.Done | m.StatusReport | m.Flushed)
            continue
        assert isinstance(answer, m.Failed), kind
        assert answer.status in ("PERMISSION_DENIED", "INVALID_ARGUMENT"), kind
        tool.close()
    # Nor does the protocol know a word for it.
    tags = {kind.__struct_config__.tag for kind in samples}
    assert not tags & {"drop", "clear", "shutdown", "evict", "set", "reload", "exec"}
    after = scene.daemon.group()
    assert after["host"] == before["host"]
    assert after["engines"].keys() == before["engines"].keys()
    assert engine.restored(chain) == 5


def _sample(kind: type[msgspec.Struct], root: bytes) -> Any:
    """An honest message of a kind, about a chain that exists."""
    if kind is m.Attach:
        return hello(SMALL)
    by_type = {"int": 0, "bytes": root, "bool": True, "str": "x", "Literal['owned', 'borrowed']": "owned"}
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    types = [str(kind.__annotations__[name]) for name in fields[: len(fields) - len(defaults)]]
    return kind(*[[] if name.startswith("list") else by_type[name] for name in types])


@pytest.fixture
def open_daemon() -> Iterator[RealDaemon]:
    """A daemon in a folder that every user may look into: only its socket's mode is the door."""
    with tempfile.TemporaryDirectory(prefix="kvd") as folder:
        Path(folder).chmod(0o755)
        daemon = RealDaemon(Path(folder))
        try:
            yield daemon.start()
            daemon.assert_sound()
        finally:
            daemon.close()


# Becomes nobody, then knocks; says what came of it.
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__, os.geteuid())
else:
    print("connected", os.geteuid())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_case_33_another_user_does_not_get_in(open_daemon: RealDaemon) -> None:
    assert stat.S_IMODE(open_daemon.socket.stat().st_mode) == 0o600

    def knock() -> str:
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, str(open_daemon.socket)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            preexec_fn=live_with_parent,
        )
        return done.stdout.strip()

    assert knock() == "PermissionError 65534"
    # The test is one of the mode and of nothing else: with another mode the same stranger connects.
    open_daemon.socket.chmod(0o666)
    assert knock() == "connected 65534"


# Becomes nobody and asks the daemon to end, first as a tool, then without a word of who it is.
SABOTEUR = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from raw_session import RawSession
from kvstore.rpc import messages as m
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(RawSession(Path(sys.argv[1])).tool().ask(m.Stop(False)).status, end=" ")
print(RawSession(Path(sys.argv[1])).ask(m.Stop(False)).status, os.geteuid())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_case_33_another_user_cannot_stop_the_daemon(open_daemon: RealDaemon) -> None:
    """Not even where the socket's mode lets it in."""
    open_daemon.socket.chmod(0o666)
    here = str(Path(raw_session.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SABOTEUR, str(open_daemon.socket), here],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=live_with_parent,
    )
    assert done.stdout.split() == ["PERMISSION_DENIED", "PERMISSION_DENIED", "65534"], done.stderr
    assert open_daemon.alive


def test_case_33_an_engine_cannot_stop_the_daemon(scene: Scene) -> None:
    raw = scene.session().attach(SMALL, model=scene.name).prove()
    answer = raw.ask(m.Stop(False))
    assert isinstance(answer, m.Failed)
    assert answer.status == "PERMISSION_DENIED"
    assert raw.ask(m.Heartbeat()) == m.Done()


def test_case_33_a_pickled_frame_is_refused_and_never_loaded(scene: Scene, tmp_path: Path) -> None:
    trace = tmp_path / "it was loaded"
    bomb = pickle.dumps(Bomb(trace))
    for payload in (bomb, msgspec.msgpack.encode([1, bomb]), msgspec.msgpack.encode([1, ["attach", bomb]])):
        raw = scene.session()
        raw.sock.sendall(len(payload).to_bytes(4, "little") + payload)
        assert raw.last_words().status in ("INVALID_ARGUMENT", "PERMISSION_DENIED")
    # Where a message does carry bytes and text, they stay bytes and text.
    raw = scene.session()
    raw.sock.sendall(frame(1, hello(SMALL, model=scene.name, engine=bomb[:16])))
    got = raw.receive()
    assert got is not None
    assert isinstance(got.body, m.Attached)
    answer = raw.ask(m.Prove())
    assert isinstance(answer, m.ProveSlot)
    assert isinstance(raw.ask(m.Quiesced()), m.Quieted)
    assert not trace.exists()
    # The bomb itself works: had anything loaded it, there would be a trace.
    pickle.loads(bomb).close()  # noqa: S301  (our own, made above)
    assert trace.exists()


def shipped() -> list[Path]:
    found = [path for folder in ("kvstore", "connectors") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 60
    return found


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_case_33_shipped_code_makes_no_code_of_bytes(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & CODE_FROM_BYTES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in CODE_FROM_BYTES
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in CODE_FROM_TEXT, f"line {node.lineno}"
            unsafe = called in LOADERS and "weights_only=True" not in ast.unparse(node)
            assert not unsafe, f"line {node.lineno}: {called}"
            assert "allow_pickle=True" not in ast.unparse(node), f"line {node.lineno}"


def test_case_33_a_report_is_values(scene: Scene) -> None:
    """What a tool gets is JSON text of plain values: nothing in it can be run, nothing in it is secret."""
    engine: FakeEngine = scene.engine()
    chain = engine.saved(1, 3)
    with RawSession(scene.daemon.socket) as tool:
        tool.tool()
        text = tool.ask(m.Status()).json
    assert engine.client.engine.hex() in text
    for secret in (chain.root, *(key.tobytes() for key in chain.keys)):
        assert secret.hex() not in text
    json.loads(text)
