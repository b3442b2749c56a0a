"""`yoke stop RUN`: asks a run, or all runs of a sweep, for a checkpoint and the end, and waits until they have ended.

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
    return stop_all([Stopper(run, timeout_s) for run in find_runs(run_root(config, names))])


def stop_all(stoppers: Sequence[Stopper]) -> int:
    """Ask each run to end and wait for all of them. Returns the highest of their exit codes."""
    watch, codes = Watch([stopper.run for stopper in stoppers]), dict[Stopper, int]()
    while True:
        for stopper, status in zip(stoppers, watch.look(), strict=True):
            if stopper not in codes and (code := stopper.go_on(status)) is not None:
                codes[stopper] = code
        if len(codes) == len(stoppers):
            return max(codes.values())
        time.sleep(POLL_S)


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

    def __init__(self, run: RunWatcher, timeout_s: float | None = None) -> None:
        """``timeout_s``: by default the time that a warning before a time limit gives, and a minute."""
        self.run = run
        self._timeout_s = timeout_s
        self._asked: set[tuple[str, Any]] = set()  # (how, what) that worked
        self._began = self._told = time.monotonic()
        self._failed = 0  # looks one after the other

    def go_on(self, status: Status) -> int | None:
        """One look at the run: asks it where it has to be asked. Returns the exit code once it is over."""
        self._failed = self._failed + 1 if status["state"] == "failed" else 0
        if status["state"] in (*ENDED, "not started") and not 0 < self._failed < FAILED_LOOKS:
            return self._ended(status)
        limit_s = self._timeout_s if self._timeout_s is not None else self._default_s()
        self._ask(status)
        now = time.monotonic()
        if now - self._began >= limit_s:
            return _give_up(status, now - self._began)
        if now - self._told >= TELL_S:
            self._told = now
            _say(f"{status['run']} is still {_doing(status)} after {now - self._began:.0f} s (at most {limit_s:.0f})")
        return None

    def _default_s(self) -> float:
        return float(self.run.facts["settings"]["signal_s"] or 0.0) + AFTER_WARNING_S

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
        elif self.run.may_answer and self._once("interrupt", attempt, self._interrupt, "asked it to stop"):
            return
        elif job.get("kind") == "slurm":
            self._once("signal", (job["id"], attempt), lambda: ask_job_to_stop(job["id"]), f"signalled job {job['id']}")
        elif job.get("alive") and not self.run.facts["address"]:
            self._once("kill", attempt, lambda: os.kill(job["pid"], signal.SIGINT), "it had not begun: ended it")

    def _interrupt(self) -> None:
        self.run.call("interrupt", INTERRUPT_S)

    def _once(self, how: str, what: Any, act: Any, words: str) -> bool:
        """Whether this was done, now or before."""
        if (how, what) in self._asked:
            return True
        with suppress(RpcError, QueueSilent, ProcessLookupError):
            act()
            self._asked.add((how, what))
            after = "; it ends after a checkpoint …" if how in ("interrupt", "signal") else ""
            _say(f"{self.run.root.name}: {words}{after}")
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
