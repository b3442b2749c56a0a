"""The four dialects as harnesses speak them: each keeps its conversation as ready JSON and adds to it turn by turn.

What real harnesses do on the wire is done here too: Claude Code's cache mark moves with every request and turns a block
list into a string when it leaves, Codex sends items back with their ids, Gemini CLI sends our call ids back, and call
arguments come back re-serialised wherever a dialect or a harness does so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from bench.filler import PARAMETERS, SYSTEM, TOOL_NAMES, Passage, tool_description
from bench.wire import Connection, Reply

MAX_TOKENS = 4096
encode = msgspec.json.encode


@dataclass(frozen=True)
class Retry:
    """How a harness takes failures: waits that double from ``first_s`` to ``most_s``, ``tries`` in all."""

    first_s: float
    most_s: float
    tries: int
    mid_stream: bool = True  # a drop in the middle of a stream is tried again


class Broken(Exception):
    """An answer that a harness could not go on from."""


class Talk(ABC):
    """One conversation. Not HTTP errors, which are the caller's."""

    retry: ClassVar[Retry]

    def __init__(self, key: str, prefix: str = "", extra: dict[str, Any] | None = None) -> None:
        """``prefix``: of every path; ``extra``: fields that go into each request."""
        self.key, self.prefix, self.extra = key, prefix, extra or {}
        self.history = bytearray()
        self.call_id = ""

    @abstractmethod
    def user(self, said: Passage) -> None:
        """The task."""

    @abstractmethod
    def result(self, said: Passage) -> None:
        """The result of the last tool call."""

    @abstractmethod
    def body(self) -> bytes:
        """The next request."""

    @abstractmethod
    def hear(self, data: bytes) -> str:
        """Take an answer into the conversation; its text. Raises Broken."""

    async def ask(self, connection: Connection, body: bytes) -> Reply:
        """Send a request. Raises what ``Connection.request`` does."""
        return await connection.request("POST", self.prefix + self.path, self.headers, body)

    @property
    @abstractmethod
    def path(self) -> str:
        """The path of a turn."""

    @property
    def headers(self) -> str:
        return f"authorization: Bearer {self.key}\r\n"

    def _add(self, piece: bytes) -> None:
        if self.history:
            self.history += b","
        self.history += piece


def _fields(fields: dict[str, Any]) -> bytes:
    """Fields that follow others in an object."""
    return b"," + encode(fields)[1:-1] if fields else b""


def _events(data: bytes) -> Iterator[bytes]:
    """The JSON data of an event stream."""
    for line in data.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield line[6:]


def _compact(arguments: str) -> bytes:
    """Arguments as an object, serialised again."""
    return encode(msgspec.json.decode(arguments))


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] = []


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage


class _ChatReply(msgspec.Struct):
    choices: list[_ChatChoice]


_CHAT = msgspec.json.Decoder(_ChatReply)
CHAT_TOOLS = encode(
    [
        {"type": "function", "function": {"name": name, "description": tool_description(i), "parameters": PARAMETERS}}
        for i, name in enumerate(TOOL_NAMES)
    ]
)


class Chat(Talk):
    """Chat Completions, not streamed; arguments come back compact, as OpenCode and Pi send them."""

    retry = Retry(0.4, 8.0, 27)
    path = "/v1/chat/completions"

    def user(self, said: Passage) -> None:
        self._add(b'{"role":"system","content":"%b"}' % SYSTEM.json)
        self._add(b'{"role":"user","content":"%b"}' % said.json)

    def result(self, said: Passage) -> None:
        self._add(b'{"role":"tool","tool_call_id":"%b","content":"%b"}' % (self.call_id.encode(), said.json))

    def body(self) -> bytes:
        fields = {"max_tokens": MAX_TOKENS, "temperature": 1.0} | self.extra
        form = b'{"model":"fake","messages":[%b],"tools":%b%b}'
        return form % (self.history, CHAT_TOOLS, _fields(fields))

    def hear(self, data: bytes) -> str:
        message = _CHAT.decode(data).choices[0].message
        if not message.tool_calls:
            raise Broken(f"no tool call: {data[:200]!r}")
        call = message.tool_calls[0]
        self.call_id = call.id
        function = {"name": call.function.name, "arguments": _compact(call.function.arguments).decode()}
        calls = [{"id": call.id, "type": "function", "function": function}]
        self._add(encode({"role": "assistant", "content": message.content, "tool_calls": calls}))
        return message.content or ""


class _Block(msgspec.Struct, omit_defaults=True):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    partial_json: str = ""


class _AnthropicEvent(msgspec.Struct):
    type: str
    index: int = 0
    content_block: _Block | None = None
    delta: _Delta | None = None


_ANTHROPIC = msgspec.json.Decoder(_AnthropicEvent)
_ANTHROPIC_TOOLS = encode(
    [
        {"name": name, "description": tool_description(i), "input_schema": PARAMETERS}
        for i, name in enumerate(TOOL_NAMES)
    ]
)
_CACHED = b',"cache_control":{"type":"ephemeral"}'


class Anthropic(Talk):
    """Messages, streamed. Only the last message carries the cache mark."""

    retry = Retry(0.6, 8.0, 10)
    path = "/v1/messages?beta=true"

    def __init__(self, key: str, prefix: str = "", extra: dict[str, Any] | None = None) -> None:
        super().__init__(key, prefix, extra)
        self._plain = self._marked = b""  # the last message, without and with the mark

    @property
    def headers(self) -> str:
        return f"x-api-key: {self.key}\r\nanthropic-version: 2023-06-01\r\n"

    def user(self, said: Passage) -> None:
        self._plain = b'{"role":"user","content":"%b"}' % said.json
        self._marked = b'{"role":"user","content":[{"type":"text","text":"%b"%b}]}' % (said.json, _CACHED)

    def result(self, said: Passage) -> None:
        form = b'{"role":"user","content":[{"tool_use_id":"%b","type":"tool_result","content":"%b"%b}]}'
        call_id = self.call_id.encode()
        self._plain = form % (call_id, said.json, b"")
        self._marked = form % (call_id, said.json, _CACHED)

    def body(self) -> bytes:
        before = self.history + b"," if self.history else b""
        system = b'[{"type":"text","text":"%b"%b}]' % (SYSTEM.json, _CACHED)
        form = b'{"model":"claude-x","messages":[%b%b],"system":%b,"tools":%b,"max_tokens":%d,"stream":true%b}'
        return form % (before, self._marked, system, _ANTHROPIC_TOOLS, MAX_TOKENS, _fields(self.extra))

    def hear(self, data: bytes) -> str:
        blocks: dict[int, _Block] = {}
        inputs: dict[int, str] = {}
        kind = ""
        for event in map(_ANTHROPIC.decode, _events(data)):
            kind = event.type
            if event.content_block is not None:
                blocks[event.index], inputs[event.index] = event.content_block, ""
            elif kind == "content_block_delta" and event.delta is not None:
                blocks[event.index].text += event.delta.text
                inputs[event.index] += event.delta.partial_json
        if kind != "message_stop":
            raise Broken(f"the stream ends with {kind}: {data[-200:]!r}")
        return self._take(blocks, inputs)

    def _take(self, blocks: dict[int, _Block], inputs: dict[int, str]) -> str:
        calls = [index for index, block in blocks.items() if block.type == "tool_use"]
        if not calls:
            raise Broken("no tool call")
        self.call_id = blocks[calls[0]].id
        pieces = [
            encode(block)[:-1] + (b',"input":%b}' % _compact(inputs[index] or "{}") if index in calls else b"}")
            for index, block in blocks.items()
        ]
        self._add(self._plain)
        self._add(b'{"role":"assistant","content":[%b]}' % b",".join(pieces))
        return "".join(block.text for block in blocks.values() if block.type == "text")


class _Item(msgspec.Struct):
    type: str
    call_id: str = ""
    content: list[dict[str, Any]] = []


class _ResponsesEvent(msgspec.Struct):
    type: str
    item: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSES = msgspec.json.Decoder(_ResponsesEvent)
_ITEM = msgspec.json.Decoder(_Item)
_RESPONSES_TOOLS = encode(
    [
        {
            "type": "function",
            "name": name,
            "description": tool_description(i),
            "parameters": PARAMETERS,
            "strict": False,
        }
        for i, name in enumerate(TOOL_NAMES)
    ]
)
_RESPONSES_FIELDS = encode(
    {
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
    }
)[1:-1]


class Responses(Talk):
    """Responses, streamed; items come back as they were sent, ids and all, as Codex does it."""

    retry = Retry(0.2, 8.0, 30)
    path = "/v1/responses"

    def user(self, said: Passage) -> None:
        self._add(
            b'{"type":"message","role":"user","id":"msg_user","content":[{"type":"input_text","text":"%b"}]}'
            % said.json
        )

    def result(self, said: Passage) -> None:
        self._add(b'{"type":"function_call_output","call_id":"%b","output":"%b"}' % (self.call_id.encode(), said.json))

    def body(self) -> bytes:
        form = b'{"model":"gpt-x","instructions":"%b","input":[%b],"tools":%b,%b%b}'
        return form % (SYSTEM.json, self.history, _RESPONSES_TOOLS, _RESPONSES_FIELDS, _fields(self.extra))

    def hear(self, data: bytes) -> str:
        text, self.call_id, kind = "", "", ""
        for event in map(_RESPONSES.decode, _events(data)):
            kind = event.type
            if kind != "response.output_item.done":
                continue
            item = _ITEM.decode(event.item)
            self._add(bytes(event.item))
            text += "".join(part.get("text", "") for part in item.content) if item.type == "message" else ""
            self.call_id = item.call_id or self.call_id
        if kind != "response.completed" or not self.call_id:
            raise Broken(f"the stream ends with {kind}: {data[-200:]!r}")
        return text


class _FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str
    args: msgspec.Raw = msgspec.Raw(b"{}")
    id: str = ""


class _Part(msgspec.Struct, omit_defaults=True):
    text: str = ""
    functionCall: _FunctionCall | None = None
    thought: bool = False
    thoughtSignature: str = ""


class _Content(msgspec.Struct):
    parts: list[_Part] = []


class _Candidate(msgspec.Struct):
    content: _Content = msgspec.field(default_factory=_Content)
    finishReason: str = ""


class _GeminiEvent(msgspec.Struct):
    candidates: list[_Candidate] = []


_GEMINI = msgspec.json.Decoder(_GeminiEvent)
_GEMINI_TOOLS = encode(
    [
        {
            "functionDeclarations": [
                {"name": name, "description": tool_description(i), "parametersJsonSchema": PARAMETERS}
                for i, name in enumerate(TOOL_NAMES)
            ]
        }
    ]
)


class Gemini(Talk):
    """generateContent, streamed; thoughts are dropped, as Gemini CLI does, and a cut stream ends its run."""

    retry = Retry(5.0, 20.0, 10, mid_stream=False)
    path = "/v1beta/models/gemini-x:streamGenerateContent?alt=sse"
    _name = b""

    @property
    def headers(self) -> str:
        return f"x-goog-api-key: {self.key}\r\n"

    def user(self, said: Passage) -> None:
        self._add(b'{"role":"user","parts":[{"text":"%b"}]}' % said.json)

    def result(self, said: Passage) -> None:
        call_id = b'"id":"%b",' % self.call_id.encode() if self.call_id else b""
        form = b'{"role":"user","parts":[{"functionResponse":{%b"name":"%b","response":{"output":"%b"}}}]}'
        self._add(form % (call_id, self._name, said.json))

    def body(self) -> bytes:
        settings = encode({"temperature": 1, "topP": 0.95, "topK": 64, "maxOutputTokens": MAX_TOKENS})
        form = b'{"contents":[%b],"systemInstruction":{"parts":[{"text":"%b"}]},"tools":%b,"generationConfig":%b%b}'
        return form % (self.history, SYSTEM.json, _GEMINI_TOOLS, settings, _fields(self.extra))

    def hear(self, data: bytes) -> str:
        parts, finish = [], ""
        for event in map(_GEMINI.decode, _events(data)):
            for candidate in event.candidates:
                parts += [part for part in candidate.content.parts if not part.thought]
                finish = candidate.finishReason or finish
        calls = [part.functionCall for part in parts if part.functionCall is not None]
        if not finish or not calls:
            raise Broken(f"finish {finish!r}, {len(calls)} calls: {data[-200:]!r}")
        self.call_id, self._name = calls[0].id, calls[0].name.encode()
        kept = [part for part in parts if part.text or part.functionCall is not None]
        self._add(b'{"role":"model","parts":%b}' % encode(kept))
        return "".join(part.text for part in kept)


DIALECTS: dict[str, type[Talk]] = {"chat": Chat, "anthropic": Anthropic, "responses": Responses, "gemini": Gemini}
