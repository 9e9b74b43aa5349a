"""`grpc.tokens_file` and `kvstore token`: what is read, what is refused, and what a token opens."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.config.tokens import TOKEN_VERBS, Token, Tokens, digest_of
from kvstore.errors import BadRequest, ConfigError, Refused, Unauthenticated
from kvstore.rpc.api.access import Peer, TokenAccess, Verb

SECRET = "s" * 43
GOOD = f"""
[[tokens]]
name = "router"
sha256 = "{digest_of(SECRET)}"
tenants = ["alice", "bob"]
verbs = ["read"]
"""


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_tokens(tmp_path: Path) -> None:
    other = (
        f'expires = 2031-02-03T04:05:06Z\n[[tokens]]\nname = "ops"\nsha256 = "{"0" * 64}"\ntenants = ["*"]\n'
    )
    tokens = Tokens.load(
        written(tmp_path, GOOD + other + 'verbs = ["admin", "write"]\nexpires = 2030-01-01\n')
    )
    router = tokens.find(SECRET)
    assert router is not None and len(tokens) == 2
    expires_s = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC).timestamp()
    assert router == Token("router", frozenset({"alice", "bob"}), frozenset({"read"}), expires_s)
    assert [router.opens(name) for name in ("alice", "bob", "carol", "", "*")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    for wrong in ("", SECRET[:-1], SECRET + "s", "x" * 100_000):
        assert tokens.find(wrong) is None
    assert SECRET not in repr(tokens)


def test_no_tokens_at_all(tmp_path: Path) -> None:
    assert len(Tokens.load(written(tmp_path, ""))) == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD.replace("router", "a b"), "name"),
        (GOOD.replace(digest_of(SECRET), SECRET), "sha256"),
        (GOOD.replace('["read"]', '["fly"]'), "verbs"),
        (GOOD.replace('["read"]', "[]"), "verbs"),
        (GOOD.replace('["alice", "bob"]', "[]"), "tenants"),
        (GOOD.replace('"alice"', '"a*"'), "tenants"),
        (GOOD + "colour = 1\n", "colour"),
        (GOOD + "expires = 7\n", "expires"),
        (GOOD + GOOD.replace("router", "other"), "have the same token"),
        ("tokens = 3", "tokens"),
        ("[", "not valid TOML"),
    ],
)
def test_what_is_refused_names_the_field(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        Tokens.load(written(tmp_path, text))
    assert SECRET not in str(caught.value) or "sha256" in why


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        Tokens.load(written(tmp_path, GOOD, 0o640))
    with pytest.raises(ConfigError, match="is not there"):
        Tokens.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["grpc.tls_certificate=a.pem"], "grpc.tls_certificate: of no use without grpc.tls_key"),
        (["grpc.tls_key=a.pem"], "grpc.tls_key: of no use without grpc.tls_certificate"),
        (["grpc.tls_clients=a.pem"], "grpc.tls_clients: of no use without grpc.tls_certificate"),
        (["grpc.tokens_on_unix=true"], "grpc.tokens_on_unix: of no use without grpc.tokens_file"),
    ],
)
def test_keys_that_need_each_other(flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Config.load(None, {}, flags)


def test_paths_are_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[grpc]\ntls_certificate = "c.pem"\ntls_key = "k.pem"\ntokens_file = "t.toml"\n')
    config = Config.load(file, {}).grpc
    names = [config.tls_certificate, config.tls_key, config.tokens_file]
    assert names == [str(tmp_path / name) for name in ("c.pem", "k.pem", "t.toml")]


# ---- who may do what --------------------------------------------------------------------------------------


def access(unix_needs: bool = False, at_s: float = 100.0) -> TokenAccess:
    tokens = {
        digest_of("reader"): Token("r", frozenset({"alice"}), frozenset({"read"})),
        digest_of("writer"): Token("w", frozenset({"alice"}), frozenset({"read", "write"})),
        digest_of("ops"): Token("o", frozenset({"*"}), frozenset({"admin"})),
        digest_of("owner"): Token("a", frozenset({"alice"}), frozenset({"admin"})),
        digest_of("old"): Token("x", frozenset({"*"}), frozenset({"read", "write", "admin"}), 100.0),
    }
    return TokenAccess(Tokens(tokens), unix_needs=unix_needs, unix_time=lambda: at_s)


def peer(token: str | None, *, local: bool = False, key: str = "authorization") -> Peer:
    return Peer(() if token is None else ((key, token),), local)


@pytest.mark.parametrize(
    ("token", "verb", "tenant", "answer"),
    [
        ("Bearer reader", Verb.READ, "alice", "r"),
        ("bearer  reader ", Verb.OBSERVE, "alice", "r"),
        ("Bearer reader", Verb.SUBSCRIBE, "alice", "r"),
        ("Bearer reader", Verb.SAVE, "alice", Refused),
        ("Bearer reader", Verb.READ, "bob", Refused),
        ("Bearer reader", Verb.READ, "", BadRequest),
        ("Bearer reader", Verb.ADMIN, "alice", Refused),
        ("Bearer writer", Verb.SAVE, "alice", "w"),
        ("Bearer writer", Verb.SAVE, "bob", Refused),
        ("Bearer ops", Verb.ADMIN, "", "o"),
        ("Bearer ops", Verb.ADMIN, "bob", "o"),
        ("Bearer ops", Verb.READ, "bob", Refused),
        ("Bearer owner", Verb.ADMIN, "alice", "a"),
        ("Bearer owner", Verb.ADMIN, "", Refused),
        ("Bearer old", Verb.READ, "alice", Unauthenticated),
        ("Bearer unknown", Verb.READ, "alice", Unauthenticated),
        ("Bearer ", Verb.READ, "alice", Unauthenticated),
        ("reader", Verb.READ, "alice", Unauthenticated),
        ("Basic reader", Verb.READ, "alice", Unauthenticated),
        (None, Verb.READ, "alice", Unauthenticated),
    ],
)
def test_what_a_token_opens(token: str | None, verb: Verb, tenant: str, answer: object) -> None:
    if isinstance(answer, str):
        assert access().check(peer(token), verb, tenant) == answer
        return
    assert isinstance(answer, type) and issubclass(answer, Exception)
    with pytest.raises(answer):
        access().check(peer(token), verb, tenant)


# The only word in the file of tokens that allows it.
WORD_FOR = {
    Verb.READ: "read",
    Verb.OBSERVE: "read",
    Verb.SUBSCRIBE: "read",
    Verb.SAVE: "write",
    Verb.ADMIN: "admin",
}
WORDS = [set(some) for count in (1, 2, 3) for some in itertools.combinations(TOKEN_VERBS, count)]


@pytest.mark.parametrize("words", WORDS, ids=["+".join(sorted(words)) for words in WORDS])
@pytest.mark.parametrize("tenants", ["alice", "*"])
def test_each_set_of_verbs_allows_what_its_words_do_and_no_more(words: set[str], tenants: str) -> None:
    known = {digest_of("one"): Token("t", frozenset({tenants}), frozenset(words))}
    access = TokenAccess(Tokens(known))
    assert set(WORD_FOR) == set(Verb)
    for local in (False, True):
        for verb, word in WORD_FOR.items():
            who = peer("Bearer one", local=local)
            if word in words:
                assert access.check(who, verb, "alice") == "t", verb
                continue
            with pytest.raises(Refused, match=f"does not allow to {verb}"):
                access.check(who, verb, "alice")


def test_a_token_opens_until_it_expires() -> None:
    assert access(at_s=99.9).check(peer("Bearer old"), Verb.READ, "alice") == "x"


def test_two_tokens_are_none() -> None:
    twice = Peer((("authorization", "Bearer reader"), ("authorization", "Bearer writer")), False)
    with pytest.raises(Unauthenticated):
        access().check(twice, Verb.READ, "alice")
    with pytest.raises(Unauthenticated):
        access().check(Peer((("authorization", b"Bearer reader"),), False), Verb.READ, "alice")


def test_a_unix_socket_is_a_door_unless_told_otherwise() -> None:
    assert access().check(peer(None, local=True), Verb.ADMIN, "") == ""
    assert access().check(peer(None, local=True), Verb.SAVE, "bob") == ""
    with pytest.raises(Refused):  # who shows a token has no more than that
        access().check(peer("Bearer reader", local=True), Verb.SAVE, "alice")
    with pytest.raises(Unauthenticated):
        access(unix_needs=True).check(peer(None, local=True), Verb.READ, "alice")
    assert access(unix_needs=True).check(peer("Bearer reader", local=True), Verb.READ, "alice") == "r"
