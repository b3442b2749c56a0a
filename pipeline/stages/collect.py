"""Stage collect: run a scripted teacher through the real harness in its sandbox and keep every model request it made.

The teacher answers on the socket that the sandbox hands out, in Chat Completions; the workspace it leaves is verified
like any other, so a recording is kept with the reward that it earned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.config import SandboxConfig, UserError
from pipeline.harness.base import DEFAULT_ROOT, get_harness
from pipeline.sandbox.base import Sandbox, SandboxProcess, SandboxSpec, make_sandbox
from pipeline.stages.verification import verify
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import HarborTask, load_tasks, prepare_workspace
from pipeline.tasks.teacher import Message, Teacher

log = logging.getLogger(__name__)
INSIDE_PORT = 8000
MODEL_NAME = "policy"
SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("harness", pa.string()),
        ("call", pa.int32()),
        ("reward", pa.float64()),
        ("messages", pa.string()),
        ("tools", pa.string()),
    ]
)


@dataclass
class CollectConfig:
    """Knobs of a collection."""

    harness: str = "pi"
    rollouts: int = 24
    seed: int = 0
    concurrency: int = 2
    timeout_s: float = 120.0
    home: Path = Path(DEFAULT_ROOT)
    teacher: Teacher = field(default_factory=Teacher)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


class TeacherServer:
    """Chat Completions over one listening socket: records each request and answers it as the teacher would."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.requests: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        try:
            message = self.teacher.answer(body["messages"])
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        self.requests.append({"messages": body["messages"], "tools": body.get("tools") or []})
        return stream(message) if body.get("stream") else JSONResponse(completion(message))

    @asynccontextmanager
    async def serving(self, process: SandboxProcess) -> AsyncIterator[None]:
        """Serve on the sandbox's listener while the context lasts."""
        if process.listener is None:
            raise ValueError("the sandbox was launched without a listen_port")
        server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server._serve([process.listener.dup()]))  # serve() would take over our signals
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait_for(task, 10.0)


def completion(message: Message) -> dict[str, Any]:
    """A whole chat completion around one assistant message."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {"id": "teacher", "object": "chat.completion", "created": 0, "model": MODEL_NAME, "choices": [choice]}


def stream(message: Message) -> Response:
    """The same as server-sent events: one delta, then the reason of the end."""
    delta = dict(message)
    if calls := delta.pop("tool_calls", None):
        delta["tool_calls"] = [call | {"index": index} for index, call in enumerate(calls)]
    reason = "tool_calls" if calls else "stop"
    head = {"id": "teacher", "object": "chat.completion.chunk", "created": 0, "model": MODEL_NAME}
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
    ]
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return Response("".join(f"data: {event}\n\n" for event in events), media_type="text/event-stream")


async def collect(config: CollectConfig, out: Path) -> Path:
    """Record ``config.rollouts`` runs of the teacher in ``out`` (Parquet, one row a model request) and return it.

    Raises UserError if a run ended without a request or without a grade: nothing is written then.
    """
    sandbox = make_sandbox(config.sandbox)
    limit = asyncio.Semaphore(config.concurrency)
    with tempfile.TemporaryDirectory(prefix="yoke-collect-") as scratch:
        place = Path(scratch)
        tasks = load_tasks(generate_tasks(place / "tasks", "train", config.rollouts, config.seed))

        async def one(task: HarborTask) -> list[dict[str, Any]]:
            async with limit:
                return await record(config, sandbox, task, place)

        rows = [row for rows in await asyncio.gather(*map(one, tasks)) for row in rows]
    partial = out.with_name(f".{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), partial, compression="zstd")
    os.replace(partial, out)
    log.info("%d runs, %d requests in %s", config.rollouts, len(rows), out)
    return out


async def record(config: CollectConfig, sandbox: Sandbox, task: HarborTask, scratch: Path) -> list[dict[str, Any]]:
    """One run of the harness on ``task`` with the teacher as its model: its requests with the run's reward."""
    place = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
    workspace = place / "workspace"
    workspace.mkdir()
    prepare_workspace(task, workspace)
    launch = get_harness(config.harness).launch(
        f"http://127.0.0.1:{INSIDE_PORT}", "teacher", MODEL_NAME, task.instruction, config.home
    )
    spec = SandboxSpec(
        **vars(launch),
        workspace=workspace,
        listen_port=INSIDE_PORT,
        stdout=place / "output",
        timeout_s=config.timeout_s,
    )
    server = TeacherServer(config.teacher)
    process = await sandbox.launch(spec)
    try:
        async with server.serving(process):
            process.go()
            await process.wait()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    verdict = await verify(task, workspace, sandbox, place)
    if not server.requests or verdict.reward is None:
        tail = (place / "output").read_text(errors="replace")[-500:]
        raise UserError(f"the teacher's run of {config.harness} on {task.ref.task_id} came to nothing: {tail}")
    return [
        {
            "task_id": task.ref.task_id,
            "harness": config.harness,
            "call": number,
            "reward": verdict.reward,
            "messages": json.dumps(request["messages"]),
            "tools": json.dumps(request["tools"]),
        }
        for number, request in enumerate(server.requests)
    ]


def main() -> None:
    """``python -m pipeline.stages.collect --out FILE``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=24)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    asyncio.run(collect(CollectConfig(rollouts=arguments.rollouts), arguments.out))


if __name__ == "__main__":
    main()
