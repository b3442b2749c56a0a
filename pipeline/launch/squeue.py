"""What Slurm's queue says of jobs, and how to send them a signal. One process a question, with a deadline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

DEADLINE_S = 10.0
KILLED_S = 1.0
SEPARATOR = "|"
COLUMNS = {"id": "%i", "state": "%T", "nodes": "%N", "count": "%D", "left": "%L", "reason": "%r", "start": "%S"}
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ON = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"})


class QueueSilent(RuntimeError):
    """Slurm did not answer, or its commands are not here."""


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue shows it, with Slurm's own words."""

    id: str
    state: str
    nodes: str
    count: str
    left: str
    reason: str
    start: str

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def is_on(self) -> bool:
        return self.state in ON


def find_jobs(ids: Sequence[str], deadline_s: float = DEADLINE_S) -> dict[str, QueuedJob]:
    """Those of the jobs that Slurm still knows, ended ones too. Raises QueueSilent."""
    question = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}"]
    answer = _ask([*question, f"--format={SEPARATOR.join(COLUMNS.values())}"], deadline_s)
    if answer.returncode and "invalid job id" not in answer.stderr.lower():
        raise QueueSilent(_complaint(answer))
    lines = [line.strip().split(SEPARATOR) for line in answer.stdout.splitlines()]
    jobs = [QueuedJob(*cells) for cells in lines if len(cells) == len(COLUMNS)]
    return {job.id: job for job in jobs}


def find_tasks(name: str, deadline_s: float = DEADLINE_S) -> list[tuple[str, str]]:
    """(array, state) of each task of the arrays called ``name`` that has not ended. Raises QueueSilent."""
    answer = _ask(["squeue", "--noheader", "--array", f"--name={name}", f"--format=%F{SEPARATOR}%T"], deadline_s)
    if answer.returncode:
        raise QueueSilent(_complaint(answer))
    cells = (line.strip().partition(SEPARATOR) for line in answer.stdout.splitlines())
    return [(array, state) for array, _, state in cells]


def ask_job_to_stop(job_id: str, deadline_s: float = DEADLINE_S) -> None:
    """USR1 to every rank: a checkpoint and the end. Raises QueueSilent."""
    _command(["scancel", "--signal=USR1", job_id], deadline_s)


def cancel(job_id: str, deadline_s: float = DEADLINE_S) -> None:
    """Take a job out of the queue, or end it. Raises QueueSilent."""
    _command(["scancel", job_id], deadline_s)


def _command(words: list[str], deadline_s: float) -> None:
    answer = _ask(words, deadline_s)
    if answer.returncode:
        raise QueueSilent(_complaint(answer))


def _complaint(answer: subprocess.CompletedProcess[str]) -> str:
    lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
    return f"{answer.args[0]}: {lines[-1]}"


def _ask(words: list[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``words``; whatever hangs is killed with all that it started."""
    if shutil.which(words[0]) is None:
        raise QueueSilent(f"{words[0]} is not installed here")
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(KILLED_S)
        raise QueueSilent(f"{words[0]} did not answer within {deadline_s:g} s") from None
    return subprocess.CompletedProcess(words, process.returncode, out, error)
