"""A scripted engine: render, generate and derender over a toy template whose token ids are bytes and a few marks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

END, ASSISTANT = 1000, 1001
ROLES = {"system": 1002, "user": 1003, "assistant": ASSISTANT, "tool": 1004}
WINDOW = 200_000


@dataclass
class Scripted:
    """One answer of the engine: ``text`` is sampled byte by byte, then the end mark unless it was cut."""

    text: str = "ok"
    finish: str = "stop"
    delay_s: float = 0.0
    version: str | None = None  # None: the engine's
    drop: bool = False  # close the connection instead of answering
    status: int = 200


@dataclass
class FakeEngine:
    """Serves on a free port; ``script`` is used up call by call, then every answer is "ok"."""

    version: str | None = None  # None: named as the request's salt
    script: deque[Scripted] = field(default_factory=deque)
    generated: list[dict[str, Any]] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    aborted: int = 0
    running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.lower().split("\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith("content-length"))
                self.heads.append(head)
                body = json.loads(await reader.readexactly(length) or b"null")
                reply = await self._answer(head.split(" ")[1], body, reader)
                if reply is None:
                    break
                status, payload = reply
                data = json.dumps(payload).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader) -> tuple[int, Any] | None:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": WINDOW}]}
        if path.endswith("/derender"):
            return 200, derender(body)
        if path.endswith("/render"):
            self.rendered.append(body)
            return 200, {"token_ids": render(body["messages"]), "sampling_params": {"top_k": 20, "temperature": 0.1}}
        return await self._generate(body, reader)

    async def _generate(self, body: Any, reader: asyncio.StreamReader) -> tuple[int, Any] | None:
        self.generated.append(body)
        answer = self.script.popleft() if self.script else Scripted()
        self.running += 1
        try:
            if answer.delay_s and await self._left(reader, answer.delay_s):
                self.aborted += 1
                return None
        finally:
            self.running -= 1
        if answer.drop:
            return None
        if answer.status != 200:
            return answer.status, {"error": {"message": "scripted"}}
        ids = (list(answer.text.encode()) + [END] * (answer.finish == "stop"))[: body["sampling_params"]["max_tokens"]]
        finish = answer.finish if answer.finish != "stop" or ids[-1:] == [END] else "length"
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": logprob(n)} for n, i in enumerate(ids)]},
            "weight_versions": [
                {"version": answer.version or self.version or body["cache_salt"], "start": 0, "end": len(ids)}
            ],
        }
        return 200, {"choices": [choice], "usage": {"prompt_tokens_details": None}}

    @staticmethod
    async def _left(reader: asyncio.StreamReader, delay_s: float) -> bool:
        """Wait; True when the client leaves first."""
        try:
            return await asyncio.wait_for(reader.read(1), delay_s) == b""
        except TimeoutError:
            return False


def logprob(position: int) -> float:
    return -0.5 - position / 64


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the toy model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def render(messages: list[dict[str, Any]]) -> list[int]:
    """The toy template: role mark, content and calls as bytes, end mark; then the generation prompt."""
    ids: list[int] = []
    for message in messages:
        text = _text(message.get("content"))
        for call in message.get("tool_calls") or ():
            text += call_text(call["function"]["name"], json.loads(call["function"]["arguments"]))
        ids += [ROLES[message["role"]], *text.encode(), END]
    return [*ids, ASSISTANT]


def derender(body: dict[str, Any]) -> dict[str, Any]:
    """A hermes-like parser: whole calls are taken out of the text, anything else stays in it."""
    ids = body["generate_response"]["choices"][0]["token_ids"]
    text = "".join("<|end|>" if i == END else chr(i) for i in ids)
    content, _, rest = text.partition("<tool_call>")
    calls = []
    try:
        for part in rest.split("<tool_call>") if rest else ():
            call = json.loads(part.removesuffix("</tool_call>"))
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": "theirs", "type": "function", "function": function})
    except ValueError:
        content, calls = text, []
    return {"choices": [{"index": 0, "message": {"content": content or None, "reasoning": None, "tool_calls": calls}}]}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
