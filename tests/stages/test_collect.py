"""Stage collect: the real harness in its sandbox, the real proxy in text mode, the scripted teacher behind it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.harness.base import harness_root
from pipeline.harness.install import installed
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict
from pipeline.stages import collect as module
from pipeline.stages.collect import TeacherServer, as_it_should, collect, recording_path, run_collect
from pipeline.tasks.generate import draw_tasks, generate_tasks
from pipeline.tasks.harbor import load_tasks
from pipeline.tasks.teacher import Teacher, conversation

ROOT = Path(__file__).resolve().parents[2]
needs_pi = pytest.mark.skipif(not installed("pi", harness_root()), reason="Pi is not installed")


def settings(run_dir: Path, *words: str) -> Config:
    return compose_config(["+experiment=warm_start", f"run_dir={run_dir}", "engine.shards=1", *words])


def rows_of(config: Config) -> list[dict[str, Any]]:
    return pq.read_table(recording_path(config, "pi")).to_pylist()


def assert_in_no_file(row: dict[str, Any]) -> None:
    """A harness's words belong to its makers: no file of the repository holds a line of its prompt or of its tools."""
    descriptions = [tool["function"]["description"] for tool in json.loads(row["tools"])]
    words = [json.loads(row["messages"])[0]["content"], *descriptions]
    lines = [line.strip().encode() for text in words for line in text.splitlines() if len(line) > 50]
    assert len(lines) > 10
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 100
    assert [path.name for path in files if path.suffix in (".parquet", ".arrow", ".zst", ".gz", ".zip")] == []
    for path in files:
        data = path.read_bytes()
        assert not [line for line in lines if line in data], path


@pytest.mark.slow
@needs_pi
def test_every_call_of_a_real_run_is_recorded_with_its_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, "collect.tasks=2", "collect.lazy=0", "collect.verify=1")
    assert run_collect(config) == 0
    assert "kept 2 of 2" in capsys.readouterr().out
    rows = rows_of(config)
    assert [row["call"] for row in rows] == [0, 1, 2, 3, 4] * 2
    assert all(row["reward"] == 1.0 and row["harness"] == "pi" for row in rows)
    shapes = [[message["role"] for message in json.loads(row["messages"])] for row in rows[:5]]
    assert shapes == [["system", "user", *["assistant", "tool"] * calls] for calls in range(5)]
    answers = [json.loads(row["answer"]) for row in rows[:5]]
    assert [len(answer.get("tool_calls", [])) for answer in answers] == [1, 1, 1, 1, 0]
    assert {tool["function"]["name"] for tool in json.loads(rows[0]["tools"])} >= {"bash", "read"}

    assert_in_no_file(rows[0])

    assert run_collect(config) == 0  # a whole recording is not repeated
    assert "kept" not in capsys.readouterr().out and rows_of(config) == rows
    with pytest.raises(UserError, match="other settings"):
        run_collect(replace(config, collect=replace(config.collect, rollouts=3)))


@pytest.mark.slow
@needs_pi
def test_a_teacher_at_a_url_is_kept_only_where_it_solves(tmp_path: Path) -> None:
    """The same scripted server, but as a stranger: nobody knows what it intends."""

    async def run(lazy: float) -> list[dict[str, Any]]:
        async with TeacherServer(Teacher(lazy=lazy, verify=0.0)).serving() as url:
            place = tmp_path / str(lazy)
            config = settings(place, "collect.tasks=2", f"collect.teacher_url={url}/v1")
            await collect(config, "pi", recording_path(config, "pi"))
            return rows_of(config)

    assert [row["reward"] for row in asyncio.run(run(0.0))] == [1.0] * 4
    with pytest.raises(UserError, match="came to nothing; the last one: train-0001 ended as unsolved"):
        asyncio.run(run(1.0))
    assert not list((tmp_path / "1.0" / "collect").iterdir())


def test_a_killed_recording_goes_on_with_the_rollouts_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    class Killed(BaseException):
        pass

    class FakeWorkshop:
        async def roll_out_traced(self, spec: GroupSpec, index: int) -> tuple[RolloutRecord, Trace]:
            ran.append(spec.task.task_id)
            if len(ran) == 3:
                raise Killed
            outcome = Outcome.INFRASTRUCTURE if len(ran) == 2 else Outcome.SOLVED
            version, verdict = PolicyVersion(0, 0), Verdict(None, None, 0)
            record = RolloutRecord(
                "r", "g", 0, spec.task.task_id, "pi", outcome, verdict, (), version, version, 1, 0, 0, 0, 0, 1.0
            )  # fmt: skip
            return record, Trace("s", (), "chat", {})

    @asynccontextmanager
    async def workshop(*_: object) -> AsyncIterator[FakeWorkshop]:
        yield FakeWorkshop()

    monkeypatch.setattr(module, "_workshop", workshop)
    row = dict.fromkeys(("messages", "tools", "answer"), "{}") | {"harness": "pi", "call": 0, "reward": 1.0}
    monkeypatch.setattr(module, "_rows", lambda record, trace: [row | {"task_id": record.task_id}])
    config = settings(tmp_path, "collect.tasks=4", "collect.lazy=0", "concurrency=1")
    with pytest.raises(Killed):
        asyncio.run(collect(config, "pi", recording_path(config, "pi")))
    asyncio.run(collect(config, "pi", recording_path(config, "pi")))
    assert [ran.count(f"train-{number:04d}") for number in range(4)] == [1, 2, 2, 1], "spoilt, or not ended: again"
    assert [row["task_id"] for row in rows_of(config)] == [f"train-{number:04d}" for number in range(4)]
    assert [path.name for path in (tmp_path / "collect").iterdir()] == ["pi.parquet"]


def test_only_what_was_meant_is_kept(tmp_path: Path) -> None:
    task = load_tasks(generate_tasks(tmp_path, "train", 1, 0))[0]
    idle, busy = Teacher(lazy=1.0), Teacher(lazy=0.0)
    wanted = {
        Outcome.SOLVED: [False, True, True],
        Outcome.UNSOLVED: [True, False, False],
        Outcome.AGENT_TIMEOUT: [False, False, False],
        Outcome.INFRASTRUCTURE: [False, False, False],
    }
    for outcome, kept in wanted.items():
        version, verdict = PolicyVersion(0, 0), Verdict(None, None, 0)
        record = RolloutRecord(
            "r", "g", 0, "t", "pi", outcome, verdict, (), version, version, 1, 0, 0, 0, 0, 1.0
        )  # fmt: skip
        assert [as_it_should(record, task, teacher) for teacher in (idle, busy, None)] == kept


async def ask(messages: list[dict[str, Any]]) -> httpx.Response:
    async with TeacherServer(Teacher(lazy=0.0)).serving() as url, httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{url}/v1/chat/completions", json={"messages": messages})


def test_the_teacher_answers_over_http() -> None:
    task = draw_tasks("train", 1, 0)[0]
    choice = asyncio.run(ask(conversation("s", task, ())[:2])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert task.answer in choice["message"]["tool_calls"][0]["function"]["arguments"]


def test_a_request_without_a_task_is_told_so() -> None:
    answer = asyncio.run(ask([{"role": "user", "content": "hi"}]))
    assert answer.status_code == 400 and "no word task" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mix.harnesses=[claude-code]", "harness.home=/nowhere"], "claude-code .* is not installed in /nowhere"),
        (["mix.harnesses=[nano]"], "unknown harness 'nano'"),
        pytest.param(["collect.tasks=0"], "collect.tasks=0 must be at least 1", marks=needs_pi),
        pytest.param(["collect.teacher_url=http://127.0.0.1:9/v1"], "no answer", marks=needs_pi),
        pytest.param(["collect.teacher_url=ftp://x"], "ftp://x: no answer", marks=needs_pi),
        pytest.param(["tasks=harbor", "tasks.train=/x", "tasks.test=/x"], "teacher_url", marks=needs_pi),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(tmp_path: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        run_collect(settings(tmp_path / "run", *words))
    assert not list(tmp_path.rglob("*.parquet"))


@needs_pi
def test_a_refused_key_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 X\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            config = settings(tmp_path, f"collect.teacher_url=http://127.0.0.1:{port}")
            await collect(config, "pi", recording_path(config, "pi"))

    monkeypatch.setenv("YOKE_UPSTREAM_KEY", "s3cret")
    with pytest.raises(UserError, match="refuses the key in YOKE_UPSTREAM_KEY") as failure:
        asyncio.run(run())
    assert "s3cret" in seen[0] and "GET /v1/models" in seen[0] and "s3cret" not in str(failure.value)
