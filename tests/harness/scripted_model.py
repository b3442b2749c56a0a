"""A scripted model behind the four APIs: answers with a recipe's actions, turn by turn, and keeps the requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.harness.base import Action
from pipeline.harness.scripted import chat_stream, event_stream, gemini_stream

Json = dict[str, Any]


@dataclass
class Request:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: Json


class ScriptedServer:
    """Answers every POST by ``script(body)``, streamed as ``dialect`` does if asked, on the listener of a sandbox.

    Each answer says that its prompt had ``tokens(body)`` tokens.
    """

    def __init__(self, dialect: str, script: Callable[[Json], Action]) -> None:
        self.dialect, self.script = DIALECTS[dialect], script
        self.requests: list[Request] = []
        self.tokens: Callable[[Json], int] = lambda body: 10

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, path, _ = line.decode().split(" ")
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            answer = self._answer(Request(path, headers, json.loads(content))) if method == "POST" else b""
            kind = "application/json" if answer.startswith(b"{") else "text/event-stream"
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n\r\n"
            writer.write(head.encode() + answer)
            await writer.drain()
        writer.close()

    def _answer(self, request: Request) -> bytes:
        self.requests.append(request)
        body = request.body
        say = chat_at_once if self.dialect is DIALECTS["chat"] and not body.get("stream") else self.dialect.stream
        return say(self.script(body), self.tokens(body), f"c{len(self.requests)}")

    @asynccontextmanager
    async def on(self, listener: socket.socket) -> AsyncIterator[ScriptedServer]:
        """Serve on a duplicate of ``listener``, as the proxy does."""
        server = await asyncio.start_server(self._serve, sock=listener.dup(), limit=1 << 20)
        try:
            yield self
        finally:
            server.close()

    def history(self, request: int) -> list[Any]:
        """The history that a request brought."""
        found: list[Any] = self.requests[request].body[self.dialect.history]
        return found


@dataclass(frozen=True)
class Dialect:
    """``history`` names the field of the history; ``spoken`` tells the model's own entries in it."""

    history: str
    spoken: Callable[[Json], bool]
    stream: Callable[[Action, int, str], bytes]
    key: tuple[str, str]  # the header of the key, and what stands before it


def in_turns(dialect: str, turns: Sequence[Action]) -> Callable[[Json], Action]:
    """A script that goes by the number of the model's turns in the history, so that a retry gets the same."""
    api = DIALECTS[dialect]
    return lambda body: turns[min(sum(map(api.spoken, body[api.history])), len(turns) - 1)]


def chat_at_once(action: Action, tokens: int, call_id: str) -> bytes:
    """Chat Completions without a stream."""
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": action.tool, "arguments": json.dumps(action.arguments)},
    }
    said: Json = {"content": None, "tool_calls": [call]} if action.tool else {"content": action.text}
    choice = {
        "index": 0,
        "message": {"role": "assistant", **said},
        "finish_reason": "tool_calls" if action.tool else "stop",
    }
    usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(body).encode()


def anthropic(action: Action, tokens: int, call_id: str) -> bytes:
    """Anthropic Messages."""
    block: Json = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": action.text}
    if action.tool:
        block = {"type": "tool_use", "id": f"toolu_{call_id}", "name": action.tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(action.arguments)}
    usage = {"input_tokens": tokens, "output_tokens": 5}
    message = {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": usage,
    }
    end = {"stop_reason": "tool_use" if action.tool else "end_turn", "stop_sequence": None}
    events: list[Json] = [
        {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": usage},
        {"type": "message_stop"},
    ]
    return event_stream(events)


def responses(action: Action, tokens: int, call_id: str) -> bytes:
    """OpenAI Responses."""
    content = [{"type": "output_text", "text": action.text, "annotations": []}]
    item: Json = {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "content": content}
    if action.tool:
        item = {"id": f"fc_{call_id}", "type": "function_call", "call_id": call_id}
        item |= {"name": action.tool, "arguments": json.dumps(action.arguments)}
        item |= {"namespace": action.namespace} if action.namespace else {}
    counts = {"input_tokens": tokens, "output_tokens": 5, "total_tokens": tokens + 5}
    usage = counts | {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": "r1", "object": "response", "status": "completed", "output": [item], "usage": usage}
    done = {"type": "response.output_item.done", "output_index": 0, "item": item | {"status": "completed"}}
    return event_stream([done, {"type": "response.completed", "response": whole}])


def _of_the_model(entry: Json) -> bool:
    return entry.get("role") in ("assistant", "model") or entry.get("type") == "function_call"


DIALECTS = {
    "chat": Dialect("messages", _of_the_model, chat_stream, ("authorization", "Bearer ")),
    "anthropic": Dialect("messages", _of_the_model, anthropic, ("x-api-key", "")),
    "responses": Dialect("input", _of_the_model, responses, ("authorization", "Bearer ")),
    "gemini": Dialect("contents", _of_the_model, gemini_stream, ("x-goog-api-key", "")),
}
