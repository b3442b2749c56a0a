"""The tables of the dialects: every field that an official SDK knows, every honoured field's effect, every route."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params, output_config_param
from anthropic.types.beta import beta_output_config_param
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from dialect_helpers import parse
from google.genai import types
from openai.types.chat import chat_completion_stream_options_param, completion_create_params
from openai.types.responses import response_create_params, response_text_config_param

from pipeline.capture import dialects
from pipeline.capture.dialects.__main__ import page, rows
from pipeline.capture.dialects.base import Action, ApiError, ChatRequest, Dialect, Fault
from pipeline.capture.dialects.fields import Use

SENT_AS_HEADERS = {"betas", "user_profile_id", "workspace_id"}
FOR_THE_SDK_ITSELF = {"httpOptions", "shouldReturnHttpResponse", "automaticFunctionCalling", "automaticContinuation"}
PLACES = ("", "generationConfig.", "toolConfig.")  # where an SDK's flat Gemini configuration may go


def known(dialect: Dialect) -> set[str]:
    names = {name for name, _ in rows(dialect.fields)}
    return names | set(dialect.fields)


def typed(params: Any, prefix: str = "") -> set[str]:
    return {prefix + name for name in get_type_hints(params)} - SENT_AS_HEADERS


def aliased(model: Any, prefix: str = "") -> set[str]:
    return {prefix + (field.alias or name) for name, field in model.model_fields.items()}


def test_chat_knows_every_field_of_the_sdk() -> None:
    asked = typed(completion_create_params.CompletionCreateParamsBase)
    asked |= typed(chat_completion_stream_options_param.ChatCompletionStreamOptionsParam, "stream_options.")
    assert len(asked) > 30 and asked <= known(dialects.CHAT)


def test_responses_knows_every_field_of_the_sdk() -> None:
    asked = typed(response_create_params.ResponseCreateParamsBase)
    asked |= typed(response_text_config_param.ResponseTextConfigParam, "text.")
    assert len(asked) > 30 and asked <= known(dialects.RESPONSES)


def test_anthropic_knows_every_field_of_the_sdk() -> None:
    asked = typed(message_create_params.MessageCreateParamsBase)
    asked |= typed(message_count_tokens_params.MessageCountTokensParams)
    asked |= typed(beta_create_params.MessageCreateParamsBase)
    asked |= typed(beta_count_tokens_params.MessageCountTokensParams)
    asked |= typed(output_config_param.OutputConfigParam, "output_config.")
    asked |= typed(beta_output_config_param.BetaOutputConfigParam, "output_config.")
    assert len(asked) > 25 and asked <= known(dialects.ANTHROPIC)


def test_gemini_knows_every_field_of_the_sdk() -> None:
    names = known(dialects.GEMINI)
    assert aliased(types.GenerationConfig, "generationConfig.") <= names
    assert aliased(types.ToolConfig, "toolConfig.") <= names
    flat = aliased(types.GenerateContentConfig) - FOR_THE_SDK_ITSELF
    assert [name for name in flat if not any(place + name in names for place in PLACES)] == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "f"}}
# Dialect -> (a body, honoured field -> what makes a difference when it is set, with what that needs besides).
SAMPLES: dict[Dialect, tuple[dict[str, Any], dict[str, Any]]] = {
    dialects.CHAT: (
        {"messages": [{"role": "user", "content": "x"}]},
        {
            "model": "m",
            "messages": [{"role": "user", "content": "y"}],
            "tools": [FUNCTION],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "response_format": {"type": "json_object"},
            "max_tokens": 5,
            "max_completion_tokens": 5,
            "stream": True,
            "stream_options.include_usage": True,
        },
    ),
    dialects.ANTHROPIC: (
        {"messages": [{"role": "user", "content": "x"}]},
        {
            "model": "m",
            "messages": [{"role": "user", "content": "y"}],
            "system": "s",
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "any"},
            "max_tokens": 5,
            "stream": True,
            "output_config.format": JSON_SCHEMA,
            "output_format": JSON_SCHEMA,
        },
    ),
    dialects.RESPONSES: (
        {"input": "x"},
        {
            "model": "m",
            "input": "y",
            "instructions": "s",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 5,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "text.format": JSON_SCHEMA,
        },
    ),
    dialects.GEMINI: (
        {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"responseMimeType": "application/json"}},
        {
            "contents": [{"parts": [{"text": "y"}]}],
            "systemInstruction": {"parts": [{"text": "s"}]},
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
            "toolConfig.functionCallingConfig": {"mode": "ANY"},
            "generationConfig.maxOutputTokens": 5,
            "generationConfig.responseMimeType": "text/plain",
            "generationConfig.responseSchema": SCHEMA,
            "generationConfig.responseJsonSchema": SCHEMA,
            "generateContentRequest": {"contents": [{"parts": [{"text": "y"}]}]},
        },
    ),
}


def with_field(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return body | {outer: {**body.get(outer, {}), inner: value} if inner else value}


def effect(request: ChatRequest) -> Any:
    """Everything that shapes the answer."""
    functions = request.tools.functions if request.tools else None
    shape = (request.tool_choice, request.response_format, request.parallel_tool_calls, request.max_tokens)
    return request.messages(), functions, request.model, shape, request.stream, request.include_usage, request.extra


@pytest.mark.parametrize("dialect", dialects.DIALECTS, ids=lambda dialect: dialect.name)
def test_every_honoured_field_has_an_effect(dialect: Dialect) -> None:
    body, samples = SAMPLES[dialect]
    assert set(samples) == {name for name, rule in rows(dialect.fields) if rule.use is Use.HONOURED}
    before = effect(parse(dialect, body))
    unchanged = [
        name for name, value in samples.items() if effect(parse(dialect, with_field(body, name, value))) == before
    ]
    assert unchanged == []


@pytest.mark.parametrize("dialect", dialects.DIALECTS, ids=lambda dialect: dialect.name)
def test_every_other_field_is_recorded_counted_or_refused(dialect: Dialect) -> None:
    body, _ = SAMPLES[dialect]
    for name, rule in rows(dialect.fields):
        if rule.use is Use.REJECTED:
            with pytest.raises(ApiError, match=f"{name}: not supported") as caught:
                parse(dialect, with_field(body, name, {"unheard": "of"}))
            assert caught.value.fault is Fault.INVALID
            for value in rule.harmless:
                assert parse(dialect, with_field(body, name, value))
        elif rule.use is not Use.HONOURED:
            request = parse(dialect, with_field(body, name, {"a": 1}))
            assert effect(request) == effect(parse(dialect, body))
            wished, dropped = ({name: {"a": 1}}, ()) if rule.use is Use.OVERRIDDEN else ({}, (name,))
            assert (request.wishes, request.dropped) == (wished, dropped)


def test_the_page_of_the_tables_is_current() -> None:
    written = Path(__file__).parents[2] / "docs" / "fields.md"
    assert written.read_text() == page(), "run: python -m pipeline.capture.dialects > docs/fields.md"


@pytest.mark.parametrize(
    ("method", "path", "name", "outcome"),
    [
        ("POST", "/v1/chat/completions", "chat", Action.TURN),
        ("POST", "/chat/completions", "chat", Action.TURN),
        ("GET", "/v1/models", "chat", Action.MODELS),
        ("GET", "/models", "chat", Action.MODELS),
        ("POST", "/v1/messages", "anthropic", Action.TURN),
        ("POST", "/messages", "anthropic", Action.TURN),
        ("POST", "/v1/messages/count_tokens", "anthropic", Action.COUNT_TOKENS),
        ("HEAD", "/", "anthropic", Action.HELLO),
        ("HEAD", "/api/hello", "anthropic", Action.HELLO),
        ("POST", "/v1/responses", "responses", Action.TURN),
        ("POST", "/responses", "responses", Action.TURN),
        ("GET", "/v1beta/models", "gemini", Action.MODELS),
        ("GET", "/v1/chat/completions", "chat", Fault.METHOD),
        ("PUT", "/v1/messages", "anthropic", Fault.METHOD),
        ("DELETE", "/v1/responses", "responses", Fault.METHOD),
        ("GET", "/v1beta/models/m:generateContent", "gemini", Fault.METHOD),
        ("POST", "/v1/models", "chat", Fault.METHOD),
        ("POST", "/v1/embeddings", "chat", Fault.NOT_FOUND),
        ("POST", "/v1/completions", "chat", Fault.NOT_FOUND),
        ("POST", "/v1/responses/compact", "responses", Fault.NOT_FOUND),
        ("GET", "/v1/responses/resp_1", "responses", Fault.NOT_FOUND),
        ("POST", "/v1/messages/batches", "anthropic", Fault.NOT_FOUND),
        ("POST", "/v1beta/models/m:embedContent", "gemini", Fault.NOT_FOUND),
        ("POST", "/v1beta/cachedContents", "gemini", Fault.NOT_FOUND),
        ("GET", "/", "anthropic", Fault.METHOD),
        ("GET", "/nowhere", "chat", Fault.NOT_FOUND),
    ],
)
def test_routes(method: str, path: str, name: str, outcome: Action | Fault) -> None:
    dialect, route = dialects.find(method, path)
    fault = Fault.METHOD if dialects.methods(path) else Fault.NOT_FOUND
    assert (dialect.name, route.action if route else fault) == (name, outcome)
    assert method in dialects.methods(path) if route else method not in dialects.methods(path)


def test_only_greetings_need_no_key() -> None:
    free = {(dialect.name, route.action) for dialect in dialects.DIALECTS for route in dialect.routes if route.open}
    assert free == {("anthropic", Action.HELLO)}


@pytest.mark.parametrize("dialect", dialects.DIALECTS, ids=lambda dialect: dialect.name)
def test_every_fault_has_a_body_and_a_status(dialect: Dialect) -> None:
    for fault in Fault:
        error = ApiError(fault, "why", retry_after=2)
        assert "why" in dialect.error(error)["error"]["message"] and 400 <= dialect.status(error) < 600
        assert b"why" in dialect.stream_error(error)
