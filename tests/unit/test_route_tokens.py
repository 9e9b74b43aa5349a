"""Prompts as ids: the same as transformers makes of them, from a real model's tokenizer and from odd ones."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from kvstore.connectors.embedded.gguf_file import GGUFFile
from kvstore.connectors.embedded.smollm2 import ModelUnavailable, find_smollm2
from tokenizer_kit import CALL, CHATS, TOOL, Change, as_it_is, body, chat_ids, reference, small
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from kvstore.errors import BadRequest, ConfigError
from kvstore.router.bodies import CHAT, COMPLETIONS, Body
from kvstore.router.chat_template import Chat, ChatTemplate
from kvstore.router.tokens import ByteChunks, Encoded, ModelTokens, Tokenizers

# ---- a real model's ---------------------------------------------------------------------------------------


def _array(data: mmap.mmap, key: str) -> list[Any]:
    """Of a GGUF file: strings or 32-bit integers. The gguf package takes 5 s for what needs 0.1 s."""
    at = data.find(key.encode()) + len(key)
    _, kind, count = struct.unpack_from("<IIQ", data, at)
    at += 16
    if kind != 8:
        return list(struct.unpack_from(f"<{count}i", data, at))
    found = []
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", data, at)
        found.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokens, Any]:
    """The model's own vocabulary, merges, marks and template, as Hugging Face files."""
    named = os.environ.get("KVSTORE_TEST_MODEL")
    try:
        path = Path(named) if named else find_smollm2()
    except ModelUnavailable as error:
        pytest.skip(str(error))
    values = GGUFFile(path).values
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        words, kinds = _array(data, "tokenizer.ggml.tokens"), _array(data, "tokenizer.ggml.token_type")
        merges = [tuple(pair.split(" ", 1)) for pair in _array(data, "tokenizer.ggml.merges")]
    made = tokenizers.Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    digits, rest = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    control = 3
    made.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == control])
    folder = tmp_path_factory.mktemp("smollm2")
    made.save(str(folder / "tokenizer.json"))
    marks = {name: words[int(values[f"tokenizer.ggml.{name}_token_id"])] for name in ("bos", "eos")}
    config = {"chat_template": values["tokenizer.chat_template"]}
    config |= {f"{name}_token": mark for name, mark in marks.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelTokens(folder), reference(folder)


@pytest.mark.model
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("begun", [True, False])
def test_a_real_models_chats(
    smollm2: tuple[ModelTokens, Any], messages: list[dict[str, Any]], begun: bool
) -> None:
    ours, theirs = smollm2
    expected = theirs.apply_chat_template(messages, add_generation_prompt=begun, return_dict=False)
    for _ in range(2):  # the second time from what is remembered
        assert chat_ids(ours, messages, add_generation_prompt=begun) == expected
    assert len(expected) > 3


@pytest.mark.model
def test_a_conversation_grows_by_its_new_messages_only(smollm2: tuple[ModelTokens, Any]) -> None:
    ours, theirs = smollm2
    messages: list[dict[str, Any]] = []
    encoded: list[int] = []
    inner, ours._segments._encode = ours._segments._encode, lambda t: (encoded.append(len(t)), inner(t))[1]
    try:
        for turn in range(6):
            messages += [{"role": "user", "content": f"turn {turn} " * 200}]
            assert chat_ids(ours, messages) == theirs.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            messages += [{"role": "assistant", "content": f"answer {turn} " * 200}]
    finally:
        ours._segments._encode = inner
    rendered = ours.render(Chat(messages, add_generation_prompt=False))
    assert sum(encoded) < 1.1 * len(rendered)  # 6 turns would otherwise have encoded 3.5 times as much


@pytest.mark.model
def test_completions_take_texts_and_ids(smollm2: tuple[ModelTokens, Any]) -> None:
    ours, theirs = smollm2
    expected = theirs("The capital of <|im_end|> France")["input_ids"]
    for prompt in ("The capital of <|im_end|> France", ["The capital of <|im_end|> France", "other"]):
        encoded = ours.encode(body(COMPLETIONS, {"prompt": prompt}))
        assert encoded.exact and encoded.tokens.tolist() == expected
    for ids in ([3, 4, 5], [[3, 4, 5], [6]]):
        encoded = ours.encode(body(COMPLETIONS, {"prompt": ids}))
        assert encoded.exact and encoded.tokens.tolist() == [3, 4, 5]
    nothing = ours.encode(body(COMPLETIONS, {"prompt_embeds": "AAAA"}))
    assert not nothing.exact and nothing.tokens.size == 0


# ---- odd ones, made here ----------------------------------------------------------------------------------


def _prefix_space(made: Any) -> None:
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def _metaspace(made: Any) -> None:
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _prepends(made: Any) -> None:
    made.normalizer = normalizers.Prepend("the")


def _composes(made: Any) -> None:
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def _takes_blanks(made: Any) -> None:
    made.add_special_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, special=True)])


def _overlaps(made: Any) -> None:
    made.add_tokens([AddedToken("fox<|end", normalized=False), AddedToken("\n\n", normalized=True)])
    made.add_special_tokens(["<|end|>\n"])


CHANGES: list[tuple[Change, bool]] = [
    (as_it_is, True),
    (_composes, True),
    (_overlaps, True),
    (_prefix_space, False),
    (_metaspace, False),
    (_prepends, False),
    (_takes_blanks, False),
]
PIECES = [
    "<|begin|>",
    "<|end|>",
    "<|end",
    "|>",
    "<tool>",
    " ",
    "\n",
    "\n\n",
    "fox",
    "é",
    "e\u0301",
    "quick " * 20,
]


@pytest.mark.parametrize(("change", "cuts"), CHANGES)
def test_segments_are_the_whole(tmp_path: Path, change: Change, cuts: bool) -> None:
    ours = small(tmp_path, change=change)
    assert (ours._segments._cuts is not None) is cuts
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.example("quick " * 20 + "<|end|>\nfox")
    @hypothesis.example("quick " * 20 + "fox<|end|>\n\nfox")
    @hypothesis.given(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=20).map("".join))
    def same(text: str) -> None:
        expected = whole.encode(text, add_special_tokens=False).ids
        for _ in range(2):
            assert ours.ids(text, add_special_tokens=False).tolist() == expected

    same()


TEMPLATES = {
    "tools": (
        "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}\n{% endfor %}"
        "{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}){% endfor %}{% endif %}{{ eos_token }}\n{% endfor %}"
    ),
    "alternates": (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}"
    ),
    "loops": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
        "{{ ns.n }}{{ unknown_token }}{{ strftime_now('%Y') }}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_templates_render_as_transformers_does(tmp_path: Path, template: str, tools: Any) -> None:
    ours, theirs, plain = small(tmp_path, template), reference(tmp_path), CHATS["turns"]
    called = [*plain[:3], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    said = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]
    sent = [
        *plain[:3],
        {**called[3], "tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": said}}]},
    ]  # type: ignore[dict-item]
    for theirs_see, we_get in ((plain, plain), (called, sent), (CHATS["unicode"], CHATS["unicode"])):
        text = theirs.apply_chat_template(theirs_see, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ours.render(Chat(we_get, tools or ())) == text
        expected = theirs.apply_chat_template(
            theirs_see, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert chat_ids(ours, we_get, tools=tools) == expected


def test_what_a_template_refuses_is_approximated(tmp_path: Path) -> None:
    ours = small(tmp_path, TEMPLATES["alternates"])
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(BadRequest, match="roles must alternate"):
        ours.exact(body(CHAT, {"messages": twice}))
    assert not ours.encode(body(CHAT, {"messages": twice})).exact


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ messages }}"},
        {"truncate_prompt_tokens": 5},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": []},
        {"messages": [7]},
        {"messages": "hi"},
        {"tools": [{"type": "function"}]},
    ],
)
def test_what_cannot_be_known_exactly_is_approximated(tmp_path: Path, fields: dict[str, Any]) -> None:
    encoded = small(tmp_path).encode(body(CHAT, {"messages": CHATS["one"], **fields}))
    assert not encoded.exact


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content }}",
        "{{ ('a' * 3).format(1).nothing() }}",
    ],
)
def test_a_hostile_template_ends_as_an_error(template: str) -> None:
    with pytest.raises(BadRequest, match="template"):
        ChatTemplate(template, {}).render(Chat(CHATS["one"]))


def test_messages_are_shaped_as_vllm_does() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joined = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert joined.render(Chat(parts)) == "a\nb"
    walked = ChatTemplate(
        "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}", {}
    )
    assert walked.render(Chat(parts)) == "<a><b>"
    roles = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {})
    developer = [{"role": "user", "content": "u"}, {"role": "developer", "content": "d"}]
    assert roles.render(Chat(developer)) == "system:d;user:u;"
    assert roles.render(Chat([{"role": "assistant", "content": None}])) == "assistant:;"
    bad_call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{no json"}}]}
    shown = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    assert shown.render(Chat([bad_call])) == "{}"


def test_a_message_can_be_continued(tmp_path: Path) -> None:
    ours = small(tmp_path)
    theirs = reference(tmp_path)
    messages = [*CHATS["one"], {"role": "assistant", "content": "Paris is"}]
    expected = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    got = chat_ids(ours, messages, continue_final_message=True, add_generation_prompt=False)
    assert got == expected


def test_template_files_beside_the_tokenizer(tmp_path: Path) -> None:
    small(tmp_path)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ModelTokens(tmp_path).render(Chat(CHATS["one"])) == "plain"
    assert ModelTokens(tmp_path).render(Chat(CHATS["one"], [TOOL, TOOL])) == "2"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert ModelTokens(tmp_path).render(Chat(CHATS["one"])) == "from a file"


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not there"):
        ModelTokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelTokens(tmp_path)
    small(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(ConfigError, match="chat template"):
        ModelTokens(tmp_path)


# ---- the approximation ------------------------------------------------------------------------------------


def test_four_bytes_are_a_pseudo_token() -> None:
    encoded = ByteChunks().encode(body(COMPLETIONS, {"prompt": "abcdefghij"}))
    assert not encoded.exact
    assert encoded.tokens.tolist() == [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")]


def test_a_next_turn_begins_with_the_one_before() -> None:
    turns = CHATS["turns"]
    parts = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}]}
    first = ByteChunks().encode(body(CHAT, {"messages": [parts, *turns[:3]], "tools": [TOOL]})).tokens
    second = ByteChunks().encode(body(CHAT, {"messages": [parts, *turns[:5]], "tools": [TOOL]})).tokens
    assert second[: first.size].tolist() == first.tolist() and second.size > first.size
    assert first.size < 500  # the picture is a digest
    other = ByteChunks().encode(body(CHAT, {"messages": [{**parts, "content": "y"}, *turns[:3]]})).tokens
    assert other.tolist() != first.tolist()


class Watching:
    """Notes which thread encodes."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, body: Body) -> Encoded:
        self.threads.append(threading.current_thread())
        return ByteChunks().encode(body)


async def test_long_prompts_leave_the_loop_alone() -> None:
    watching, here = Watching(), threading.current_thread()
    async with Tokenizers({"m": watching}) as tokens:
        await tokens.encode(body(CHAT, {"model": "m", "messages": CHATS["one"]}))
        long = body(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x" * 10_000}]})
        assert (await tokens.encode(long)).tokens.size > 2000
        assert not (await tokens.encode(body(CHAT, {"model": "other", "messages": CHATS["one"]}))).exact
    assert [thread is here for thread in watching.threads] == [True, False]
    assert not watching.threads[1].is_alive()
