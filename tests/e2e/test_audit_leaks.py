"""`kvstore audit-isolation` on daemons that forget something: each open door is named, and no other."""

from __future__ import annotations

import pytest
from audited import APART, BOUND, TWO, audited, street
from scene import Scene

__all__ = ["street"]

SALTLESS = {"roots_differ", "roots_are_salted", "roots_are_of_the_salts", "same_tokens_find_nothing"}


def test_a_session_without_salts(stage: Scene) -> None:
    """What it saves lies on the disk under keys that anybody can compute; the other door is closed."""
    found = audited(stage, "session").opened()
    assert {check for door, check in found if door == "session"} >= SALTLESS | {"foreign_root_is_refused"}
    assert {door for door, _ in found} == {"session", "nvme"}
    assert ("nvme", "unsalted_keys_are_not_there") in found


def test_a_public_api_without_salts(stage: Scene) -> None:
    """Its records bring the unsalted root to the disk; what the sessions saved is found nowhere."""
    found = audited(stage, "grpc").opened()
    assert {check for door, check in found if door == "grpc"} >= SALTLESS | {"same_tokens_fetch_nothing"}
    assert {door for door, _ in found} == {"grpc", "nvme"}
    assert {check for door, check in found if door == "nvme"} == {"unsalted_keys_are_not_there"}


def test_a_disk_without_salts(stage: Scene) -> None:
    assert audited(stage, "nvme").opened() == {("nvme", "unsalted_keys_are_not_there")}


LEAKS = [
    ("root", {("session", "foreign_root_is_refused"), ("session", "foreign_root_takes_no_save")}),
    (
        "keys",
        {
            ("session", "foreign_keys_find_nothing"),
            ("grpc", "foreign_keys_find_nothing"),
            ("grpc", "foreign_keys_fetch_nothing"),
        },
    ),
    ("lease", {("session", "foreign_lease_is_refused"), ("session", "foreign_lease_lives_on")}),
    ("filling", {("session", "foreign_filling_is_refused"), ("session", "foreign_filling_lives_on")}),
    ("tenant", {("session", "unknown_tenant_is_refused")}),
    (
        "words",
        {("session", "foreign_request_is_not_told"), ("session", "foreign_counts_are_not_told")},
    ),
    (
        "tokens",
        {
            ("grpc", "token_opens_its_tenant_alone"),
            ("grpc", "foreign_lease_is_refused"),
            ("grpc", "foreign_lease_lives_on"),
            ("grpc", "foreign_events_are_not_told"),
        },
    ),
    ("tls", {("grpc", "plaintext_is_refused")}),
    ("pages", {("status", "no_salts"), ("metrics", "no_salts")}),
]


@pytest.mark.parametrize(("leak", "expected"), LEAKS, ids=[leak for leak, _ in LEAKS])
def test_whatever_is_forgotten_is_named(stage: Scene, leak: str, expected: set[tuple[str, str]]) -> None:
    assert audited(stage, leak).opened() == expected


SMALL = [
    (
        "plan,services,saved,extend,parent,bearers,written",
        {
            ("grpc", "foreign_keys_find_nothing"),
            ("grpc", "standard_services_name_no_tenant"),
            ("grpc", "foreign_blocks_are_not_told"),
            ("session", "foreign_keys_extend_nothing"),
            ("session", "foreign_parent_takes_no_save"),
            ("metrics", "no_bearer_tokens"),
            ("nvme", "no_secrets_are_there"),
        },
    ),
    (
        "fetch,verbs,admin",
        {
            ("grpc", "foreign_keys_fetch_nothing"),
            ("grpc", "token_opens_its_tenant_alone"),
            ("grpc", "administration_is_refused"),
        },
    ),
]


@pytest.mark.parametrize(("leaks", "expected"), SMALL, ids=["what is told", "what may be done"])
def test_whatever_is_forgotten_at_one_call_is_named(
    stage: Scene, leaks: str, expected: set[tuple[str, str]]
) -> None:
    """Each at one verb, or in one form of a chain: all the others are sound."""
    assert audited(stage, leaks).opened() == expected


def test_a_root_that_is_shared_by_mistake(stage: Scene) -> None:
    """Whoever asks under what the group shares finds what is the first tenant's own."""
    sharing = TWO.replace('"team"', '"team"\nreuse = "group"')
    place = audited(stage, tenants=sharing)
    status, report = place.run()
    assert (status, report["open"]) == (0, []), report
    assert place.checks(report)["session", "group_root_finds_nothing"] == "closed"
    assert place.checks(report)["grpc", "group_root_finds_nothing"] == "closed"
    place.daemon.end()
    found = audited(stage, "shared", sharing).opened()
    assert found >= {("session", "group_root_finds_nothing"), ("grpc", "group_root_finds_nothing")}


def test_a_token_that_opens_another_in_one_direction(stage: Scene) -> None:
    """The other token is one that the daemon does not know: it hides nothing of the first."""
    place = audited(stage, "tokens")
    (place.daemon.folder / "b").write_text("nobody-knows-this-token")
    status, report = place.run()
    assert (status, report["open"]) == (1, ["grpc"])
    (_, tcp) = (door for door in report["doors"] if door["door"] == "grpc")
    bound = [check for check in tcp["checks"] if check["check"] == "token_opens_its_tenant_alone"]
    assert [check["verdict"] for check in bound] == ["open", "not_probed"]
    assert bound[1]["detail"].startswith("the token of b for a: ") and "UNAUTHENTICATED" in bound[1]["detail"]


def test_a_fault_of_the_daemon_is_no_refusal(stage: Scene) -> None:
    """Nor does a status that names nobody say that it keeps quiet of the other."""
    place = audited(stage, "nothing")
    status, report = place.run()
    assert (status, report["ok"], report["open"]) == (3, False, []), report
    assert "session" in report["not_probed"]
    assert {"session foreign_lease_is_refused", "session foreign_counts_are_not_told"} <= set(
        report["skipped"]
    )
    (check,) = (c for c in report["doors"][0]["checks"] if c["check"] == "foreign_lease_is_refused")
    assert "INTERNAL" in check["detail"]


def test_a_door_for_strangers(stage: Scene) -> None:
    found = audited(stage, "strangers").opened()
    assert found >= {
        ("grpc", check)
        for check in ("no_token_is_refused", "unknown_token_is_refused", "administration_is_refused")
    }
    assert {door for door, _ in found} == {"grpc"}


def test_events_that_are_one(stage: Scene) -> None:
    assert audited(stage, "events", APART).opened() == {("grpc", "foreign_events_are_not_told")}


def test_arenas_that_are_one(stage: Scene) -> None:
    place = audited(stage, "arena", APART, nvme__directory='""')
    assert ("session", "arenas_differ") in place.opened()


def test_users_that_do_not_matter(street: Scene) -> None:
    place = audited(street, "users", BOUND, daemon__socket_mode="0o666")
    assert place.opened() == {("session", "other_users_are_refused"), ("grpc", "other_users_are_refused")}


def test_sockets_that_everybody_may_open(street: Scene) -> None:
    place = audited(street, daemon__socket_mode="0o666")
    assert place.opened() == {("session", "socket_mode"), ("grpc", "socket_mode")}


def test_files_that_others_may_read(stage: Scene) -> None:
    place = audited(stage)
    nvme = place.daemon.folder / "nvme"
    (nvme / "secrets.toml").chmod(0o640)
    (nvme / "team").chmod(0o755)
    assert place.opened() == set(), "nobody else gets as far as that"
    nvme.chmod(0o711)
    assert place.opened() == {("nvme", "salts_are_private"), ("nvme", "directory_is_private (team)")}
