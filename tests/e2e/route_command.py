"""`kvstore route` as a process, and engines behind it that keep the prefixes they have seen."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from real_daemon import WAIT_S, eventually, live_with_parent

__all__ = ["CachingEngine", "Reply", "RouteCommand"]


@dataclass(frozen=True)
class Reply:
    """Of the router to one request."""

    status: int
    body: Any
    replica: str
    expected_tokens: int

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


class CachingEngine:
    """An OpenAI server that reuses the longest prefix of text that it has ever seen, 64 characters a block.

    Args:
        delay_s: before it answers what it has not seen; what it has seen it answers at once.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._seen: set[str] = set()
        self._delay = threading.Event()
        self._delay_s = delay_s
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """As an engine would, with its usage."""
        self.bodies.append(body)
        text = str(body.get("cache_salt", "")) + json.dumps(body.get("messages") or body.get("prompt"))
        blocks = [text[: 64 * (i + 1)] for i in range(len(text) // 64)]
        hits = 0
        while hits < len(blocks) and blocks[hits] in self._seen:
            hits += 1
        if hits < len(blocks):
            self._delay.wait(self._delay_s)
        self._seen.update(blocks)
        details = {"cached_tokens": 16 * hits}
        usage = {
            "prompt_tokens": 16 * len(blocks) + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": details,
        }
        return {"choices": [{"message": {"content": "."}}], "usage": usage}

    def close(self) -> None:
        """Hang up; its port is closed from now on. Again is harmless."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                data = json.dumps(engine.answer(body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("connection", "close")  # or it would go on answering after close()
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        return Handler


class RouteCommand:
    """`python -m kvstore route`, ended with the `with` block."""

    def __init__(self, folder: Path, words: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self._log = folder / "route.log"
        self._sink = self._log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "route", "--listen", "127.0.0.1:0", *words],
            stdout=self._sink,
            stderr=self._sink,
            preexec_fn=live_with_parent,
            env={**os.environ, **(environ or {})},
        )
        self.http, self.grpc = "", ""

    def said(self) -> list[dict[str, Any]]:
        """What it has logged."""
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_up(self) -> Self:
        """Until it says where it listens."""

        def listening() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            for line in self.said():
                if line["event"] == "routing":
                    self.http, self.grpc = line["http"], line["grpc"]
            return bool(self.http)

        eventually(listening, "the router listens")
        return self

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.http, timeout=WAIT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the rows with these labels (`replica="a"`)."""
        rows = [line for line in self.get("/metrics").splitlines() if line.startswith(f"{name}{{")]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if all(label in row for label in labels))

    def ask(self, text: str, token: str = "", **more: Any) -> Reply:
        """One chat request with a single message."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return self._post("/v1/chat/completions", body, token)

    def complete(self, ids: list[int]) -> Reply:
        """One completion of token ids."""
        return self._post("/v1/completions", {"model": "m", "prompt": ids}, "")

    def _post(self, path: str, body: dict[str, Any], token: str) -> Reply:
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {token}"} if token else {}
        )
        connection = http.client.HTTPConnection(self.http, timeout=WAIT_S)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            told = response.headers
            return Reply(
                response.status,
                json.loads(response.read()),
                told.get("x-kvstore-replica", ""),
                int(told.get("x-kvstore-expected-tokens", "0")),
            )
        finally:
            connection.close()

    def end(self) -> int:
        """SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(WAIT_S)
        self._sink.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._sink.close()
