"""The Responses dialect by itself: items to canonical form, answers and errors as the official SDK reads them."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import openai
import pytest
from dialect_helpers import ANSWER, CALLS, events_of, parse, serving

from pipeline.capture.canonical import Memo, Tool
from pipeline.capture.dialects.base import ApiError, Fault, ToolCall
from pipeline.capture.dialects.responses import Responses

DIALECT = Responses()
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
HELLO = {"role": "user", "content": "hello"}
BASH = {"type": "function", "name": "bash", "description": "run", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "apply", "description": "edit", "format": {"type": "grammar", "syntax": "lark"}}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "helpers",
    "tools": [BASH | {"name": "spawn"}, {"type": "custom", "name": "say"}],
}
TOOLS = [BASH, PATCH, AGENTS, {"type": "local_shell"}, {"type": "web_search"}]


def ask(*items: Any, **fields: Any) -> Any:
    return parse(DIALECT, {"model": "m", "input": list(items), **fields})


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function"} | {"function": function}],
    }


def said(*calls: ToolCall, **more: Any) -> Any:
    return msgspec.structs.replace(ANSWER, **({"text": "", "tool_calls": calls, "finish_reason": "tool_calls"} | more))


def test_one_turn_of_several_items_is_one_message() -> None:
    request = ask(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        USER,
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "bash", "arguments": '{"c": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        {"role": "developer", "content": "late"},
        instructions="be good",
    )
    calls = [*call("c1", "bash", '{"c": 1}')["tool_calls"], *call("c2", "agents__spawn", "{}")["tool_calls"]]
    assert request.messages() == [
        {"role": "system", "content": "be good"},
        {"role": "system", "content": "rules"},
        HELLO,
        {"role": "assistant", "content": "see", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        {"role": "system", "content": "late"},
    ]


def test_a_bare_string_is_a_user_message() -> None:
    assert parse(DIALECT, {"input": "hello"}).messages() == [HELLO]


def test_calls_of_other_kinds_and_their_results() -> None:
    history = ask(
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {
            "type": "local_shell_call",
            "id": "x",
            "call_id": "c2",
            "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None},
        },
        {"type": "local_shell_call_output", "id": "c2", "output": "a.py"},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "b", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "p"}},
        {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
    ).messages()
    assert history == [
        call("c1", "apply", '{"input":"*** é"}'),
        {"role": "tool", "tool_call_id": "c1", "content": "Done"},
        call("c2", "local_shell", '{"command":["ls"]}'),
        {"role": "tool", "tool_call_id": "c2", "content": "a.py"},
        call("c3", "shell", '{"commands":["ls"]}'),
        {"role": "tool", "tool_call_id": "c3", "content": '[{"stdout":"b","stderr":""}]'},
        call("c4", "apply_patch", '{"type":"delete_file","path":"p"}'),
        {"role": "tool", "tool_call_id": "c4", "content": "completed"},
    ]


def test_images_are_kept_for_the_engine_to_refuse() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "look"}
    history = ask(
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "shot"}, image]},
    ).messages()
    assert history == [
        {"role": "user", "content": [text, part]},
        {"role": "tool", "tool_call_id": "c", "content": "shot"},
        {"role": "user", "content": [part]},
    ]


def test_reasoning_comes_back_from_whatever_the_client_kept() -> None:
    item = events_of(DIALECT.events(ask(USER, include=["reasoning.encrypted_content"]), CALLS))[-1]["response"][
        "output"
    ][0]
    assert base64.b64decode(item["encrypted_content"]).endswith(b"hm, so")
    for kept in (item, item | {"encrypted_content": None}, item | {"summary": []}):
        assert ask(USER, kept, USER).messages()[1]["reasoning"] == "hm, so"
    foreign = ask(USER, item | {"summary": [], "encrypted_content": "gAAA"}, USER)
    assert len(foreign.messages()) == 2 and foreign.dropped == ("item_reasoning",)


def test_what_only_their_servers_do_is_counted() -> None:
    request = ask(
        USER,
        {"type": "web_search_call", "id": "w", "status": "completed"},
        USER,
        tools=TOOLS,
        store=False,
        prompt_cache_key="k",
        include=["file_search_call.results"],
        brand_new=1,
    )
    assert [message["role"] for message in request.messages()] == ["user", "user"]
    fields = ("store", "prompt_cache_key", "unknown", "include")
    assert request.dropped == (*fields, "item_web_search_call", "tool_format", "tool_web_search")


def test_tools_become_functions_and_remember_what_they_were() -> None:
    tools = ask(USER, tools=TOOLS).tools
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.functions}
    assert list(functions) == ["bash", "apply", "agents__spawn", "agents__say", "local_shell"]
    assert functions["apply"]["parameters"]["required"] == ["input"]
    assert functions["agents__spawn"]["description"] == "helpers\n\nrun"
    assert functions["local_shell"]["parameters"]["properties"]["command"]["type"] == "array"
    assert tools.origin("bash") == Tool("function", "bash")
    assert tools.origin("agents__say") == Tool("custom", "say", "agents")


def test_every_kind_of_call_comes_back_in_its_own_shape_and_is_known_when_replayed() -> None:
    answer = said(
        ToolCall("c1", "bash", '{"cmd": "ls"}'),
        ToolCall("c2", "apply", '{"input": "*** é"}'),
        ToolCall("c3", "agents__spawn", "{}"),
        ToolCall("c4", "local_shell", '{"command": ["ls"], "timeout_ms": 9}'),
    )
    request = ask(USER, tools=TOOLS)
    items = DIALECT.answer(request, answer)["output"]
    assert [(item["type"], item["call_id"]) for item in items] == [
        ("function_call", "c1"),
        ("custom_tool_call", "c2"),
        ("function_call", "c3"),
        ("local_shell_call", "c4"),
    ]
    assert (items[1]["name"], items[1]["input"]) == ("apply", "*** é")
    assert (items[2]["name"], items[2]["namespace"]) == ("spawn", "agents")
    assert items[3]["action"] == {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 9}
    [replayed] = ask(*items).messages()
    calls = [
        (one["id"], one["function"]["name"], msgspec.json.decode(one["function"]["arguments"]))
        for one in replayed["tool_calls"]
    ]
    assert calls == [(one.id, one.name, msgspec.json.decode(one.arguments)) for one in answer.tool_calls]


def test_arguments_that_fit_no_shape_stay_as_they_are() -> None:
    answer = said(
        ToolCall("c1", "apply", "{bad"), ToolCall("c2", "local_shell", "{bad"), ToolCall("c3", "bash", "{bad")
    )
    custom, shell, function = DIALECT.answer(ask(USER, tools=TOOLS), answer)["output"]
    assert custom["input"] == "{bad"
    assert (shell["type"], shell["name"], shell["arguments"]) == ("function_call", "local_shell", "{bad")
    assert function["arguments"] == "{bad"


@pytest.mark.parametrize(
    ("choice", "canonical"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "bash"}, "bash"),
        ({"type": "custom", "name": "apply"}, "apply"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]}, "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "bash"}]}, "bash"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{}, {}]}, "required"),
    ],
)
def test_tool_choice(choice: Any, canonical: str) -> None:
    words = ("auto", "none", "required")
    expected = canonical if canonical in words else {"type": "function", "function": {"name": canonical}}
    assert ask(USER, tools=TOOLS, tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("wish", "canonical"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        ),
    ],
)
def test_text_format(wish: dict[str, Any], canonical: dict[str, Any]) -> None:
    request = ask(USER, text={"format": wish, "verbosity": "low"}, reasoning={"effort": "high"})
    assert request.response_format == canonical and request.forced == (wish["type"] != "text")
    assert request.dropped == ("text.verbosity",) and request.wishes == {"reasoning": {"effort": "high"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input: missing"),
        ({"input": []}, "no message"),
        ({"input": 5}, "input: must be a list"),
        ({"input": [5]}, "must be an object"),
        ({"input": [{"type": "hologram"}]}, "unsupported item type"),
        ({"input": [{"id": "x"}]}, "send each of them whole"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send each of them whole"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "send the messages"),
        ({"input": [{"role": "owner", "content": "x"}]}, "unknown role"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "unsupported part"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "needs a name"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id: not supported; .*whole history"),
        ({"input": "x", "conversation": "c"}, "whole history"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "function"}]}, "a name is missing"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "namespace"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "web_search"),
        ({"input": "x", "tool_choice": "maybe"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "instructions": [1]}, "instructions"),
    ],
)
def test_what_cannot_be_meant_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(DIALECT, body)
    assert caught.value.fault is Fault.INVALID


def test_harmless_values_of_refused_fields_pass() -> None:
    assert ask(USER, background=False, previous_response_id=None, conversation=None).dropped == ()


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_reads_answers(stream: bool) -> None:
    with serving(CALLS, said(ToolCall("c2", "apply", '{"input":"*** é"}')), ANSWER) as stub:
        client = openai.OpenAI(base_url=f"{stub.base_url}/v1", api_key="k", max_retries=0)

        def create(history: Any) -> Any:
            wish: Any = {"model": "m", "input": history, "tools": TOOLS}
            if not stream:
                return client.responses.create(**wish)
            with client.responses.stream(**wish) as events:
                return events.get_final_response()

        first = create("hello")
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output[0].summary[0].text, first.output_text, first.status) == ("hm, so", "see", "completed")
        assert [item.arguments for item in first.output[2:]] == ['{"cmd":"ls é"}', '{"cmd":"pwd"}']
        usage = first.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (20, 5, 7)
        assert 0 < usage.output_tokens_details.reasoning_tokens < 7
        results = [{"type": "function_call_output", "call_id": c, "output": c} for c in ("call_1", "call_2")]
        history: list[Any] = [USER, *(item.to_dict() for item in first.output), *results]
        second = create(history)
        assert (second.output[0].type, second.output[0].input) == ("custom_tool_call", "*** é")
        assert stub.requests[-1].messages()[1]["reasoning"] == "hm, so"
        assert create(history).output_text == "done"


def test_the_event_contract() -> None:
    events = events_of(DIALECT.events(ask(USER, tools=TOOLS), CALLS))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for event in events[2:-1]:
        assert event.get("item_id", output[event["output_index"]]["id"]) == output[event["output_index"]]["id"]


def test_a_cut_answer_is_incomplete() -> None:
    cut = msgspec.structs.replace(ANSWER, finish_reason="length")
    events = events_of(DIALECT.events(ask(USER), cut))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message() -> None:
    [item] = DIALECT.answer(ask(USER), msgspec.structs.replace(ANSWER, text=""))["output"]
    assert item["content"][0]["text"] == ""
    assert ask(USER, item, USER).messages()[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        (Fault.INVALID, openai.BadRequestError, None),
        (Fault.CONTEXT, openai.BadRequestError, "context_length_exceeded"),
        (Fault.UNAUTHORIZED, openai.AuthenticationError, "invalid_api_key"),
        (Fault.NOT_FOUND, openai.NotFoundError, "not_found"),
        (Fault.RATE_LIMITED, openai.RateLimitError, "rate_limit_exceeded"),
        (Fault.OVERLOADED, openai.InternalServerError, "overloaded"),
        (Fault.INTERNAL, openai.InternalServerError, "internal_error"),
    ],
)
def test_the_sdk_knows_errors(fault: Fault, kind: type[openai.APIStatusError], code: str | None) -> None:
    with serving(ApiError(fault, "no")) as stub:
        client = openai.OpenAI(base_url=f"{stub.base_url}/v1", api_key="k", max_retries=0)
        with pytest.raises(kind, match="no") as caught:
            client.responses.create(model="m", input="x")
        assert caught.value.code == code


def test_an_error_in_a_started_stream() -> None:
    events = events_of(DIALECT.stream_error(ApiError(Fault.CONTEXT, "too long")))
    assert [event["type"] for event in events] == ["error", "response.failed"]
    assert events[0]["error"]["param"] == "input"
    assert events[1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}


def test_the_memo_tells_instructions_from_input() -> None:
    memo = Memo()
    request = parse(DIALECT, {"input": "same", "instructions": "same"}, memo=memo)
    assert [atoms[0].role for atoms in request.atoms] == ["system", "user"]
