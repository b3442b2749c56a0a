"""The items of the Responses API: those of a history as canonical messages, those of an answer from canonical calls.

Every tool call has one canonical spelling that depends on the item alone, so that a replayed call equals the answer.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.capture.canonical import ChatMessage, Tool
from pipeline.capture.dialects.base import ToolCall, among, require

# Items of tools that OpenAI's servers run; nothing here can have made them.
SERVER_ITEMS = frozenset(
    "web_search_call file_search_call image_generation_call code_interpreter_call computer_call computer_call_output"
    " mcp_list_tools mcp_approval_request mcp_approval_response mcp_call tool_search_call tool_search_output program"
    " program_output configuration_update".split()
)
OURS = b"yoke:"  # begins the encrypted content of our own thoughts, which is no secret


@dataclass(frozen=True)
class ClientTool:
    """A tool that the API defines and the client runs: its call item, the field with the arguments, their schema."""

    item: str
    field: str
    constant: dict[str, Any]  # what the field holds besides
    needed: str  # the argument without which the item cannot be made
    description: str
    properties: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the canonical function's arguments."""
        return {"type": "object", "properties": self.properties, "required": [self.needed]}


STRINGS, STRING, INTEGER = {"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "integer"}
CLIENT_TOOLS = {
    "local_shell": ClientTool(
        "local_shell_call",
        "action",
        {"type": "exec", "env": {}},
        "command",
        "Runs a command, given as a list of its words, and returns its output.",
        {"command": STRINGS, "working_directory": STRING, "timeout_ms": INTEGER},
    ),
    "shell": ClientTool(
        "shell_call",
        "action",
        {},
        "commands",
        "Runs shell commands and returns their output.",
        {"commands": STRINGS, "timeout_ms": INTEGER, "max_output_length": INTEGER},
    ),
    "apply_patch": ClientTool(
        "apply_patch_call",
        "operation",
        {},
        "type",
        "Creates, updates or deletes one file; diff is a V4A diff.",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": STRING, "diff": STRING},
    ),
}
CLIENT_ITEMS = {tool.item: name for name, tool in CLIENT_TOOLS.items()}


def joined_name(name: str, namespace: str = "") -> str:
    """The canonical name of a function."""
    return f"{namespace}__{name}" if namespace else name


def messages_of(item: Any) -> list[ChatMessage]:
    """One item as canonical messages. Raises ApiError(INVALID)."""
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    require(isinstance(item, dict), "input: each item must be an object")
    kind = kind_of(item)
    if kind in SERVER_ITEMS:
        return []
    require(kind in READERS, f"input: {NOT_KEPT.get(kind, f'unsupported item type {kind!r}')}")
    return READERS[kind](item)


def kind_of(item: dict[str, Any]) -> str:
    """An item's type; a message may leave it out."""
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


NOT_KEPT = {
    "item_reference": "items are not kept here, so none can be referred to: send each of them whole",
    "compaction": "a compaction item of another server cannot be read: send the messages themselves",
    "compaction_summary": "a compaction item of another server cannot be read: send the messages themselves",
    "compaction_trigger": "there is no compaction here: ask the model for a summary",
}


def parts_of(content: Any) -> list[dict[str, Any]]:
    """A string or a list of parts as canonical parts. Raises ApiError(INVALID)."""
    if isinstance(content, str) or content is None:
        return [{"type": "text", "text": content or ""}]
    require(isinstance(content, list), "content: must be a string or a list of parts")
    return [_part(part) for part in content]


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and among(part.get("type"), PARTS)


def _part(part: Any) -> dict[str, Any]:
    require(_is_part(part), f"content: unsupported part {str(part)[:80]}")
    return PARTS[part["type"]](part)


def _text(part: dict[str, Any]) -> dict[str, Any]:
    text = part.get("refusal") if part["type"] == "refusal" else part.get("text")
    require(isinstance(text, str), "content: a text must be a string")
    return {"type": "text", "text": text}


def _image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": str(part.get("image_url") or part.get("file_id"))}}


def _file(part: dict[str, Any]) -> dict[str, Any]:
    data = part.get("file_data") or part.get("file_url") or part.get("file_id")
    return {"type": "file", "file": {"file_data": str(data), "filename": str(part.get("filename") or "file")}}


def _audio(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": part.get("input_audio")}


PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"), _text),
    **dict.fromkeys(("input_image", "computer_screenshot"), _image),
    "input_file": _file,
    "input_audio": _audio,
}


def _content(content: Any) -> Any:
    """One text; a list when there is more than text, for the engine to take or refuse."""
    parts = parts_of(content)
    return _joined(parts) if all(part["type"] == "text" for part in parts) else parts


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _message(item: dict[str, Any]) -> list[ChatMessage]:
    """Also ``developer``, which the engine would hoist to the front."""
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    require(role in ("user", "system", "assistant"), f"input: unknown role {role!r}")
    content = _content(item.get("content"))
    require(role != "assistant" or isinstance(content, str), "content: an assistant message can only hold text")
    return [{"role": role, "content": content}]


def _assistant_call(call_id: Any, name: Any, arguments: str) -> list[ChatMessage]:
    require(isinstance(name, str), "input: a call needs a name")
    call = {"id": str(call_id or ""), "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def _function_call(item: dict[str, Any]) -> list[ChatMessage]:
    arguments = item.get("arguments") or "{}"
    require(isinstance(arguments, str), "input: the arguments of a function_call must be a string")
    return _assistant_call(item.get("call_id"), _name(item), arguments)


def _custom_call(item: dict[str, Any]) -> list[ChatMessage]:
    return _assistant_call(item.get("call_id"), _name(item), _json({"input": str(item.get("input") or "")}))


def _name(item: dict[str, Any]) -> str:
    require(isinstance(item.get("name"), str), "input: a call needs a name")
    return joined_name(item["name"], item.get("namespace") or "")


def _client_call(item: dict[str, Any]) -> list[ChatMessage]:
    name = CLIENT_ITEMS[item["type"]]
    tool = CLIENT_TOOLS[name]
    payload: Any = item.get(tool.field)
    require(isinstance(payload, dict), f"input: {item['type']} needs {tool.field}")
    arguments = {key: payload[key] for key in tool.properties if payload.get(key) is not None}
    return _assistant_call(item.get("call_id") or item.get("id"), name, _json(arguments))


def _output(item: dict[str, Any]) -> list[ChatMessage]:
    """A result as text; what else it holds follows as the user's."""
    output = item.get("output")
    call_id = str(item.get("call_id") or item.get("id") or "")
    if output is None or isinstance(output, str):
        return [{"role": "tool", "tool_call_id": call_id, "content": output or str(item.get("status") or "")}]
    typed = isinstance(output, list) and all(
        isinstance(part, dict) and among(part.get("type"), PARTS) for part in output
    )
    parts = parts_of(output if typed else _json(output))
    others = [part for part in parts if part["type"] != "text"]
    result = {"role": "tool", "tool_call_id": call_id, "content": _joined(parts)}
    return [result, *([{"role": "user", "content": others}] if others else [])]


def _reasoning(item: dict[str, Any]) -> list[ChatMessage]:
    """The thought in full where the item has it, else what our own encrypted content says."""
    parts = item.get("content") or item.get("summary") or []
    text = _joined(parts_of(parts)) or _ours(item.get("encrypted_content"))
    return [{"role": "assistant", "content": "", "reasoning": text}] if text else []


def _ours(encrypted: Any) -> str:
    try:
        data = base64.b64decode(str(encrypted or ""), validate=True)
        return data.removeprefix(OURS).decode() if data.startswith(OURS) else ""
    except (binascii.Error, UnicodeDecodeError):
        return ""


READERS = {
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "reasoning": _reasoning,
    **dict.fromkeys(CLIENT_ITEMS, _client_call),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", *(f"{item}_output" for item in CLIENT_ITEMS)), _output
    ),
}


def reasoning_item(answer_id: str, text: str, encrypted: bool) -> dict[str, Any]:
    """A thought as the answer's first item; with encrypted content only where it was asked for."""
    item = {"id": f"rs_{answer_id}", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
    return item | ({"encrypted_content": base64.b64encode(OURS + text.encode()).decode()} if encrypted else {})


def call_item(call: ToolCall, tool: Tool) -> dict[str, Any]:
    """A call in the shape of the tool that it calls; a plain function call when its arguments do not fit that shape."""
    if tool.kind in CLIENT_TOOLS and (item := _client_item(call, CLIENT_TOOLS[tool.kind])):
        return item
    head = {"status": "completed", "call_id": call.id, "name": tool.name}
    head |= {"namespace": tool.namespace} if tool.namespace else {}
    if tool.kind == "custom":
        return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **head, "input": _custom_input(call.arguments)}
    return {"id": f"fc_{call.id}", "type": "function_call", **head, "arguments": call.arguments}


def _client_item(call: ToolCall, tool: ClientTool) -> dict[str, Any] | None:
    arguments = _object(call.arguments)
    if tool.needed not in arguments:
        return None
    payload = tool.constant | arguments
    return {"id": call.id, "type": tool.item, "status": "completed", "call_id": call.id, tool.field: payload}


def _custom_input(arguments: str) -> str:
    """The free text that a custom tool wants; malformed arguments as they are."""
    text = _object(arguments).get("input")
    return text if isinstance(text, str) else arguments


def _object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
