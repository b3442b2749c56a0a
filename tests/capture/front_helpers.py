"""`yoke proxy` as a user runs it, in front of a scripted engine that lives in a thread."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


@dataclass
class Running:
    """A proxy process and a client of its session API."""

    process: subprocess.Popen[str]
    url: str
    api: httpx.Client
    log: Path

    def create(self, **fields: Any) -> Harness:
        reply = self.api.post("/sessions", json=fields)
        assert reply.status_code == 201, reply.text
        return Harness(reply.json(), self.api)

    def children(self) -> list[int]:
        """The processes that the proxy started."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids]

    def shard_pid(self, index: int) -> int | None:
        """The process that is a shard now."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.children()}
        return next((pid for pid, command in commands.items() if f"shard-{index}.journal" in command), None)

    def end(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


class Harness:
    """A session and a client with its key."""

    def __init__(self, session: dict[str, Any], api: httpx.Client) -> None:
        self.id, self.key, self.url = session["session_id"], session["api_key"], session["base_url"]
        self.shard: int = session["shard"]
        self._api = api

    def ask(self, text: str = "hello", url: str | None = None, key: str | None = None, **body: Any) -> httpx.Response:
        messages = body.pop("messages", [{"role": "user", "content": text}])
        headers = {"authorization": f"Bearer {key or self.key}"}
        body = {"model": "m", "messages": messages, **body}
        return httpx.post(f"{url or self.url}/v1/chat/completions", json=body, headers=headers, timeout=30)

    def show(self) -> dict[str, Any]:
        return dict(self._api.get(f"/sessions/{self.id}").json())

    def table(self, kind: str = "calls") -> pa.Table:
        reply = self._api.get(f"/sessions/{self.id}/{kind}")
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/vnd.apache.arrow.stream"
        return pa.ipc.open_stream(io.BytesIO(reply.content)).read_all()

    def close(self) -> dict[str, Any]:
        reply = self._api.post(f"/sessions/{self.id}/close")
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


@contextlib.contextmanager
def running(engine_url: str, directory: Path, *flags: str, **environment: str) -> Iterator[Running]:
    """`yoke proxy` until the context ends."""
    command = [sys.executable, "-m", "pipeline", "proxy", "--llm-url", engine_url, "--port", "0"]
    log = directory.with_suffix(".err")
    with log.open("a") as errors:
        process = subprocess.Popen(
            [*command, "--dir", str(directory), *flags],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=os.environ | environment,
        )  # fmt: skip
    try:
        url = _ready_url(process, log)
        with httpx.Client(base_url=url, timeout=30) as api:
            yield Running(process, url, api, log)
    finally:
        process.kill()
        process.wait(10)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()
    line = ""
    with contextlib.suppress(queue.Empty):
        line = lines.get(timeout=START_S)
    assert line.startswith("yoke proxy: ready on "), f"{line!r} {log.read_text()[-2000:]}"
    return line.split()[-1]
