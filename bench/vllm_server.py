"""vLLM's OpenAI server as users start it: API, scheduler and workers are processes of their own."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.vllm_processes import Child, EngineFailed
from bench.vllm_settings import Settings, environment

__all__ = ["ApiServer", "free_port"]

_START_S = 180.0
_ANSWER_S = 600.0


class ApiServer(Child):
    """The OpenAI server as users start it: API, scheduler and workers are processes of their own.

    Args:
        folder: for the log.
        settings: of the engine; tokens become text here, so the model needs its tokenizer.
        name: of the log.
        port: to listen on; 0 = any free one.
    """

    def __init__(self, folder: Path, settings: Settings, name: str = "server", port: int = 0) -> None:
        self.port = port or free_port()
        self.model = settings.model
        flags = {**settings.arguments(), "host": "127.0.0.1", "port": self.port}
        flags["skip_tokenizer_init"] = False
        words: list[str] = []
        for key, value in flags.items():
            flag = f"--{key.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value not in (None, False):
                words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        if not settings.prefix_caching:
            words.append("--no-enable-prefix-caching")
        variables = environment(settings.ranks, multiprocess=True)
        super().__init__(
            ["vllm.entrypoints.openai.api_server", *words], folder / f"{name}.log", variables, pipes=False
        )

    def wait_healthy(self, timeout_s: float = _START_S) -> ApiServer:
        """Until it answers; two servers started before either is awaited come up side by side.

        Raises:
            EngineFailed: it ended, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise self.failed("the server ended while starting")
            try:
                if self._get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        self.kill()
        raise self.failed(f"the server was not healthy after {timeout_s:.0f} s")

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return self.post("/v1/completions", {"prompt": given, "max_tokens": max_tokens, **more})

    def chat(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int = 16, **more: Any
    ) -> dict[str, Any]:
        """POST /v1/chat/completions, greedy."""
        return self.post(
            "/v1/chat/completions", {"messages": list(messages), "max_tokens": max_tokens, **more}
        )

    def chat_timed(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int = 16, **more: Any
    ) -> tuple[str, float]:
        """As `chat`, streamed.

        Returns:
            The text, and the seconds to its first piece.
        """
        began = time.perf_counter()
        text, first_s = "", 0.0
        body = {"messages": list(messages), "max_tokens": max_tokens, "stream": True, **more}
        for event in self._stream("/v1/chat/completions", body):
            piece = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
            if piece and not text:
                first_s = time.perf_counter() - began
            text += piece
        return text, first_s

    def metrics(self) -> str:
        """GET /metrics."""
        return self._get("/metrics")[1].decode()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request.

        Raises:
            EngineFailed: an answer that is not 200; the message holds it.
        """
        with _Connection(self.port) as connection:
            self._send(connection, path, body)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise EngineFailed(f"{path}: {response.status} {data[:2000].decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with _Connection(self.port) as connection:
            self._send(connection, path, body)
            for line in connection.getresponse():
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield json.loads(data)

    def _send(self, connection: _Connection, path: str, body: Mapping[str, Any]) -> None:
        whole = {"model": self.model, "temperature": 0.0, **body}
        connection.request("POST", path, json.dumps(whole), {"Content-Type": "application/json"})

    def _get(self, path: str) -> tuple[int, bytes]:
        with _Connection(self.port) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def close(self) -> None:
        """End it and all that it started. Again is harmless."""
        self.end()

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection(http.client.HTTPConnection):
    """To a port of this machine, closed at the end of a `with`."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, timeout=_ANSWER_S)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
