"""Runs the shards: assigns sessions, watches heartbeats, replaces a dead shard with the same journal and listeners."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.capture import control
from pipeline.capture.shard_process import (
    START_S,
    STOP_S,
    CaptureError,
    OpenSession,
    ShardFigures,
    ShardGone,
    ShardProcess,
    first,
    package_environment,
)
from pipeline.capture.trace import read_trace
from pipeline.config import SessionPolicy
from pipeline.records import Inside, PolicyVersion, Trace

HEARTBEAT_S = 2.0
SILENT_S = 10.0  # a shard that says nothing for so long is killed
MOST_BACKOFF_S = 5.0
DESCRIBED = 100  # sessions in one message to a shard
HANDED_OVER = 64  # sessions that a fresh process opens at once

log = logging.getLogger(__name__)


class ShardSupervisor:
    """The capture proxy of a node. All methods are for one event loop."""

    def __init__(
        self,
        engine_url: str,
        shards: int,
        journal_dir: Path,
        model_name: str,
        request_timeout_s: float = 300.0,
        outage_s: float = 60.0,
        upstream: str = "engine",
        upstream_key: str | None = None,
        listeners: Sequence[socket.socket] = (),
        render_fields: Mapping[str, Any] | None = None,
        named_weights: bool = True,
        read_s: float = 60.0,
    ) -> None:
        """``upstream="text"``: ``engine_url`` is the base URL of any Chat Completions API that serves ``model_name``.

        Its API key is ``upstream_key``, else the environment's YOKE_UPSTREAM_KEY. Its traces hold text, no ids.
        ``listeners``: a listening socket a shard, for sessions that bring none of their own.
        ``render_fields`` go into every render and derender: chat_template_kwargs, for example.
        ``named_weights``: the engine names its weights by policy version (false for one that is not ours).
        """
        if upstream not in control.UPSTREAMS:
            raise ValueError(f"upstream={upstream!r} is none of {control.UPSTREAMS}")
        self._model_name = model_name
        self._directory = journal_dir.resolve()
        command = [sys.executable, "-m", "pipeline.capture.shard", "--engine", engine_url, "--model", model_name]
        command += ["--request-timeout", str(request_timeout_s), "--outage", str(outage_s), "--upstream", upstream]
        command += ["--render-fields", json.dumps(dict(render_fields))] if render_fields else []
        command += [] if named_weights else ["--foreign-weights"]
        command += ["--read", str(read_s)]
        environment = package_environment() | ({control.UPSTREAM_KEY: upstream_key} if upstream_key else {})
        journals = [self._directory / f"shard-{i}.journal" for i in range(shards)]
        shared = [*listeners, *[None] * (shards - len(listeners))]
        self._ports = [listener.getsockname()[1] for listener in listeners]
        self._shards = [ShardProcess(i, command, journals[i], environment, shared[i]) for i in range(shards)]
        self._homes: dict[str, ShardProcess] = {}
        self._version = PolicyVersion(0, 0)
        self._draining = False
        # Told the sessions that were idle for longer than their time to live, at every heartbeat until they are closed.
        self.on_expired: Callable[[list[str]], None] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._abandoned: set[asyncio.Task[None]] = set()

    async def start(self, deadline_s: float = START_S) -> None:
        """Start the shards. Raises CaptureError when they are not ready in time."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._keepers = [asyncio.create_task(self._keep(shard)) for shard in self._shards]
        waits = asyncio.gather(*(shard.ready.wait() for shard in self._shards))
        await self._in_time(waits, deadline_s, "the shards to start")

    async def stop(self) -> None:
        """End the shards; sessions still open are lost."""
        tasks = [*self._keepers, *self._abandoned]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(shard.kill(STOP_S) for shard in self._shards))
        for shard in self._shards:
            for session in shard.sessions.values():
                session.close()
            shard.sessions.clear()
        self._homes.clear()

    def least_loaded(self) -> int:
        """The shard that has the fewest sessions."""
        return min(self._shards, key=lambda shard: len(shard.sessions)).index

    async def open_session(
        self,
        session_id: str,
        policy: SessionPolicy,
        listener: socket.socket | None = None,
        model_name: str | None = None,
        deadline_s: float = 30.0,
        shard: int | None = None,
        inside: Inside | None = None,
    ) -> None:
        """Serve a session on a listening socket, of which a duplicate is kept. The session id is its API key.

        ``inside`` is the sandbox that the listener is in, and is duplicated too: calls that are not the harness's own
        are then told apart and not trained. Without a listener it is served on the shared one of ``shard`` (None: the
        least loaded). A session that a shard still has from before is taken up again. Raises CaptureError when the id
        is taken or no shard answers in time.
        """
        if session_id in self._homes:
            raise CaptureError("a session with this id is open")
        home = self._shards[self.least_loaded() if shard is None else shard]
        terms = asdict(policy) | {"model_name": model_name or self._model_name}
        kept = Inside(os.dup(inside.proc), os.dup(inside.sockets)) if inside and listener else None
        self._homes[session_id] = home
        home.sessions[session_id] = OpenSession(terms, listener.dup() if listener else None, kept)
        try:
            await self._in_time(self._ask(home, session_id), deadline_s, "a shard to open a session")
        except BaseException:
            self._forget(session_id)
            self._abandon(session_id, home.index)
            raise

    async def close_session(self, session_id: str, deadline_s: float = 30.0) -> Trace:
        """End a session: aborts its calls in flight, frees its memory and returns its trace. Raises CaptureError."""
        return await asyncio.to_thread(_take_trace, await self.end_session(session_id, deadline_s))

    async def end_session(self, session_id: str, deadline_s: float = 30.0) -> Path:
        """The same, but returns the trace file, which is left to the caller. Raises CaptureError."""
        shard = self._home(session_id)
        reply = await self._order(shard, {"op": "close", "session": session_id}, deadline_s, "to close a session")
        self._forget(session_id)
        return Path(reply["trace"])

    async def finish_session(self, session_id: str, shard: int, deadline_s: float = 30.0) -> Path:
        """End a session that a shard may still have and nobody takes up again; its trace. Raises CaptureError."""
        order = {"op": "close", "session": session_id}
        reply = await self._order(self._shards[shard], order, deadline_s, "to close a session")
        return Path(reply["trace"])

    def _abandon(self, session_id: str, shard: int) -> None:
        """A shard may have opened a session too late: end it there, however long that takes."""
        task = asyncio.create_task(self._end_late(session_id, shard))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _end_late(self, session_id: str, shard: int) -> None:
        try:
            if session_id not in self._homes:
                (await self.finish_session(session_id, shard)).unlink()
        except (CaptureError, OSError) as error:
            log.info("a session that was not opened in time: %s", error)

    async def in_flight(self) -> int:
        """Calls that are being answered right now. Raises CaptureError."""
        orders = (self._order(shard, {"op": "ping"}, START_S, "to answer") for shard in self._shards)
        return sum(reply["gauges"]["in_flight"] for reply in await asyncio.gather(*orders))

    async def snapshot(self, session_id: str, deadline_s: float = 30.0) -> Path:
        """A file with the trace so far of an open session, left to the caller. Raises CaptureError."""
        order = {"op": "snapshot", "session": session_id}
        reply = await self._order(self._home(session_id), order, deadline_s, "to write a trace")
        return Path(reply["trace"])

    async def describe(self, session_ids: Sequence[str], deadline_s: float = 30.0) -> dict[str, dict[str, Any]]:
        """Figures of those of these sessions that are open, by session. Raises CaptureError."""
        homes: dict[ShardProcess, list[str]] = {}
        for session_id in session_ids:
            if session_id in self._homes:
                homes.setdefault(self._homes[session_id], []).append(session_id)
        orders = [
            self._order(shard, {"op": "describe", "sessions": part}, deadline_s, "to describe sessions")
            for shard, ids in homes.items()
            for part in batched(ids, DESCRIBED)
        ]
        replies = await asyncio.gather(*orders)
        return {session: figures for reply in replies for session, figures in reply["sessions"].items()}

    async def set_policy_version(self, version: PolicyVersion, deadline_s: float = 30.0) -> None:
        """Salt every new call with this version; returns when every shard has acknowledged. Raises CaptureError."""
        self._version = version
        orders = asyncio.gather(*(self._insist(shard, self._version_order()) for shard in self._shards))
        await self._in_time(orders, deadline_s, f"the shards to take policy version {version}")

    async def drain(self, deadline_s: float = 30.0) -> None:
        """Have every shard refuse new turns; those in flight go on. Raises CaptureError."""
        self._draining = True
        orders = (self._order(shard, {"op": "drain"}, deadline_s, "to drain") for shard in self._shards)
        await asyncio.gather(*orders)

    def figures(self) -> list[ShardFigures]:
        """What each shard's last heartbeat told."""
        for shard in self._shards:
            shard.figures.pid = shard.pid if shard.ready.is_set() else None
            shard.figures.restarts = max(0, shard.starts - 1)
        return [shard.figures for shard in self._shards]

    def stats(self) -> dict[str, Any]:
        """Figures of the last heartbeats, summed over shards."""
        total: Counter[str] = Counter()
        for shard in self.figures():
            total.update(shard.gauges)
            total.update(shard.totals)
        restarts = sum(shard.restarts for shard in self.figures())
        alive = sum(shard.ready.is_set() for shard in self._shards)
        return {**total, "open_sessions": len(self._homes), "shards_alive": alive, "shard_restarts": restarts}

    async def _keep(self, shard: ShardProcess) -> None:
        """Keep one shard running, whatever happens to its process."""
        failures = 0
        while True:
            try:
                await shard.start()
                await self._hand_over(shard)
                failures = 0
                await self._watch(shard)
            except Exception as error:  # whatever it is, without its keeper the shard would stay dead
                failures += 1
                log.warning("shard %d could not start: %r", shard.index, error, exc_info=not is_known(error))
            await shard.kill()
            shard.figures.died()
            await asyncio.sleep(min(0.1 * 2**failures, MOST_BACKOFF_S) if failures else 0)

    async def _hand_over(self, shard: ShardProcess) -> None:
        """Give a fresh process the version and the sessions that its predecessor had."""
        await asyncio.wait_for(shard.request(self._version_order()), START_S)
        if self._draining:
            await asyncio.wait_for(shard.request({"op": "drain"}), START_S)
        for part in batched(list(shard.sessions), HANDED_OVER):
            await asyncio.wait_for(asyncio.gather(*(self._open(shard, session) for session in part)), START_S)
        if shard.listener is not None:
            order = {"op": "listen", "index": shard.index, "ports": self._ports}
            await asyncio.wait_for(shard.request(order, [shard.listener.fileno()]), START_S)
        shard.ready.set()

    async def _watch(self, shard: ShardProcess) -> None:
        """Returns when the process is dead or silent."""
        ping: asyncio.Task[Any] | None = None
        while not shard.gone.is_set() and shard.silence_s < SILENT_S:
            if ping is None or ping.done():
                ping = asyncio.create_task(self._ping(shard))
            await first(shard.gone, timeout_s=HEARTBEAT_S)
        why = "died" if shard.gone.is_set() else f"was silent for {shard.silence_s:.0f} s"
        log.warning("shard %d (pid %s) %s and is replaced", shard.index, shard.pid, why)

    async def _ping(self, shard: ShardProcess) -> None:
        try:
            reply = await shard.request({"op": "ping"})
        except (ShardGone, CaptureError) as error:
            log.info("no heartbeat from shard %d: %r", shard.index, error)
            return
        shard.figures.take(reply)
        if reply["expired"] and self.on_expired is not None:
            self.on_expired(reply["expired"])

    async def _ask(self, shard: ShardProcess, session_id: str) -> None:
        """Open a session on its shard, on the next process if this one dies."""
        while True:
            await shard.ready.wait()
            try:
                return await self._open(shard, session_id)
            except ShardGone:
                await asyncio.sleep(0)

    async def _open(self, shard: ShardProcess, session_id: str) -> None:
        """Have the present process open a session, unless it was forgotten meanwhile."""
        session = shard.sessions.get(session_id)
        if session is None:
            return
        order = {"op": "open", "session": session_id, "policy": session.policy}
        await shard.request(order, session.descriptors)

    async def _insist(self, shard: ShardProcess, message: dict[str, Any]) -> dict[str, Any]:
        """A shard's answer to an order that may be given twice."""
        while True:
            await shard.ready.wait()
            try:
                return await shard.request(message)
            except ShardGone:
                await asyncio.sleep(0)

    async def _order(
        self, shard: ShardProcess, message: dict[str, Any], deadline_s: float, what: str
    ) -> dict[str, Any]:
        """A shard's answer in time. Raises CaptureError."""
        reply: dict[str, Any] = await self._in_time(self._insist(shard, message), deadline_s, f"a shard {what}")
        return reply

    def _home(self, session_id: str) -> ShardProcess:
        shard = self._homes.get(session_id)
        if shard is None:
            raise CaptureError("no session with this id is open")
        return shard

    async def _in_time(self, work: Any, deadline_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(work, deadline_s)
        except TimeoutError as error:
            raise CaptureError(f"waited {deadline_s:.0f} s for {what}; logs are in {self._directory}") from error

    def _version_order(self) -> dict[str, Any]:
        return {"op": "version", "version": str(self._version)}

    def _forget(self, session_id: str) -> None:
        self._homes.pop(session_id).sessions.pop(session_id).close()


def is_known(error: Exception) -> bool:
    """Whether an error is one that a dying shard causes."""
    return isinstance(error, (CaptureError, ShardGone, OSError))


def batched(items: Sequence[str], size: int) -> list[Sequence[str]]:
    """Cut a list into parts."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _take_trace(path: Path) -> Trace:
    trace = read_trace(path)
    path.unlink()
    return trace
