"""Properties of all dialects: requests lose nothing, streams equal answers, replays are known, junk is refused."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from dialect_clients import CLIENTS, Client
from dialect_helpers import ANSWER, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.canonical import Memo
from pipeline.capture.dialects.base import Answer, ApiError, Fault, ToolCall
from pipeline.capture.matcher import Match, Matcher

EACH = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.dialect.name)
BRISK = settings(max_examples=25, deadline=None)
CALL_IDS = ("call_0", "call_1", "call_2")

words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(str.strip)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | words
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
arguments = st.dictionaries(words, values, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """Answers as an engine's parser gives them, with arguments in any spelling."""
    calls = []
    for call_id in CALL_IDS[: draw(st.integers(0, 3))]:
        name = draw(st.sampled_from(["bash", "read", "apply", "agents__spawn"]))
        value = {"input": draw(words)} if name == "apply" else draw(arguments)
        text = json.dumps(value, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
        calls.append(ToolCall(call_id, name, text))
    text = draw(words) if draw(st.booleans()) or not calls else ""
    reasoning = draw(words) if draw(st.booleans()) else ""
    finish = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    return msgspec.structs.replace(
        ANSWER, text=text, reasoning=reasoning, tool_calls=tuple(calls), finish_reason=finish
    )


def broken(answer: Answer) -> Answer:
    """The answer with arguments that are no JSON."""
    calls = tuple(msgspec.structs.replace(call, arguments="{broken") for call in answer.tool_calls)
    return msgspec.structs.replace(answer, tool_calls=calls)


def whole(client: Client, answer: Answer) -> dict[str, Any]:
    return client.dialect.answer(parse(client.dialect, client.body(client.user("hi")), client.path), answer)


@EACH
@given(answer=answers(), sse=st.booleans(), malformed=st.booleans())
@BRISK
def test_a_stream_spells_out_the_whole_answer(client: Client, answer: Answer, sse: bool, malformed: bool) -> None:
    request = parse(client.dialect, client.body(client.user("hi")), client.path, "alt=sse" if sse else "")
    given_answer = broken(answer) if malformed else answer
    stream = client.dialect.events(request, given_answer)
    assert client.read(stream) == client.dialect.answer(request, given_answer)


@EACH
@given(turns=st.lists(st.tuples(words, answers(), st.lists(words, min_size=3, max_size=3)), min_size=1, max_size=3))
@BRISK
def test_a_request_loses_nothing_on_the_way_to_canonical_form(client: Client, turns: Any) -> None:
    history: list[Any] = []
    expected: list[tuple[Any, ...]] = []
    for turn, (text, answer, outputs) in enumerate(turns):
        renamed = tuple(msgspec.structs.replace(call, id=f"{call.id}_{turn}") for call in answer.tool_calls)
        answer = msgspec.structs.replace(answer, tool_calls=renamed)
        history += client.user(text) + client.replays(whole(client, answer))[0] + client.results(answer, outputs)
        calls = [(call.id, call.name, json.loads(call.arguments)) for call in renamed]
        expected += [("user", text), ("assistant", answer.text or None, answer.reasoning, calls)]
        expected += [("tool", call.id, output) for call, output in zip(renamed, outputs, strict=False)]
    request = parse(client.dialect, client.body(history), client.path)
    assert [flat(message) for message in request.messages()] == expected
    assert request.tools and len(request.tools.functions) == 4 and request.dropped == ()
    assert [message for item in range(len(request.items)) for message in request.messages(item)[:1]]


def flat(message: dict[str, Any]) -> tuple[Any, ...]:
    role = message["role"]
    if role == "tool":
        return role, message["tool_call_id"], message["content"]
    if role == "user":
        return role, message["content"]
    functions = [(call["id"], call["function"]) for call in message.get("tool_calls", [])]
    calls = [(call_id, each["name"], json.loads(each["arguments"])) for call_id, each in functions]
    return role, message["content"] or None, message.get("reasoning", ""), calls


def found(client: Client, answer: Answer, replay: list[Any], memo: Memo) -> Match:
    """What the matcher says of a history in which ``replay`` stands where ``answer`` was given."""
    asked = parse(client.dialect, client.body(client.user("hi")), client.path, memo=memo)
    nodes: list[Any] = []
    matcher = Matcher(nodes)
    nodes.append(SimpleNamespace(call_id=0, answer=answer, chain=matcher.walk(b"", asked.atoms).chain, delivered=True))
    matcher.add(nodes[0])
    history = [*client.user("hi"), *replay, *client.results(answer, ["out"] * 3), *client.user("go on")]
    return matcher.walk(b"", parse(client.dialect, client.body(history), client.path, memo=memo).atoms)


@EACH
@given(answer=answers())
@BRISK
def test_every_way_of_replaying_an_answer_is_known(client: Client, answer: Answer) -> None:
    memo = Memo()
    for replay in client.replays(whole(client, answer)):
        match = found(client, answer, replay, memo)
        assert match.parent == 0 and not match.rewritten, replay


@EACH
@given(answer=answers().filter(lambda answer: bool(answer.tool_calls)))
@BRISK
def test_malformed_calls_are_known_by_their_ids(client: Client, answer: Answer) -> None:
    if client.has_text_arguments:
        for replay in client.replays(whole(client, broken(answer))):
            assert found(client, broken(answer), replay, Memo()).parent == 0, replay


@EACH
@given(answer=answers())
@BRISK
def test_another_answer_is_never_taken_for_ours(client: Client, answer: Answer) -> None:
    forged = client.forged(whole(client, answer))
    assert len(forged) >= 2
    for replay in forged:
        assert found(client, answer, replay, Memo()).parent is None, replay


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places(each, (*path, key)))]


@EACH
@given(answer=answers(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_junk_anywhere_is_read_or_refused(client: Client, answer: Answer, data: st.DataObject) -> None:
    history = [*client.user("hi"), *client.replays(whole(client, answer))[0], *client.results(answer, ["out"] * 3)]
    body = copy.deepcopy(client.body(history))
    *way, last = data.draw(st.sampled_from([place for place in places(body) if place]))
    target: Any = body
    for key in way:
        target = target[key]
    target[last] = data.draw(values | st.just([[]]) | st.just({"type": ["x"]}) | st.just([{"type": {}}]))
    try:
        parse(client.dialect, body, client.path).messages()
    except ApiError as error:
        assert error.fault is Fault.INVALID and error.message
