"""The teachers of stage collect: the scripted one, served here, and any other at a URL, asked once before the work."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.capture.text import api_base, trusts_environment
from pipeline.config import CollectConfig, UserError
from pipeline.tasks.teacher import Teacher

STOP_S = 10.0
GREET_S = 60.0
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "noop",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    },
}
SHOWN = 200  # characters of a teacher's complaint


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


def check_url(url: str) -> None:
    """Raises UserError for what is no URL of a server, or holds a password: the settings of a recording keep it."""
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise UserError(f"collect.teacher_url={url} is no http(s) address, such as https://host/v1")
    if place.username or place.password or place.query:
        raise UserError(
            f"collect.teacher_url must hold no password or key (host {place.hostname}): put the key into an "
            "environment variable and name that with collect.api_key_env=…"
        )


async def greet(collect: CollectConfig, key: str | None) -> None:
    """One short request with a tool. Raises UserError when the teacher does not answer it: no rollout could go well."""
    url = str(collect.teacher_url)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {
        "model": collect.teacher_model,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [PROBE_TOOL],
        "max_tokens": 16,
    }
    try:
        async with httpx.AsyncClient(trust_env=trusts_environment(url), timeout=GREET_S) as client:
            reply = await client.post(f"{api_base(url)}/chat/completions", headers=headers, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"collect.teacher_url={url}: no answer ({error or type(error).__name__})") from error
    if reply.status_code in (401, 403):
        told = (
            f"the key in {collect.api_key_env}" if key else f"a request without a key ({collect.api_key_env} is empty)"
        )
        raise UserError(f"collect.teacher_url={url} refuses {told} (status {reply.status_code})")
    if reply.status_code != 200 or not _has_choices(reply):
        raise UserError(
            f"collect.teacher_url={url} does not serve collect.teacher_model={collect.teacher_model} with tools "
            f"(status {reply.status_code}): {_complaint(reply, key)}"
        )


def _has_choices(reply: httpx.Response) -> bool:
    try:
        return bool(reply.json()["choices"])
    except (ValueError, KeyError, TypeError):
        return False


def _complaint(reply: httpx.Response, key: str | None) -> str:
    """In one line; some servers repeat the key in it."""
    try:
        text = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = reply.text
    line = " ".join(str(text).split())
    return (line.replace(key, "…") if key else line)[:SHOWN] or "an empty reply"
