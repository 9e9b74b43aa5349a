"""Write README's figures from bench/results: between `<!-- numbers:NAME -->` and `<!-- /numbers -->`.

python -m bench.numbers          rewrite README.md
python -m bench.numbers --check  exit 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.machine import RESULTS
from bench.numbers_nvme import kill9_text, nvme_text
from bench.numbers_plan import breakeven_text, surprises_text

__all__ = ["main", "rendered"]

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"<!-- numbers:(\w+) -->\n.*?<!-- /numbers -->", re.DOTALL)


def rendered(text: str) -> str:
    """README with every block of figures made anew."""
    return _BLOCK.sub(
        lambda match: f"<!-- numbers:{match[1]} -->\n{_BLOCKS[match[1]]()}<!-- /numbers -->", text
    )


def _demo() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "demo.json").read_text())
    where = result["where"]
    rows = [
        "![time to first token, cold and from each tier](bench/results/demo.png)\n",
        "| what | time to first token | against cold |",
        "|---|---|---|",
    ]
    cold = result["ttft_s"]["cold"]
    for name, text in (
        ("cold", "computed"),
        ("L2", "idle device blocks"),
        ("HOST", "arena, new engine process"),
        ("NVME", "disk, new daemon too, one sample"),
    ):
        seconds = result["ttft_s"].get(name)
        if seconds is None:  # measured before there was such a tier
            continue
        rows.append(f"| {name} ({text}) | {1000 * seconds:.0f} ms | {cold / seconds:.1f} × |")
    same = "yes" if result["answers_identical"] else "NO"
    noticed = "yes" if result["negative_control_detected"] else "NO"
    machine = f"{where['cores']} cores of {where['cpu']}"
    tokens, new, speed = result["prompt_tokens"], result["new_tokens"], result["prefill_over_transformers"]
    sentences = (
        f"\nPrompt of {tokens} tokens, medians of three. {new} greedy tokens of every answer identical to",
        f"the uncached run: {same}. One inverted cell noticed: {noticed}. Cold prefill runs at {speed:.2f} ×",
        "the speed of HF transformers, so no slow engine flatters the cache.",
        f"`{result['command']}`, commit {where['commit']}, {machine}, {where['date']}.\n",
    )
    rows.append(" ".join(sentences))
    return "\n".join(rows)


def _aiofiles() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "aiofiles_cost.json").read_text())
    us, where = result["us_per_block"], result["where"]
    rows = [
        "| µs per block | aiofiles | `preadv`/`pwritev` on a thread | the same call alone |",
        "|---|---|---|---|",
    ]
    for verb in ("read", "write"):
        for name, size in (("64k", "64 KiB"), ("256k", "256 KiB"), ("2m", "2 MiB")):
            cells = [f"{us[f'{verb}_{way}_{name}']:.0f}" for way in ("aiofiles", "pool", "direct")]
            rows.append(f"| {verb} {size} | {' | '.join(cells)} |")
    rows.append(
        f"\nOne hop to a thread and back: {result['hop_us']:.0f} µs. Medians of {result['repeats']}, "
        f"page cache. `{result['command']}`, commit {where['commit']}, {where['cores']} cores of "
        f"{where['cpu']}, {where['date']}.\n"
    )
    return "\n".join(rows)


_COPIES = {
    "load_over_memcpy": ("load, every cell checked", ("2m", "256k", "64k")),
    "save_steady_over_memcpy": ("save into a full arena, summed on the way", ("2m", "256k", "64k")),
    "save_first_over_memcpy": ("the very first save of a fresh process, 1 GiB", ("2m",)),
    "save_first_512m_over_memcpy": ("the very first save of a fresh process, 512 MiB", ("2m",)),
    "save_first_256m_over_memcpy": ("the very first save of a fresh process, 256 MiB", ("2m",)),
}
_LOOKUPS = {"": "whole chain known", "half_": "half of it known", "miss_": "nothing known"}
_SIZES = {"2m": "2 MiB", "256k": "256 KiB", "64k": "64 KiB"}


def _local() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "local.json").read_text())
    spread = result["spread"]
    rows = ["| copies | block | speed, memcpy = 1 | quartiles |", "|---|---|---|---|"]
    for name, (what, sizes) in _COPIES.items():
        rows += [_row(what, _SIZES[size], spread[f"{name}_{size}"]) for size in sizes]
    rows += ["", "| lookups | blocks | time, echo = 1 | quartiles |", "|---|---|---|---|"]
    for kind, what in _LOOKUPS.items():
        for length in (1000, 8000):
            rows.append(_row(what, f"{length:,}", spread[f"lookup_{kind}{length}_over_echo"]))
    facts = (
        "\nmemcpy: the better of the C library's and numpy's, same pages, one thread each; for a first save",
        "the first memcpy of another fresh process. Echo: all keys of",
        "the chain to a bare asyncio server and back, over the same kind of socket. The daemon holds",
        f"{result['lookup_nodes']:,} nodes in random order. A key costs",
        f"{result['hash_over_compression']:.2f} × a bare BLAKE2b compression. A heartbeat beside the copying",
        f"waited {result['loop_lag_ms_p99']:.1f} ms at p99.",
        _origin(result),
    )
    return "\n".join(rows) + "\n" + " ".join(facts) + "\n"


_PEERS = {"put_first": "first put", "put_steady": "put into a full store", "get": "get"}


def _peers() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "local.json").read_text())
    sizes = {"2m": "2 MiB", "64k": "64 KiB"}
    heads = [f"{what}, {size}" for size in sizes.values() for what in _PEERS.values()]
    rows = [f"| store | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, peer in result["peers"].items():
        if peer["failed"]:
            rows.append(f"| {name} | {peer['failed']} {'| ' * len(heads)}|")
            continue
        cells = [f"{peer[f'{move}_over_memcpy_{size}']:.2f} ×" for size in sizes for move in _PEERS]
        rows.append(f"| {name} {peer['version']} | {' | '.join(cells)} |")
    size_mib = result["peers_working_set"]["bytes"] >> 20
    void = any("lookup" in peer["void"] for peer in result["peers"].values())
    facts = f"Speed, memcpy = 1, {size_mib} MiB a store, one thread each; what each does: bench/README.md."
    facts += " Lookups were too noisy to show." if void else ""
    return "\n".join(rows) + f"\n\n{facts} `python -m bench.local --peers`, same run as above.\n"


def _row(what: str, size: str, ratio: dict[str, float]) -> str:
    return f"| {what} | {size} | {ratio['median']:.2f} × | {_quartiles(ratio)} |"


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['low']:.2f} … {ratio['high']:.2f}"


def _origin(result: dict[str, Any]) -> str:
    where = result["where"]
    machine = f"{where['cores']} cores of {where['cpu']}"
    return f"`{result['command']}`, commit {where['commit']}, {machine}, {where['date']}."


def _idle_share() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "idle_share.json").read_text())
    found = {host: swept["crossover_blocks"] for host, swept in result["hosts"].items()}
    told = "; ".join(f"{host} HOST arena: {at or 'none'}" for host, at in found.items())
    facts = (
        "![tokens reused and throughput over the idle share](bench/results/idle_share.png)\n\nIdle blocks",
        f"from which on idle prefixes cost more than they save, of {result['pool_blocks']}: {told}.",
        _origin(result),
    )
    return " ".join(facts) + "\n"


def _memory() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "memory.json").read_text())
    facts = (
        "A daemon with a 1 GiB arena and 100,000 blocks of 8 KiB takes",
        f"{result['daemon_anon_and_page_tables_mib']:.0f} MiB of private memory and page tables. A node",
        f"of the index takes {result['index_bytes_per_node']:.0f} bytes, by resident memory from 100,000",
        "to 1,000,000 nodes.",
        _origin(result),
    )
    return " ".join(facts) + "\n"


def _nvme() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "nvme.json").read_text())
    return f"{nvme_text(result)} {_origin(result)}\n"


def _kill9() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "kill9.json").read_text())
    return f"{kill9_text(result)} {_origin(result)}\n"


def _breakeven() -> str:
    name = "breakeven_quick"
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return f"{breakeven_text(result, name)} {_origin(result)}\n"


def _surprises() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "surprises.json").read_text())
    return f"{surprises_text(result)}{_origin(result)}\n"


def _vllm_two() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "vllm_two.json").read_text())
    lines = ["```console"]
    for name, port, what in (("computed", 8001, "A computes it"), ("loaded", 8002, "B loads it")):
        asked = result[name]
        lines += [
            f"$ curl -s localhost:{port}/v1/chat/completions -d @question.json  "
            f"# server {what}, first token after {asked['first_token_s']:.2f} s",
            f'  "content": {json.dumps(asked["answer"])}',
            f'  "kv_transfer_params": {{"kvstore": {{"hit_tokens": {json.dumps(asked["hit_tokens"])}, …}}}}',
        ]
    lines.append("$ curl -s localhost:8002/metrics | grep kvstore_load")
    lines += [f'{name}{{engine="0",…}} {value:g}' for name, value in result["metrics_of_b"].items()]
    tokens = result["loaded"]["prompt_tokens"]
    return "\n".join(lines) + f"\n```\n\nA prompt of {tokens:,} tokens. {_origin(result)}\n"


def _vllm() -> str:
    result: dict[str, Any] = json.loads((RESULTS / "vllm.json").read_text())
    rows = [
        "![time to first token over that of vLLM's own prefix cache](bench/results/vllm.png)\n",
        "| connector | tokens | computed | vLLM's own | loaded | loaded over own | computed over loaded |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cells in result["rows"].items():
        if "failed" in cells:
            rows.append(f"| {name} | {cells['failed']} | | | | | |")
        for length, cell in cells.items():
            if length != "failed":
                rows.append(_vllm_row(name, result["prompt_tokens"][length], cell))
    overhead = result["overhead"]
    same = "yes" if result["outputs_identical"] else "NO"
    facts = (
        f"\n64 greedy tokens of all three ways identical: {same}. Without any reuse, in {overhead['pairs']}",
        f"pairs of runs: {result['overhead_no_reuse']:+.1%} CPU seconds of engine and daemon, at most",
        f"{result['overhead_no_reuse_p95']:+.1%} (95 %), while {result['saved_share']:.0%} of all full",
        "blocks were saved. Rows were measured one after another on a shared machine: compare the ratios,",
        f"each of which is to the row's own engines. {_origin(result.get('parts', {}).get('ttft', result))}",
    )
    return "\n".join(rows) + "\n" + " ".join(facts) + "\n"


def _vllm_row(name: str, tokens: int, cell: dict[str, Any]) -> str:
    times = " | ".join(f"{1000 * cell['seconds'][arm]:.0f} ms" for arm in ("cold", "own", "host"))
    ratios = [f"{cell[ratio]['median']:.2f} ×" for ratio in ("host_over_own", "cold_over_host")]
    noisy = " (noisy)" if cell["void"] else ""
    return f"| {name} | {tokens:,} | {times} | {ratios[0]}{noisy} | {ratios[1]} |"


_BLOCKS = {
    "demo": _demo,
    "local": _local,
    "peers": _peers,
    "idle_share": _idle_share,
    "memory": _memory,
    "nvme": _nvme,
    "kill9": _kill9,
    "breakeven": _breakeven,
    "surprises": _surprises,
    "vllm": _vllm,
    "vllm_two": _vllm_two,
    "aiofiles": _aiofiles,
}


def main() -> int:
    """Returns the exit status."""
    before = README.read_text()
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print("README.md does not show what bench/results say: run python -m bench.numbers")
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
