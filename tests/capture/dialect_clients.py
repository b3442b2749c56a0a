"""A plain client of each dialect: it reads streams, and replays answers in every way in which harnesses do."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from dialect_helpers import events_of

from pipeline.capture import dialects
from pipeline.capture.dialects.base import Answer, Dialect

NAMES = ("bash", "read", "apply", "agents__spawn")
EMPTY_SCHEMA = {"type": "object", "properties": {}}
FUNCTIONS = [{"name": name, "description": f"does {name}", "parameters": EMPTY_SCHEMA} for name in NAMES]


class Client(ABC):
    """One dialect's wire forms. A history is a list of what ``user``, ``replays`` and ``results`` give."""

    dialect: Dialect
    path = ""
    has_text_arguments = True  # malformed arguments can be sent

    @abstractmethod
    def user(self, text: str) -> list[Any]:
        """A user's message."""

    @abstractmethod
    def results(self, answer: Answer, texts: list[str]) -> list[Any]:
        """What the calls of an answer gave."""

    @abstractmethod
    def replays(self, whole: dict[str, Any]) -> list[list[Any]]:
        """An answer's body as history, in every way that keeps its calls; the first is the most faithful."""

    @abstractmethod
    def body(self, history: list[Any]) -> dict[str, Any]:
        """A request."""

    @abstractmethod
    def read(self, stream: bytes) -> dict[str, Any]:
        """The body that a stream spells out."""

    @abstractmethod
    def forged(self, whole: dict[str, Any]) -> list[list[Any]]:
        """An answer's body as history that some other model could have written: no ids of ours, arguments changed."""


def respelt(text: str) -> list[str]:
    """JSON text as several clients would send it back; text that is no JSON as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return [text, json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value)]


def changed(arguments: Any) -> Any:
    """Other arguments."""
    return {**arguments, "changed": True} if isinstance(arguments, dict) else {"changed": True}


class ChatClient(Client):
    dialect = dialects.CHAT

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def results(self, answer: Answer, texts: list[str]) -> list[Any]:
        calls = zip(answer.tool_calls, texts, strict=False)
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in calls]

    def replays(self, whole: dict[str, Any]) -> list[list[Any]]:
        message = whole["choices"][0]["message"]
        bare = {key: value for key, value in message.items() if key not in ("reasoning_content", "refusal")}
        text = message["content"] or ""
        missing = {key: value for key, value in bare.items() if key != "content" or value}
        parts = bare | {"content": [{"type": "text", "text": text}]}
        forms = [message, bare, bare | {"content": text}, missing, parts, bare | {"content": text.strip()}]
        if calls := message.get("tool_calls"):
            spellings = zip(*(respelt(call["function"]["arguments"]) for call in calls), strict=False)
            for spelling in spellings:
                forms.append(
                    bare | {"tool_calls": [self._with(call, text) for call, text in zip(calls, spelling, strict=True)]}
                )
            forms.append(bare | {"tool_calls": [call | {"index": 0} for call in calls]})
        return [[form] for form in forms]

    def forged(self, whole: dict[str, Any]) -> list[list[Any]]:
        message = whole["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        other = [
            self._with(call, json.dumps(changed(json.loads(call["function"]["arguments"])))) | {"id": "x"}
            for call in calls
        ]
        text = message | {"content": f"{message['content'] or ''}zz"}
        more = message | {"tool_calls": [*calls, {"id": "x", "function": {"name": "bash", "arguments": "{}"}}]}
        fewer = message | {"tool_calls": calls[1:]}
        return [[text], [more], *([[message | {"tool_calls": other}], [fewer]] if calls else [])]

    def _with(self, call: Any, text: str) -> Any:
        return call | {"function": call["function"] | {"arguments": text}}

    def body(self, history: list[Any]) -> dict[str, Any]:
        tools = [{"type": "function", "function": function} for function in FUNCTIONS]
        return {"model": "m", "messages": history, "tools": tools, "stream_options": {"include_usage": True}}

    def read(self, stream: bytes) -> dict[str, Any]:
        message: dict[str, Any] = {"content": None, "refusal": None}
        *chunks, last = events_of(stream)
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            for key, value in delta.items():
                if key == "tool_calls":
                    [call] = value
                    calls = message.setdefault(key, [])
                    assert call["index"] == len(calls)
                    calls.append({name: each for name, each in call.items() if name != "index"})
                else:
                    message[key] = (message.get(key) or "") + value
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        finish = chunks[-1]["choices"][0]["finish_reason"]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        head = {key: last[key] for key in ("id", "created", "model")}
        return head | {"object": "chat.completion", "choices": [choice], "usage": last["usage"]}


class AnthropicClient(Client):
    dialect = dialects.ANTHROPIC

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    def results(self, answer: Answer, texts: list[str]) -> list[Any]:
        calls = zip(answer.tool_calls, texts, strict=False)
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in calls]
        return [{"role": "user", "content": blocks}] if blocks else []

    def replays(self, whole: dict[str, Any]) -> list[list[Any]]:
        blocks = whole["content"]
        thoughtless = [block for block in blocks if block["type"] != "thinking"]
        marked = [block | {"cache_control": {"type": "ephemeral"}} for block in thoughtless]
        raw = {"__unparsedToolInput": {"raw": "x", "len": 1}}
        wrapped = [block | {"input": raw} if "unparsed" in block.get("input", {}) else block for block in blocks]
        forms: list[Any] = [blocks, thoughtless, marked, wrapped]
        if [block["type"] for block in thoughtless] == ["text"]:
            forms += [thoughtless[0]["text"], thoughtless[0]["text"].strip()]
        return [[{"role": "assistant", "content": form}] for form in forms]

    def forged(self, whole: dict[str, Any]) -> list[list[Any]]:
        blocks = whole["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        others = [block for block in blocks if block["type"] != "tool_use"]
        other = [call | {"id": "x", "input": changed(call["input"])} for call in calls]
        extra = {"type": "tool_use", "id": "x", "name": "bash", "input": {}}
        forms = [[{"type": "text", "text": "zz"}, *blocks], [*blocks, extra]]
        forms += [[*others, *other], [*others, *calls[1:]]] if calls else []
        return [[{"role": "assistant", "content": form}] for form in forms]

    def body(self, history: list[Any]) -> dict[str, Any]:
        tools = [{"name": name, "description": f"does {name}", "input_schema": EMPTY_SCHEMA} for name in NAMES]
        return {"model": "m", "max_tokens": 99, "messages": history, "tools": tools}

    def read(self, stream: bytes) -> dict[str, Any]:
        start, *events, stop = events_of(stream)
        assert (start["type"], stop["type"]) == ("message_start", "message_stop")
        message: dict[str, Any] = start["message"]
        texts: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            elif event["type"] == "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                else:
                    block[kind] += delta[kind]
            elif event["type"] == "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
        for index, text in texts.items():
            message["content"][index]["input"] = self._parsed(text)
        return message

    def _parsed(self, text: str) -> Any:
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = None
        return value if isinstance(value, dict) else {"unparsed": text}


class ResponsesClient(Client):
    dialect = dialects.RESPONSES

    def user(self, text: str) -> list[Any]:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]

    def results(self, answer: Answer, texts: list[str]) -> list[Any]:
        outputs = []
        for call, text in zip(answer.tool_calls, texts, strict=False):
            kind = "custom_tool_call" if call.name == "apply" else "function_call"
            outputs.append({"type": f"{kind}_output", "call_id": call.id, "output": text})
        return outputs

    def replays(self, whole: dict[str, Any]) -> list[list[Any]]:
        items = whole["output"]
        bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
        thoughtless = [item for item in items if item["type"] != "reasoning"]
        easy = [
            {"role": "assistant", "content": item["content"][0]["text"]} if item["type"] == "message" else item
            for item in items
        ]
        respelled = [
            item | {"arguments": respelt(item["arguments"])[-1]} if "arguments" in item else item for item in items
        ]
        return [items, bare, thoughtless, easy, respelled]

    def forged(self, whole: dict[str, Any]) -> list[list[Any]]:
        items = whole["output"]
        calls = [item for item in items if item["type"].endswith("_call")]
        others = [item for item in items if not item["type"].endswith("_call")]
        forms = [
            [{"role": "assistant", "content": "zz"}, *items],
            [*items, {"type": "function_call", "name": "x", "call_id": "x"}],
        ]
        return forms + ([[*others, *map(self._other, calls)], [*others, *calls[1:]]] if calls else [])

    def _other(self, item: Any) -> Any:
        if "input" in item:
            return item | {"call_id": "x", "input": item["input"] + "zz"}
        return item | {"call_id": "x", "arguments": json.dumps(changed(json.loads(item["arguments"])))}

    def body(self, history: list[Any]) -> dict[str, Any]:
        bash, read, apply, spawn = FUNCTIONS
        tools = [{"type": "function"} | bash, {"type": "function"} | read, {"type": "custom"} | apply]
        members = [{"type": "function"} | spawn | {"name": "spawn"}]
        namespace = {"type": "namespace", "name": "agents", "description": "", "tools": members}
        return {"model": "m", "input": history, "tools": [*tools, namespace]}

    def read(self, stream: bytes) -> dict[str, Any]:
        """The last event, once everything before it was found to spell out the same."""
        created, *events, end = events_of(stream)
        items: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        for event in events:
            kind = event["type"]
            if kind.endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
            elif kind == "response.output_item.done":
                assert event["output_index"] == len(items)
                items.append(event["item"])
        assert created["response"]["id"] == end["response"]["id"] and items == end["response"]["output"]
        assert [texts[item["id"]] for item in items] == [self._text(item) for item in items]
        return dict(end["response"])

    def _text(self, item: Any) -> Any:
        parts = item.get("content") or item.get("summary")
        return parts[0]["text"] if parts else item.get("arguments", item.get("input", ""))


class GeminiClient(Client):
    dialect = dialects.GEMINI
    path = "/v1beta/models/m:streamGenerateContent"
    has_text_arguments = False

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "parts": [{"text": text}]}]

    def results(self, answer: Answer, texts: list[str]) -> list[Any]:
        calls = zip(answer.tool_calls, texts, strict=False)
        made = [{"id": call.id, "name": call.name, "response": {"output": text}} for call, text in calls]
        return [{"role": "user", "parts": [{"functionResponse": each} for each in made]}] if made else []

    def replays(self, whole: dict[str, Any]) -> list[list[Any]]:
        parts = whole["candidates"][0]["content"].get("parts", [])
        thoughtless = [part for part in parts if not part.get("thought")]
        own = [self._call(part, {"id": f"own_{index}"}) for index, part in enumerate(thoughtless)]
        none = [self._call(part, {"id": ""}) for part in thoughtless]
        return [[{"role": "model", "parts": form}] for form in (parts, thoughtless, own, none)]

    def forged(self, whole: dict[str, Any]) -> list[list[Any]]:
        parts = whole["candidates"][0]["content"].get("parts", [])
        calls = [part for part in parts if "functionCall" in part]
        others = [part for part in parts if "functionCall" not in part]
        other = [self._call(part, {"id": "x", "args": changed(part["functionCall"]["args"])}) for part in calls]
        forms = [[{"text": "zz"}, *parts], [*parts, {"functionCall": {"name": "x", "args": {}}}]]
        forms += [[*others, *other], [*others, *calls[1:]]] if calls else []
        return [[{"role": "model", "parts": form}] for form in forms]

    def _call(self, part: Any, change: dict[str, Any]) -> Any:
        return part | {"functionCall": part["functionCall"] | change} if "functionCall" in part else part

    def body(self, history: list[Any]) -> dict[str, Any]:
        return {"contents": history, "tools": [{"functionDeclarations": FUNCTIONS}]}

    def read(self, stream: bytes) -> dict[str, Any]:
        chunks = events_of(stream) if stream.startswith(b"data:") else msgspec.json.decode(stream)
        whole: dict[str, Any] = chunks[-1]
        parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"].get("parts", [])]
        if parts:
            whole["candidates"][0]["content"]["parts"] = parts
        return whole


CLIENTS: tuple[Client, ...] = (ChatClient(), AnthropicClient(), ResponsesClient(), GeminiClient())
