"""The tree of errors: as drawn, and each with one status."""

from __future__ import annotations

import re

import pytest

from kvstore import errors
from kvstore.errors import STATUS, BadRequest, KVStoreError, LimitExceeded, from_status


def family(base: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [base, *(c for child in base.__subclasses__() for c in family(child))]


# Only ours: a test may define subclasses of its own.
TREE = [cls for cls in family(KVStoreError) if cls.__module__ == errors.__name__]


def drawn() -> dict[str, str]:
    """The docstring's picture: class → its base."""
    assert errors.__doc__
    bases, above = {}, {0: "KVStoreError"}
    for indent, name in re.findall(r"^([│ ]*)[├└]── (\w+)", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 4 + 1
        bases[name], above[depth] = above[depth - 1], name
    return bases


def test_the_picture_is_the_tree() -> None:
    assert drawn() == {cls.__name__: cls.__bases__[0].__name__ for cls in TREE if cls is not KVStoreError}


def test_every_error_is_offered() -> None:
    assert {cls.__name__ for cls in TREE} <= set(errors.__all__)


def test_every_error_has_a_status() -> None:
    assert STATUS.keys() == set(TREE)


@pytest.mark.parametrize("cls", TREE)
def test_a_status_comes_back_as_the_error_or_its_kind(cls: type[KVStoreError]) -> None:
    back = from_status(STATUS[cls], "what happened")
    assert str(back) == "what happened"
    assert STATUS[type(back)] == STATUS[cls]
    # Two errors share a status with a wider one: those come back as it.
    wider = {errors.ConfigError: BadRequest, errors.OutOfMemory: LimitExceeded}
    assert type(back) is wider.get(cls, cls)


def test_a_status_of_a_later_version_is_still_an_error() -> None:
    assert type(from_status("DATA_LOSS", "x")) is KVStoreError
