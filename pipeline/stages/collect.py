"""Stage collect: a teacher's rollouts through the real harness, its sandbox and the proxy in text mode.

The teacher is any Chat Completions API; by default a scripted one is served here. What it leaves is verified like any
rollout's workspace, and every model request of a rollout that went as it should is kept with the reward it earned.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.capture.control import UPSTREAM_KEY
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.capture.text import api_base, trusts_environment
from pipeline.config import Config, UserError
from pipeline.harness.base import get_harness, harness_root
from pipeline.records import GroupSpec, Outcome, RolloutRecord, Trace
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.rollout import Workshop
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import HarborTask, load_tasks
from pipeline.tasks.teacher import Teacher, parse_task

SCRIPTED_HARNESS = "pi"  # whose tools the scripted teacher calls
TELL_EVERY_S = 10.0
STOP_S = 10.0
GREET_S = 20.0
SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("harness", pa.string()),
        ("call", pa.int32()),
        ("reward", pa.float64()),
        ("messages", pa.string()),  # JSON, as are the next two
        ("tools", pa.string()),
        ("answer", pa.string()),
    ]
)


def run_collect(config: Config) -> int:
    """Record each harness of the mix in ``<run_dir>/collect/<harness>.parquet``; a whole recording is not repeated.

    Raises UserError for a wrong setting, or when no rollout of the teacher was worth keeping.
    """
    for harness in config.mix.harnesses:
        _check(config, harness)
        out = recording_path(config, harness)
        if config.fresh:
            out.unlink(missing_ok=True)
        if not out.exists():
            asyncio.run(collect(config, harness, out))
        elif _settings_of(out) != _settings(config):
            raise UserError(f"{out} was recorded with other settings: fresh=true records again")
        _say(f"{out}: {pq.read_metadata(out).num_rows} model requests of {harness}")
    return 0


def recording_path(config: Config, harness: str) -> Path:
    """Where a harness's recording lies."""
    return Path(config.run_dir).absolute() / "collect" / f"{harness}.parquet"


def scripted_teacher(config: Config) -> Teacher:
    """The scripted teacher of a configuration."""
    return Teacher(lazy=config.collect.lazy, verify=config.collect.verify, seed=config.seed)


async def collect(config: Config, harness: str, out: Path) -> None:
    """Roll out one harness on ``collect.rollouts`` training tasks and publish the requests of the kept ones.

    Parquet, one row a model request, columns as in SCHEMA. Raises UserError when nothing was kept.
    """
    teacher = None if config.collect.upstream_url else scripted_teacher(config)
    parts = _parts(config, out)
    async with _upstream(config, teacher) as url, _workshop(config, url) as workshop:
        finished = await _roll_out_all(config, workshop, harness, teacher, parts)
    kept = [part["rows"] for part in finished if part["rows"]]
    _say(f"collect {harness}: kept {len(kept)} of {len(finished)} rollouts")
    if not kept:
        shutil.rmtree(parts, ignore_errors=True)  # the next try is a new one
        raise UserError(f"the teacher's rollouts of {harness} came to nothing; the last one: {finished[-1]['ended']}")
    _publish([row for rows in kept for row in rows], _settings(config), out)
    shutil.rmtree(parts, ignore_errors=True)


def as_it_should(record: RolloutRecord, task: HarborTask, teacher: Teacher | None) -> bool:
    """Whether a rollout is kept: it solved its task, or the scripted teacher meant to be idle and was."""
    if teacher is not None and not teacher.plan(parse_task([{"role": "user", "content": task.instruction}])):
        return record.outcome is Outcome.UNSOLVED
    return record.outcome is Outcome.SOLVED


class TeacherServer:
    """The scripted teacher as an OpenAI-compatible server."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port of 127.0.0.1 while the context lasts; gives the URL."""
        server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server._serve([listener]))  # serve() would take over the program's signals
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = server.force_exit = True
                await asyncio.wait_for(task, STOP_S)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        try:
            message = self.teacher.answer(body["messages"])
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        head = {"id": "teacher", "object": "chat.completion", "created": int(time.time()), "model": body.get("model")}
        return JSONResponse(head | {"choices": [choice]})


@asynccontextmanager
async def _upstream(config: Config, teacher: Teacher | None) -> AsyncIterator[str]:
    if teacher is None:
        url = str(config.collect.upstream_url)
        await _greet(url)
        yield url
    else:
        async with TeacherServer(teacher).serving() as url:
            yield url


async def _greet(url: str) -> None:
    """Raises UserError when nothing answers at a URL, or it refuses the key: rollouts would wait for it in vain."""
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get(UPSTREAM_KEY)) else {}
    try:
        async with httpx.AsyncClient(trust_env=trusts_environment(url), timeout=GREET_S) as client:
            reply = await client.get(f"{api_base(url)}/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"collect.upstream_url={url}: no answer ({error})") from error
    if reply.status_code in (401, 403):
        raise UserError(f"collect.upstream_url={url} refuses the key in {UPSTREAM_KEY} (status {reply.status_code})")


@asynccontextmanager
async def _workshop(config: Config, url: str) -> AsyncIterator[Workshop]:
    """What rollouts need, with the proxy in text mode in front of ``url``."""
    with tempfile.TemporaryDirectory(prefix="yoke-collect-") as scratch:
        supervisor = ShardSupervisor(
            url, config.engine.shards, Path(scratch) / "journal", config.collect.upstream_model,
            request_timeout_s=config.engine.request_timeout_s, upstream="text",
        )  # fmt: skip
        try:
            await supervisor.start()
            home = harness_root(config.harness.home)
            yield Workshop(make_sandbox(config.sandbox), supervisor, config.harness, Path(scratch), home)
        finally:
            await supervisor.stop()


async def _roll_out_all(
    config: Config, workshop: Workshop, harness: str, teacher: Teacher | None, parts: Path
) -> list[dict[str, Any]]:
    """One rollout a task, ``config.concurrency`` at once, in the order of the tasks; what an earlier try left counts.

    Each gives ``rows``, none when it is not kept, and how it ``ended``.
    """
    tasks = _tasks(config)
    limit = asyncio.Semaphore(config.concurrency)
    started = told = time.monotonic()
    done = 0

    async def one(task: HarborTask) -> dict[str, Any]:
        nonlocal done, told
        place = parts / f"{task.ref.task_id}.json"
        if not place.exists():
            async with limit:
                spec = GroupSpec(f"collect-{task.ref.task_id}", task.ref, harness, 0, 1)
                record, trace = await workshop.roll_out_traced(spec, 0)
            part = _part(task, record, trace, teacher)
            if record.outcome is not Outcome.INFRASTRUCTURE:
                _keep(place, part)
        else:
            part = json.loads(place.read_text())
        done += 1
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            _say(f"collect {harness}: {done} of {len(tasks)} rollouts, {told - started:.0f} s")
        return part

    return await asyncio.gather(*map(one, tasks))


def _part(task: HarborTask, record: RolloutRecord, trace: Trace, teacher: Teacher | None) -> dict[str, Any]:
    rows = _rows(record, trace) if as_it_should(record, task, teacher) else []
    return {"rows": rows, "ended": f"{record.task_id} ended as {record.outcome} {record.verdict.reason}".strip()}


def _parts(config: Config, out: Path) -> Path:
    """Where finished rollouts wait for the others, so that a killed job goes on with the rest."""
    name = hashlib.sha256(_settings(config).encode()).hexdigest()[:12]
    return out.with_name(f".{out.stem}-{name}")


def _keep(place: Path, part: dict[str, Any]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_suffix(".draft")
    draft.write_text(json.dumps(part))
    os.replace(draft, place)


def _tasks(config: Config) -> list[HarborTask]:
    size = config.collect.rollouts
    if config.tasks.kind == "harbor":
        return load_tasks(Path(config.tasks.train or ""))[:size]
    return load_tasks(generate_tasks(Path(config.run_dir).absolute() / "tasks", "train", size, config.tasks.seed))


def _rows(record: RolloutRecord, trace: Trace) -> list[dict[str, Any]]:
    """One row a delivered call."""
    head = {"task_id": record.task_id, "harness": record.harness, "reward": record.verdict.correctness}
    return [
        head | {"call": call.call_id} | {name: json.dumps(text) for name, text in entry.items()}
        for call, entry in zip(trace.calls, trace.transcript, strict=True)
        if call.delivered
    ]


def _publish(rows: list[dict[str, Any]], settings: str, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.partial")
    schema = SCHEMA.with_metadata({"settings": settings})
    pq.write_table(pa.Table.from_pylist(rows, schema), draft, compression="zstd")
    os.replace(draft, out)


def _settings(config: Config) -> str:
    """What decides about a recording's content."""
    tasks = {"kind": config.tasks.kind, "train": config.tasks.train, "seed": config.tasks.seed}
    return json.dumps({"collect": asdict(config.collect), "tasks": tasks, "seed": config.seed}, sort_keys=True)


def _settings_of(out: Path) -> str:
    return str((pq.read_schema(out).metadata or {}).get(b"settings", b"").decode())


def _check(config: Config, harness: str) -> None:
    """Raises UserError for what cannot work."""
    get_harness(harness).check_installed(harness_root(config.harness.home))
    if config.collect.rollouts < 1:
        raise UserError(f"collect.rollouts={config.collect.rollouts} must be at least 1")
    if config.collect.upstream_url is None and (harness != SCRIPTED_HARNESS or config.tasks.kind != "generated"):
        raise UserError(
            f"the scripted teacher knows only {SCRIPTED_HARNESS} and the generated tasks: "
            "collect.upstream_url=… takes any Chat Completions API as the teacher"
        )


def _say(text: str) -> None:
    print(text, flush=True)
