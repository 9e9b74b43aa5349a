"""`kvstore simulate`: what a routing policy would do with a trace, before it routes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from kvstore.cli.answers import say_json, say_text
from kvstore.cli.options import AsJson
from kvstore.errors import BadRequest

if TYPE_CHECKING:
    from kvstore.simulate.queueing import QueueSettings
    from kvstore.simulate.sweep import Candidate
    from kvstore.simulate.views import View

__all__ = ["FamilyFlags", "PolicyFlags", "TraceFlags", "simulate_command"]

T = TypeVar("T", int, float)
_FAMILY_POLICIES = ("round_robin", "affinity", "hybrid")
_RUNS_MAX = 1000


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """Which policies.

    Attributes:
        policy: names with commas between them. Default: all for a trace, else round_robin,affinity,hybrid
        max_skew: of hybrid; several with commas between them are a sweep
        skew_of: what hybrid compares, assigned or in_flight
        weight: of scored, then fixed; several with commas between them are a sweep. Default: follows the load
        replicas: how many. Default 8 for a trace, else 3
        capacity: of each, in blocks for a trace (default 5859), else in families (default 2); a sweep
    """

    policy: str = ""
    max_skew: str = "0,1,2"
    skew_of: str = "assigned"
    weight: str = ""
    replicas: int | None = None
    capacity: str = ""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class FamilyFlags:
    """Whole prefixes by name.

    Attributes:
        requests: families in order, like "A A B", or "AAB" where each is one letter
        lengths: tokens of each family, like A=1000,B=800
        seconds_per_request: what each request that a replica is ahead costs the next one
        prefill_tokens_per_s: for scored, which compares seconds
    """

    requests: str = ""
    lengths: str = ""
    seconds_per_request: float = 1.0
    prefill_tokens_per_s: float = 1000.0


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TraceFlags:
    """Requests in time.

    Attributes:
        trace: JSON lines as Mooncake publishes them
        block_tokens: tokens that one of its ids stands for
        load: input tokens over what all replicas could compute in the time of the trace
        lag_s: seconds until the router hears of a change
        view: exact, from events; or capacity, what was sent there last; or ttl, the same by age
        view_ttl_s: of the view by age
        fit_weight: fix the weight of scored on the first half
        seed: of ties. Default 1 for a trace, else ties go to the first replica
    """

    trace: Path | None = None
    block_tokens: int = 512
    load: float = 0.9
    lag_s: float = 0.0
    view: str = "exact"
    view_ttl_s: float = 120.0
    fit_weight: Annotated[bool, Parameter(negative=())] = False
    seed: int | None = None


Golden = Annotated[bool, Parameter(negative=(), help="compute every published number again and compare")]
Plot = Annotated[Path | None, Parameter(help="write a PNG: reuse against skew, or against TTFT p99")]


def simulate_command(
    *,
    policies: PolicyFlags | None = None,
    families: FamilyFlags | None = None,
    traces: TraceFlags | None = None,
    golden: Golden = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> int:
    """Try routing policies on a trace, before they route.

    They are the code that the router runs, over made-up replicas. With --requests and --lengths: whole
    prefixes by name, no time; reused tokens, skew, evictions, assignments and a queue penalty of each policy
    at each capacity. With --trace: replicas that compute prompts one after the other, reuse and seconds to
    first token. With --golden: exit 1 when a published number comes out differently. Needs no daemon.

    Examples:
        kvstore simulate --requests AABACABDAACBADABCABA --lengths A=1000,B=800,C=600,D=400 --capacity 1,2
        kvstore simulate --trace conversation.jsonl --policy round_robin,scored --fit-weight
        kvstore simulate --trace conversation.jsonl --policy scored --weight 1,2,4 --lag-s 120 --json
        kvstore simulate --golden
    """
    which, named, timed = policies or PolicyFlags(), families or FamilyFlags(), traces or TraceFlags()
    modes = [golden, bool(named.requests), timed.trace is not None]
    if sum(modes) != 1:
        raise BadRequest("simulate: say one of --requests with --lengths, --trace FILE, or --golden")
    if golden:
        if plot is not None:
            raise BadRequest("--plot: --golden has nothing to draw")
        return _golden(as_json)
    from kvstore.simulate.report import family_lines, trace_lines  # numpy: not for `kvstore --help`

    if timed.trace is None:
        answer, lines, cost = *_families(which, named, timed.seed), "skew of assignments"
        rows, told = answer["runs"], family_lines(answer["runs"])
    else:
        answer, lines, cost = *_trace(which, timed), "TTFT p99, s"
        rows, told = answer["runs"], trace_lines(answer["runs"])
    if plot is not None:
        _plot(rows, cost, plot)
    if as_json:
        say_json(answer)
    else:
        say_text("\n".join([*lines, "", *told]))
    return 0


def _golden(as_json: bool) -> int:
    from kvstore.simulate.golden import check_golden
    from kvstore.simulate.report import golden_lines

    checks = check_golden()
    ok = all(check.ok for check in checks)
    if as_json:
        say_json({"mode": "golden", "ok": ok, "checks": [check.json() for check in checks]})
    else:
        say_text("\n".join(golden_lines(checks)))
    return 0 if ok else 1


def _families(which: PolicyFlags, named: FamilyFlags, seed: int | None) -> tuple[dict[str, Any], list[str]]:
    from kvstore.simulate.families import FamilySettings
    from kvstore.simulate.sweep import sweep_families

    lengths = _lengths(named.lengths)
    requests = _requests(named.requests, lengths)
    replicas = 3 if which.replicas is None else which.replicas
    every = [
        FamilySettings(lengths, replicas, size, named.seconds_per_request, named.prefill_tokens_per_s)
        for size in _numbers("--capacity", which.capacity or "2", int)
    ]
    chosen = _candidates(which, _FAMILY_POLICIES, len(every))
    rows = sweep_families(requests, chosen, every, seed)
    answer = {"mode": "families", "requests": len(requests), "replicas": replicas, "runs": rows}
    return answer, [f"{len(requests):,} requests, {replicas} replicas, capacity in families"]


def _trace(which: PolicyFlags, timed: TraceFlags) -> tuple[dict[str, Any], list[str]]:
    from dataclasses import asdict, replace

    from kvstore.policy.routing.make import POLICIES
    from kvstore.simulate.fitting import fit_weight
    from kvstore.simulate.queueing import QueueSettings
    from kvstore.simulate.sweep import sweep_trace
    from kvstore.simulate.trace_file import read_trace

    assert timed.trace is not None
    if timed.fit_weight and which.weight:
        raise BadRequest("--fit-weight: chooses the weight; leave --weight away")
    base = QueueSettings(replicas=8 if which.replicas is None else which.replicas, load=timed.load)
    base = replace(base, lag_s=timed.lag_s, seed=1 if timed.seed is None else timed.seed)
    every = [
        replace(base, capacity_blocks=size) for size in _numbers("--capacity", which.capacity or "5859", int)
    ]
    view = _view(timed)
    chosen = _candidates(which, tuple(POLICIES), len(every))
    workload = read_trace(timed.trace, timed.block_tokens)
    weight = None
    if timed.fit_weight:
        weight = fit_weight(workload, max(1, len(workload) // 2), every[0])
        chosen = _candidates(replace(which, weight=str(weight)), tuple(POLICIES), len(every))
    rows = sweep_trace(workload, chosen, every, view)
    answer = {
        "mode": "trace",
        "trace": {
            "requests": len(workload),
            "input_tokens": int(workload.input_tokens.sum()),
            "block_tokens": workload.block_tokens,
            "sha256": workload.sha256,
        },
        "fleet": {**asdict(base), "capacity_blocks": [each.capacity_blocks for each in every]},
        "view": timed.view,
        "weight_of_first_half": weight,
        "runs": rows,
    }
    fitted = [] if weight is None else [f"scored: weight {weight:g}, fixed on the first half"]
    return answer, [
        f"{len(workload):,} requests, {base.replicas} replicas at load {base.load:g}, capacity in blocks; "
        "reuse = reused / all input tokens",
        *fitted,
    ]


def _view(timed: TraceFlags) -> Callable[[QueueSettings], View]:
    from kvstore.simulate.views import ApproximateView, ExactView

    if timed.view == "exact":
        return lambda fleet: ExactView(fleet.replicas)
    if timed.view == "capacity":
        return lambda fleet: ApproximateView(fleet.replicas, fleet.capacity_blocks)
    if timed.view == "ttl":
        if not timed.view_ttl_s > 0:
            raise BadRequest(f"--view-ttl-s: need more than 0, got {timed.view_ttl_s}")
        return lambda fleet: ApproximateView(fleet.replicas, None, timed.view_ttl_s)
    raise BadRequest(f"--view: {timed.view!r:.40} is none; say exact, capacity or ttl")


def _candidates(which: PolicyFlags, default: Sequence[str], fleets: int) -> list[Candidate]:
    from kvstore.policy.routing.hybrid import Skew
    from kvstore.policy.routing.make import PolicySettings
    from kvstore.simulate.sweep import candidates

    if which.skew_of not in list(Skew):
        raise BadRequest(f"--skew-of: {which.skew_of!r:.40} is none; say {' or '.join(Skew)}")
    names = [word.replace("-", "_") for word in _words(which.policy)] or list(default)
    weights = _numbers("--weight", which.weight, float) if which.weight else []
    max_skews = _numbers("--max-skew", which.max_skew, int)
    chosen = candidates(names, PolicySettings(skew_of=Skew(which.skew_of)), max_skews, weights)
    if len(chosen) * fleets > _RUNS_MAX:
        raise BadRequest(f"simulate: {len(chosen) * fleets} runs are more than runs_max = {_RUNS_MAX}")
    return chosen


def _requests(text: str, lengths: dict[str, int]) -> list[str]:
    words = _words(text)
    if len(words) == 1 and words[0] not in lengths and all(letter in lengths for letter in words[0]):
        return list(words[0])
    return words


def _lengths(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in _words(text):
        name, equals, tokens = word.partition("=")
        if not equals or not name or name in found:
            raise BadRequest(
                f"--lengths: need FAMILY=TOKENS with commas between them, each once, got {word!r:.40}"
            )
        found[name] = _numbers("--lengths", tokens, int)[0]
    if not found:
        raise BadRequest("--lengths: --requests needs it, like A=1000,B=800")
    return found


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        found = [kind(word) for word in _words(text)]
    except ValueError:
        raise BadRequest(f"{option}: need numbers with commas between them, got {text!r:.40}") from None
    if not found:
        raise BadRequest(f"{option}: need a number, got {text!r:.40}")
    return found


def _plot(rows: Sequence[dict[str, Any]], cost: str, path: Path) -> None:
    from kvstore.simulate.plot import Point, draw

    several = len({row["capacity"] for row in rows}) > 1
    points = []
    for row in rows:
        label = f"{row['label']} ({row['capacity']})" if several else row["label"]
        whole = row.get("all")
        where = (whole["ttft_p99_s"], whole["reuse"]) if whole else (row["skew"], row["reuse"])
        points.append(Point(label, *where))
    draw(points, cost, path)
