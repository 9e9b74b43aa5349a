"""Can one tenant tell from its times to first token what another one has asked before?

    python -m bench.timing_probe --json      a minute

Tenant A asks n random prompts, and all of them are saved. Then an engine of tenant B, in the same trust
group and so over the same arena, asks for these and for as many that nobody has asked yet, all of one length,
each of them once and in random order. The daemon's plan is always to load, so that whatever is found is used;
the device keeps no idle blocks, so that nothing is found there; the arena holds everything, so that nothing
leaves.

    auc_separate    each tenant under a root of its own (reuse = own)
    auc_shared      both under the trust group's root (reuse = group): a hit may be seen there, and this shows
                    that the probe sees it
    auc_control     of the first run, half of the new prompts against the other half: what noise alone makes

AUC is the probability that a new prompt takes longer than one that A has asked, ties counted half: 0.5 is
what guessing gives. For n = 300 that of equal times has a standard deviation of 0.024, the control's is
0.033; a run whose control is outside of the bar is void.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvstore.connectors.embedded.attach import connect
from kvstore.connectors.embedded.engine import Engine
from kvstore.connectors.embedded.model import load_model
from kvstore.connectors.embedded.processes import DaemonProcess
from kvstore.connectors.embedded.request import Report, Request
from kvstore.connectors.embedded.tiny import TINY, save_tiny
from numpy.typing import NDArray

from bench.measure import finish, parser
from kvstore.client import Limits

__all__ = [
    "SEPARATE",
    "SHARED_MIN",
    "TOKENS",
    "Probed",
    "auc_of",
    "main",
    "probe",
    "settings",
    "tenants",
    "write_model",
]

SEPARATE = 0.4, 0.6
SHARED_MIN = 0.9
# Eight blocks and one token more: some 15 ms of one core to compute, and a hit leaves one token of it.
BLOCK_TOKENS = 32
TOKENS = 8 * BLOCK_TOKENS + 1
_SPEC = replace(TINY, layers=2, kv_heads=1)
_KEPT_BYTES = TOKENS // BLOCK_TOKENS * (2 * _SPEC.layers * _SPEC.head_dim * 4 * BLOCK_TOKENS + 4096)
_SLAB_BYTES = 2 << 20
_WARM = 15
_POOL_BLOCKS = 32
_WAIT_S = 60.0
_PATIENT = Limits(call_s=30.0, attach_s=_WAIT_S, copy_s=_WAIT_S)
_GROUP = "team"


@dataclass(frozen=True, slots=True)
class Probed:
    """What tenant B saw.

    Attributes:
        known_s, new_s: times to first token of prompts that A has asked, and that nobody has, in their order.
        known_reused, new_reused: tokens of those prompts that were reused.
    """

    known_s: NDArray[np.float64]
    new_s: NDArray[np.float64]
    known_reused: int
    new_reused: int

    @property
    def auc(self) -> float:
        """How well time tells one from the other."""
        return auc_of(self.known_s, self.new_s)

    @property
    def control(self) -> float:
        """The same of new prompts alone, every other one against the rest; their order is random."""
        return auc_of(self.new_s[::2], self.new_s[1::2])

    def json(self) -> dict[str, float]:
        """Medians and tokens, for a result file."""
        return {
            "known_ttft_s": _short(float(np.median(self.known_s))),
            "new_ttft_s": _short(float(np.median(self.new_s))),
            "known_reused_tokens": self.known_reused,
            "new_reused_tokens": self.new_reused,
        }


def auc_of(known_s: NDArray[np.float64], new_s: NDArray[np.float64]) -> float:
    """Probability that one of `new_s` is larger than one of `known_s`, ties counted half; exact, by ranks."""
    _, place, counts = np.unique(np.concatenate([known_s, new_s]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    above = ranks[len(known_s) :].sum() - len(new_s) * (len(new_s) + 1) / 2
    return float(above / (len(known_s) * len(new_s)))


# ---- the stage --------------------------------------------------------------------------------------------


def tenants(reuse: str) -> str:
    """[[tenants]] tables of A and B, in one trust group."""
    rows = (f'[[tenants]]\nname = "{name}"\ngroup = "{_GROUP}"\nreuse = "{reuse}"\n' for name in ("a", "b"))
    return "\n".join(rows)


def settings(n: int) -> dict[str, str]:
    """table.key → value of a daemon that keeps whatever a probe of this size saves."""
    prompts = 3 * n + 3 * _WARM
    slabs = -(-prompts * _KEPT_BYTES * 5 // 4 // _SLAB_BYTES)
    return {
        "host.capacity_bytes": str(slabs * _SLAB_BYTES),
        "host.slab_bytes": str(_SLAB_BYTES),
        "host.huge_pages": "false",
    }


def write_model(folder: Path) -> Path:
    """The model that both tenants serve."""
    path: Path = save_tiny(folder, _SPEC)
    return path


class _Asker:
    """An engine of one tenant that asks one prompt at a time."""

    def __init__(self, socket: Path, model: Path, tenant: str, reuse: str) -> None:
        made = load_model(model, blocks=_POOL_BLOCKS + 1, block_tokens=BLOCK_TOKENS)
        memory = made.memory
        self._tables = connect(socket, made.spec, memory, model, idle_max=0, tenant=tenant, limits=_PATIENT)
        self._engine = Engine(made, self._tables)
        self._reuse = reuse
        self._asked = 0
        deadline = time.monotonic() + _WAIT_S
        while not self._tables.attached and time.monotonic() < deadline:
            self._tables.poll()
            time.sleep(0.005)
        if not self._tables.attached:
            raise RuntimeError(f"the daemon did not accept the engine: {self._tables.client.refusal}")
        self._tables.poll()

    def ask(self, prompt: Sequence[int]) -> Report:
        """One request to its end; all that it leaves to save is saved before the next one."""
        self._asked += 1
        request = Request(f"probe-{self._asked}", tuple(prompt), 1, ignore_eos=True, reuse=self._reuse)
        report = self._engine.generate([request])[0]
        if not self._tables.settle(_WAIT_S) or self._tables.dropped_saves:
            raise RuntimeError(f"a prompt was not saved: {self._tables.dropped_saves or 'it takes too long'}")
        return report

    def close(self) -> None:
        """Leave in order."""
        self._engine.close()


@contextmanager
def _asker(socket: Path, model: Path, tenant: str, reuse: str) -> Iterator[_Asker]:
    made = _Asker(socket, model, tenant, reuse)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Its matrices are too small to share, and a thread that waits for its turn is noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def probe(socket: Path, model: Path, reuse: str, n: int, seed: int = 1) -> Probed:
    """A asks, then B asks and measures.

    Args:
        socket: of a daemon with `settings(n)`, `tenants(reuse)` and plan.mode = load, which nobody else uses.
        model: see `write_model`.
        reuse: under which roots both ask, own or group.
        n: prompts of each kind that count.
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(3, _SPEC.vocab, (2 * n + 2 * _WARM, TOKENS)).tolist()
    known, new, warm = prompts[:n], prompts[n : 2 * n], prompts[2 * n :]
    times = np.empty(2 * n, np.float64)
    reused = np.empty(2 * n, np.int64)
    with _one_thread():
        with _asker(socket, model, "a", reuse) as owner:
            for prompt in [*known, *warm[:_WARM]]:
                owner.ask(prompt)
        with _asker(socket, model, "b", reuse) as other:
            for number in random.permutation(len(warm)).tolist():
                other.ask(warm[number])
            for number in random.permutation(2 * n).tolist():
                report = other.ask(known[number] if number < n else new[number - n])
                times[number], reused[number] = report.ttft_s, sum(report.reused.values())
    return Probed(times[:n], times[n:], int(reused[:n].sum()), int(reused[n:].sum()))


# ---- the program ------------------------------------------------------------------------------------------


def main() -> int:
    """Exit status: 0, 1 where a bar was missed, 3 when void."""
    ask = parser("timing_probe", __doc__)
    ask.add_argument("--n", type=int, default=300, help="prompts of each kind (300)")
    ask.add_argument("--seed", type=int, default=1, help="of the prompts and their order (1)")
    options = ask.parse_args()
    probed = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-probe-") as name:
        folder = Path(name)
        model = write_model(folder / "model")
        for reuse in ("own", "group"):
            probed[reuse] = _probed(folder / reuse, model, reuse, options.n, options.seed)
            if not options.json:
                print(f"reuse = {reuse}: AUC {probed[reuse].auc:.3f}, {probed[reuse].json()}", flush=True)
    separate, shared = probed["own"], probed["group"]
    figures: dict[str, Any] = {
        "auc_separate": round(separate.auc, 4),
        "auc_shared": round(shared.auc, 4),
        "auc_control": round(separate.control, 4),
        "n": options.n,
        "prompt_tokens": TOKENS,
        "separate": separate.json(),
        "shared": shared.json(),
        "bars": {"auc_separate": list(SEPARATE), "auc_shared_min": SHARED_MIN},
    }
    figures["missed"] = _missed(figures)
    low, high = SEPARATE
    off = "" if low <= separate.control <= high else f"noise: the control's AUC is {separate.control:.3f}"
    status = finish("timing_probe", options, figures, [off])
    return status or int(bool(figures["missed"]))


def _probed(folder: Path, model: Path, reuse: str, n: int, seed: int) -> Probed:
    """With a daemon of its own."""
    folder.mkdir()
    config = folder / "kvstore.toml"
    config.write_text(tenants(reuse))
    daemon = DaemonProcess(folder, {**settings(n), "plan.mode": "load"}, config)
    try:
        daemon.wait_ready()
        return probe(daemon.socket, model, reuse, n, seed)
    finally:
        daemon.end()


def _missed(figures: dict[str, Any]) -> list[str]:
    low, high = SEPARATE
    out = []
    if not low <= figures["auc_separate"] <= high:
        out.append(f"auc_separate {figures['auc_separate']} is not in [{low}, {high}]")
    if not figures["auc_shared"] > SHARED_MIN:
        out.append(f"auc_shared {figures['auc_shared']} <= {SHARED_MIN}")
    if figures["separate"]["known_reused_tokens"] or figures["separate"]["new_reused_tokens"]:
        out.append("a tenant reused what another one has asked")
    return out


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
