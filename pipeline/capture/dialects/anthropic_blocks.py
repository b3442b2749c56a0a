"""Anthropic's messages and their blocks as canonical messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from pipeline.capture.canonical import ChatMessage
from pipeline.capture.dialects.base import ApiError, Fault, require

# Blocks of tools that Anthropic's servers run, and of state that they keep; nothing here can have made them.
SERVER_BLOCKS = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_(use|listing)|\w+_tool_result|container_upload|fallback|browser_state"
    r"|tool_(addition|removal)"
)
ASSISTANT_BLOCKS = ("text", "compaction", "thinking", "tool_use")
SAYS_ERROR = re.compile(r"error|fail|exception|exit code|denied|rejected", re.IGNORECASE)


def blocks_of(content: Any, name: str) -> list[dict[str, Any]]:
    """The blocks of a string or of a list of blocks."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    require(isinstance(content, list), f"{name}: must be a string or a list of blocks")
    typed = all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in content)
    require(typed, f"{name}: each block must be an object with a type")
    return list(content)


def parts_of(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as canonical content parts, those of Anthropic's servers left out."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if not SERVER_BLOCKS.fullmatch(block["type"]):
            require(block["type"] in PARTS, f"content: unsupported block type {block['type']!r}")
            parts += PARTS[block["type"]](block)
    return parts


def _text(block: dict[str, Any]) -> list[dict[str, Any]]:
    text = block.get("text") or ""
    require(isinstance(text, str), "content: a text must be a string")
    return [{"type": "text", "text": text}]


def _image(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": _url(block)}}]


def _document(block: dict[str, Any]) -> list[dict[str, Any]]:
    source = _source(block)
    if source.get("type") == "text":
        return [{"type": "text", "text": str(source.get("data"))}]
    if source.get("type") == "content":
        return parts_of(blocks_of(source.get("content"), "content"))
    return [{"type": "file", "file": {"file_data": _url(block), "filename": str(block.get("title") or "document")}}]


def _source(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise ApiError(Fault.INVALID, f"content: {block['type']} needs a source")
    return source


def _url(block: dict[str, Any]) -> str:
    source = _source(block)
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(source.get("url") or source.get("file_id"))


def _search_result(block: dict[str, Any]) -> list[dict[str, Any]]:
    head = {"type": "text", "text": f"{block.get('title')} ({block.get('source')})"}
    return [head, *parts_of(blocks_of(block.get("content"), "content"))]


def _compaction(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": str(block.get("content") or "")}]


def _tool_reference(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"The tool {block.get('tool_name')} is available now."}]


PARTS = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "compaction": _compaction,
    "tool_reference": _tool_reference,
}


def _content(parts: list[dict[str, Any]]) -> Any:
    """Parts as one text; a list when there is more than text, for the engine to take or refuse."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _user(message: dict[str, Any]) -> Iterator[ChatMessage]:
    """A user (or late system) message: its tool results, and its runs of other blocks, in their order."""
    blocks = blocks_of(message.get("content"), "content")
    if not blocks:
        yield {"role": message["role"], "content": ""}
    for results, run in groupby(blocks, lambda block: bool(block["type"] == "tool_result")):
        if results:
            yield from _results(run)
        elif parts := parts_of(run):
            yield {"role": message["role"], "content": _content(parts)}


def _results(blocks: Iterable[dict[str, Any]]) -> Iterator[ChatMessage]:
    """Tool results as texts; what else they hold follows the last of them, as the user's."""
    others: list[dict[str, Any]] = []
    for block in blocks:
        parts = parts_of(blocks_of(block.get("content"), "tool_result"))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        others += [part for part in parts if part["type"] != "text"]
        if block.get("is_error") and not SAYS_ERROR.search(text):
            text = f"Error: {text}"
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}
    if others:
        yield {"role": "user", "content": others}


def _assistant(message: dict[str, Any]) -> Iterator[ChatMessage]:
    blocks = blocks_of(message.get("content"), "content")
    known = [block for block in blocks if not SERVER_BLOCKS.fullmatch(block["type"])]
    unknown = [block["type"] for block in known if block["type"] not in ASSISTANT_BLOCKS]
    require(not unknown, f"content: unsupported block types {unknown} in an assistant message")
    text = "".join(part["text"] for part in parts_of(block for block in known if block["type"] in PARTS))
    thoughts = "".join(str(block.get("thinking") or "") for block in known if block["type"] == "thinking")
    calls = [_call(block) for block in known if block["type"] == "tool_use"]
    canonical: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
    canonical |= {"tool_calls": calls} if calls else {}
    yield canonical | ({"reasoning": thoughts} if thoughts else {})


READERS = {"user": _user, "system": _user, "assistant": _assistant}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(block.get("name"), str), "content: a tool_use needs a name")
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}
