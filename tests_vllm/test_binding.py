"""Keys against vLLM's own hashes, and against what the model sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from kvstore.connectors.vllm.binding import Binder
from made_requests import BLOCK, Adapter, Case, Image, build, keys_of, make_adapters


@pytest.fixture(scope="module", autouse=True)
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    yield from make_adapters(tmp_path_factory.mktemp("adapters"))


# ---- cases that differ in one thing -----------------------------------------------------------------------

# As in tests/: the same cases every time, unless HYPOTHESIS=explore asks for others.
COMMON = settings(
    derandomize=os.environ.get("HYPOTHESIS", "repeatable") == "repeatable",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
NAMES = ("cat", "dog", "owl")
SALTS = (None, "", "a", "ab", "é")
EPOCHS = (b"", b"1" * 16, b"2" * 16)
ADAPTERS = st.none() | st.builds(Adapter, st.sampled_from(NAMES), st.integers(0, 2))
WHOLE = {"salt": st.sampled_from(SALTS), "adapter": ADAPTERS, "epoch": st.sampled_from(EPOCHS)}
KINDS = ("images", "text", "embeds", "mixed")
ALWAYS = ("tokens", "salt", "adapter", "near adapter", "epoch", "none")
WAYS = [
    *[("images", "image")] * 14,
    *[(kind, way) for kind in KINDS for way in ALWAYS],
    *[("embeds", "rows"), ("mixed", "rows"), ("mixed", "mask")] * 3,
]


@st.composite
def images(draw: st.DrawFn, tokens: int) -> tuple[Image, ...]:
    found: list[Image] = []
    at = draw(st.integers(0, 5))
    while at < tokens and len(found) < 3:
        length = draw(st.integers(1, 6))
        image = Image(at, length, draw(st.sampled_from(NAMES)), draw(st.integers(0, 2)), draw(st.booleans()))
        # Within a request a name stands for one content; between two requests it may not.
        image = replace(
            image, content=next((i.content for i in found if i.name == image.name), image.content)
        )
        found.append(image)
        at += length + draw(st.integers(0, 5))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    tokens = tuple(draw(st.lists(st.integers(0, 3), min_size=6, max_size=18)))
    rows = tuple(draw(st.integers(0, 2)) for _ in tokens) if kind in ("embeds", "mixed") else ()
    return Case(
        tokens,
        draw(st.sampled_from(SALTS)),
        draw(ADAPTERS),
        draw(images(len(tokens))) if kind == "images" else (),
        rows,
        tuple(draw(st.booleans()) for _ in tokens) if kind == "mixed" else (),
        draw(st.sampled_from(EPOCHS)),
    )


def changed(draw: st.DrawFn, values: tuple[Any, ...], value: st.SearchStrategy[Any]) -> tuple[Any, ...]:
    at = draw(st.integers(0, len(values) - 1))
    return (*values[:at], draw(value), *values[at + 1 :])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """Two cases that are equal, or differ in one thing: a quarter of them in an image."""
    kind, way = draw(st.sampled_from(WAYS))
    one = draw(cases(kind))
    event(way)
    if way == "none":
        return one, one
    if way == "image":
        return one, replace(one, images=draw(one_changed(one.images)))
    if way == "near adapter":  # another name or another path, the same content
        adapter = Adapter(NAMES[0], 0)
        other = draw(st.sampled_from([Adapter(NAMES[1], 0), Adapter(NAMES[0], 2)]))
        return replace(one, adapter=adapter), replace(one, adapter=other)
    if way in WHOLE:
        return one, replace(one, **{way: draw(WHOLE[way])})
    entry = {"tokens": st.integers(0, 3), "rows": st.integers(0, 2), "mask": st.booleans()}[way]
    return one, replace(one, **{way: changed(draw, getattr(one, way), entry)})


@st.composite
def one_changed(draw: st.DrawFn, found: tuple[Image, ...]) -> tuple[Image, ...]:
    at = draw(st.integers(0, len(found) - 1))
    before, image, after = found[:at], found[at], found[at + 1 :]
    room = not after or after[0].offset > image.offset + image.length
    ways = ["name", "content", "masked", "drop", *["offset", "length"] * room, *["swap"] * bool(after)]
    way = draw(st.sampled_from(ways))
    event(f"image {way}")
    if way == "drop":
        return before + after
    if way == "swap":
        return (*before, place(image, after[0]), place(after[0], image), *after[1:])
    if way in ("name", "content"):  # of all of that name: within a request it stands for one thing
        free = [name for name in NAMES if name not in {i.name for i in found}]
        value = draw(st.integers(0, 2)) if way == "content" else draw(st.sampled_from(free or [image.name]))
        return tuple(replace(i, **{way: value}) if i.name == image.name else i for i in found)
    if way == "masked":
        return (*before, replace(image, masked=not image.masked), *after)
    return (*before, replace(image, **{way: getattr(image, way) + 1}), *after)


def place(where: Image, what: Image) -> Image:
    """One image where another was."""
    return replace(where, name=what.name, content=what.content)


def seen(case: Case, block: int) -> tuple[object, ...]:
    """What the model sees up to the end of `block`: KV may be shared if, and only if, this is equal.

    An image counts as a whole as soon as its first token is there, with its name: that far vLLM goes, too.
    """
    end = (block + 1) * BLOCK
    given = case.mask or (not case.rows,) * len(case.tokens)
    tokens = tuple(token if known else 0 for token, known in zip(case.tokens, given, strict=True))
    adapter = case.adapter and (case.adapter, case.adapter.folder % 2)
    near = tuple(image for image in case.images if image.offset < end)
    return (
        tokens[:end],
        case.salt or None,
        adapter,
        case.epoch,
        near,
        case.rows[:end],
        case.mask[:end],
        bool(case.rows),
    )


@settings(COMMON, max_examples=600)
@given(pair=pairs())
def test_equal_keys_mean_equal_hashes_and_equal_sight(adapters: list[Path], pair: tuple[Case, Case]) -> None:
    """Each in an engine of its own: nothing but the keys keeps them apart."""
    requests = [build(case, adapters) for case in pair]
    bounds = [Binder().bind(r, BLOCK, c.epoch) for r, c in zip(requests, pair, strict=True)]
    keys = [keys_of(r, b) for r, b in zip(requests, bounds, strict=True)]
    assert [len(k) for k in keys] == [len(r.block_hashes) for r in requests]
    for block in range(min(map(len, keys))):
        same = keys[0][block] == keys[1][block]
        assert same == (seen(pair[0], block) == seen(pair[1], block))
        if same and pair[0].epoch == pair[1].epoch:
            assert requests[0].block_hashes[block] == requests[1].block_hashes[block]


@given(case=st.sampled_from(KINDS).flatmap(cases))
@settings(COMMON, max_examples=60)
def test_a_request_bound_twice_has_the_same_keys(adapters: list[Path], case: Case) -> None:
    binder = Binder()
    first = binder.bind(build(case, adapters), BLOCK, case.epoch)
    assert binder.bind(build(case, adapters), BLOCK, case.epoch) == first
    assert binder.holds(first)
    assert all(len(piece) == 32 for piece in first.extra.values())
