"""`yoke status` on run directories of every state, with sources that answer, lie torn on the disk, or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import NODE, MadeUpRun, MadeUpSlurm, overview

from pipeline.cli import main
from pipeline.launch import status as status_module
from pipeline.launch.run_directory import Attempt
from pipeline.launch.status import RunWatcher, Watch

LONG_S = 30.0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpSlurm:
    return MadeUpSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


def look(run: MadeUpRun) -> dict[str, Any]:
    """Through JSON, as scripts get it."""
    found: dict[str, Any] = json.loads(json.dumps(Watch([RunWatcher(run.root)]).look()[0]))
    return found


def yoke(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


# --- runs that never started


def test_a_run_that_was_never_started_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = yoke(capsys, "status", str(tmp_path / "nothing"))
    assert (code, out) == (2, "")
    assert error == f"yoke: {tmp_path}/nothing does not exist: no run was started there\n"
    (tmp_path / "empty").mkdir()
    code, _, error = yoke(capsys, "status", f"run_dir={tmp_path}/empty")
    assert code == 2
    assert error == f"yoke: no run was started in {tmp_path}/empty\n"
    (tmp_path / "file").write_text("")
    assert yoke(capsys, "stop", str(tmp_path / "file"))[2] == (
        f"yoke: {tmp_path}/file is a file, not the directory of a run\n"
    )


def test_a_wrong_word_is_named(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert yoke(capsys, "status", str(run.root), "--wach")[::2] == (
        2,
        "yoke: --wach is unknown: yoke status RUN [--watch] [--json]\n",
    )


def test_a_queued_run_shows_its_job(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    slurm.job("4711", "PENDING", nodes="", reason="Priority")
    found = look(run)
    assert (found["state"], found["reason"]) == ("queued", "Priority")
    job = found["job"]
    assert (job["id"], job["state"], job["start"], job["nodes"]) == ("4711", "PENDING", "2026-11-30T12:00:00", None)
    assert found["updates"] == {"done": 0, "planned": 20, "seconds_each": None, "eta_s": None}
    assert found["requeues"] == {"used": 0, "max": 20}


def test_a_job_that_left_the_queue_before_it_began(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    assert look(run)["state"] == "failed"
    slurm.job("4711", "CANCELLED")
    assert look(run)["state"] == "stopped"
    slurm.program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert look(run)["reason"] == "job 4711 ended without a word: Slurm does not know it any more"


# --- runs that are on


def test_a_running_job_is_shown_from_its_coordinator(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    run.slurm_attempt("4711", failed={"rank": "trainer", "text": "boom", "user_error": False})
    attempt = run.slurm_attempt("4711", restart=1)
    run.checkpoint(4)
    run.updates(5, 6)
    with run.coordinator(attempt):
        found = look(run)
    assert (found["state"], found["figures"]["from"]) == ("running", "coordinator")
    assert (found["job"]["nodes"], found["job"]["left"]) == ("n[1-2]", "1:02:03")
    assert found["requeues"] == {"used": 1, "max": 20}
    endings = [(a["number"], a["ending"], a["why"], a["restart"]) for a in found["attempts"]]
    assert endings == [(1, "failed", "trainer rank: boom", 0), (2, "running", None, 1)]
    assert found["phase"]["name"] == "train"
    updates = found["updates"]
    assert (updates["done"], updates["planned"], updates["seconds_each"]) == (6, 20, 10.0)
    assert 129.0 <= updates["eta_s"] <= 140.0
    assert found["reward"]["harnesses"]["pi"] == {"reward": 0.6, "pass_rate": 0.55}
    assert found["staleness"] == {"min": 0.0, "mean": 0.8, "max": 2.0}
    assert found["weight_sync_s"] == 0.21
    assert found["weight_sync_phases"] == {"gather": 0.05, "load": 0.16}
    assert found["rollouts"]["credits_used"] == 24
    assert found["nodes"] == [NODE | {"shards": 2}]
    assert found["checkpoint"]["newest"] == "000004-update-000004"
    assert (found["checkpoint"]["update"], found["checkpoint"]["next_update"]) == (4, 8)
    assert [error["text"] for error in found["errors"]] == ["attempt 1: trainer rank: boom"]
    assert all(source["error"] is None for source in found["sources"].values())


def test_an_unreachable_coordinator_leaves_its_snapshot(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    attempt = run.slurm_attempt("4711")
    attempt.publish("coordinator", {"url": "http://127.0.0.1:9", "token": "x"})
    run.snapshot(age_s=42.0)
    found = look(run)
    assert (found["state"], found["figures"]["from"]) == ("running", "status.json")
    assert 42.0 <= found["time"] - found["figures"]["time"] < 42.0 + LONG_S
    assert found["nodes"][0]["name"] == "node0"
    assert "no answer to overview" in found["sources"]["coordinator"]["error"]


def test_a_snapshot_of_an_older_attempt_does_not_count(run: MadeUpRun) -> None:
    run.local_attempt(alive=False, failed={"rank": "engine", "text": "boom"})
    run.local_attempt(alive=True)
    run.snapshot(age_s=0.0, attempt=1)
    found = look(run)
    assert (found["state"], found["phase"], found["nodes"], found["figures"]["from"]) == ("running", None, [], None)


@pytest.mark.parametrize(("age_s", "state"), [(5.0, "running"), (500.0, "unknown")])
def test_without_an_answer_from_anybody_the_snapshots_age_decides(
    run: MadeUpRun, slurm: MadeUpSlurm, monkeypatch: pytest.MonkeyPatch, age_s: float, state: str
) -> None:
    monkeypatch.setattr(status_module, "QUEUE_S", 0.5)
    slurm.program("squeue", "sleep 600")
    run.submitted("4711")
    run.slurm_attempt("4711")
    run.snapshot(age_s)
    began = time.monotonic()
    found = look(run)
    assert time.monotonic() - began < LONG_S, "a hanging squeue is given up"
    assert (found["state"], found["attempts"][0]["ending"]) == (state, state)
    assert found["sources"]["squeue"]["error"] == "squeue did not answer within 0.5 s"
    assert found["sources"]["squeue"]["silent_s"] >= 0.5


@pytest.mark.parametrize(("name", "state"), [("failed", "unknown"), ("requeued", "unknown"), ("stopped", "stopped")])
def test_what_may_have_been_requeued_is_not_taken_for_ended(
    run: MadeUpRun, slurm: MadeUpSlurm, name: str, state: str
) -> None:
    slurm.program("squeue", "exit 1")
    run.submitted("4711")
    run.slurm_attempt("4711", **{name: {"rank": "engine", "text": "boom", "checkpoint": True}})
    run.snapshot(age_s=1.0)
    assert look(run)["state"] == state


def test_a_machine_without_slurm_says_so(run: MadeUpRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run.submitted("4711")
    found = look(run)
    assert found["sources"]["squeue"]["error"] == "squeue is not installed here"
    assert found["state"] == "unknown"


def test_a_local_run_lives_with_its_process(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    found = look(run)
    assert (found["state"], found["job"]["pid"], found["requeues"]) == ("running", os.getpid(), None)
    attempt.publish("job", {"pid": os.getpid(), "started": 1, "host": "elsewhere"})
    assert look(run)["state"] == "unknown", "another machine's process cannot be looked at"
    with run.coordinator(attempt):
        assert look(run)["state"] == "running"


def test_an_answer_from_before_does_not_outlive_the_run(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    watch = Watch([RunWatcher(run.root)])
    with run.coordinator(attempt):
        assert watch.look()[0]["state"] == "running"
    attempt.publish("job", {"pid": os.getpid(), "started": 1})
    found = watch.look()[0]
    assert (found["state"], found["reason"]) == ("failed", "it ended without a word: its processes are gone")
    assert found["attempts"][0]["ending"] == "lost"


def test_a_source_that_hangs_keeps_its_last_answer_and_tells_for_how_long(
    run: MadeUpRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.local_attempt(alive=True)
    watch = Watch([RunWatcher(run.root)])
    watch.look()
    hang = threading.Event()
    questions: list[int] = []
    monkeypatch.setattr(status_module, "FILES_S", 0.3)
    monkeypatch.setattr(status_module, "read_facts", lambda root: questions.append(1) or hang.wait(LONG_S))
    first, second = watch.look()[0], watch.look()[0]
    hang.set()
    assert len(questions) == 1, "nobody is asked twice at once"
    assert first["attempts"][0]["number"] == 1
    assert 0.3 <= first["sources"]["files"]["silent_s"] < second["sources"]["files"]["silent_s"]


# --- runs that have ended


@pytest.mark.parametrize(
    ("records", "state", "reason"),
    [
        ({"done": {"rollouts": 3}}, "done", None),
        ({"stopped": {"checkpoint": True}}, "stopped", "stopped as asked, after a checkpoint"),
        ({"terminated": {}}, "stopped", "told to end (SIGTERM), after a checkpoint"),
        ({"failed": {"rank": "engine", "text": "vLLM died"}}, "failed", "engine rank: vLLM died"),
    ],
)
def test_how_it_ended(run: MadeUpRun, records: dict[str, Any], state: str, reason: str | None) -> None:
    run.local_attempt(alive=False, **records)
    run.checkpoint(8)
    run.snapshot(age_s=1.0, updates={"done": 11, "planned": 20})
    found = look(run)
    assert (found["state"], found["reason"]) == (state, reason)
    assert found["updates"]["done"] == 8, "what the checkpoint holds counts, not what was lost after it"
    assert (found["phase"], found["nodes"], found["updates"]["eta_s"]) == (None, [], None)


def test_a_stage_by_itself_does_not_change_how_the_run_ended(run: MadeUpRun) -> None:
    run.local_attempt(alive=False, failed={"rank": "engine", "text": "vLLM died"})
    run.local_attempt(alive=False, stage_done={})
    assert (look(run)["state"], look(run)["reason"]) == ("failed", "engine rank: vLLM died")


def test_a_lost_attempt_shows_its_last_words_and_what_the_batch_script_said(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    attempt = run.slurm_attempt("4711", restart=2)
    (attempt.logs / "engine-node1.log").write_text("all well\nbus error\n\n")
    (run.root / "jobs").mkdir()
    entries = [
        {"time": 1.0, "job": "4711", "restart": 1, "rc": 1, "requeue": True, "why": "requeued"},
        {"time": 2.0, "job": "4711", "restart": 2, "rc": 137, "requeue": False, "why": "not requeued: used up"},
    ]
    (run.root / "jobs" / "requeues.jsonl").write_text("\n".join(map(json.dumps, entries)))
    found = look(run)
    assert (found["state"], found["reason"]) == ("failed", "not requeued: used up")
    assert "engine-node1.log: bus error" in [error["text"] for error in found["errors"]]


def test_a_new_job_counts_more_than_how_the_last_one_ended(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.slurm_attempt("11", failed={"rank": "engine", "text": "boom"})
    run.submitted("12", at=time.time() + 5)
    slurm.job("12", "RUNNING")
    found = look(run)
    assert (found["state"], found["job"]["id"], found["requeues"]["used"]) == ("running", "12", 0)
    assert found["attempts"][0]["ending"] == "failed"


# --- files as a crash or a reader in between leaves them


def test_torn_files_count_as_not_there(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    run.updates(1, 2)
    with run.run.metrics.open("a") as file:
        file.write('{"update": 3, "perf/st')
    attempt.ledger.write_text('{"t": 1.0, "harness": "pi", "what": "set aside", "reason": "no"}\n{"t": 2')
    for path in (run.run.status, attempt.root / "coordinator.json", run.root / "submission.json"):
        path.write_text('{"half": ')
    (run.run.checkpoints / "000002-update-000008").mkdir(parents=True)  # no manifest: not finished
    found = look(run)
    assert (found["state"], found["reward"]["update"], found["checkpoint"]["newest"]) == ("running", 2, None)
    assert found["errors"] == [{"time": 1.0, "text": "pi set aside: no"}]
    for name in ("job.json", "failed.json"):
        (attempt.root / name).write_text("{")
    run.run.config.write_text("training: [")
    found = look(run)
    assert (found["state"], found["reason"]) == ("failed", "a rank: no reason can be read")
    assert found["updates"]["planned"] == 0


def test_the_pace_is_that_of_the_newest_updates_as_written(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    run.updates(*range(1, 8), step_s=1000.0)  # up to a crash
    run.updates(*range(5, 13), step_s=20.0)  # from the checkpoint on
    with run.coordinator(attempt, overview=lambda: overview(updates={"done": 12, "planned": 20})):
        updates = look(run)["updates"]
    assert updates["seconds_each"] == 20.0
    assert updates["eta_s"] == pytest.approx(160.0, abs=21.0)


def test_only_the_last_attempts_are_read(run: MadeUpRun) -> None:
    for _ in range(12):
        run.local_attempt(alive=False)
    found = look(run)
    assert [attempt["number"] for attempt in found["attempts"]] == list(range(5, 13))
    assert found["attempts_total"] == 12


# --- the command


def test_json_is_one_object(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.local_attempt(alive=False, done={})
    code, out, error = yoke(capsys, "status", str(run.root), "--json")
    assert (code, error, out.count("\n")) == (0, "", 1)
    assert json.loads(out)["state"] == "done"


def test_watch_goes_on_until_the_end(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = run.local_attempt(alive=True)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            attempt.publish("job", {"pid": os.getpid(), "started": 1})
            attempt.publish("done", {})

    monkeypatch.setattr(status_module.time, "sleep", pause)
    code, out, _ = yoke(capsys, "status", str(run.root), "--watch", "--json")
    assert code == 0
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["running", "running", "done"]


def fail(attempt: Attempt) -> None:
    attempt.publish("failed", {"rank": "engine", "text": "boom"})
    attempt.publish("job", {"pid": os.getpid(), "started": 1})


def test_watch_does_not_leave_a_run_that_is_started_again(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.local_attempt(alive=True)
    steps = iter(
        [
            lambda: fail(first),
            lambda: run.local_attempt(alive=True),
            lambda: fail(run.run.attempt(2)),
            lambda: None,
        ]
    )
    monkeypatch.setattr(status_module.time, "sleep", lambda _: next(steps)())
    code, out, _ = yoke(capsys, "status", str(run.root), "--watch", "--json")
    assert code == 0
    assert [json.loads(line)["state"] for line in out.splitlines()] == [
        "running",
        "failed",
        "running",
        "failed",
        "failed",
    ]


def test_a_sweep_is_one_line_a_run(tmp_path: Path, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep-x"
    first = MadeUpRun(sweep / "loss=gspo")
    first.submitted("7")
    first.slurm_attempt("7", done={})
    second = MadeUpRun(sweep / "loss=cispo")
    second.submitted("8")
    slurm.job("8", "PENDING", reason="Priority")
    points = [{"name": name, "overrides": []} for name in ("loss=gspo", "loss=cispo", "loss=none")]
    (sweep / "sweep.json").write_text(json.dumps({"schema": 1, "points": points}))
    code, out, _ = yoke(capsys, "status", str(sweep))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert [line[:3] for line in lines[1:]] == [
        ["loss=gspo", "done", "7"],
        ["loss=cispo", "queued", "8"],
        ["loss=none", "not", "started"],
    ]
    code, out, _ = yoke(capsys, "status", str(sweep), "--json")
    assert [run["state"] for run in json.loads(out)["runs"]] == ["done", "queued", "not started"]
    code, out, _ = yoke(capsys, "status", str(first.root), "--json")  # a path with an = in it is no setting
    assert json.loads(out)["run"] == str(first.root)


def test_it_loads_nothing_slow() -> None:
    heavy = ("torch", "vllm", "transformers", "deepspeed", "submitit", "wandb", "matplotlib")
    text = f"import sys, pipeline.launch.status, pipeline.launch.stop; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert loaded.stdout.strip() == "[]"
