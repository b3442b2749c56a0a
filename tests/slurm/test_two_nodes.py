"""Two nodes, everything real: a plan, `yoke train cluster=slurm`, and what it leaves; then a job submitted by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import assert_every_group_ended_once
from slurm_helpers import ROOT, Testbed
from slurm_run import SETTINGS, SlurmRun, assert_all_files_are_whole

UPDATES = 2
RUN_S = 560.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def finished(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRun]:
    root = tmp_path_factory.mktemp("two-nodes") / "run"
    run = SlurmRun(testbed, root, ["cluster.nodes=2", f"training.updates={UPDATES}", "evaluation.before=false"])
    run.submit()
    run.finish(RUN_S)
    yield run


def test_a_plan_is_printed_and_nothing_submitted(slurm: Testbed, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path / "run", ["cluster.nodes=2", "cluster.partition=preempt"])
    before = queue(slurm)
    text = run.yoke("train", "dry_run=true")
    for line in ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--partition=preempt", "--signal=USR2@60"):
        assert f"#SBATCH {line}\n" in text
    assert "--kill-on-bad-exit=1" in text
    assert queue(slurm) <= before, "of other tests"
    assert not run.root.exists()


def queue(slurm: Testbed) -> set[str]:
    """The ids of all jobs that Slurm knows, ended ones too."""
    return set(slurm.run("squeue", "--noheader", "--states=all", "--format=%i").split())


def test_both_engines_rolled_out_groups(finished: SlurmRun) -> None:
    closed = [entry for entry in finished.ledger(1) if entry["what"] == "admitted"]
    assert {entry["engine"] for entry in closed} == {"node0", "node1"}


def test_both_trainers_took_part(finished: SlurmRun) -> None:
    newest = max((finished.root / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_text())
    assert state["ranks"] == 2 and state["state"]["flow"]["update"] == UPDATES
    shards = sorted(path.name for path in newest.glob("engine/zero_pp_rank_*_optim_states.pt"))
    assert len(shards) == 2 and all((newest / "engine" / shard).stat().st_size > 1_000_000 for shard in shards)


def test_every_group_ended_once_and_all_files_are_whole(finished: SlurmRun) -> None:
    assert_every_group_ended_once(finished.root, UPDATES)
    assert_all_files_are_whole(finished.root)
    assert [int(json.loads(line)["update"]) for line in metrics(finished) if "batch/" in line] == [1, 2]


def metrics(run: SlurmRun) -> list[str]:
    return (run.root / "metrics.jsonl").read_text().splitlines()


def test_logs_are_kept_by_attempt_rank_and_node(finished: SlurmRun) -> None:
    assert finished.attempts == [1]
    logs = {path.name: path.stat().st_size for path in (finished.attempt(1) / "logs").iterdir()}
    assert set(logs) == {f"{rank}-node{node}.log" for rank in ("trainer", "engine", "vllm") for node in (0, 1)}
    assert all(logs.values())


def test_report_and_wandb_run_are_written(finished: SlurmRun) -> None:
    results = json.loads((finished.root / "report" / "results.json").read_text())
    assert results["updates"] == UPDATES and results["after"]["n"] == 4 and results["provisional"] is False
    runs = list(finished.root.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(runs) == 1 and runs[0].stat().st_size > 1000


def test_the_same_command_says_that_it_is_done(finished: SlurmRun) -> None:
    job = finished.job
    assert "is done" in finished.yoke("train")
    assert finished.job == job


def test_a_job_submitted_by_hand(slurm: Testbed, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path / "run")
    settings = [word for word in SETTINGS if word != "cluster=slurm"]
    little = ["training.updates=1", "evaluation.before=false", "evaluation.after=false", "logging.wandb=disabled"]
    options = ["--nodes=1", "--cpus-per-task=4", "--mem=8G", f"--output={tmp_path}/batch.log"]  # of pretend nodes
    job = slurm.sbatch(*options, ROOT / "slurm" / "train.sbatch", f"run_dir={run.root}", *settings, *little)
    slurm.wait_for(job, ("COMPLETED",), RUN_S)
    assert run.done and run.updates == 1, (tmp_path / "batch.log").read_text() + run.last_words()
    assert_every_group_ended_once(run.root, 1)
