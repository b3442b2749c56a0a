"""One proxy process: serves its sessions' listeners, obeys the supervisor's control socket, exits when that closes.

Started by the supervisor as ``python -m pipeline.capture.shard``; a replacement replays the journal of the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
import uvloop

from pipeline.capture import journal as records
from pipeline.capture.app import SessionApp, SharedApp
from pipeline.capture.control import UPSTREAM_KEY, UPSTREAMS, Channel
from pipeline.capture.delivery import PING_EVERY_S
from pipeline.capture.exchange import BODY_CAP
from pipeline.capture.heap import Heap
from pipeline.capture.journal import Closed, Journal, Opened, Policy
from pipeline.capture.listener import KEEP_ALIVE_S, READ_S, Listener
from pipeline.capture.origin import Inspector
from pipeline.capture.session import Session, file_name, restore
from pipeline.capture.turn import EngineTurns, Turns
from pipeline.capture.upstream import Engine

REWRITE_BYTES = 256 * 2**20  # the journal drops closed sessions when it has grown by so much
GC_THRESHOLDS = (50_000, 50, 100)  # requests make many objects and hardly a cycle
TICK_S = 0.05
LAG_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # bounds of the histogram of the loop's delays
AT_LEISURE = 4  # calls in flight of a shard that has time for housekeeping
EXPIRED = 100  # sessions in one heartbeat
CLOSE_S = 5.0  # turns of a closing session get so long to end
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger(__name__)


class Shard:
    """The sessions of this process and the supervisor's orders. Every order is answered by ``{"id", "ok", ...}``."""

    def __init__(
        self,
        control: socket.socket,
        journal_path: Path,
        make_turns: Callable[[Journal], Turns],
        read_s: float = READ_S,
    ) -> None:
        self._read_s = read_s
        self._directory = journal_path.parent
        self._sessions = restore(records.read(journal_path))
        self._journal = Journal(journal_path)
        self._journal_floor = self._journal.size
        self._turns = make_turns(self._journal)
        self._listeners: dict[str, Listener] = {}
        self._inspectors: dict[str, Inspector] = {}
        self._config = server_config()
        self._orders: set[asyncio.Task[None]] = set()
        self._handlers: dict[str, Callable[[dict[str, Any], list[int]], Coroutine[Any, Any, dict[str, Any]]]] = {
            "listen": self._listen,
            "open": self._open,
            "close": self._close,
            "describe": self._describe,
            "snapshot": self._snapshot,
            "drain": self._drain,
            "version": self._version,
            "ping": self._ping,
        }
        self._lag = Lag()
        self._heap = Heap()
        self.ended = asyncio.Event()
        self._channel = Channel(control, self._order, self.ended.set)
        self._channel.send({"ready": True, "sessions": len(self._sessions)})

    async def warm(self) -> None:
        """Learn what can be learnt before the first request."""
        await self._turns.warm()

    def _order(self, message: dict[str, Any], fds: list[int]) -> None:
        task = asyncio.ensure_future(self._obey(message["id"], self._handlers[message["op"]](message, fds)))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _obey(self, order_id: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            reply = {"ok": True, **await work}
        except Exception as error:  # the supervisor raises it where the order was given
            log.exception("an order failed")
            reply = {"ok": False, "error": repr(error)}
        self._channel.send({"id": order_id, **reply})

    async def _listen(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Serve all sessions without a listener of their own on one socket."""
        app = SharedApp(self._sessions, self._turns, message["index"], message["ports"])
        self._shared = await Listener.open(socket.socket(fileno=fds[0]), app, self._config, self._read_s)
        return {}

    async def _open(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Open a session, or take up one that the journal or an earlier order already opened."""
        session_id = message["session"]
        if session_id not in self._sessions:
            policy = msgspec.convert(message["policy"], Policy)
            session = Session(session_id, policy)
            self._journal.append(Opened(session_id, policy, session.opened))
            self._sessions[session_id] = session
        if session_id in self._listeners:
            for fd in fds:
                os.close(fd)
        elif fds:
            await self._serve(self._sessions[session_id], socket.socket(fileno=fds[0]), fds[1:])
        return {}

    async def _serve(self, session: Session, listener: socket.socket, inside: list[int]) -> None:
        """Listen for one session; ``inside`` is the sandbox that it is in, where that is known."""
        inspect = None
        if inside:
            proc, sockets = inside
            inspector = Inspector(proc, sockets, listener.getsockname()[1], lambda: session.first_answer)
            self._inspectors[session.id], inspect = inspector, inspector.origin
        app = SessionApp(session, self._turns)
        self._listeners[session.id] = await Listener.open(listener, app, self._config, self._read_s, inspect)

    async def _close(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """End a session and write its trace; closing it again names the same file."""
        session_id = message["session"]
        path = self._directory / file_name(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            if not path.exists():
                raise KeyError("no such session")
            return {"trace": str(path)}
        await self._end_turns(session)
        records.write(path, session.records())
        self._journal.append(Closed(session_id))
        self._sessions.pop(session_id, None)
        self._shrink()
        return {"trace": str(path)}

    async def _end_turns(self, session: Session) -> None:
        """Abort the calls in flight; answers that are on their way get some time to be delivered."""
        session.closing = True
        listener = self._listeners.pop(session.id, None)
        if listener is not None:
            listener.shut()
        for turn in session.answering:
            turn.cancel()
        if session.turns:
            await asyncio.wait(session.turns, timeout=CLOSE_S)
        if listener is not None:
            listener.close()
        if inspector := self._inspectors.pop(session.id, None):
            await asyncio.to_thread(inspector.close)

    async def _describe(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """What the named sessions have done so far; sessions that are not here are left out."""
        known = (self._sessions.get(session_id) for session_id in message["sessions"])
        return {"sessions": {session.id: summary(session) for session in known if session}}

    async def _snapshot(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Write the trace so far of a session that goes on."""
        session = self._sessions[message["session"]]
        path = self._directory / f"{file_name(session.id)}.{message['id']}.snapshot"
        await asyncio.to_thread(records.write, path, list(session.records()))
        return {"trace": str(path), "summary": summary(session)}

    def _shrink(self) -> None:
        """Drop the records of closed sessions once they are worth it."""
        if self._journal.size - self._journal_floor > REWRITE_BYTES:
            self._journal.rewrite(record for session in self._sessions.values() for record in session.records())
            self._journal_floor = self._journal.size

    async def _version(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._turns.version = message["version"]
        return {}

    async def _drain(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Take no new turns."""
        self._turns.draining = True
        return {}

    async def _ping(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """The heartbeat: gauges of now, totals since the process's start, sessions that are idle for too long."""
        sessions = self._sessions.values()
        gauges = {
            "sessions": len(sessions),
            "in_flight": sum(len(session.turns) for session in sessions),
            "upstream": sum(len(session.answering) for session in sessions),
            "journal_bytes": self._journal.size,
        }
        self._heap.relieve(busy=gauges["in_flight"] > AT_LEISURE)
        totals = self._turns.totals | self._lag.counts
        expired = [session.id for session in sessions if is_idle(session)][:EXPIRED]
        return {"gauges": gauges, "totals": totals, "stall_s": self._lag.take(), "expired": expired}


class Lag:
    """How late this process's loop is: the delays of a timer."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._worst = 0.0
        self._tick(time.monotonic())

    def take(self) -> float:
        """The longest delay since this was asked last, in seconds."""
        worst, self._worst = self._worst, 0.0
        return worst

    def _tick(self, due: float) -> None:
        late = max(0.0, time.monotonic() - due)
        self._worst = max(self._worst, late)
        bound = next((bound for bound in LAG_MS if late * 1000 <= bound), "more")
        self.counts[f"lag_ms_{bound}"] += 1
        self.counts["lag_us"] += int(late * 1e6)
        asyncio.get_running_loop().call_later(TICK_S, self._tick, time.monotonic() + TICK_S)


def is_idle(session: Session) -> bool:
    """Whether a session has outlived its time to live without a call."""
    ttl_s = session.policy.ttl_s
    return bool(ttl_s) and not session.turns and time.monotonic() - session.touched > ttl_s


def summary(session: Session) -> dict[str, Any]:
    """The figures of one session."""
    nodes = session.tree.nodes
    return {
        "calls": len(nodes),
        "delivered": sum(node.delivered for node in nodes),
        "prompt_tokens": sum(node.answer.prompt_tokens for node in nodes),
        "sampled_tokens": sum(node.answer.completion_tokens for node in nodes),
        "in_flight": len(session.turns),
        "counters": session.tally(),
        "dialect": session.dialect,
    }


def server_config(ping_s: float = PING_EVERY_S) -> uvicorn.Config:
    """How the listeners serve; ``ping_s`` is the time between the pings of a WebSocket."""
    return uvicorn.Config(
        _no_app, lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        log_level="warning",  # below it, uvicorn logs the paths of WebSockets with their keys
        ws=cast(type[asyncio.Protocol], _upgraded),
        ws_max_size=BODY_CAP, ws_per_message_deflate=False, ws_ping_interval=ping_s,
        ws_ping_timeout=None,  # a client may be deaf for as long as its tools run
    )  # fmt: skip


def _upgraded(**given: Any) -> asyncio.Protocol:
    """What takes over from a connection on which an upgrade was asked for."""
    from pipeline.capture.upgrade import Socket  # slow to import, and few harnesses use it

    return Socket(**given)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Stands in uvicorn's configuration; every connection gets its session's app."""


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the supervisor is gone."""
    shard = Shard(socket.socket(fileno=arguments.control), arguments.journal, turns_factory(arguments), arguments.read)
    warming = asyncio.create_task(shard.warm())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    await shard.ended.wait()
    warming.cancel()


def turns_factory(arguments: argparse.Namespace) -> Callable[[Journal], Turns]:
    """Makes the turns for the kind of upstream that was asked for."""
    limits = arguments.request_timeout, arguments.outage
    if arguments.upstream == "engine":
        engine = Engine(arguments.engine, arguments.model, *limits, arguments.render_fields)
        return functools.partial(EngineTurns, engine, named_weights=not arguments.foreign_weights)
    from pipeline.capture.text import TextTurns, TextUpstream  # httpx is slow to import and not for the hot path

    key = os.environ.get(UPSTREAM_KEY, "")
    return functools.partial(TextTurns, TextUpstream(arguments.engine, arguments.model, key, *limits))


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True, help="inherited descriptor of the control socket")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--engine", required=True, help="URL of the engine, or of a text upstream")
    parser.add_argument("--upstream", choices=UPSTREAMS, default="engine")
    parser.add_argument("--model", required=True, help="name under which the engine serves the policy")
    parser.add_argument("--request-timeout", type=float, default=300.0, help="seconds for one request to the engine")
    parser.add_argument("--read", type=float, default=READ_S, help="seconds in which a request must have arrived")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds that an engine outage is waited out")
    parser.add_argument("--render-fields", type=msgspec.json.decode, help="JSON object: sent with every render")
    parser.add_argument("--foreign-weights", action="store_true", help="the engine does not know policy versions")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for ignored in IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
