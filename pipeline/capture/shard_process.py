"""One shard's process, as its supervisor sees it: start, requests over the control socket, figures, end."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.capture import control
from pipeline.records import Inside

STALLS = 30  # heartbeats that the worst delay of a loop is kept for
START_S = 30.0
STOP_S = 5.0


class ShardGone(Exception):
    """The shard died before it answered."""


class CaptureError(Exception):
    """A shard could not do what it was asked to."""


@dataclass
class OpenSession:
    """What a replacement shard needs to take a session up."""

    policy: dict[str, Any]
    listener: socket.socket | None  # None: the shard's shared one
    inside: Inside | None = None  # who calls on it

    @property
    def descriptors(self) -> list[int]:
        """What goes to the shard with the order to open it."""
        listener = [self.listener.fileno()] if self.listener else []
        return [*listener, self.inside.proc, self.inside.sockets] if self.inside else listener

    def close(self) -> None:
        """Let go of its descriptors."""
        if self.listener is not None:
            self.listener.close()
        if self.inside is not None:
            os.close(self.inside.proc)
            os.close(self.inside.sockets)


@dataclass
class ShardFigures:
    """What a shard's heartbeats told, whichever process it was. ``stalls``: the loop's longest delay in each."""

    index: int
    pid: int | None = None
    restarts: int = 0
    gauges: dict[str, int] = field(default_factory=dict)
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=STALLS))
    _present: dict[str, int] = field(default_factory=dict)
    _past: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> Counter[str]:
        """Counts since the first process's start."""
        return self._past + Counter(self._present)

    def take(self, heartbeat: dict[str, Any]) -> None:
        """Take in a heartbeat."""
        self.gauges, self._present = heartbeat["gauges"], heartbeat["totals"]
        self.stalls.append(heartbeat["stall_s"])

    def died(self) -> None:
        """The next process counts from zero."""
        self._past.update(self._present)
        self._present, self.gauges = {}, {}


class ShardProcess:
    """One shard's process, as the supervisor sees it; the process may be a later one than before."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        journal: Path,
        environment: dict[str, str],
        listener: socket.socket | None = None,
    ) -> None:
        self.index = index
        self.listener = listener
        self.sessions: dict[str, OpenSession] = {}
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.figures = ShardFigures(index)
        self.starts = 0
        self._command = [*command, "--journal", str(journal)]
        self._environment = environment
        self._log_path = journal.with_suffix(".log")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._channel: control.Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = 0.0

    @property
    def pid(self) -> int | None:
        """The process id of the current process."""
        return self._process.pid if self._process else None

    @property
    def silence_s(self) -> float:
        """Seconds since the shard last said something."""
        return time.monotonic() - self._heard

    async def start(self) -> None:
        """Start a process and wait until it has replayed the journal. Raises CaptureError."""
        ours, theirs = control.pair()
        self.gone, said_ready = asyncio.Event(), asyncio.Event()
        self._said_ready = said_ready
        self.starts += 1
        with theirs, self._log_path.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._command, "--control", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, env=self._environment,
            )  # fmt: skip
        self._channel = control.Channel(ours, self._hear, self._lost)
        self._heard = time.monotonic()
        if not await first(said_ready, self.gone, timeout_s=START_S):
            await self.kill()
            raise CaptureError(f"shard {self.index} was not ready within {START_S:.0f} s; see {self._log_path}")

    async def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """The shard's answer. Raises ShardGone or CaptureError."""
        if self._channel is None or self.gone.is_set():
            raise ShardGone
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._channel.send({"id": number, **message}, fds)
        try:
            reply = await answer
        finally:
            self._waiting.pop(number, None)
        if not reply["ok"]:
            raise CaptureError(f"shard {self.index} could not {message['op']}: {reply['error']}")
        return reply

    async def kill(self, patience_s: float = 0.0) -> None:
        """End the process and fail what waits on it; a closed control socket is the order to exit."""
        self.ready.clear()
        if self._channel is not None:
            self._channel.close()
        self._lost()
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process, patience_s)

    def _lost(self) -> None:
        """The process is gone, and with it what it was asked for."""
        self.gone.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ShardGone())

    def _hear(self, message: dict[str, Any], fds: list[int]) -> None:
        self._heard = time.monotonic()
        if message.get("ready"):
            self._said_ready.set()
        answer = self._waiting.get(message.get("id", -1))
        if answer is not None and not answer.done():
            answer.set_result(message)


async def first(*events: asyncio.Event, timeout_s: float) -> bool:
    """Wait for any of the events; whether the first of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return events[0].is_set()


def _reap(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def package_environment() -> dict[str, str]:
    """This process's environment, in which a child finds this very package."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
