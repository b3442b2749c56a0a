"""The load generator: sessions of agent conversations in four dialects, then an exact check of every trace.

    python -m bench.load --adapter yoke --base http://127.0.0.1:18701 --engine http://127.0.0.1:18700 --n 640

Closed loop: each of ``n`` clients asks again as soon as it has its answer, ``duration`` seconds long or one session
each. Open loop (``--rate``): turns are due on a schedule whatever the target does, and latency counts from the moment
that a turn was due. Prints one JSON document; "LOAD_DONE" on stderr says that the load itself is over;
nothing is asked of the target for ``settle`` seconds then, so that its memory can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvloop

from bench.check import Checker, Said, Turn
from bench.contract import Adapter, Opened, ReadCall, ReadRow, load_adapter
from bench.dialects import DIALECTS, Talk
from bench.filler import SIZE, SYSTEM, passage
from bench.limits import raise_open_files
from bench.tokens import MARK
from bench.wire import Connection, Dropped, Reply

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses that harnesses ask again after
OVERHEAD_PER_TURN = 400  # bytes of a turn that are not tool result
LEAST_RESULT = 200
LEAD_S = 0.25  # between opening a session and its first turn in an open loop
STALL_TICK_S = 0.05


class Lost(Exception):
    """A session that could not go on; the message says why."""


class Timing(NamedTuple):
    """One turn; ``due``: when it was to begin."""

    due: float
    done: float
    latency_s: float  # the engine's

    @property
    def added_s(self) -> float:
        return self.done - self.due - self.latency_s


@dataclass
class Session:
    """One client and what it knows of its conversation."""

    number: int
    dialect: str
    opened: Opened
    talk: Talk
    connection: Connection
    script: list[Said] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: list[ReadCall] | Exception | None = None  # the trace, once read
    rows: list[ReadRow] | None = None

    def say(self, text: str, at: int, size: int) -> None:
        """Add the task or a tool result."""
        said = passage(text, at, size)
        first = not self.script
        if first:
            self.script.append(Said("system", SYSTEM))
        self.script.append(Said("user" if first else "tool", said))
        (self.talk.user if first else self.talk.result)(said)


class Generator:
    """Runs the load and keeps its figures."""

    def __init__(self, options: argparse.Namespace, adapter: Adapter) -> None:
        self.options, self.adapter = options, adapter
        place = urlsplit(options.base)
        self._host, self._port = str(place.hostname), int(place.port or 80)
        self.dialects: dict[str, type[Talk]] = getattr(adapter, "DIALECTS", DIALECTS)
        self.names = [name for name in options.dialects.split(",") if name in self.dialects] or list(self.dialects)
        self.turns = 0
        self.timings: list[Timing] = []  # of the turns that count
        self.finished: list[Session] = []
        self.lost: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.read_s: list[float] = []
        self.stalls: list[float] = []
        self._reading = asyncio.Semaphore(options.readback_par)
        self._window = (0.0, float("inf"))  # due times that count in an open loop

    # --- one session -------------------------------------------------------------------------------------------

    async def open(self, number: int) -> Session | None:
        """A new session; None when it could not be opened, which is a lost one."""
        try:
            opened = await self._with_control(lambda control: self.adapter.register(control, number))
        except Exception as error:
            self.lost[f"open: {error!r:.80}"] += 1
            return None
        name = self.names[number % len(self.names)]
        extra = getattr(self.adapter, "CHAT_EXTRA", {}) if name == "chat" else {}
        talk = self.dialects[name](opened.key, self.adapter.PREFIX, extra)
        connection = Connection(opened.host, opened.port, self.options.timeout)
        return Session(number, name, opened, talk, connection)

    async def run(self, session: Session, moment: Callable[[int], float] | None = None) -> None:
        """All turns of a session; turn k is due at ``moment(k)``, or at once. Ends it early on what a harness would."""
        rnd = random.Random(session.number)
        session.say(f"session {session.number} task: ", rnd.randrange(SIZE), 1500)
        try:
            for index in range(self.options.turns):
                due = time.perf_counter() if moment is None else moment(index)
                if due > self._window[1]:
                    break
                await asyncio.sleep(due - time.perf_counter())
                size = await self._turn(session, due)
                room = self._size(index + 1) - size - OVERHEAD_PER_TURN
                session.say(f"s{session.number} t{index}\n", rnd.randrange(SIZE), max(LEAST_RESULT, int(room)))
        except Lost as lost:
            self.lost[str(lost)] += 1
        else:
            self.finished += [session] if session.turns else []
        finally:
            session.connection.close()
        if self.options.readback == "end" and session.turns:
            await self.read(session)

    async def _turn(self, session: Session, due: float) -> int:
        """One turn; the size of its request."""
        body = session.talk.body()
        data = await self._answer(session, body)
        done = time.perf_counter()
        try:
            text = session.talk.hear(data)
            mark = MARK.search(text)
        except Exception as error:
            raise Lost(f"{session.dialect} answer: {error!r:.120}") from error
        if mark is None:
            raise Lost(f"{session.dialect} answer without a mark: {text!r:.80}")
        seed, tokens, latency_ms, _ = map(int, mark.groups())
        self.turns += 1
        if self._window[0] <= due:
            self.timings.append(Timing(due, done, latency_ms / 1000))
        session.turns.append(Turn(seed, tokens, len(session.script)))
        session.script.append(Said("assistant", None, seed, tokens))
        return len(body)

    async def _answer(self, session: Session, body: bytes) -> bytes:
        """The answer to a request, asked again as the harness would when ``--retry`` is on. Raises Lost."""
        rule, wait = session.talk.retry, session.talk.retry.first_s
        tries = rule.tries if self.options.retry else 1
        for attempt in range(1, tries + 1):
            reason, final, retry_after_s = "", False, None
            try:
                reply = await session.talk.ask(session.connection, body)
                if reply.status == 200:
                    return reply.body
                reason, final, retry_after_s = _refused(reply)
            except Dropped as drop:
                reason, final = f"dropped: {drop}", drop.started and not rule.mid_stream
            except TimeoutError:
                reason, final = f"no answer within {self.options.timeout:.0f} s", True
            if final or attempt == tries:
                break
            self.retries[f"{session.dialect}: {reason:.40}"] += 1
            await asyncio.sleep(retry_after_s or wait)
            wait = min(wait * 2, rule.most_s)
        raise Lost(f"{session.dialect} {reason}")

    def _size(self, index: int) -> float:
        """The size in bytes that request ``index`` is to have."""
        options = self.options
        if options.kb_step:
            return 1024 * (options.kb_start + options.kb_step * index)
        growth = options.kb_end / options.kb_start
        return float(1024 * options.kb_start * growth ** (index / max(1, options.turns - 1)))

    async def read(self, session: Session) -> None:
        """Read a session's trace back."""
        async with self._reading:
            started = time.perf_counter()
            try:
                session.calls = await self._with_control(
                    lambda control: self.adapter.read_trace(control, session.opened.key)
                )
                self.read_s.append(time.perf_counter() - started)
                if self.options.rows:
                    read_rows = self.adapter.read_rows  # type: ignore[attr-defined]  # optional
                    session.rows = await self._with_control(lambda control: read_rows(control, session.opened.key))
                if self.options.delete:
                    await self._with_control(lambda control: self.adapter.delete(control, session.opened.key))
            except Exception as error:
                session.calls = error

    async def _with_control(self, use: Callable[[Connection], Awaitable[Any]]) -> Any:
        control = Connection(self._host, self._port, self.options.timeout)
        try:
            return await use(control)
        finally:
            control.close()

    # --- the load ----------------------------------------------------------------------------------------------

    async def closed_loop(self) -> None:
        """``n`` clients, each as fast as it is answered."""
        options, started = self.options, time.perf_counter()

        async def client(index: int) -> None:
            await asyncio.sleep(options.ramp * index / options.n)
            number = index
            while True:
                session = await self.open(number)
                if session is not None:
                    await self.run(session)
                number += options.n
                if time.perf_counter() - started >= options.duration:
                    return

        await asyncio.gather(*[client(index) for index in range(options.n)])

    async def open_loop(self) -> None:
        """Sessions arrive at random moments at a mean of ``rate / turns`` a second; the first ones do not count.

        Turns of a session are due ``period`` seconds apart, give or take, whether or not the one before was quick.
        """
        options, rnd = self.options, random.Random(11)
        warm_s = options.turns * options.period
        total_s = warm_s + options.duration
        now = time.perf_counter()
        self._window = (now + warm_s, now + total_s)
        count = round(options.rate / options.turns * total_s)

        async def arrive(number: int, at: float, jitters: list[float]) -> None:
            await asyncio.sleep(at - time.perf_counter())
            session = await self.open(number)
            if session is not None:
                await self.run(session, lambda index: at + LEAD_S + options.period * (index + jitters[index]))

        arrivals = []
        for number in range(count):
            jitters = [rnd.uniform(0, options.jitter) for _ in range(options.turns)]
            arrivals.append(arrive(number, now + rnd.uniform(0, total_s), jitters))
        await asyncio.gather(*arrivals)

    async def watch_stalls(self) -> None:
        """How late the generator's own loop is."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(STALL_TICK_S)
            self.stalls.append(time.perf_counter() - before - STALL_TICK_S)

    async def read_all(self) -> None:
        """Read back what was not read at the end of its session."""
        todo = [session for session in self.finished if session.calls is None]
        if self.options.readback_max < len(todo):
            todo = random.Random(1).sample(todo, self.options.readback_max)
        await asyncio.gather(*[self.read(session) for session in todo])

    async def check(self) -> Checker:
        """Compare everything that was read with what must be."""
        place = urlsplit(self.options.engine)
        engine = Connection(str(place.hostname), int(place.port or 80), self.options.timeout)
        prompts = json.loads((await engine.request("GET", "/prompts")).body)
        engine.close()
        checker = Checker({int(seed): digest for seed, digest in prompts.items()}, self.options.retry)
        for session in self.finished:
            if isinstance(session.calls, Exception):
                checker.unreadable(session.calls)
            elif session.calls is not None:
                checker.check(session.dialect, session.script, session.turns, session.calls)
                if session.rows is not None:
                    checker.check_rows(session.calls, session.rows)
                session.calls = session.rows = None
        return checker

    def figures(self, wall_s: float, cpu_s: float) -> dict[str, Any]:
        """The figures of the load."""
        done = sorted(timing.done for timing in self.timings)
        added = [timing.added_s for timing in self.timings]
        measured_s = self.options.duration if self.options.rate else wall_s
        return {
            "wall_s": round(wall_s, 2),
            "turns": self.turns,
            "turns_per_s": round(len(self.timings) / measured_s, 1),
            "mid_turns_per_s": middle_rate(done),
            "sessions": len(self.finished),
            "lost_sessions": sum(self.lost.values()),
            "lost": dict(self.lost),
            "retries": dict(self.retries),
            "added_p50_s": percentile(added, 0.5),
            "added_p99_s": percentile(added, 0.99),
            "added_max_s": percentile(added, 1.0),
            "generator_cpu_ms_turn": round(cpu_s * 1000 / max(1, self.turns), 3),
            "generator_stall_max_s": percentile(self.stalls, 1.0),
            "read_p50_s": percentile(self.read_s, 0.5),
            "read_max_s": percentile(self.read_s, 1.0),
        }


def _refused(reply: Reply) -> tuple[str, bool, float | None]:
    """(reason, whether asking again is useless, seconds to wait) for an error status."""
    return f"status {reply.status}: {reply.body[:100]!r}", reply.status not in TRANSIENT, reply.retry_after_s


def percentile(values: list[float], share: float) -> float | None:
    """The value below which ``share`` of the values lie."""
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 4) if values else None


def middle_rate(moments: list[float]) -> float | None:
    """Events a second in the middle 60% of the time; ``moments`` ascend."""
    if len(moments) < 10 or moments[-1] <= moments[0]:
        return None
    span = moments[-1] - moments[0]
    low, high = moments[0] + 0.2 * span, moments[0] + 0.8 * span
    return round(sum(low <= moment <= high for moment in moments) / (high - low), 1)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole: load, read-back, check. The figures."""
    generator = Generator(options, load_adapter(options.adapter))
    stalls = asyncio.create_task(generator.watch_stalls())
    started, cpu = time.perf_counter(), time.process_time()
    await (generator.open_loop() if options.rate else generator.closed_loop())
    figures = generator.figures(time.perf_counter() - started, time.process_time() - cpu)
    stalls.cancel()
    print("LOAD_DONE", file=sys.stderr, flush=True)
    await asyncio.sleep(options.settle)
    if options.readback != "none":
        await generator.read_all()
        figures |= {"read_p50_s": percentile(generator.read_s, 0.5), "read_max_s": percentile(generator.read_s, 1.0)}
    checker = await generator.check()
    return figures | {"trace": vars(checker.verdict), "wrong": checker.verdict.wrong}


def parser() -> argparse.ArgumentParser:
    """The generator's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="a name in bench/adapters or a path")
    parser.add_argument("--base", required=True, help="URL of the target")
    parser.add_argument("--engine", required=True, help="URL of the fake engine")
    parser.add_argument("--n", type=int, default=50, help="clients of a closed loop")
    parser.add_argument("--turns", type=int, default=10, help="of a session")
    parser.add_argument("--dialects", default=",".join(DIALECTS))
    parser.add_argument("--kb-start", type=float, default=20, help="size of the first request")
    parser.add_argument("--kb-end", type=float, default=200, help="size of the last request")
    parser.add_argument("--kb-step", type=float, default=0, help="grow by so much a turn instead")
    parser.add_argument("--ramp", type=float, default=2, help="seconds over which clients start")
    parser.add_argument("--duration", type=float, default=0, help="seconds")
    parser.add_argument("--rate", type=float, default=0, help="turns a second of an open loop; 0: closed loop")
    parser.add_argument(
        "--period", type=float, default=3, help="seconds between the turns of a session in an open loop"
    )
    parser.add_argument("--jitter", type=float, default=0.25, help="share of the period by which a turn may be late")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one answer")
    parser.add_argument("--retry", action="store_true", help="ask again as harnesses do")
    parser.add_argument("--readback", choices=["after", "end", "none"], default="after")
    parser.add_argument("--readback-max", type=int, default=10**9)
    parser.add_argument("--readback-par", type=int, default=4)
    parser.add_argument("--settle", type=float, default=0, help="seconds of rest after the load")
    parser.add_argument("--rows", action="store_true", help="read and check the rows, too")
    parser.add_argument("--out", type=Path, help="a file for the figures instead of stdout")
    parser.add_argument("--delete", action="store_true", help="delete each session once it was read")
    return parser


def main() -> None:
    options = parser().parse_args()
    raise_open_files()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    figures = json.dumps(uvloop.run(run(options)))
    options.out.write_text(figures) if options.out else print(figures)


if __name__ == "__main__":
    main()
