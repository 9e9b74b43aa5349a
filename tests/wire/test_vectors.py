"""Golden bytes of format v1: keys and frames as any other implementation must compute them.

The hexadecimal literals were made with hashlib and a hand-written encoder, never with the code under test.
A change here is a change of the format: old daemons and clients would no longer understand each other.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest

from kvstore import _native, keys
from kvstore.keys import KeyChain
from kvstore.rpc import messages as m
from kvstore.rpc.messages import ReplyFrame, RequestFrame
from kvstore.types import BlockLayout, Namespace

NAMESPACE = Namespace(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    weights="7e27bd9f95328f0f3b08261d1252705110c806f8",
    tokenizer="chatml-1",
    adapter="none",
    attention="rope=100000",
    kv_dtype="bfloat16",
    layout="8f14e45fceea167a5a36dedd4bea2543",
    block_tokens="16",
)
CANONICAL = (
    "0700000061646170746572040000006e6f6e6509000000617474656e74696f6e0b000000726f70653d3130303030300c"
    "000000626c6f636b5f746f6b656e73020000003136080000006b765f64747970650800000062666c6f61743136060000"
    "006c61796f7574200000003866313465343566636565613136376135613336646564643462656132353433050000006d"
    "6f64656c2300000048756767696e674661636554422f536d6f6c4c4d322d3133354d2d496e7374727563740900000074"
    "6f6b656e697a657208000000636861746d6c2d3107000000776569676874732800000037653237626439663935333238"
    "66306633623038323631643132353237303531313063383036"
    "6638"
)
DIGEST = "9edf5f93bb801b3d74a74cea5db43d41cc90cd1d5e31b2ac120fccf5627157ff"
ROOT_UNSALTED = "9d6fec6138ab144a90e2168e1235c05f240b48a5e19b60b073ea164cb86c1dec"
SALT = bytes(range(100, 132))
ROOT = "e92d24679857c44c025e51503813b26eba8d1810a8aa6909b2023dd444dc7b16"
ROOT_SALT_64 = "9da8d732bc8c22c88edc2463fa08293af78c92433c3aed93650494f0f0008e3d"
TOKENS = [*range(1, 41), *[2**32 - 1] * 8]
KEYS = [
    "9e4fad97ae1b83de4ef0c4f94fe5b33791247e94dd756eac3caad65be7db373e",
    "6aeb86ee3cacf2b0cfc161179342956c8c6aba65c4c27520c0aeebcf677dc0fe",
    "4942576d8e70a19d7b346a91fb33fef2274a6e101d5be3ac4798ca9ae2be31dd",
]
EXTRA = {0: b"salt of this request", 2: b"image " * 40}
KEYS_EXTRA = [
    "7cf86cc7d5638a7874dc7c462cb1f225369a2c8c8eb583bc77158c42867835ea",
    "446170095f28281b0bee06978cd43207c4878660c9255de9f06a5c1cf42bf507",
    "7e77d240d317dfd77a4d159c0e16c69ab7bb60134c0273283428b589e8adc2e9",
]
KEYS_OF_ONE_TOKEN = [
    "a3d468008f0bd6a09e650fc0302466467541943623622a0554aa97fc074d3425",
    "d836e00ac526fa7d68ae827f8fb063af3f49dff009934004da08cdeb4b9b3c55",
]


def hexes(chain: KeyChain) -> list[str]:
    return [key.tobytes().hex() for key in chain.keys]


def test_namespace() -> None:
    assert NAMESPACE.canonical().hex() == CANONICAL
    assert NAMESPACE.digest.hex() == DIGEST


def test_root() -> None:
    assert NAMESPACE.root(b"").hex() == ROOT_UNSALTED
    assert NAMESPACE.root(SALT).hex() == ROOT
    assert NAMESPACE.root(bytes(range(64))).hex() == ROOT_SALT_64


def test_keys() -> None:
    root = bytes.fromhex(ROOT)
    assert hexes(KeyChain.of(root, TOKENS, 16)) == KEYS
    assert hexes(KeyChain.of(root, TOKENS, 16, EXTRA)) == KEYS_EXTRA
    assert hexes(KeyChain.of(bytes(32), [0, 1], 1)) == KEYS_OF_ONE_TOKEN


def test_digest_of_keys() -> None:
    chain = KeyChain.of(bytes.fromhex(ROOT), TOKENS, 16)
    assert chain.digest(3) == 0x0582532D85F65D49
    assert KeyChain.of(bytes.fromhex(ROOT), TOKENS, 16, EXTRA).digest(3) == 0x015E541327DA71BE
    assert chain.digest(0) == _native.keys_digest(np.empty((0, 32), np.uint8)) == 0


def test_key_test_vector() -> None:
    vector = "0291ea83dd6795e797465accc6d0ea44b0242da5d831da6d4611fc607f51ba83"
    assert keys.test_vector().hex() == vector


def test_layout_fingerprint() -> None:
    layout = BlockLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
    assert layout.fingerprint == "96fbca1bf14677de3398a66576113ce0"


def test_proof_pattern() -> None:
    pattern = (
        "8ae79869c9949bb9667001ec7226b9b213b8660d6821b2e4d79027d9d28cc30f9b95a02db5698d6a79610599d8eae5c0"
    )
    assert m.pattern(b"seed of 16 bytes", 3, 2, 48).hex() == pattern


def test_crc32c() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C (Castagnoli)


# ---- frames -----------------------------------------------------------------------------------------------

K = bytes(range(32))
KR = K[::-1]
LAYOUT = m.Layout(30, 3, 64, "bfloat16", 16, "[K|V][token][dim]", 0, "causal", "full")


def u32(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in numbers)


def u64(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


REQUESTS: list[tuple[m.Request, str]] = [
    (
        m.Attach(1, "both", b"", {"model": "m"}, LAYOUT, (0, 30, 0, 3), ["default"], K),
        (
            "92cd012c99a661747461636801a4626f7468c40081a56d6f64656ca16d991e0340a862666c6f6174313610b1"
            "5b4b7c565d5b746f6b656e5d5b64696d5d00a663617573616ca466756c6c94001e000391a764656661756c74"
            "c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (m.Prove(), "92cd012c91a570726f7665"),
    (m.ProvedStore(), "92cd012c91ac70726f7665645f73746f7265"),
    (m.Proved(ok=True), "92cd012c92a670726f766564c3"),
    (m.Pool("owned", 4096, 512), "92cd012c94a4706f6f6ca56f776e6564cd1000cd0200"),
    (
        m.Lookup(K, 300, u32(0, 17), K + KR, (4800, "cmpl-7", 0.25, True, 3, 900, 2048, "load")),
        (
            "92cd012c96a66c6f6f6b7570c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d"
            "1e1fcd012cc4080000000011000000c440000102030405060708090a0b0c0d0e0f101112131415161718191a"
            "1b1c1d1e1f1f1e1d1c1b1a191817161514131211100f0e0d0c0b0a0908070605040302010098cd12c0a6636d"
            "706c2d37cb3fd0000000000000c303cd0384cd0800a46c6f6164"
        ),
    ),
    (
        m.Extend(7, u32(3), K),
        (
            "92cd012c94a6657874656e6407c40403000000c420000102030405060708090a0b0c0d0e0f10111213141516"
            "1718191a1b1c1d1e1f"
        ),
    ),
    (m.Fetch(7, 0, 12), "92cd012c95a5666574636807000cc2"),
    (m.Fetch(7, 4, 12, descending=True), "92cd012c95a5666574636807040cc3"),
    (m.Enough(7, 9), "92cd012c93a6656e6f7567680709"),
    (m.Report(7, u32(5)), "92cd012c93a67265706f727407c40405000000"),
    (m.Release(7), "92cd012c92a772656c6561736507"),
    (
        m.Reserve(K, K, KR),
        (
            "92cd012c94a772657365727665c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c"
            "1d1e1fc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4201f1e1d1c1b"
            "1a191817161514131211100f0e0d0c0b0a09080706050403020100"
        ),
    ),
    (m.Publish(9, 4, checked=True), "92cd012c94a77075626c6973680904c3"),
    (m.Abort(9), "92cd012c92a561626f727409"),
    (m.Acquire(7, 20), "92cd012c93a7616371756972650714"),
    (
        m.Commit(7, K, 4, K, KR),
        (
            "92cd012c96a6636f6d6d697407c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c"
            "1d1e1f04c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4201f1e1d1c"
            "1b1a191817161514131211100f0e0d0c0b0a09080706050403020100"
        ),
    ),
    (
        m.Adopt(u32(1, 2, 3), K, K),
        (
            "92cd012c94a561646f7074c40c010000000200000003000000c420000102030405060708090a0b0c0d0e0f10"
            "1112131415161718191a1b1c1d1e1fc420000102030405060708090a0b0c0d0e0f101112131415161718191a"
            "1b1c1d1e1f"
        ),
    ),
    (
        m.Observe(10, 20, 70, K, b""),
        (
            "92cd012c96a76f6273657276650a1446c420000102030405060708090a0b0c0d0e0f10111213141516171819"
            "1a1b1c1d1e1fc400"
        ),
    ),
    (m.Heartbeat(), "92cd012c91a9686561727462656174"),
    (
        m.Timings(
            [("default", 0.25, 100, 96)],
            [(512, 131_072.0, 3, 900, 0.5)],
            [("load", 3, 4096, 0.125)],
            2,
            [(9, 0.75)],
        ),
        "92cd012c96a774696d696e67739194a764656661756c74cb3fd000000000000064609195cd0200cb410000000000000003cd"
        "0384cb3fe00000000000009194a46c6f616403cd1000cb3fc000000000000002919209cb3fe8000000000000",
    ),
    (m.Quiesced(), "92cd012c91a87175696573636564"),
    (m.Status(), "92cd012c91a6737461747573"),
    (m.Check(), "92cd012c91a5636865636b"),
    (m.Explain("cmpl-7"), "92cd012c92a76578706c61696ea6636d706c2d37"),
    (m.Flush(), "92cd012c91a5666c757368"),
    (m.Stop(True), "92cd012c92a473746f70c3"),
]
REPLIES: list[tuple[m.Reply | m.Notice, str]] = [
    (
        m.Attached(K[:16], 5, K[16:], {"default": {"own": K}}, 1 << 30, 8192, 1.0, 2**62),
        (
            "92cd012c99a86174746163686564c410000102030405060708090a0b0c0d0e0f05c410101112131415161718"
            "191a1b1c1d1e1f81a764656661756c7481a36f776ec420000102030405060708090a0b0c0d0e0f1011121314"
            "15161718191a1b1c1d1e1fce40000000cd2000cb3ff0000000000000cf4000000000000000"
        ),
    ),
    (
        m.ProveSlot(512, 2**63 + 5, K, K[:16]),
        (
            "92cd012c95aa70726f76655f736c6f74cd0200cf8000000000000005c420000102030405060708090a0b0c0d0e0f10111213141516"
            "1718191a1b1c1d1e1fc410000102030405060708090a0b0c0d0e0f"
        ),
    ),
    (m.ProveLoad(K[:16]), "92cd012c92aa70726f76655f6c6f6164c410000102030405060708090a0b0c0d0e0f"),
    (
        m.Found(
            7,
            12,
            4,
            13,
            17,
            2**63 + 1,
            (4, 12),
            u32(512, 8),
            [("GPU", 0, 4), ("HOST", 4, 12)],
            "loads it",
            plan=9,
            choice="split",
            lag=(0.25, 0.5, 1.5),
        ),
        (
            "92cd012c9fa5666f756e64070c040d11cf800000000000000192040cc40800020000080000009293a3475055"
            "000493a4484f5354040ca86c6f616473206974a009a573706c697493cb3fd0000000000000cb3fe000000000"
            "0000cb3ff8000000000000"
        ),
    ),
    (m.Fetched(12, u32(512, 12)), "92cd012c93a7666574636865640cc408000200000c000000"),
    (
        m.Released([m.Demote(9, u32(1, 2), u32(512, 513), u64(3, 2**40))]),
        "92cd012c92a872656c65617365649195a664656d6f746509c4080100000002000000c4080002000001020000c4100300"
        "0000000000000000000000010000",
    ),
    (
        m.Reserved(9, u32(512, 2**32 - 1), u64(258), 1, 0, 2, "no room"),
        "92cd012c99a8726573657276656409c40800020000ffffffffc4080201000000000000010002a76e6f20726f6f6da0",
    ),
    (m.Published(4, 0, pending=False), "92cd012c94a97075626c69736865640400c2"),
    (
        m.Acquired(7, u32(1, 2), 1, (1, 2), u32(512, 1), []),
        "92cd012c98a8616371756972656407c408010000000200000001920102c408000200000100000090a0",
    ),
    (m.Committed(16), "92cd012c92a9636f6d6d697474656410"),
    (m.StatusReport("{}"), "92cd012c92ad7374617475735f7265706f7274a27b7d"),
    (m.Explained('{"plan":7}'), "92cd012c92a96578706c61696e6564aa7b22706c616e223a377d"),
    (
        m.Flushed(4096, 2**33, 12, 0.25, "group a: I/O"),
        "92cd012c96a7666c7573686564cd1000cf00000002000000000ccb3fd0000000000000ac67726f757020613a20492f4f",
    ),
    (m.Quieted(2**62 + 7), "92cd012c92a771756965746564cf4000000000000007"),
    (m.Done(), "92cd012c91a4646f6e65"),
    (
        m.Failed("NOT_FOUND", "lease 7: gone"),
        "92cd012c93a66661696c6564a94e4f545f464f554e44ad6c6561736520373a20676f6e65",
    ),
    (m.Progress(7, 8, 12, u32(512, 8)), "92cd012c95a870726f677265737307080cc4080002000008000000"),
]


def kind(case: object) -> str:
    return type(case).__name__ if isinstance(case, msgspec.Struct) else "hex"


@pytest.mark.parametrize(("body", "golden"), REQUESTS, ids=kind)
def test_request_bytes(body: m.Request, golden: str) -> None:
    frame = RequestFrame(300, body)
    assert msgspec.msgpack.encode(frame).hex() == golden
    assert msgspec.msgpack.decode(bytes.fromhex(golden), type=RequestFrame) == frame


@pytest.mark.parametrize(("body", "golden"), REPLIES, ids=kind)
def test_reply_bytes(body: m.Reply | m.Notice, golden: str) -> None:
    frame = ReplyFrame(300, body)
    assert msgspec.msgpack.encode(frame).hex() == golden
    assert msgspec.msgpack.decode(bytes.fromhex(golden), type=ReplyFrame) == frame


def test_every_message_has_golden_bytes() -> None:
    assert {type(body) for body, _ in REQUESTS} == set(get_args(m.Request))
    assert {type(body) for body, _ in REPLIES} == {*get_args(m.Reply), m.Notice}


def malformed(frame: list[object]) -> list[object]:
    """Frames that are nearly `frame`, each wrong in one place."""
    number, body = frame
    assert isinstance(body, list)
    tag, *fields = body
    out: list[object] = [
        [number],
        [number, body, 0],
        [str(number), body],
        [number, []],
        [number, [*body, 0]],
        [number, ["no such message", *fields]],
        [number, {"type": tag}],
        [number, None],
        body,
        {"id": number, "body": body},
    ]
    for place, value in enumerate(fields, 1):
        wrong: object = 1.5 if isinstance(value, bytes | str | list | dict) or value is None else "x"
        out.append([number, [*body[:place], wrong, *body[place + 1 :]]])
    if fields:
        out.append([number, [tag]])
    return out


@pytest.mark.parametrize(("body", "golden"), REQUESTS, ids=kind)
def test_malformed_requests_are_refused(body: m.Request, golden: str) -> None:
    frame = msgspec.msgpack.decode(bytes.fromhex(golden))
    for wrong in malformed(frame):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=RequestFrame)
    for length in range(len(golden) // 2):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(bytes.fromhex(golden)[:length], type=RequestFrame)


@pytest.mark.parametrize(("body", "golden"), REPLIES, ids=kind)
def test_requests_and_replies_are_not_mistaken_for_each_other(body: m.Reply, golden: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(bytes.fromhex(golden), type=RequestFrame)


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        m.Release(7).lease = 8  # type: ignore[misc]
