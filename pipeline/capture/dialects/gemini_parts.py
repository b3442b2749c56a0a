"""Gemini's contents, parts and schemas as canonical messages and JSON schemas. Names may be spelt in snake_case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec

from pipeline.capture.canonical import ChatMessage
from pipeline.capture.dialects.base import require

# Parts of tools that Google's servers run; nothing here can have made them.
SERVER_PARTS = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
OUTPUT_KEYS = ("output", "result", "content", "error")  # a result's only field with one of these names is its text


@lru_cache(512)
def camel(name: str) -> str:
    """A field's name in camelCase."""
    return re.sub(r"(?<=[a-z0-9])_([a-z])", lambda found: found[1].upper(), name)


def spelt(value: dict[str, Any]) -> dict[str, Any]:
    """An object with its own names in camelCase and without what is null; what lies inside stays."""
    return {camel(name): each for name, each in value.items() if each is not None}


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects with their names in camelCase. Raises ApiError(INVALID)."""
    typed = isinstance(value, list) and all(isinstance(each, dict) for each in value)
    require(typed, f"{name}: must be a list of objects")
    return [spelt(each) for each in value]


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The parts of a wire content. Raises ApiError(INVALID)."""
    if isinstance(content, str):
        return [{"text": content}]
    require(isinstance(content, dict), "content: must be an object with parts")
    return objects("parts", content.get("parts") or [])


def canonical_parts(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts, images and files as canonical content parts; parts of Google's servers left out."""
    canonical: list[dict[str, Any]] = []
    for part in parts:
        if "text" in part:
            require(isinstance(part["text"], str), "parts: text must be a string")
            canonical.append({"type": "text", "text": part["text"]})
        elif kind := next((kind for kind in ("inlineData", "fileData") if kind in part), None):
            canonical.append(_blob(part[kind]))
        else:
            known = part.keys() <= {"thoughtSignature", "thought", *SERVER_PARTS}
            require(known, f"parts: unsupported part with {sorted(part)}")
    return canonical


def _blob(blob: Any) -> dict[str, Any]:
    """Also a file, for the engine to take or refuse."""
    require(isinstance(blob, dict), "parts: inlineData and fileData must be objects")
    blob = spelt(blob)
    kind = str(blob.get("mimeType"))
    url = str(blob["fileUri"]) if "fileUri" in blob else f"data:{kind};base64,{blob.get('data')}"
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"file_data": url, "filename": str(blob.get("displayName") or "file")}}


def _user(parts: list[dict[str, Any]]) -> Iterator[ChatMessage]:
    """Function responses, and runs of other parts, in their order."""
    if not parts:
        yield {"role": "user", "content": ""}
    for responses, run in groupby(parts, lambda part: "functionResponse" in part):
        if responses:
            yield from _responses(part["functionResponse"] for part in run)
        elif content := canonical_parts(run):
            texts = [part["text"] for part in content if part["type"] == "text"]
            yield {"role": "user", "content": "\n".join(texts) if len(texts) == len(content) else content}


def _responses(responses: Iterable[Any]) -> Iterator[ChatMessage]:
    """Results as texts; what else they hold follows the last of them, as the user's."""
    others: list[dict[str, Any]] = []
    for response in objects("functionResponse", list(responses)):
        others += canonical_parts(objects("functionResponse.parts", response.get("parts") or []))
        yield {
            "role": "tool",
            "tool_call_id": str(response.get("id") or ""),
            "name": str(response.get("name") or ""),
            "content": _result(response.get("response")),
        }
    if others:
        yield {"role": "user", "content": others}


def _result(response: Any) -> str:
    if isinstance(response, dict) and len(response) == 1:
        [(name, value)] = response.items()
        if name in OUTPUT_KEYS and isinstance(value, str):
            return value
    return "" if response is None else _json(response)


def _model_turn(parts: list[dict[str, Any]]) -> Iterator[ChatMessage]:
    calls = [_call(part["functionCall"]) for part in parts if "functionCall" in part]
    others = canonical_parts(part for part in parts if "functionCall" not in part and not part.get("thought"))
    require(all(part["type"] == "text" for part in others), "parts: a model's turn can only hold text and calls")
    text = "".join(part["text"] for part in others)
    thoughts = "".join(part["text"] for part in canonical_parts(part for part in parts if part.get("thought")))
    canonical: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
    canonical |= {"tool_calls": calls} if calls else {}
    yield canonical | ({"reasoning": thoughts} if thoughts else {})


READERS = {"user": _user, "function": _user, "model": _model_turn}


def _call(wire: Any) -> dict[str, Any]:
    require(isinstance(wire, dict) and isinstance(wire.get("name"), str), "parts: a functionCall needs a name")
    function = {"name": wire["name"], "arguments": _json(wire.get("args") or {})}
    return {"id": str(wire.get("id") or ""), "type": "function", "function": function}


def function_of(declared: dict[str, Any]) -> dict[str, Any]:
    """A function declaration as a canonical tool. Raises ApiError(INVALID)."""
    require(isinstance(declared.get("name"), str), "functionDeclarations: a name is missing")
    parameters = declared.get("parametersJsonSchema") or json_schema(declared.get("parameters"))
    function = {
        "name": declared["name"],
        "description": str(declared.get("description") or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def json_schema(schema: Any) -> Any:
    """An OpenAPI schema as JSON schema: types in lower case, nullable as a type, numbers as numbers."""
    if not isinstance(schema, dict):
        return schema
    fixed = {SCHEMA_NAMES.get(name, name): value for name, value in spelt(schema).items() if name not in NOT_IN_JSON}
    for name, value in fixed.items():
        if name in ("properties", "$defs") and isinstance(value, dict):
            fixed[name] = {key: json_schema(each) for key, each in value.items()}
        elif name == "anyOf" and isinstance(value, list):
            fixed[name] = [json_schema(each) for each in value]
        elif name in ("items", "additionalProperties"):
            fixed[name] = json_schema(value)
        elif name in COUNTS and isinstance(value, str) and value.isdigit():
            fixed[name] = int(value)
    if isinstance(kind := fixed.get("type"), str):
        fixed["type"] = [kind.lower(), "null"] if fixed.pop("nullable", False) else kind.lower()
    return fixed


SCHEMA_NAMES = {"defs": "$defs", "ref": "$ref"}
NOT_IN_JSON = ("propertyOrdering", "property_ordering")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
