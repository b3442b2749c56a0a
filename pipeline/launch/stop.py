"""`yoke stop RUN`: asks a run for a checkpoint and the end, and waits until it has ended.

The coordinator is asked first; where it does not answer, the run's Slurm job gets USR1, which means the same. What has
not begun is cancelled.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.config import Config, UserError
from pipeline.launch.rpc import RpcError
from pipeline.launch.run_status import ENDED, OPEN
from pipeline.launch.squeue import QueueSilent, ask_job_to_stop, cancel
from pipeline.launch.status import RunWatcher, Watch, find_runs, run_root

POLL_S = 1.0
TELL_S = 10.0  # between two lines that say how long it has been waited
INTERRUPT_S = 10.0
FAILED_LOOKS = 3  # a `yoke train` on this machine starts a failed run again within a second
AFTER_WARNING_S = 60.0
USAGE = "yoke stop RUN [--timeout SECONDS]"
Status = Mapping[str, Any]


def run(config: Config, words: Sequence[str]) -> int:
    """The job. Exit code 0: it does not run (any more); 1: it still did when the time was up."""
    names, timeout_s = _parse(words)
    runs = find_runs(run_root(config, names))
    if len(runs) > 1:
        raise UserError(f"this is a sweep: stop its runs one by one: {', '.join(run.root.name for run in runs)}")
    return Stopper(runs[0]).stop(timeout_s)


def _parse(words: Sequence[str]) -> tuple[list[str], float | None]:
    """(RUN, the time limit if one was given). Raises UserError."""
    names, rest = [], iter(words)
    timeout_s = None
    for word in rest:
        if not word.startswith("--"):
            names.append(word)
        elif word == "--timeout":
            timeout_s = _seconds(next(rest, ""))
        else:
            raise UserError(f"{word} is unknown: {USAGE}")
    return names, timeout_s


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--timeout {text}: a number of seconds is needed: {USAGE}") from None


class Stopper:
    """Asks one run to end, each attempt once, and waits for it."""

    def __init__(self, run: RunWatcher) -> None:
        self._run = run
        self._watch = Watch([run])
        self._asked: set[tuple[str, Any]] = set()  # (how, what) that worked

    def stop(self, timeout_s: float | None = None) -> int:
        """``timeout_s``: by default the time that a warning before a time limit gives, and a minute."""
        began = told = time.monotonic()
        failed = 0
        while True:
            status = self._watch.look()[0]
            failed = failed + 1 if status["state"] == "failed" else 0
            if status["state"] in (*ENDED, "not started") and not 0 < failed < FAILED_LOOKS:
                return self._ended(status)
            limit_s = timeout_s if timeout_s is not None else self._default_s()
            self._ask(status)
            now = time.monotonic()
            if now - began >= limit_s:
                return _give_up(status, now - began)
            if now - told >= TELL_S:
                told = now
                _say(f"… still {_doing(status)} after {now - began:.0f} s (at most {limit_s:.0f})")
            time.sleep(POLL_S)

    def _default_s(self) -> float:
        return float(self._run.facts["settings"]["signal_s"] or 0.0) + AFTER_WARNING_S

    def _ended(self, status: Status) -> int:
        name, state, why = status["run"], status["state"], f" ({status['reason']})" if status["reason"] else ""
        if not self._asked:
            _say(f"{name} is not running: {state}{why}")
        elif state == "done":
            _say(f"{name} was done before it stopped")
        else:
            kept = status["checkpoint"]
            at = f"its checkpoint is of update {kept['update']}" if kept["newest"] else "it had no checkpoint yet"
            _say(f"{name}: {state}{why}; {at}. The same `yoke train` command goes on from there.")
        return 0

    # --- how it is asked

    def _ask(self, status: Status) -> None:
        """In the mildest way that works, once an attempt; ways that failed are tried again at the next look."""
        job, newest = status["job"] or {}, status["attempts"][-1] if status["attempts"] else {}
        attempt = newest.get("number")
        if status["state"] == "queued":
            self._once("cancel", job["id"], lambda: cancel(job["id"]), f"job {job['id']} is taken out of the queue")
        elif job.get("id") == newest.get("slurm") and newest.get("ending") not in OPEN:
            return  # it has ended, and its job is about to
        elif self._run.may_answer and self._once("interrupt", attempt, self._interrupt, "asked it to stop"):
            return
        elif job.get("kind") == "slurm":
            self._once("signal", (job["id"], attempt), lambda: ask_job_to_stop(job["id"]), f"signalled job {job['id']}")
        elif job.get("alive") and not self._run.facts["address"]:
            self._once("kill", attempt, lambda: os.kill(job["pid"], signal.SIGINT), "it had not begun: ended it")

    def _interrupt(self) -> None:
        self._run.call("interrupt", INTERRUPT_S)

    def _once(self, how: str, what: Any, act: Any, words: str) -> bool:
        """Whether this was done, now or before."""
        if (how, what) in self._asked:
            return True
        with suppress(RpcError, QueueSilent, ProcessLookupError):
            act()
            self._asked.add((how, what))
            _say(f"{words}; it ends after a checkpoint …" if how in ("interrupt", "signal") else words)
        return (how, what) in self._asked


def _doing(status: Status) -> str:
    phase = status["phase"]
    return f"{status['state']}, phase {phase['name']}," if phase else f"{status['state']}"


def _give_up(status: Status, waited_s: float) -> int:
    job = status["job"] or {}
    harsher = f"scancel {job['id']}" if job.get("kind") == "slurm" else f"kill -INT {job.get('pid')}"
    print(
        f"yoke: {status['run']} is still {_doing(status)} after {waited_s:.0f} s; wait on with the same command, "
        f"or end it at once: {harsher} (its checkpoints stay)",
        file=sys.stderr,
    )
    return 1


def _say(text: str) -> None:
    print(text, flush=True)
