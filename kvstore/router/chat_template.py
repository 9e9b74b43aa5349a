"""A chat as the text that a model sees: its own template, rendered as its engine does.

The sandbox, the filters and the functions are those of transformers (`apply_chat_template`); what happens to
messages before (parts of text joined, arguments of tool calls parsed, `developer` where a template does not
know it) is what vLLM's front end does. Only the model's own template is rendered here, never a caller's.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from kvstore.clock import unix_time_s
from kvstore.errors import BadRequest, ConfigError

__all__ = ["Chat", "ChatTemplate", "load_templates"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILE_BYTES_MAX = 64 << 20
# In place of the end of a message that is to be continued; the rendered text is cut where it stands.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template is given.

    Attributes:
        messages: as a caller sends them.
        tools: as a caller sends them; empty = none.
        documents: for templates that know them; None = none.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: end within the last message instead.
        more: other variables, such as `enable_thinking`.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] = ()
    documents: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One template, compiled.

    Args:
        text: Jinja.
        tokens: names such as `bos_token` → text.

    Raises:
        ConfigError: not Jinja.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(text)
            self._joins_parts = not _walks_content(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from None
        self._tokens = dict(tokens)
        self._knows_developer = '"developer"' in text or "'developer'" in text

    def render(self, chat: Chat) -> str:
        """The prompt.

        Raises:
            BadRequest: the template refuses these messages, or they are none.
        """
        if not chat.messages:
            raise BadRequest("messages: need at least one")
        messages = [_message(message, joins_parts=self._joins_parts) for message in chat.messages]
        if not self._knows_developer and any(m["role"] == "developer" for m in messages):
            messages = _developers_as_system(messages)
        if chat.continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_CONTINUED}"}
        given: dict[str, Any] = {
            **self._tokens,
            **chat.more,
            "messages": messages,
            "tools": [_tool(tool) for tool in chat.tools] or None,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._template.render(given)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise BadRequest(f"messages: the model's chat template refuses them ({error})") from None
        except (AttributeError, RecursionError, MemoryError) as error:
            raise BadRequest(f"messages: the model's chat template fails ({error})") from None
        return _cut(text) if chat.continue_final_message else text


def load_templates(folder: Path) -> Mapping[str, ChatTemplate]:
    """Of a model's directory: name → template; the one without a name is `default`. Empty = it has none.

    Raises:
        ConfigError: a file cannot be read.
    """
    config = _json(folder / "tokenizer_config.json")
    tokens = _special_tokens(config, _json(folder / "special_tokens_map.json"))
    found: dict[str, str] = {}
    said = config.get("chat_template")
    if isinstance(said, str):
        found["default"] = said
    elif isinstance(said, list):
        found |= {entry["name"]: entry["template"] for entry in said if isinstance(entry, dict)}
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file.read_text()
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text()
    return {name: ChatTemplate(text, tokens) for name, text in found.items()}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"{path}: longer than {_FILE_BYTES_MAX} bytes")
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    return found if isinstance(found, dict) else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        for source in sources:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens.setdefault(name, value)
    return tokens


# ---- what an engine does to messages before ----------------------------------------------------------------


def _message(message: Any, *, joins_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("messages: need objects with a role")
    role, content = message["role"], message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    texts = [_text(part) for part in parts]
    joined = "\n".join(texts)
    whole: Any = joined if joins_parts else [{"type": "text", "text": text} for text in texts]
    made = {"role": role, "content": joined if role == "tool" or isinstance(content, str) else whole}
    if role == "assistant":
        made |= _spoken(message)
    if role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise BadRequest("messages: a part of a content is not text")
    return text


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls and isinstance(calls, list):
        made["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if isinstance(reasoning, str):
        made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return made


def _call(call: Any) -> dict[str, Any]:
    """Templates want the arguments as an object; the API has them as its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest("tool_calls: need objects with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Any) -> dict[str, Any]:
    """In the engine's order of keys, whatever the caller's: the prompt's tokens follow it."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest("tools: need objects with a function")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": made}


def _developers_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As one system message at the front: many templates accept no other."""
    system = [m for m in messages if m["role"] in ("system", "developer")]
    if not all(isinstance(m["content"], str) for m in system):
        return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    text = "\n\n".join(m["content"] for m in system)
    return [{"role": "system", "content": text}, *(m for m in messages if m not in system)]


def _cut(text: str) -> str:
    at = text.rfind(_CONTINUED.strip())
    if at < 0:
        raise BadRequest("continue_final_message: the model's chat template does not show the last message")
    kept = text[at : at + len(_CONTINUED)] == _CONTINUED
    return text[:at] if kept else text[:at].rstrip()


# ---- the sandbox ------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: marks for training, nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML needs escaped."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """The engine's date, as far as both run in one time zone."""
    return datetime.datetime.fromtimestamp(unix_time_s()).strftime(form)


def _walks_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a template loops over the parts of a content; one that does not gets one text (vLLM's rule)."""
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node | None) -> bool:
    if isinstance(node, jinja2.nodes.Filter):
        return _is_content(node.node)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"
