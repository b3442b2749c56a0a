"""Stage collect: the real harness in its sandbox, the scripted teacher as its model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from pipeline.harness.base import DEFAULT_ROOT
from pipeline.harness.install import installed
from pipeline.stages.collect import CollectConfig, TeacherServer, collect
from pipeline.tasks.generate import draw_tasks
from pipeline.tasks.teacher import Teacher, conversation

needs_pi = pytest.mark.skipif(not installed("pi", Path(DEFAULT_ROOT).expanduser()), reason="Pi is not installed")


@pytest.mark.slow
@needs_pi
def test_every_call_of_a_real_run_is_recorded_with_its_reward(tmp_path: Path) -> None:
    config = CollectConfig(rollouts=2, teacher=Teacher(lazy=0.0, verify=1.0))
    rows = pq.read_table(asyncio.run(collect(config, tmp_path / "runs.parquet"))).to_pylist()
    assert [row["call"] for row in rows] == [0, 1, 2, 3, 4] * 2
    assert all(row["reward"] == 1.0 and row["harness"] == "pi" for row in rows)
    shapes = [[message["role"] for message in json.loads(row["messages"])] for row in rows[:5]]
    assert shapes == [["system", "user", *["assistant", "tool"] * calls] for calls in range(5)]
    assert [file.name for file in tmp_path.iterdir()] == ["runs.parquet"]


@pytest.mark.slow
@needs_pi
def test_a_lazy_run_earns_nothing(tmp_path: Path) -> None:
    config = CollectConfig(rollouts=1, teacher=Teacher(lazy=1.0))
    rows = pq.read_table(asyncio.run(collect(config, tmp_path / "runs.parquet"))).to_pylist()
    assert [row["reward"] for row in rows] == [0.0]


def test_the_teacher_answers_whole_or_streamed() -> None:
    task = draw_tasks("train", 1, 0)[0]
    server = TeacherServer(Teacher(lazy=0.0))
    client = TestClient(server.app)
    asked = {"messages": conversation("s", task, ())[:2], "tools": []}
    whole = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    events = client.post("/v1/chat/completions", json=asked | {"stream": True}).text.split("\n\n")
    delta = json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]
    assert [call.pop("index") for call in delta["tool_calls"]] == [0]
    assert delta == whole["message"] and events[2] == "data: [DONE]"
    assert len(server.requests) == 2


def test_a_request_without_a_task_is_told_so() -> None:
    server = TeacherServer(Teacher())
    answer = TestClient(server.app).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 400 and "no word task" in answer.json()["error"]["message"]
    assert server.requests == []
