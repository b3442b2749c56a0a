"""Whether a job whose ranks have ended is put back into the queue: the last lines of every batch script.

`python -m pipeline.launch.requeue RUN_DIR RC` within the job. After a warning (time limit, preemption) submitit
requeues by itself; this is for crashes, which no callback sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.launch.rendezvous import restart_count
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.report.store import append_jsonl, read_jsonl

SAME_PLACE = 3  # crashes in a row without a new checkpoint or evaluation cell between them
SCONTROL_S = 30.0
TRIES = 3
PAUSE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """What is known when srun has ended."""

    rc: int
    restart: int  # of this start of the job: SLURM_RESTART_COUNT
    job: dict[str, str] | None  # what scontrol shows of it; None = no answer
    max_requeues: int
    crashes_here: int = 1  # crashes in a row at the same checkpoint, this one included
    done: bool = False
    stopped: bool = False
    mistake: str = ""  # a wrong setting that a rank found
    failure: str = ""  # what else the first rank that failed said


@dataclass(frozen=True)
class Decision:
    """``why`` is one line for the job's log."""

    requeue: bool
    why: str
    ghost: bool = False  # another start of this job has taken over: nothing may be written


def decide(ended: Ended) -> Decision:
    """The whole rule, in order: the first line that fits counts."""
    job = ended.job or {}
    restarts = int(job.get("Restarts", ended.restart))
    state = job.get("JobState", "unknown")
    said = ended.failure or f"exit code {ended.rc}"
    no = [
        (ended.rc == 0, "stopped as asked" if ended.stopped else "the job ended well"),
        (ended.job is None, "Slurm does not say how the job stands"),
        (restarts != ended.restart, f"this is start {ended.restart} of the job, start {restarts} has taken over"),
        (state != "RUNNING", f"the job is {state}: Slurm or somebody has ended it"),
        (ended.done, "the run is done"),
        (ended.stopped, "stopped as asked"),
        (bool(ended.mistake), f"this must be mended first: {ended.mistake}"),
        (
            ended.crashes_here >= SAME_PLACE,
            f"{ended.crashes_here} crashes in a row without a new checkpoint; the last: {said}",
        ),
        (
            ended.restart >= ended.max_requeues,
            f"cluster.max_requeues={ended.max_requeues} is used up; the last crash: {said}",
        ),
    ]
    reason = next((why for holds, why in no if holds), None)
    if reason is None:
        return Decision(True, f"requeued after a crash ({ended.restart + 1} of {ended.max_requeues} restarts): {said}")
    ghost = ended.job is not None and restarts != ended.restart
    return Decision(False, f"not requeued: {reason}" if ended.rc else reason, ghost)


def own_job() -> str | None:
    """The id of the job that this process is in: ARRAY_TASK for a task of an array, whose plain number may mean all."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def after_srun(run: RunDirectory, rc: int) -> Decision:
    """Decide, write the reason down, and requeue. Called within the job that ``rc`` is of."""
    job_id = own_job() or ""
    decision = decide(_look(run, rc, job_id))
    print(f"yoke: {decision.why}", flush=True)
    if rc and not decision.ghost:
        append_jsonl(_log(run), _entry(run, job_id, rc, decision))
    if decision.requeue:
        subprocess.run(["scontrol", "requeue", job_id], timeout=SCONTROL_S, check=True)
    return decision


def _look(run: RunDirectory, rc: int, job_id: str) -> Ended:
    attempt = _own_attempt(run, job_id)
    failed = (attempt and attempt.read("failed")) or {"text": "", "user_error": False, "rank": ""}
    mistake = failed["text"] if failed["user_error"] else ""
    return Ended(
        rc=rc,
        restart=restart_count(),
        job=_show(job_id) if rc else {},
        max_requeues=_bound(run, job_id),
        crashes_here=_crashes_here(run, job_id),
        done=run.done is not None,
        stopped=attempt is not None and attempt.read("stopped") is not None,
        mistake=mistake,
        failure="" if mistake or not failed["text"] else f"{failed['rank']}: {failed['text']}",
    )


def _bound(run: RunDirectory, job_id: str) -> int:
    """``cluster.max_requeues`` as this job was submitted with; the run's own where the job is not the run's."""
    path = run.root / "submission.json"
    submission = json.loads(path.read_text()) if path.exists() else {}
    own = submission.get("job_id") == job_id
    return int(submission["max_requeues"]) if own else run.saved_config().cluster.max_requeues


def _own_attempt(run: RunDirectory, job_id: str) -> Attempt | None:
    """The newest attempt, if this start of this job made it; a crash may come before that."""
    for number in run.attempt_numbers()[-1:]:
        attempt = run.attempt(number)
        job = attempt.read("job") or {}
        if str(job.get("slurm")) == job_id and job.get("restart") == restart_count():
            return attempt
    return None


def _crashes_here(run: RunDirectory, job_id: str) -> int:
    place = _progress(run)
    count = 1
    for entry in reversed(read_jsonl(_log(run))):
        if entry["job"] != job_id or entry["progress"] != place:
            break
        count += 1
    return count


def _progress(run: RunDirectory) -> list[Any]:
    """Changes whenever the run has gone on for good: its newest checkpoint, and how many evaluation cells there are."""
    whole = run.checkpoints.glob("[0-9]*-update-*/manifest.json")  # their names sort; training.checkpoint needs torch
    cells = sum(1 for _ in (run.root / "evaluation").glob("*/*.parquet"))
    return [max((path.parent.name for path in whole), default=""), cells]


def _entry(run: RunDirectory, job_id: str, rc: int, decision: Decision) -> dict[str, Any]:
    words = {"time": time.time(), "job": job_id, "restart": restart_count(), "rc": rc}
    return words | {"progress": _progress(run), "requeue": decision.requeue, "why": decision.why}


def _log(run: RunDirectory) -> Path:
    return run.root / "jobs" / "requeues.jsonl"


def _show(job_id: str) -> dict[str, str] | None:
    """The words of `scontrol show job`, or None when Slurm does not answer."""
    for _ in range(TRIES):
        try:
            command = ["scontrol", "--oneliner", "show", "job", job_id]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"yoke: scontrol: {error}", file=sys.stderr)
            time.sleep(PAUSE_S)
            continue
        return dict(word.split("=", 1) for word in answer.stdout.split() if "=" in word)
    return None


if __name__ == "__main__":
    after_srun(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]))
