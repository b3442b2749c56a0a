"""Histories in common words, and how each of the four model APIs spells them on the wire, as harnesses do.

A history is what a harness remembers; ``Traits`` say how it replays it. Prompts and tools are filler text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call as it arrived; ``arguments`` is JSON text. ``kind``: function, custom (Codex) …"""

    id: str
    name: str
    arguments: str
    kind: str = "function"
    namespace: str = ""


@dataclass(frozen=True)
class Said:
    """An answer of the model. ``marks`` is what its API wants back unread (signatures, item ids)."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = "stop"
    marks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class User:
    """What the user or the harness itself tells the model."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Late:
    """A system message in the middle."""

    text: str


@dataclass(frozen=True)
class Results:
    """What tools gave back, in the order of the calls, and what the harness says beside it."""

    of: tuple[Call, ...]
    outputs: tuple[str, ...]
    beside: tuple[str, ...] = ()


Entry = User | Late | Said | Results


def user(*texts: str) -> User:
    return User(texts)


def parsed(arguments: str) -> Any:
    """JSON text as data; None when it is none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def as_sent(arguments: str) -> str:
    return arguments


def compact(arguments: str) -> str:
    """As JavaScript's JSON.stringify spells it."""
    return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))


def dumps(arguments: str) -> str:
    """As Python's json.dumps spells it."""
    return json.dumps(json.loads(arguments))


@dataclass(frozen=True)
class Traits:
    """How a harness replays history over its API."""

    streams: bool = True
    arguments: Any = as_sent
    empty: str = "null"  # content of an answer without text: null | "" | missing
    parts: bool = False  # texts as lists of parts
    result_parts: bool = False
    thoughts: bool = True  # sent back
    indexed: bool = False  # an extra ``index`` in each replayed call
    own_ids: bool = False  # calls get ids of the harness's own
    max_tokens: str = "max_tokens"
    extra: dict[str, Any] = field(default_factory=dict)  # other fields of every request


@dataclass(frozen=True)
class Prompt:
    """What stands before the history."""

    system: str
    tools: tuple[str, ...]
    max_tokens: int = 4096


def _written(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


class Wire(ABC):
    """One model API as a client speaks it."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @abstractmethod
    def path(self, model: str) -> str:
        """Where requests go."""

    @abstractmethod
    def key(self, key: str) -> dict[str, str]:
        """The header that holds the key."""

    @abstractmethod
    def body(self, prompt: Prompt, history: Sequence[Entry], model: str) -> dict[str, Any]:
        """A request."""

    @abstractmethod
    def read(self, text: str) -> Said:
        """An answer, from the whole reply. Raises Torn when the stream ends too early."""

    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Torn(Exception):
    """A stream ended before its end."""


def sse(text: str) -> list[Any]:
    """The data of a stream's events."""
    lines = (line[5:].strip() for line in text.split("\n") if line.startswith("data:"))
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


class ChatWire(Wire):
    """Chat Completions."""

    def path(self, model: str) -> str:
        return "/v1/chat/completions"

    def key(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def body(self, prompt: Prompt, history: Sequence[Entry], model: str) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for entry in history:
            messages += self._messages(entry)
        body: dict[str, Any] = {"model": model, "messages": messages, **self.traits.extra}
        if prompt.tools:
            body["tools"] = [self._tool(name) for name in prompt.tools]
        if self.traits.max_tokens:
            body[self.traits.max_tokens] = prompt.max_tokens
        if self.traits.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _tool(self, name: str) -> dict[str, Any]:
        function = {"name": name, "description": f"the tool {name}", "parameters": self.parameters()}
        return {"type": "function", "function": function}

    def _messages(self, entry: Entry) -> list[dict[str, Any]]:
        if isinstance(entry, Said):
            return [self._assistant(entry)]
        if isinstance(entry, Results):
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": self._content(output, self.traits.result_parts)}
                for call, output in zip(entry.of, entry.outputs, strict=True)
            ]
            return results + [{"role": "user", "content": text} for text in entry.beside]
        if isinstance(entry, Late):
            return [{"role": "system", "content": entry.text}]
        parts = [{"type": "text", "text": text} for text in entry.texts]
        alone = len(parts) == 1 and not self.traits.parts
        return [{"role": "user", "content": entry.texts[0] if alone else parts}]

    def _assistant(self, said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if said.text:
            message["content"] = self._content(said.text, self.traits.parts)
        elif self.traits.empty != "missing":
            message["content"] = None if self.traits.empty == "null" else ""
        if said.reasoning and self.traits.thoughts:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [self._call(index, call) for index, call in enumerate(said.calls)]
        return message

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        spelt = self.traits.arguments(call.arguments) if parsed(call.arguments) is not None else call.arguments
        function = {"name": call.name, "arguments": spelt}
        return ({"index": index} if self.traits.indexed else {}) | {
            "id": call.id,
            "type": "function",
            "function": function,
        }

    @staticmethod
    def _content(text: str, parts: bool) -> Any:
        return [{"type": "text", "text": text}] if parts else text

    def read(self, text: str) -> Said:
        if not self.traits.streams:
            choice = json.loads(text)["choices"][0]
            return self._said([choice["message"]], choice["finish_reason"])
        chunks = [chunk["choices"][0] for chunk in sse(text) if chunk["choices"]]
        finish = next((chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]), None)
        if finish is None:
            raise Torn
        return self._said([chunk["delta"] for chunk in chunks], finish)

    @staticmethod
    def _said(deltas: list[dict[str, Any]], finish: str) -> Said:
        texts = [delta.get("content") or "" for delta in deltas]
        thoughts = [delta.get("reasoning_content") or "" for delta in deltas]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        made = tuple(Call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls)
        return Said("".join(texts), "".join(thoughts), made, finish)


class AnthropicWire(Wire):
    """Messages. A cache mark sits on the last block and moves; without it a lone block is a plain string."""

    def path(self, model: str) -> str:
        return "/v1/messages?beta=true"

    def key(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def body(self, prompt: Prompt, history: Sequence[Entry], model: str) -> dict[str, Any]:
        messages = [self._message(entry) for entry in history]
        last = messages[-1]
        last["content"] = [*last["content"][:-1], last["content"][-1] | {"cache_control": {"type": "ephemeral"}}]
        for message in messages[:-1]:
            if len(message["content"]) == 1 and message["content"][0]["type"] == "text" and message["role"] != "user":
                message["content"] = message["content"][0]["text"]
        billing = {"type": "text", "text": f"x-anthropic-billing-header: n={len(history)}"}
        system = {"type": "text", "text": prompt.system, "cache_control": {"type": "ephemeral"}}
        tools = [{"name": n, "description": f"the tool {n}", "input_schema": self.parameters()} for n in prompt.tools]
        return {
            "model": model, "messages": messages, "system": [billing, system], "tools": tools, "stream": True,
            "max_tokens": prompt.max_tokens, **self.traits.extra,
        }  # fmt: skip

    def _message(self, entry: Entry) -> dict[str, Any]:
        if isinstance(entry, Said):
            return {"role": "assistant", "content": list(self._blocks(entry))}
        if isinstance(entry, Late):
            return {"role": "system", "content": [{"type": "text", "text": entry.text}]}
        blocks: list[dict[str, Any]] = []
        if isinstance(entry, Results):
            blocks = [
                {"type": "tool_result", "tool_use_id": call.id, "content": output}
                for call, output in zip(entry.of, entry.outputs, strict=True)
            ]
        texts = entry.beside if isinstance(entry, Results) else entry.texts
        return {"role": "user", "content": [*blocks, *({"type": "text", "text": text} for text in texts)]}

    def _blocks(self, said: Said) -> Any:
        if said.reasoning and self.traits.thoughts:
            yield {"type": "thinking", "thinking": said.reasoning, "signature": said.marks.get("signature", "")}
        if said.text:
            yield {"type": "text", "text": said.text}
        for call in said.calls:
            given = parsed(call.arguments)
            whole = {"__unparsedToolInput": {"raw": call.arguments, "len": len(call.arguments)}}
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": whole if given is None else given}

    def read(self, text: str) -> Said:
        blocks: dict[int, dict[str, Any]] = {}
        finish = ""
        for event in sse(text):
            kind = event["type"]
            if kind == "content_block_start":
                blocks[event["index"]] = event["content_block"] | {"said": ""}
            elif kind == "content_block_delta":
                delta = event["delta"]
                piece = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                blocks[event["index"]]["said"] += piece
            elif kind == "message_delta":
                finish = event["delta"]["stop_reason"]
            elif kind == "message_stop":
                return self._said(list(blocks.values()), finish)
        raise Torn

    @staticmethod
    def _said(blocks: list[dict[str, Any]], finish: str) -> Said:
        text = "".join(block["said"] for block in blocks if block["type"] == "text")
        thoughts = "".join(block["said"] for block in blocks if block["type"] == "thinking")
        calls = tuple(Call(b["id"], b["name"], b["said"] or "{}") for b in blocks if b["type"] == "tool_use")
        kinds = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        return Said(text, thoughts, calls, kinds[finish])


class ResponsesWire(Wire):
    """Responses without state: every input item carries an id; output items go back as they came."""

    def path(self, model: str) -> str:
        return "/v1/responses"

    def key(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def body(self, prompt: Prompt, history: Sequence[Entry], model: str) -> dict[str, Any]:
        items = [self._item("developer", prompt.system)]
        for entry in history:
            items += self._items(entry)
        items = [{"id": f"item_{index}"} | item for index, item in enumerate(items)]
        return {"model": model, "input": items, "stream": True, "store": False, **self.traits.extra} | (
            {"tools": [self._tool(name) for name in prompt.tools], "tool_choice": "auto"} if prompt.tools else {}
        )

    def _tool(self, name: str) -> dict[str, Any]:
        if name == "patch":
            grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
            return {"type": "custom", "name": name, "description": "free text", "format": grammar}
        if name == "crew":
            inner = {"type": "function", "name": "spawn", "description": "d", "parameters": self.parameters()}
            return {"type": "namespace", "name": name, "description": "others", "tools": [inner]}
        if name == "web_search":
            return {"type": "web_search"}
        return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": self.parameters()}

    @staticmethod
    def _item(role: str, *texts: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    def _items(self, entry: Entry) -> list[dict[str, Any]]:
        if isinstance(entry, Said):
            return self._said_items(entry)
        if isinstance(entry, Late):
            return [self._item("developer", entry.text)]
        if isinstance(entry, User):
            return [self._item("user", *entry.texts)]
        results = [
            {"type": f"{self._prefix(call)}_output", "call_id": call.id, "output": output}
            for call, output in zip(entry.of, entry.outputs, strict=True)
        ]
        return results + [self._item("user", text) for text in entry.beside]

    @staticmethod
    def _prefix(call: Call) -> str:
        return "custom_tool_call" if call.kind == "custom" else "function_call"

    def _said_items(self, said: Said) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = [said.marks["thoughts"]] if said.marks.get("thoughts") else []
        items += [self._item("assistant", said.text)] if said.text else []
        for call in said.calls:
            item = {"type": self._prefix(call), "call_id": call.id, "name": call.name}
            item |= {"input" if call.kind == "custom" else "arguments": call.arguments}
            items.append(item | ({"namespace": call.namespace} if call.namespace else {}))
        return items

    def read(self, text: str) -> Said:
        items: list[dict[str, Any]] = []
        for event in sse(text):
            if event["type"] == "response.output_item.done":
                items.append(event["item"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                return self._said(items, event["response"]["status"])
        raise Torn

    def _said(self, items: list[dict[str, Any]], status: str) -> Said:
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = next((item for item in items if item["type"] == "reasoning"), None)
        calls = tuple(self._called(item) for item in items if item["type"].endswith("_call"))
        finish = "length" if status == "incomplete" else "tool_calls" if calls else "stop"
        reasoning = "".join(part["text"] for part in (thoughts or {}).get("summary") or ())
        return Said("".join(texts), reasoning, calls, finish, {"thoughts": thoughts})

    @staticmethod
    def _called(item: dict[str, Any]) -> Call:
        custom = item["type"] == "custom_tool_call"
        given = item["input"] if custom else item["arguments"]
        kind = "custom" if custom else "function"
        return Call(item["call_id"], item["name"], given, kind, item.get("namespace") or "")


class GeminiWire(Wire):
    """generateContent: thoughts are dropped from the history, their signatures go back, calls may get other ids."""

    def path(self, model: str) -> str:
        return f"/v1beta/models/{model}:streamGenerateContent?alt=sse"

    def key(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def body(self, prompt: Prompt, history: Sequence[Entry], model: str) -> dict[str, Any]:
        declared = [
            {"name": name, "description": f"the tool {name}", "parametersJsonSchema": self.parameters()}
            for name in prompt.tools
        ]
        config = {"temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": {"includeThoughts": True}}
        return {
            "contents": [self._content(entry) for entry in history],
            "systemInstruction": {"role": "user", "parts": [{"text": prompt.system}]},
            "tools": [{"functionDeclarations": declared}],
            "generationConfig": config,
        }

    def _content(self, entry: Entry) -> dict[str, Any]:
        if isinstance(entry, Said):
            return {"role": "model", "parts": self._parts(entry)}
        if isinstance(entry, User | Late):
            texts = entry.texts if isinstance(entry, User) else (entry.text,)
            return {"role": "user", "parts": [{"text": text} for text in texts]}
        parts: list[dict[str, Any]] = [
            {"functionResponse": {"id": self._id(call), "name": call.name, "response": {"output": output}}}
            for call, output in zip(entry.of, entry.outputs, strict=True)
        ]
        return {"role": "user", "parts": parts + [{"text": text} for text in entry.beside]}

    def _parts(self, said: Said) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"text": said.text}] if said.text else []
        for call in said.calls:
            called = {"id": self._id(call), "name": call.name, "args": parsed(call.arguments) or {}}
            parts.append({"functionCall": called})
        signature = said.marks.get("signature")
        if signature and parts:
            parts[0] = parts[0] | {"thoughtSignature": signature}
        return parts

    def _id(self, call: Call) -> str:
        return f"{call.name}_{sum(call.id.encode())}_0" if self.traits.own_ids else call.id

    def read(self, text: str) -> Said:
        chunks = [chunk["candidates"][0] for chunk in sse(text) if chunk.get("candidates")]
        finish = next((chunk["finishReason"] for chunk in chunks if chunk.get("finishReason")), None)
        if finish is None:
            raise Torn
        parts = [part for chunk in chunks for part in chunk.get("content", {}).get("parts", ())]
        return self._said(parts, finish)

    @staticmethod
    def _said(parts: list[dict[str, Any]], finish: str) -> Said:
        text = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
        thoughts = "".join(part["text"] for part in parts if part.get("thought") and "text" in part)
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = tuple(
            Call(c.get("id", ""), c["name"], json.dumps(c.get("args", {}), ensure_ascii=False)) for c in called
        )
        signature = next((part["thoughtSignature"] for part in parts if part.get("thoughtSignature")), None)
        kinds = {"MAX_TOKENS": "length", "MALFORMED_FUNCTION_CALL": "malformed"}
        return Said(
            text, thoughts, calls, kinds.get(finish, "tool_calls" if calls else "stop"), {"signature": signature}
        )
