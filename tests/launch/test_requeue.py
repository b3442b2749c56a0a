"""Whether a job that ended is put back into the queue, case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.launch import requeue
from pipeline.launch.requeue import Ended, decide
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import record_submission

CRASH = Ended(rc=1, restart=2, job={"JobState": "RUNNING", "Restarts": "2"}, max_requeues=5)


@pytest.mark.parametrize(
    ("change", "wanted", "why"),
    [
        ({}, True, "requeued after a crash (3 of 5 restarts): exit code 1"),
        ({"failure": "engine: vLLM died"}, True, "engine: vLLM died"),
        ({"rc": 0}, False, "the job ended well"),
        ({"rc": 0, "stopped": True}, False, "stopped as asked"),
        ({"stopped": True}, False, "stopped as asked"),
        ({"job": {"JobState": "COMPLETING", "Restarts": "2"}}, False, "the job is COMPLETING"),
        ({"job": {"JobState": "CANCELLED", "Restarts": "2"}}, False, "the job is CANCELLED"),
        ({"job": {"JobState": "RUNNING", "Restarts": "3"}}, False, "start 3 has taken over"),
        ({"job": {"JobState": "PENDING", "Restarts": "3"}}, False, "start 3 has taken over"),
        ({"job": None}, False, "Slurm does not say"),
        ({"done": True}, False, "the run is done"),
        ({"mistake": "tasks.train is empty"}, False, "must be mended first: tasks.train is empty"),
        ({"crashes_here": 2}, True, "requeued"),
        ({"crashes_here": 3}, False, "3 crashes in a row without a new checkpoint; the last: exit code 1"),
        ({"max_requeues": 2}, False, "cluster.max_requeues=2 is used up"),
        ({"max_requeues": 3}, True, "requeued"),
    ],
)
def test_the_rule(change: dict[str, object], wanted: bool, why: str) -> None:
    decision = decide(replace(CRASH, **change))  # type: ignore[arg-type]
    assert decision.requeue is wanted
    assert why in decision.why
    assert decision.ghost is ("taken over" in why)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run in job 7, and a scontrol that notes what it is asked and answers from `state`."""
    run = RunDirectory(tmp_path / "run")
    run.save_config(compose_config(["+experiment=smoke", f"run_dir={run.root}", "cluster=slurm"]))
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/state\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    show(tmp_path, 0)
    return run


def show(folder: Path, restarts: int) -> None:
    (folder / "state").write_text(f"JobId=7 JobName=yoke-run JobState=RUNNING Reason=None Restarts={restarts}\n")


def asked(run: RunDirectory) -> str:
    path = run.root.parent / "asked"
    return path.read_text() if path.exists() else ""


def test_a_crash_is_requeued_and_written_down(run: RunDirectory) -> None:
    attempt = run.new_attempt()
    attempt.publish("job", {"slurm": "7", "restart": 0})
    attempt.fail("engine", RuntimeError("no memory"))
    assert requeue.after_srun(run, 1).requeue
    assert asked(run).endswith("requeue 7\n")
    entry = json.loads((run.root / "jobs" / "requeues.jsonl").read_text())
    assert entry["why"] == "requeued after a crash (1 of 20 restarts): engine: no memory"


def test_a_good_end_asks_nothing(run: RunDirectory) -> None:
    assert not requeue.after_srun(run, 0).requeue
    assert asked(run) == "" and not (run.root / "jobs").exists()


def test_a_ghost_writes_nothing(run: RunDirectory) -> None:
    show(run.root.parent, 1)
    assert not requeue.after_srun(run, 1).requeue
    assert not (run.root / "jobs").exists() and "requeue 7" not in asked(run)


def test_the_word_of_another_start_does_not_count(run: RunDirectory) -> None:
    attempt = run.new_attempt()
    attempt.publish("job", {"slurm": "6", "restart": 0})
    attempt.publish("failed", {"rank": "trainer", "text": "wrong", "user_error": True})
    assert requeue.after_srun(run, 1).requeue


@pytest.mark.parametrize("goes_on_by", ["checkpoint", "evaluation"])
def test_a_run_that_gets_nowhere_ends(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, goes_on_by: str) -> None:
    def crash(restart: int) -> bool:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        show(run.root.parent, restart)
        return requeue.after_srun(run, 1).requeue

    assert [crash(restart) for restart in range(2)] == [True, True]
    place = {
        "checkpoint": run.checkpoints / "000001-update-000002" / "manifest.json",
        "evaluation": run.evaluation("before") / "pi--task.parquet",
    }[goes_on_by]
    place.parent.mkdir(parents=True)
    place.touch()
    assert [crash(restart) for restart in range(2, 5)] == [True, True, False]


def test_another_job_begins_anew(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert requeue.after_srun(run, 1).requeue
        assert requeue.after_srun(run, 1).requeue


def test_when_slurm_is_silent_nothing_is_requeued(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "PAUSE_S", 0.0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "Slurm does not say" in requeue.after_srun(run, 1).why


def test_a_task_of_an_array_is_requeued_alone(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert requeue.after_srun(run, 1).requeue
    assert asked(run) == "--oneliner show job 7_2\nrequeue 7_2\n"


def test_the_bound_is_that_of_the_job(run: RunDirectory) -> None:
    config = run.saved_config()
    config.cluster.max_requeues = 0
    record_submission(config, run, "6", run.root)
    assert requeue.after_srun(run, 1).requeue
    record_submission(config, run, "7", run.root)
    assert "cluster.max_requeues=0 is used up" in requeue.after_srun(run, 1).why
