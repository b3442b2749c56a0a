"""The Gemini dialect by itself: contents to canonical form, answers and errors as the official SDK reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dialect_helpers import ANSWER, CALLS, events_of, parse, serving
from google import genai
from google.genai import errors, types

from pipeline.capture import dialects
from pipeline.capture.canonical import Memo
from pipeline.capture.dialects.base import Action, Answer, ApiError, ChatRequest, Fault, ToolCall
from pipeline.capture.dialects.gemini import Gemini

DIALECT = Gemini()
PATH = "/v1beta/models/m:generateContent"
STREAM = "/v1beta/models/m:streamGenerateContent"
USER = {"role": "user", "parts": [{"text": "hello"}]}
HELLO = {"role": "user", "content": "hello"}
PNG = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
LS = {"functionCall": {"name": "ls", "args": {"p": "é"}}}
TOOLS = [{"functionDeclarations": [{"name": "ls", "description": "list"}]}, {"googleSearch": {}}]


def ask(*contents: Any, path: str = PATH, query: str = "", **fields: Any) -> ChatRequest:
    return parse(DIALECT, {"contents": list(contents), **fields}, path, query)


def config(**fields: Any) -> ChatRequest:
    return ask(USER, generationConfig=fields)


def response(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": value, **more}}


def tool(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "ls", "content": content}


def call(call_id: str, arguments: str = '{"p":"é"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "ls", "arguments": arguments}}


def test_parts_become_canonical_messages() -> None:
    history = ask(
        USER,
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True, "thoughtSignature": "eA=="},
                {"text": "se"},
                {"text": "e"},
                {"functionCall": {"id": "c1", "name": "ls", "args": {"p": "é"}}, "thoughtSignature": "eA=="},
            ],
        },
        {"role": "user", "parts": [{"text": "before"}, response("ls", {"output": "a\nb"}, id="c1"), {"text": "after"}]},
        systemInstruction={"parts": [{"text": "be good"}, {"text": "and kind"}]},
    ).messages()
    assert history == [
        {"role": "system", "content": "be good\nand kind"},
        HELLO,
        {"role": "assistant", "content": "see", "tool_calls": [call("c1")], "reasoning": "hm"},
        {"role": "user", "content": "before"},
        tool("c1", "a\nb"),
        {"role": "user", "content": "after"},
    ]


def test_calls_without_ids_get_them_in_order() -> None:
    history = ask(
        USER,
        {"role": "model", "parts": [LS, LS]},
        {"role": "function", "parts": [response("ls", {"output": "one"}), response("ls", {"output": "two"}, id="")]},
    ).messages()
    ids = [each["id"] for each in history[1]["tool_calls"]]
    assert len(set(ids)) == 2 and history[2:] == [tool(ids[0], "one"), tool(ids[1], "two")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"output": "a\n"}, "a\n"),
        ({"result": "x"}, "x"),
        ({"content": "x"}, "x"),
        ({"error": "no"}, "no"),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"output": "x", "exit": 1}, '{"output":"x","exit":1}'),
        ({"other": "é"}, '{"other":"é"}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_results_are_bare_text_where_they_are_text(value: Any, text: str) -> None:
    assert ask({"parts": [response("ls", value)]}).messages()[0]["content"] == text


def test_both_spellings_are_one() -> None:
    snake = {
        "system_instruction": {"parts": [{"text": "s"}]},
        "contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": "AA=="}}]}],
        "tools": [{"function_declarations": [{"name": "ls", "parameters_json_schema": {"a_b": 1}}]}],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["ls"]}},
        "generation_config": {"max_output_tokens": 9, "top_p": 0.5},
    }
    request = parse(DIALECT, snake, PATH)
    assert request.messages() == [{"role": "system", "content": "s"}, {"role": "user", "content": [PNG_PART]}]
    assert request.tools and request.tools.functions[0]["function"]["parameters"] == {"a_b": 1}
    assert request.tool_choice == {"type": "function", "function": {"name": "ls"}}
    assert request.max_tokens == 9 and request.wishes == {"generationConfig.topP": 0.5}


def test_images_are_kept_for_the_engine_to_refuse() -> None:
    pdf = {"fileData": {"mimeType": "application/pdf", "fileUri": "u"}}
    result = response("ls", {"output": "shot"}, id="c1", parts=[PNG])
    history = ask({"parts": [{"text": "look"}, pdf]}, {"parts": [result]}).messages()
    file = {"type": "file", "file": {"file_data": "u", "filename": "file"}}
    assert history == [
        {"role": "user", "content": [{"type": "text", "text": "look"}, file]},
        tool("c1", "shot"),
        {"role": "user", "content": [PNG_PART]},
    ]


def test_what_only_their_servers_do_is_counted_once() -> None:
    memo = Memo()
    code = {"role": "model", "parts": [{"executableCode": {"code": "1"}}, {"text": "so"}]}
    body = {"contents": [USER, code, USER], "tools": TOOLS, "safetySettings": [], "brandNew": 1}
    first = parse(DIALECT, body, PATH, memo=memo)
    assert first.messages()[1] == {"role": "assistant", "content": "so"}
    assert first.dropped == ("safetySettings", "unknown", "part_executableCode", "tool_googleSearch")
    assert parse(DIALECT, body, PATH, memo=memo).dropped == ("safetySettings", "unknown", "tool_googleSearch")


def test_schemas_become_json_schemas() -> None:
    wire = {
        "type": "OBJECT",
        "propertyOrdering": ["a"],
        "properties": {
            "type": {"type": "STRING", "nullable": True, "description": "STRING"},
            "a": {"type": "ARRAY", "min_items": "1", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "NULL"}]}},
        },
    }
    request = ask(USER, tools=[{"functionDeclarations": [{"name": "ls", "parameters": wire}, {"name": "pwd"}]}])
    assert request.tools
    ls, pwd = (each["function"]["parameters"] for each in request.tools.functions)
    assert ls == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "description": "STRING"},
            "a": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
    }
    assert pwd == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("wish", "canonical", "dropped"),
    [
        ({}, None, ()),
        ({"mode": "AUTO"}, None, ()),
        ({"mode": "VALIDATED"}, None, ()),
        ({"mode": "NONE"}, "none", ()),
        ({"mode": "ANY"}, "required", ()),
        ({"mode": "any", "allowedFunctionNames": ["ls"]}, {"type": "function", "function": {"name": "ls"}}, ()),
        ({"mode": "ANY", "allowedFunctionNames": ["ls", "pwd"]}, "required", ("allowedFunctionNames",)),
    ],
)
def test_function_calling_mode(wish: Any, canonical: Any, dropped: tuple[str, ...]) -> None:
    request = ask(USER, toolConfig={"functionCallingConfig": wish})
    assert request.tool_choice == canonical and request.dropped == dropped


def test_the_shape_of_the_answer() -> None:
    assert config(responseMimeType="text/plain").response_format is None
    assert config(responseMimeType="application/json").response_format == {"type": "json_object"}
    upper = config(responseMimeType="application/json", responseSchema={"type": "OBJECT"}).response_format
    plain = config(responseMimeType="application/json", responseJsonSchema={"type": "object"}).response_format
    assert upper == plain == {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    assert config(candidateCount=1, responseModalities=["TEXT"], temperature=1).wishes == {
        "generationConfig.temperature": 1
    }


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1beta/models/m:generateContent", "m"),
        ("/v1/models/my/model-1:generateContent", "my/model-1"),
        ("/models/m:generateContent", "m"),
        ("/v1beta/tunedModels/m:generateContent", "m"),
        ("/v1beta1/projects/p/locations/l/publishers/google/models/m:generateContent", "m"),
        ("/v1alpha/my/model:generateContent", "my/model"),
        ("/v1beta/models/m:tag:generateContent", "m:tag"),
    ],
)
def test_paths(path: str, model: str) -> None:
    for verb, action in (
        ("generateContent", Action.TURN),
        ("streamGenerateContent", Action.TURN),
        ("countTokens", Action.COUNT_TOKENS),
    ):
        dialect, route = dialects.find("POST", path.replace("generateContent", verb))
        assert dialect.name == "gemini" and route and route.action is action
    assert ask(USER, path=path).model == model
    assert not ask(USER, path=path).stream and ask(USER, path=path.replace(":g", ":streamG")).stream


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"contents": []},
        {"contents": "x"},
        {"contents": ["x"]},
        {"contents": [{"role": "owner", "parts": [{"text": "x"}]}]},
        {"contents": [{"parts": "x"}]},
        {"contents": [{"parts": [{"text": 5}]}]},
        {"contents": [{"parts": [{"hologram": {}}]}]},
        {"contents": [{"parts": [{"inlineData": "x"}]}]},
        {"contents": [{"role": "model", "parts": [PNG]}]},
        {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]},
        {"contents": [USER], "tools": [{"functionDeclarations": [{}]}]},
        {"contents": [USER], "cachedContent": "cachedContents/1"},
        {"contents": [USER], "toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}},
        {"contents": [USER], "generationConfig": {"candidateCount": 2}},
        {"contents": [USER], "generationConfig": {"responseMimeType": "text/x.enum"}},
        {"contents": [USER], "generationConfig": {"responseJsonSchema": {}}},
        {"contents": [USER], "generationConfig": {"maxOutputTokens": "x"}},
        {"contents": [USER], "generationConfig": {"responseModalities": ["AUDIO"]}},
        {"contents": [USER], "generationConfig": 5},
    ],
)
def test_what_cannot_be_meant_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(DIALECT, body, PATH)
    assert caught.value.fault is Fault.INVALID


def test_count_tokens_takes_a_whole_request_too() -> None:
    inner = {"model": "models/m", "contents": [USER], "systemInstruction": {"parts": [{"text": "s"}]}}
    path = "/v1beta/models/m:countTokens"
    assert [each["role"] for each in parse(DIALECT, {"generateContentRequest": inner}, path).messages()] == [
        "system",
        "user",
    ]
    assert parse(DIALECT, {"contents": [USER]}, path).messages() == [HELLO]
    assert DIALECT.token_count(42) == {"totalTokens": 42}


def sdk(base_url: str) -> genai.Client:
    return genai.Client(api_key="k", http_options=types.HttpOptions(base_url=base_url))


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_reads_answers(stream: bool) -> None:
    with serving(CALLS, ANSWER) as stub:
        client = sdk(stub.base_url)
        declared = types.FunctionDeclaration(name="bash", parameters=types.Schema(type=types.Type.OBJECT))
        wish = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declared])],
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )

        def create(contents: Any) -> tuple[list[types.Part], types.GenerateContentResponse]:
            if not stream:
                whole = client.models.generate_content(model="my/model", contents=contents, config=wish)
                return list(whole.parts or []), whole
            chunks = list(client.models.generate_content_stream(model="my/model", contents=contents, config=wish))
            return [part for chunk in chunks for part in chunk.parts or []], chunks[-1]

        parts, end = create("hello")
        assert [(part.text, bool(part.thought)) for part in parts[:2]] == [("hm, so", True), ("see", False)]
        assert parts[0].thought_signature
        calls = [part.function_call for part in parts[2:]]
        assert [(one.id, one.args) for one in calls if one] == [("call_1", {"cmd": "ls é"}), ("call_2", {"cmd": "pwd"})]
        usage = end.usage_metadata
        assert usage and (usage.prompt_token_count, usage.cached_content_token_count, usage.total_token_count) == (
            20,
            5,
            27,
        )
        assert (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0) == 7
        assert end.candidates and end.candidates[0].finish_reason is types.FinishReason.STOP
        results = [
            types.Part(function_response=types.FunctionResponse(id=one.id, name="bash", response={"output": "x"}))
            for one in calls
            if one
        ]
        history: Any = [
            types.Content(role="user", parts=[types.Part(text="hello")]),
            types.Content(role="model", parts=parts),
            types.Content(role="user", parts=results),
        ]
        assert client.models.count_tokens(model="m", contents=history).total_tokens == 42
        assert create(history)[0][0].text == "done"
        replayed = stub.requests[-1].messages()[1]
        assert (replayed["content"], replayed["reasoning"]) == ("see", "hm, so")
        assert [each["id"] for each in replayed["tool_calls"]] == ["call_1", "call_2"]
        assert stub.requests[-1].model == "my/model" and stub.requests[-1].stream is stream
        assert [model.name for model in client.models.list()] == ["models/m"]


def chunks_of(answer: Answer, query: str = "alt=sse") -> list[Any]:
    stream = DIALECT.events(ask(USER, path=STREAM, query=query), answer)
    return events_of(stream) if query else msgspec.json.decode(stream)


def test_a_stream_without_sse_is_a_json_list() -> None:
    assert chunks_of(CALLS, "") == chunks_of(CALLS) and len(chunks_of(CALLS)) == 4
    assert ask(USER, path=STREAM, query="alt=sse&key=k").extra["sse"]


@pytest.mark.parametrize(
    ("change", "reason", "parts"),
    [
        ({"text": ""}, "STOP", None),
        ({"finish_reason": "length"}, "MAX_TOKENS", [{"text": "done"}]),
        ({"tool_calls": (ToolCall("c", "ls", "{bad"),)}, "MALFORMED_FUNCTION_CALL", [{"text": "done"}]),
        ({"tool_calls": (ToolCall("c", "ls", "[]"),), "text": ""}, "MALFORMED_FUNCTION_CALL", None),
        ({"tool_calls": (ToolCall("c", "ls", "{bad"),), "finish_reason": "length"}, "MAX_TOKENS", [{"text": "done"}]),
    ],
)
def test_how_an_answer_ended(change: dict[str, Any], reason: str, parts: Any) -> None:
    answer = msgspec.structs.replace(ANSWER, **change)
    whole = DIALECT.answer(ask(USER), answer)
    [candidate] = whole["candidates"]
    assert candidate["finishReason"] == reason and candidate["content"].get("parts") == parts
    assert chunks_of(answer) == [whole | {"modelVersion": "m"}]


@pytest.mark.parametrize(
    ("fault", "code", "status", "words"),
    [
        (Fault.INVALID, 400, "INVALID_ARGUMENT", "no"),
        (Fault.CONTEXT, 400, "INVALID_ARGUMENT", "exceeds the maximum number of tokens"),
        (Fault.UNAUTHORIZED, 401, "UNAUTHENTICATED", "no"),
        (Fault.NOT_FOUND, 404, "NOT_FOUND", "no"),
        (Fault.RATE_LIMITED, 429, "RESOURCE_EXHAUSTED", "no"),
        (Fault.UNAVAILABLE, 503, "UNAVAILABLE", "no"),
        (Fault.INTERNAL, 500, "INTERNAL", "no"),
        (Fault.TIMEOUT, 504, "DEADLINE_EXCEEDED", "no"),
    ],
)
def test_the_sdk_knows_errors(fault: Fault, code: int, status: str, words: str) -> None:
    with serving(ApiError(fault, "no")) as stub, pytest.raises(errors.APIError, match=words) as caught:
        client = sdk(stub.base_url)
        client.models.generate_content(model="m", contents="x")
    assert (caught.value.code, caught.value.status) == (code, status)


def test_an_error_says_when_to_come_back_and_ends_a_started_stream() -> None:
    error = ApiError(Fault.RATE_LIMITED, "later", retry_after=3)
    [detail] = DIALECT.error(error)["error"]["details"]
    assert detail["retryDelay"] == "3s" and detail["@type"].endswith("RetryInfo")
    assert events_of(DIALECT.stream_error(error)) == [DIALECT.error(error)]
    assert DIALECT.ping == b""
