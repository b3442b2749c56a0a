"""A scripted model server on the listener that a sandbox hands out: one tool call, then a last word."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

Script = Callable[[dict[str, Any]], bytes]


class ScriptedServer:
    """Answers every POST by ``script(body)``, as an event stream, and keeps the requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, path, _ = line.decode().split(" ")
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            stream = b""
            if method == "POST":
                self.requests.append((path, headers, json.loads(body)))
                stream = self.script(self.requests[-1][2])
            head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(stream)}\r\n\r\n"
            writer.write(head.encode() + stream)
            await writer.drain()
        writer.close()

    @asynccontextmanager
    async def on(self, listener: socket.socket) -> AsyncIterator[ScriptedServer]:
        """Serve on a duplicate of ``listener``, as the proxy does."""
        server = await asyncio.start_server(self._serve, sock=listener.dup())
        try:
            yield self
        finally:
            server.close()


def chat(body: dict[str, Any]) -> bytes:
    """Chat Completions: run a command in the first turn, stop after its result."""
    arguments = json.dumps({"command": "printf 42 > answer.txt"})
    if body["messages"][-1]["role"] == "tool":
        delta: dict[str, Any] = {"role": "assistant", "content": "Done."}
        reason = "stop"
    else:
        function = {"name": "bash", "arguments": arguments}
        delta = {
            "role": "assistant",
            "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}],
        }
        reason = "tool_calls"
    chunks = [(delta, None), ({}, reason)]
    events = [
        {
            "id": "x",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "delta": part, "finish_reason": why}],
        }
        for part, why in chunks
    ]
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def anthropic(body: dict[str, Any]) -> bytes:
    """Anthropic Messages: the same two turns."""
    last = body["messages"][-1]["content"]
    if isinstance(last, list) and any(block.get("type") == "tool_result" for block in last):
        block = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": "Done."}
        reason = "end_turn"
    else:
        block = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
        arguments = {"command": "printf 42 > answer.txt", "description": "write the answer"}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        reason = "tool_use"
    usage = {"input_tokens": 10, "output_tokens": 5}
    message = {"id": "m1", "type": "message", "role": "assistant", "model": body["model"], "content": []}
    events = [
        {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


@pytest.fixture
def scripted() -> Callable[[str], ScriptedServer]:
    """Makes a server of a dialect."""
    scripts = {"chat": chat, "anthropic": anthropic}
    return lambda dialect: ScriptedServer(scripts[dialect])
