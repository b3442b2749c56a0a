"""The Anthropic dialect by itself: requests to canonical form, answers and errors as the official SDK reads them."""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest
from dialect_helpers import ANSWER, CALLS, events_of, parse, serving

from pipeline.capture.canonical import Memo
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import ApiError, Fault, ToolCall

DIALECT = Anthropic()
TOOL = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hello"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def messages(*wire: Any, **fields: Any) -> list[dict[str, Any]]:
    return parse(DIALECT, {"messages": list(wire), **fields}).messages()


def tool(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_blocks_become_canonical_messages() -> None:
    history = messages(
        user(text("a"), text("b")),
        {"role": "system", "content": "late"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                text("see"),
                {"type": "tool_use", "id": "c1", "name": "bash", "input": {"c": "é"}},
            ],
        },
        user(result("c1", [text("out"), text("put")]), text("go on")),
        system=[text("x-anthropic-billing-header: cch=1;"), text("be good"), text("and kind")],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"c":"é"}'}}
    assert history == [
        {"role": "system", "content": "be good\n\nand kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "late"},
        {"role": "assistant", "content": "see", "tool_calls": [call], "reasoning": "hm"},
        tool("c1", "out\nput"),
        {"role": "user", "content": "go on"},
    ]


def test_the_billing_line_is_cut_from_a_system_string_too() -> None:
    history = messages(USER, system="x-anthropic-billing-header: cch=2\nbe good")
    assert history[0] == {"role": "system", "content": "be good"}
    assert messages(USER, system="x-anthropic-billing-header: cch=2") == [USER]


def test_order_and_attachments_are_kept() -> None:
    image_result = result("c1", [text("shot"), PNG])
    history = messages(user(text("before"), image_result, result("c2", "ok"), text("after"), PNG))
    assert history == [
        {"role": "user", "content": "before"},
        tool("c1", "shot"),
        tool("c2", "ok"),
        {"role": "user", "content": [PNG_PART]},
        {"role": "user", "content": [{"type": "text", "text": "after"}, PNG_PART]},
    ]


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ({"type": "text", "data": "plain"}, None),
        ({"type": "content", "content": [text("plain")]}, None),
        ({"type": "url", "url": "u"}, {"type": "file", "file": {"file_data": "u", "filename": "document"}}),
    ],
)
def test_documents_are_text_where_they_are_text(source: dict[str, Any], part: Any) -> None:
    [message] = messages(user({"type": "document", "source": source}))
    assert message["content"] == ("plain" if part is None else [part])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no such tool", "Error: no such tool"),
        ("Exit code 1", "Exit code 1"),
        ("An Error", "An Error"),
        ([], "Error: "),
    ],
)
def test_a_failed_tool_says_so_once(content: Any, expected: str) -> None:
    assert messages(user(result("c", content, is_error=True)))[0]["content"] == expected
    assert messages(user(result("c", "fine", is_error=False)))[0]["content"] == "fine"


def test_moving_cache_marks_change_no_atom() -> None:
    memo, mark = Memo(), {"cache_control": {"type": "ephemeral"}}
    marked = parse(DIALECT, {"messages": [user(text("a", **mark)), USER], "system": [text("s", **mark)]}, memo=memo)
    plain = parse(DIALECT, {"messages": [{"role": "user", "content": "a"}, USER], "system": "s"}, memo=memo)
    assert marked.atoms == plain.atoms
    tools = [parse(DIALECT, {"messages": [USER], "tools": [TOOL | more]}).tools for more in ({}, mark)]
    assert tools[0] and tools[1] and tools[0].digest == tools[1].digest


def test_what_only_their_servers_do_is_counted_once() -> None:
    memo = Memo()
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    secret = {"type": "redacted_thinking", "data": "x"}
    body = {
        "messages": [USER, {"role": "assistant", "content": [secret, search, found, text("so")]}, USER],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "metadata": {"user_id": "u"},
        "brand_new": 1,
    }
    first = parse(DIALECT, body, memo=memo)
    assert first.messages()[1] == {"role": "assistant", "content": "so"}
    blocks = ("block_redacted_thinking", "block_server_tool_use", "block_web_search_tool_result")
    assert first.dropped == ("metadata", "unknown", *blocks, "tool_web_search_20250305")
    assert parse(DIALECT, body, memo=memo).dropped == ("metadata", "unknown", "tool_web_search_20250305")
    assert first.tools and [tool["function"]["name"] for tool in first.tools.functions] == ["bash"]


def test_fields_that_shape_the_answer() -> None:
    schema = {"type": "object"}
    request = parse(
        DIALECT,
        {
            "model": "m",
            "max_tokens": 9,
            "stream": True,
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}},
            "thinking": {"type": "adaptive"},
            "temperature": 0.3,
        },
    )
    assert (request.model, request.max_tokens, request.stream) == ("m", 9, True)
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    assert request.forced and not request.parallel_tool_calls
    wishes = {"output_config.effort": "high", "thinking": {"type": "adaptive"}, "temperature": 0.3}
    assert request.wishes == wishes


@pytest.mark.parametrize(
    ("choice", "canonical"),
    [
        ({"type": "auto"}, None),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "bash"}, {"type": "function", "function": {"name": "bash"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], canonical: Any) -> None:
    assert parse(DIALECT, {"messages": [USER], "tools": [TOOL], "tool_choice": choice}).tool_choice == canonical


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": ["x"]},
        {"messages": {"role": "user"}},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "owner", "content": "x"}]},
        {"messages": [user({"type": "hologram"})]},
        {"messages": [user({"text": "no type"})]},
        {"messages": [user({"type": "image"})]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        {"messages": [{"role": "assistant", "content": [PNG]}]},
        {"messages": [USER], "tool_choice": {"type": "?"}},
        {"messages": [USER], "tool_choice": {"type": "tool"}},
        {"messages": [USER], "max_tokens": -1},
        {"messages": [USER], "model": 5},
        {"messages": [USER], "tools": [{"input_schema": {}}]},
        {"messages": [USER], "tools": "x"},
        {"messages": [USER], "mcp_servers": [{"url": "u"}]},
        {"messages": [USER], "thread": {"type": "create"}},
        {"messages": [USER], "output_config": {"format": {"type": "xml"}}},
    ],
)
def test_what_cannot_be_meant_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(DIALECT, body)
    assert caught.value.fault is Fault.INVALID


def test_null_means_absent() -> None:
    request = parse(DIALECT, {"messages": [USER], "tools": None, "tool_choice": None, "system": None, "stream": None})
    assert request.tools is None and request.tool_choice is None and not request.stream


def test_half_a_character_spoils_no_conversation() -> None:
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d \\\\ud83d"}], "model": "m"}'
    assert DIALECT.parse(body, Memo()).messages()[0]["content"] == "cut ? \\ud83d"


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_reads_answers(stream: bool) -> None:
    with serving(CALLS, ANSWER) as stub:
        client = anthropic.Anthropic(base_url=stub.base_url, api_key="k", max_retries=0)
        wish: Any = {"model": "m", "max_tokens": 99, "messages": [USER], "tools": [TOOL]}

        def ask(**more: Any) -> Any:
            if not stream:
                return client.messages.create(**(wish | more))
            with client.messages.stream(**(wish | more)) as events:
                return events.get_final_message()

        first = ask()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        thought, said, *calls = first.content
        assert (thought.thinking, said.text, first.stop_reason) == ("hm, so", "see", "tool_use")
        assert thought.signature
        assert [(call.id, call.input) for call in calls] == [("call_1", {"cmd": "ls é"}), ("call_2", {"cmd": "pwd"})]
        usage = first.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (15, 5, 7)
        results = user(result("call_1", "a.py"), result("call_2", "/w"))
        history = [USER, {"role": "assistant", "content": [block.model_dump() for block in first.content]}, results]
        assert client.messages.count_tokens(model="m", messages=history).input_tokens == 42
        assert ask(messages=history).stop_reason == "end_turn"
        replayed = stub.requests[-1].messages()[1]
        assert (replayed["content"], replayed["reasoning"]) == ("see", "hm, so")
        assert [call["function"]["arguments"] for call in replayed["tool_calls"]] == ['{"cmd":"ls é"}', '{"cmd":"pwd"}']


def test_the_stream_starts_with_true_usage() -> None:
    request = parse(DIALECT, {"messages": [USER], "model": "m"})
    events = events_of(DIALECT.events(request, ANSWER))
    usage = events[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (15, 5, 0)
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]


def test_malformed_arguments_reach_the_client_as_they_are() -> None:
    bad = msgspec.structs.replace(ANSWER, tool_calls=(ToolCall("c", "bash", '{"cmd": "ls'),), finish_reason="length")
    request = parse(DIALECT, {"messages": [USER]})
    whole = DIALECT.answer(request, bad)
    assert whole["content"][1]["input"] == {"unparsed": '{"cmd": "ls'} and whole["stop_reason"] == "max_tokens"
    deltas = [event["delta"] for event in events_of(DIALECT.events(request, bad)) if "delta" in event]
    assert {"type": "input_json_delta", "partial_json": '{"cmd": "ls'} in deltas


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault.INVALID, anthropic.BadRequestError, "no"),
        (Fault.CONTEXT, anthropic.BadRequestError, "prompt is too long"),
        (Fault.UNAUTHORIZED, anthropic.AuthenticationError, "no"),
        (Fault.NOT_FOUND, anthropic.NotFoundError, "no"),
        (Fault.TOO_LARGE, anthropic.APIStatusError, "request_too_large"),
        (Fault.RATE_LIMITED, anthropic.RateLimitError, "no"),
        (Fault.OVERLOADED, anthropic.InternalServerError, "overloaded_error"),
        (Fault.UNAVAILABLE, anthropic.InternalServerError, "no"),
        (Fault.INTERNAL, anthropic.InternalServerError, "no"),
    ],
)
def test_the_sdk_knows_errors(fault: Fault, kind: type[Exception], words: str) -> None:
    with serving(ApiError(fault, "no")) as stub:
        client = anthropic.Anthropic(base_url=stub.base_url, api_key="k", max_retries=0)
        with pytest.raises(kind, match=words):
            client.messages.create(model="m", max_tokens=9, messages=[USER])  # type: ignore[list-item]


def test_an_error_in_a_started_stream_is_an_error_event() -> None:
    event = DIALECT.stream_error(ApiError(Fault.OVERLOADED, "later"))
    assert event.startswith(b"event: error\n") and b"overloaded_error" in event
    assert DIALECT.ping == b'event: ping\ndata: {"type": "ping"}\n\n'
    assert set(DIALECT.statuses.values()) == {529}
    for fault in Fault:
        assert DIALECT.error(ApiError(fault, "x"))["error"]["type"] and DIALECT.status(ApiError(fault, "x"))
