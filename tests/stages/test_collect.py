"""Stage collect: the real harness in its sandbox, the real proxy in text mode, the scripted teacher behind it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from stage_helpers import call
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.harness.base import harness_root
from pipeline.harness.install import installed
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict
from pipeline.stages import collect as module
from pipeline.stages.collect import as_it_should, collect, recording_path, run_collect
from pipeline.stages.teachers import TeacherServer
from pipeline.tasks.generate import draw_tasks, generate_tasks
from pipeline.tasks.harbor import load_tasks
from pipeline.tasks.teacher import Teacher, call_message, conversation

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
        run_collect(replace(config, collect=replace(config.collect, tasks=3)))


KEY = "correct-horse-battery-staple"
LOOK_AROUND = "env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'"


class Stranger(TeacherServer):
    """The same scripted teacher, but nobody knows what it intends; it wants a key, and looks for it first."""

    saw: str = ""

    async def _chat(self, request: Request) -> Response:
        messages = (await request.json())["messages"]
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        self.saw += json.dumps(messages)
        started = any(message["role"] == "assistant" for message in messages)
        answer = {"role": "assistant", "content": "hello"}
        if len(messages) > 1:
            answer = self.teacher.answer(messages[:2] + messages[4:]) if started else call_message(LOOK_AROUND, "c")
        return JSONResponse({"choices": [{"message": answer, "finish_reason": "stop"}]})


@pytest.mark.slow
@needs_pi
def test_a_teacher_at_a_url_is_kept_only_where_it_solves_and_its_key_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(lazy: float) -> list[dict[str, Any]]:
        stranger = Stranger(Teacher(lazy=lazy, verify=0.0))
        async with stranger.serving() as url:
            place = tmp_path / str(lazy)
            words = [f"collect.teacher_url={url}/v1", "collect.api_key_env=MY_TEACHER"]
            config = settings(place, "collect.tasks=2", *words)
            try:
                await collect(config, ["pi"])
            finally:
                assert "HOME=" in stranger.saw, "the agent looked at its environment"
                assert KEY not in stranger.saw
            return rows_of(config)

    monkeypatch.setenv("MY_TEACHER", KEY)
    assert [row["reward"] for row in asyncio.run(run(0.0))] == [1.0] * 6
    with pytest.raises(UserError, match=r"came to nothing; the last one: train-000\d in pi ended as unsolved"):
        asyncio.run(run(1.0))
    assert not list((tmp_path / "1.0" / "collect").iterdir())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


class Killed(BaseException):
    pass


def solved(spec: GroupSpec, index: int) -> Outcome:
    return Outcome.SOLVED


def said(spec: GroupSpec, index: int) -> str:
    return f"{spec.task.task_id} {index}"


class FakeWorkshop:
    """Rollouts of one call with one tool call, that end as ``ends`` says and hold the answer that ``says`` gives."""

    def __init__(
        self,
        ends: Callable[[GroupSpec, int], Outcome] = solved,
        says: Callable[[GroupSpec, int], str] = said,
        tools: int = 1,
    ) -> None:
        self.ends, self.says, self.tools = ends, says, tools
        self.ran: list[tuple[str, str, int]] = []

    async def roll_out_traced(self, spec: GroupSpec, index: int) -> tuple[RolloutRecord, Trace]:
        self.ran.append((spec.harness, spec.task.task_id, index))
        await asyncio.sleep(0)
        outcome = self.ends(spec, index)
        verdict = Verdict(None, 1.0 if outcome is Outcome.SOLVED else 0.25, 0, "because")
        version = PolicyVersion(0, 0)
        record = RolloutRecord(
            "r", "g", 0, spec.task.task_id, spec.harness, outcome, verdict, (), version, version, 1, 0, 0, 0, 0, 1.0
        )  # fmt: skip
        answer = {"role": "assistant", "content": self.says(spec, index)}
        entry = {"messages": [{"role": "user", "content": "do"}], "tools": [], "answer": answer}
        return record, Trace("s", (call(0, None, self.tools),), "chat", {}, (entry,))


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeWorkshop], FakeWorkshop]:
    """Puts a fake workshop in the place of the real one."""

    def use(fake: FakeWorkshop) -> FakeWorkshop:
        @asynccontextmanager
        async def workshop(*_: object) -> AsyncIterator[FakeWorkshop]:
            yield fake

        async def greeted(*_: object) -> None:
            pass

        monkeypatch.setattr(module, "_workshop", workshop)
        monkeypatch.setattr(module, "greet", greeted)
        return fake

    return use


Use = Callable[[FakeWorkshop], FakeWorkshop]
TEACHER = ["collect.teacher_url=http://teacher/v1", "concurrency=1"]


def names(config: Config, harness: str = "pi") -> list[str]:
    return [row["rollout"] for row in pq.read_table(recording_path(config, harness)).to_pylist()]


def test_a_killed_recording_goes_on_with_the_rollouts_that_it_lacks(tmp_path: Path, at_work: Use) -> None:
    def ends(spec: GroupSpec, index: int) -> Outcome:
        if len(fake.ran) == 3:
            raise Killed
        return Outcome.INFRASTRUCTURE if len(fake.ran) == 2 else Outcome.SOLVED

    fake = at_work(FakeWorkshop(ends))
    config = settings(tmp_path, "collect.tasks=4", *TEACHER)
    with pytest.raises(Killed):
        asyncio.run(collect(config, ["pi"]))
    asyncio.run(collect(config, ["pi"]))
    counts = Counter(task for _, task, _ in fake.ran)
    assert counts == {"train-0000": 1, "train-0001": 2, "train-0002": 2, "train-0003": 1}, "spoilt, not ended: again"
    assert names(config) == [f"pi--train-{number:04d}--0" for number in range(4)]
    assert [path.name for path in (tmp_path / "collect").iterdir()] == ["pi.parquet"]


def test_harnesses_take_turns_and_each_has_a_recording(tmp_path: Path, at_work: Use) -> None:
    fake = at_work(FakeWorkshop())
    config = settings(tmp_path, "collect.tasks=2", "collect.attempts=2", *TEACHER)
    asyncio.run(collect(config, ["pi", "codex"]))
    assert [harness for harness, _, index in fake.ran if index == 0] == ["pi", "codex"] * 2
    assert len(fake.ran) == 8 == len(set(fake.ran))
    for harness in ("pi", "codex"):
        assert names(config, harness) == [f"{harness}--train-000{task}--{index}" for task in (0, 1) for index in (0, 1)]


def test_attempts_at_a_task_end_when_enough_are_kept(tmp_path: Path, at_work: Use) -> None:
    def ends(spec: GroupSpec, index: int) -> Outcome:
        return Outcome.SOLVED if spec.task.task_id.endswith("0") or index == 2 else Outcome.UNSOLVED

    fake = at_work(FakeWorkshop(ends))
    config = settings(tmp_path, "collect.tasks=2", "collect.attempts=4", "collect.keep=1", *TEACHER)
    asyncio.run(collect(config, ["pi"]))
    assert Counter(task for _, task, _ in fake.ran) == {"train-0000": 1, "train-0001": 3}
    assert names(config) == ["pi--train-0000--0", "pi--train-0001--2"]


def test_the_same_answers_to_the_same_task_are_kept_once(
    tmp_path: Path, at_work: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    at_work(FakeWorkshop(says=lambda spec, index: "the same" if index < 2 else "other"))
    config = settings(tmp_path, "collect.tasks=2", "collect.attempts=3", *TEACHER)
    asyncio.run(collect(config, ["pi"]))
    assert names(config) == [f"pi--train-000{task}--{index}" for task in (0, 1) for index in (0, 2)]
    assert "kept 4 of 6 rollouts (2 the same as another)" in capsys.readouterr().out


def test_a_rollout_with_a_credential_is_dropped_and_the_credential_is_nowhere(
    tmp_path: Path, at_work: Use, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["fine", "it is correct-horse-battery", "a variable-of-mine here", "AKIA" + "ABCDEFGHIJKLMNOP"]
    at_work(FakeWorkshop(says=lambda spec, index: texts[int(spec.task.task_id[-1])]))
    monkeypatch.setenv("TEACHER_WORD", "correct-horse-battery")
    monkeypatch.setenv("SOME_TOKEN", "variable-of-mine")
    config = settings(tmp_path, "collect.tasks=4", "collect.api_key_env=TEACHER_WORD", *TEACHER)
    asyncio.run(collect(config, ["pi"]))
    out = capsys.readouterr().out
    assert names(config) == ["pi--train-0000--0"]
    for kind in ("the teacher's key", "value of $SOME_TOKEN", "AWS access key"):
        assert f"1 held a credential ({kind})" in out
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) + out.encode()
    assert not [text for text in texts[1:] if text.split()[-1].encode() in written or text.encode() in written]


def test_a_teacher_that_never_calls_a_tool_is_told_soon(tmp_path: Path, at_work: Use) -> None:
    fake = at_work(FakeWorkshop(lambda spec, index: Outcome.UNSOLVED, tools=0))
    with pytest.raises(UserError, match=r"4 rollouts of pi, and no tool call .* --enable-auto-tool-choice"):
        asyncio.run(collect(settings(tmp_path, "collect.tasks=20", *TEACHER), ["pi"]))
    assert len(fake.ran) <= 5


@pytest.mark.parametrize(("least", "kept"), [(0.2, 1), (0.5, 0)])
def test_partly_solved_tasks_are_kept_above_the_least_reward(
    tmp_path: Path, at_work: Use, least: float, kept: int
) -> None:
    at_work(FakeWorkshop(lambda spec, index: Outcome.UNSOLVED))
    config = settings(tmp_path, "collect.tasks=1", f"collect.min_reward={least}", *TEACHER)
    if kept:
        asyncio.run(collect(config, ["pi"]))
        assert [row["reward"] for row in rows_of(config)] == [0.25]
    else:
        with pytest.raises(
            UserError, match="came to nothing; the last one: train-0000 in pi ended as unsolved because"
        ):
            asyncio.run(collect(config, ["pi"]))
        assert not list((tmp_path / "collect").iterdir())


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
        assert [as_it_should(record, task, teacher, 1.0) for teacher in (idle, busy, None)] == kept


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
        pytest.param(["collect.tasks=-1"], "collect.tasks=-1 must be at least 0", marks=needs_pi),
        pytest.param(["collect.attempts=0"], "collect.attempts=0 must be at least 1", marks=needs_pi),
        pytest.param(["collect.min_reward=0"], "min_reward=0.0 must lie in", marks=needs_pi),
        pytest.param(["collect.teacher_url=http://me:pass@h/v1"], "must hold no password", marks=needs_pi),
        pytest.param(["collect.teacher_url=http://127.0.0.1:9/v1"], "no answer", marks=needs_pi),
        pytest.param(["collect.teacher_url=ftp://x"], "ftp://x is no http", marks=needs_pi),
        pytest.param(["tasks=harbor", "tasks.train=/x", "tasks.test=/x"], "teacher_url", marks=needs_pi),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(tmp_path: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        run_collect(settings(tmp_path / "run", *words))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (401, "", "refuses the key in MY_TEACHER .status 401"),
        (
            404,
            '{"error": {"message": "no model\\n x"}}',
            "does not serve collect.teacher_model=m with tools .status 404.: no",
        ),
        (400, f"auto tool choice is off ({KEY})", r"status 400.: auto tool choice is off \(…\)"),
        (200, "<html>", "status 200.: <html>"),
    ],
)
def test_a_teacher_that_cannot_serve_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, body: str, complaint: str
) -> None:
    seen: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body.encode())}\r\n\r\n{body}".encode())
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            words = ["collect.api_key_env=MY_TEACHER", "collect.teacher_model=m"]
            await collect(settings(tmp_path, f"collect.teacher_url=http://127.0.0.1:{port}", *words), ["pi"])

    monkeypatch.setenv("MY_TEACHER", KEY)
    with pytest.raises(UserError, match=complaint) as failure:
        asyncio.run(run())
    assert f"Bearer {KEY}" in seen[0] and "POST /v1/chat/completions" in seen[0] and KEY not in str(failure.value)
    assert "\n" not in str(failure.value)
