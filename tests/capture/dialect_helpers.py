"""For tests of a dialect by itself: short ways in, and an HTTP server that answers its SDK with scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from pipeline.capture import dialects
from pipeline.capture.canonical import Memo
from pipeline.capture.dialects.base import Action, Answer, ApiError, ChatRequest, Dialect, Fault, ToolCall

ANSWER = Answer("a1", "done", "", (), "stop", prompt_tokens=20, completion_tokens=7, cached_tokens=5, created=9)
LS = ToolCall("call_1", "bash", '{"cmd":"ls é"}')
PWD = ToolCall("call_2", "bash", '{"cmd":"pwd"}')
CALLS = msgspec.structs.replace(
    ANSWER, text="see", reasoning="hm, so", tool_calls=(LS, PWD), finish_reason="tool_calls"
)


def parse(dialect: Dialect, body: Any, path: str = "", query: str = "", memo: Memo | None = None) -> ChatRequest:
    """A request from its body as Python data."""
    return dialect.parse(msgspec.json.encode(body), memo or Memo(), path, query)


def events_of(stream: bytes) -> list[Any]:
    """The data of every event of a stream, in order; comments and pings left out."""
    blocks = [block.split("\n") for block in stream.decode().split("\n\n")]
    data = [line.removeprefix("data: ") for block in blocks for line in block if line.startswith("data: ")]
    return [msgspec.json.decode(text) for text in data if text != "[DONE]"]


class Stub:
    """What the server was asked, and what it answers next (an error is raised before anything is sent)."""

    def __init__(self, *script: Answer | ApiError) -> None:
        self.script = list(script)
        self.requests: list[ChatRequest] = []
        self.base_url = ""

    def reply(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        path, query = unquote(urlsplit(target).path), urlsplit(target).query
        dialect, route = dialects.find(method, path)
        try:
            if route is None:
                raise ApiError(Fault.NOT_FOUND, f"no such route: {path}")
            if route.action is Action.MODELS:
                return 200, "application/json", msgspec.json.encode(dialect.models("m"))
            request = dialect.parse(body, Memo(), path, query)
            self.requests.append(request)
            if route.action is Action.COUNT_TOKENS:
                return 200, "application/json", msgspec.json.encode(dialect.token_count(42))
            answer = self.script.pop(0)
            if isinstance(answer, ApiError):
                raise answer
        except ApiError as error:
            return dialect.status(error), "application/json", msgspec.json.encode(dialect.error(error))
        if request.stream:
            kind = "text/event-stream" if request.extra.get("sse", True) else "application/json"
            return 200, kind, dialect.events(request, answer)
        return 200, "application/json", msgspec.json.encode(dialect.answer(request, answer))


@contextmanager
def serving(*script: Answer | ApiError) -> Iterator[Stub]:
    """A Stub on a port of its own."""
    stub = Stub(*script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            status, kind, body = stub.reply(self.command, self.path, self.rfile.read(length))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.base_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
