"""The scripted teacher of stage collect, served here."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.tasks.teacher import Teacher

STOP_S = 10.0


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
