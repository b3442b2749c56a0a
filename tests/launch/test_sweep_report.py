"""The report of a sweep in which every run stands elsewhere: it reads what there is, and leaves the runs alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.launch import jobs, status
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.squeue import QueuedJob, QueueSilent
from pipeline.launch.sweep_report import report_sweep
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Verdict
from pipeline.report.store import append_jsonl, write_group, write_json

HARNESSES = ("pi", "codex")
NAMES = ("new", "queued", "running", "done", "failed", "stopped", "lost")


def evaluated(run: RunDirectory, label: str, solved: dict[str, int], tasks: int) -> None:
    """``solved[harness]`` of ``tasks`` held-out rollouts; one file a task and harness, as the run writes them."""
    for harness, right in solved.items():
        for index in range(tasks):
            verdict = Verdict(float(index < right), float(index < right), 1)
            outcome = Outcome.SOLVED if index < right else Outcome.UNSOLVED
            record = RolloutRecord(
                rollout_id=f"{label}-{harness}-{index}",
                group_id=f"{label}-{harness}-{index}",
                index=0,
                task_id=f"t{index}",
                harness=harness,
                outcome=outcome,
                verdict=verdict,
                rows=(),
                version=PolicyVersion(1, 0),
                newest_version=PolicyVersion(1, 0),
                calls=2,
                malformed=0,
                undelivered=0,
                prompt_tokens=10,
                sampled_tokens=5,
                wall_s=1.0,
                info={"harness_version": "1"},
            )
            write_group(run.evaluation(label) / f"{harness}-{index}.parquet", [record])


def make(root: Path, config: Config, name: str, updates: int) -> RunDirectory:
    run = RunDirectory(root / name)
    run.save_config(replace(config, run_dir=str(run.root)))
    if updates:
        run.new_attempt()
        checkpoint = run.checkpoints / f"000001-update-{updates:06d}"
        write_json(checkpoint / "state.json", {"state": {"wall_s": {"train": 30.0 * updates}}})
        write_json(checkpoint / "manifest.json", {"files": {}})
    for update in range(1, updates + 1):
        append_jsonl(run.metrics, {"update": update, "time": time.time(), "reward": 0.1 * update, "pass_rate": 0.5})
    return run


def submitted(run: RunDirectory, job: str) -> None:
    write_json(run.root / "submission.json", {"job_id": job, "time": time.time()})


def sweep_of_all_states(root: Path) -> None:
    points = [{"name": name, "overrides": [f"seed={number}"]} for number, name in enumerate(NAMES)]
    write_json(root / "sweep.json", {"schema": 1, "words": [], "points": points})
    words = ["+experiment=smoke", "tasks.test_size=4", "training.updates=4", "mix.harnesses=[pi,codex]"]
    config = compose_config(words)
    submitted(make(root, config, "queued", 0), "7")
    running = make(root, config, "running", 2)
    running.attempt(1).publish("job", {"slurm": "8", "restart": 0, "nodes": ["n1"]})
    submitted(running, "8")
    evaluated(running, "before", {"pi": 1, "codex": 2}, 4)
    done = make(root, config, "done", 4)
    evaluated(done, "before", {"pi": 0, "codex": 2}, 4)
    evaluated(done, "after", {"pi": 4, "codex": 2}, 4)
    done.attempt(1).publish("done", {"wall_s": {"train": 90.0, "start": 6.0}, "rollouts": 48, "set_aside": {}})
    failed = make(root, config, "failed", 1).attempt(1)
    failed.publish("failed", {"rank": "trainer", "text": "boom", "user_error": False})
    make(root, config, "stopped", 1).attempt(1).publish("stopped", {"update": 1})
    submitted(make(root, config, "lost", 0), "9")


@pytest.fixture(autouse=True)
def _queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm knows two jobs."""
    known = {
        "7": QueuedJob("7", "PENDING", "", "1", "", "Priority", ""),
        "8": QueuedJob("8", "RUNNING", "n1", "1", "1:00", "None", ""),
    }
    monkeypatch.setattr(status, "find_jobs", lambda ids, deadline_s: {job: known[job] for job in ids if job in known})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run in each state."""
    root = tmp_path_factory.mktemp("runs") / "sweep-mine"
    sweep_of_all_states(root)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """The same, for a test of its own."""
    return Path(shutil.copytree(made, tmp_path / made.name))


def read(root: Path) -> dict[str, dict[str, Any]]:
    results = json.loads((root / "report" / "results.json").read_text())
    assert results["name"] == "mine"
    return {point["name"]: point for point in results["points"]}


def test_the_report_of_a_sweep_in_all_states(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(root)
    assert report_sweep(root) == 0
    assert listing(root) == before, "runs are only read"
    points = read(root)
    check_states(points)
    check_figures(points)
    check_table((root / "report" / "table.md").read_text().splitlines())
    shown = capsys.readouterr().out
    assert (
        "not started" in shown
        and "failed: trainer rank: boom" in shown
        and str(root / "report" / "curves.png") in shown
    )
    assert "25.0% of 8 (7 to 59)" in shown and "→ 75.0% of 8 (41 to 93)" in shown
    assert max(map(len, shown.splitlines()[:-3])) <= 80, "it fits a terminal"
    check_page((root / "report" / "index.html").read_text())
    height, width = image.imread(root / "report" / "curves.png").shape[:2]
    assert width > 1500 and height > 500, "four beside each other, in two rows"


def listing(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if (root / "report") not in [path, *path.parents]}


def check_states(points: dict[str, dict[str, Any]]) -> None:
    assert {name: points[name]["state"] for name in NAMES} == {
        "new": "not started",
        "queued": "queued",
        "running": "running",
        "done": "done",
        "failed": "failed",
        "stopped": "stopped",
        "lost": "failed",
    }
    assert (points["queued"]["job"], points["running"]["job"]) == ("7", "8")
    assert points["failed"]["reason"] == "trainer rank: boom" and "job 9 ended" in points["lost"]["reason"]
    assert [points[name]["updates_planned"] for name in NAMES] == [0, 4, 4, 4, 4, 4, 4]


def check_page(page: str) -> None:
    assert '<th scope="col">seed</th>' in page
    assert '<th scope="row">running</th><td>2</td><td>running</td><td>2/4</td>' in page
    assert "<li>done: +50.0 points, n = 8 pairs (every task" in page and "in the first run and in another" in page
    assert "failed: trainer rank: boom" in page and "have no page of their own yet" in page


def test_the_page_compares_with_the_first_run_and_links_to_each(root: Path) -> None:
    record = json.loads((root / "sweep.json").read_text())
    wanted = {point["name"]: point for point in record["points"]}
    write_json(root / "sweep.json", record | {"points": [wanted["done"], wanted["running"]]})
    evaluated(RunDirectory(root / "running"), "after", {"pi": 2, "codex": 1}, 4)
    (root / "running" / "report").mkdir()
    (root / "running" / "report" / "index.html").touch()
    report_sweep(root)
    points, page = read(root), (root / "report" / "index.html").read_text()
    assert points["done"]["against"] is None and points["running"]["against"]["difference"]["pass@1"] == pytest.approx(
        -0.375
    )
    assert '<th scope="row"><a href="../running/report/index.html">running</a></th>' in page
    assert "running, pi: -50.0 points" in page and "<li>running: -37.5 points" in page
    assert '<th scope="row">done</th>' in page, "it has no page of its own"


def test_json_or_markdown_and_nothing_else(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anything = compose_config([])
    jobs.report(anything, [str(root), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((root / "report" / "results.json").read_text())
    jobs.report(anything, [str(root), "--md"])
    assert capsys.readouterr().out.strip() == (root / "report" / "table.md").read_text().strip()


def check_figures(points: dict[str, dict[str, Any]]) -> None:
    done, running = points["done"], points["running"]
    assert done["before"]["pass@1"] == 0.25 and done["after"]["pass@1"] == 0.75
    assert done["difference"]["pass@1"] == 0.5 and done["after"]["harnesses"]["pi"]["pass@1"] == 1.0
    assert done["wall_s"] == 96.0 and done["reward"] == pytest.approx(0.4) and done["provisional"] is False
    assert running["before"]["pass@1"] == 0.375 and running["after"] is None and running["wall_s"] == 60.0
    assert [points[name]["updates"] for name in NAMES] == [0, 0, 2, 4, 1, 1, 0]
    assert points["new"]["before"] is None and points["new"]["reward"] is None


def check_table(table: list[str]) -> None:
    whole = "| done | done | 4/4 | 0.400 | 25.0% of 8 (7 to 59) | 75.0% of 8 (41 to 93) | +50.0"
    assert any(line.startswith(whole) and line.endswith(" 1.6 min |") for line in table)
    assert any(
        line.startswith("| running | running | 2/4 | 0.200 | 37.5% of 8") and "| – | – |" in line for line in table
    )
    assert any(line.startswith("| done | pi | 0.0% of 4") and "100.0% of 4" in line for line in table), "by harness"
    assert "| new | not started | – | – | – | – | – | – |" in table
    assert "failed: trainer rank: boom" in table


def test_a_half_finished_evaluation_is_provisional(root: Path) -> None:
    next(iter((root / "done" / "evaluation" / "after").glob("pi-3*"))).unlink()
    report_sweep(root)
    assert read(root)["done"]["provisional"] is True
    assert "Provisional, some rollouts are ungraded: done." in (root / "report" / "table.md").read_text()


def test_yoke_report_takes_a_sweep_or_a_run_as_a_word(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anything = compose_config([])
    monkeypatch.setattr(jobs, "_report", lambda config, run, form: run.root.name)
    assert jobs.report(anything, [str(root / "done")]) == "done"
    assert jobs.report(anything, [str(root)]) == 0 and read(root)
    with pytest.raises(UserError, match="is no run directory"):
        jobs.report(anything, [str(root / "nothing")])
    with pytest.raises(UserError, match="takes a sweep by itself"):
        jobs.report(anything, [str(root), str(root / "done")])


def test_a_damaged_sweep_is_told(root: Path) -> None:
    (root / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="is no sweep's directory"):
        report_sweep(root)


def test_a_silent_slurm_hides_nothing_but_the_state(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_jobs(ids: Sequence[str], deadline_s: float) -> None:
        raise QueueSilent("squeue did not answer within 10 s")

    monkeypatch.setattr(status, "find_jobs", find_jobs)
    report_sweep(root)
    points = read(root)
    assert points["done"]["state"] == "done" and points["queued"]["state"] == "unknown"
    assert points["running"]["before"]["pass@1"] == 0.375
