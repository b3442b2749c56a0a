"""Recordings: what of a trace is kept, when two rollouts are the same, and others' data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stage_helpers import call, record

from pipeline.config import UserError
from pipeline.records import Outcome, Trace
from pipeline.stages.recording import (
    about,
    fingerprint,
    read_rollouts,
    recordings_in,
    rows_of,
    write_rows,
)

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"limit": {"default": None}}}}}


def said(command: str, call_id: str = "call_0", **more: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}], **more}


def entry(answer: dict[str, Any], *before: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "do"}, *before]
    return {"messages": messages, "tools": [TOOL], "answer": answer}


def rows(*answers: dict[str, Any], rollout: str = "pi--t0--0") -> list[dict[str, Any]]:
    calls = tuple(call(number, None) for number in range(len(answers)))
    trace = Trace("s", calls, transcript=tuple(entry(answer) for answer in answers))
    return rows_of(rollout, record(Outcome.SOLVED), trace)


def test_only_answers_worth_learning_are_kept() -> None:
    changes = [{}, {"delivered": False}, {"foreign": True}, {"malformed": True}, {"finish_reason": "length"}, {}]
    calls = tuple(replace(call(number, None), **change) for number, change in enumerate(changes))
    trace = Trace("s", calls, transcript=tuple(entry(said(str(number))) for number in range(len(calls))))
    kept = rows_of("r", record(Outcome.SOLVED), trace)
    assert [row["call"] for row in kept] == [0, 5]
    assert {row["rollout"] for row in kept} == {"r"}


def test_what_is_written_is_read_rollout_by_rollout(tmp_path: Path) -> None:
    first, second = rows(said("a"), said("b")), rows(said("c"), rollout="pi--t0--1")
    write_rows(tmp_path / "pi.parquet", [first, second], {"settings": "x"})
    assert about(tmp_path / "pi.parquet")["settings"] == "x"
    read = list(read_rollouts(tmp_path / "pi.parquet"))
    assert [[turn.answer for turn in turns] for turns in read] == [[said("a"), said("b")], [said("c")]]
    assert read[0][0].tools == [TOOL], "a null in a tool's schema is part of it"
    assert read[0][0].messages == entry(said("a"))["messages"]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (said("a", call_id="another"), True),
        (said("b"), False),
        (said("a", content="I  look.\n"), False),
        (said("a", reasoning="hm"), False),
    ],
)
def test_rollouts_are_the_same_when_the_teacher_said_the_same(other: dict[str, Any], same: bool) -> None:
    assert (fingerprint(rows(other)) == fingerprint(rows(said("a"), rollout="x"))) is same


def test_white_space_and_the_spelling_of_arguments_do_not_count() -> None:
    spelt = said("a", content="I look.")
    spelt["tool_calls"][0]["function"]["arguments"] = '{ "command":\n"a"}'
    assert fingerprint(rows(spelt)) == fingerprint(rows(said("a", content=" I\n look. ")))


CONVERSATION = [
    {"role": "user", "content": "do"},
    said("a"),
    {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
    {"role": "assistant", "content": "Done."},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_conversation_of_others_is_a_turn_for_each_answer(tmp_path: Path, suffix: str) -> None:
    path, data = tmp_path / f"theirs.{suffix}", [{"messages": CONVERSATION, "tools": None}] * 2
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in data))
    else:
        pq.write_table(pa.Table.from_pylist(data), path)  # nested columns, filled up with nulls
    read = list(read_rollouts(path))
    assert len(read) == 2
    first, last = read[0]
    assert first.messages == CONVERSATION[:1] and last.messages[1]["tool_calls"] == CONVERSATION[1]["tool_calls"]
    assert last.answer == CONVERSATION[3] and first.tools == []


def test_what_cannot_be_read_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recordings"):
        recordings_in(tmp_path)
    with pytest.raises(UserError, match="no recordings"):
        recordings_in(tmp_path / "gone.parquet")
    for name, text in (("a.jsonl", "{"), ("b.jsonl", '{"text": "no messages"}'), ("c.parquet", "no parquet")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="Chat Completions form"):
            list(read_rollouts(tmp_path / name))
    assert [path.name for path in recordings_in(tmp_path)] == ["a.jsonl", "b.jsonl", "c.parquet"]
