"""In which state a run is, from its directory, from Slurm's queue and from the processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.launch.local import living
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import SlurmError, queued

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")  # Slurm's words


class State(StrEnum):
    """Words of `yoke report` and of its files."""

    NEW = "not started"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"  # Slurm does not answer


@dataclass(frozen=True)
class Standing:
    """A run's state, the Slurm job that it is in, and, for what ended early, why."""

    state: State
    job: str | None = None
    reason: str = ""

    @property
    def on_its_way(self) -> bool:
        return self.state in (State.QUEUED, State.RUNNING)


def standing(run: RunDirectory) -> Standing:
    """How the run stands now. A job in the queue counts more than what an earlier attempt left."""
    try:
        job = queued(run)
    except SlurmError as error:
        return Standing(State.DONE if run.done else State.UNKNOWN, reason=str(error))
    if job is not None:
        return Standing(State.QUEUED if job[1] in WAITING else State.RUNNING, job[0])
    if living(run):
        return Standing(State.RUNNING)
    if run.done:
        return Standing(State.DONE)
    return _ended_early(run)


def _ended_early(run: RunDirectory) -> Standing:
    numbers = run.attempt_numbers()
    if not numbers:
        lost = (run.root / "submission.json").exists()
        return Standing(State.FAILED, reason="its job left the queue before it began") if lost else Standing(State.NEW)
    newest = run.attempt(numbers[-1])
    if newest.read("stopped"):
        return Standing(State.STOPPED)
    failed = newest.read("failed") or {"text": "it ended without a word"}
    return Standing(State.FAILED, reason=str(failed["text"]))
