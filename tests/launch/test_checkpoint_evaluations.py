"""Evaluations that a run submits itself, against an sbatch and a squeue that only note what they are asked."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from evaluation_helpers import NAMES, FakeSlurm, export, fake_engine, made, settings
from safetensors.torch import load_file

from pipeline.config import Config, UserError
from pipeline.launch import checkpoint_evaluations, evaluation_jobs, jobs
from pipeline.launch.checkpoint_evaluations import CheckpointEvaluations
from pipeline.launch.evaluation import FINISHED, EvaluationJob, evaluate, place
from pipeline.launch.evaluation_jobs import EvaluationProgram, evaluation_cluster, job_name, on_slurm
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.trainer_rank import EndRequest, TrainerRank
from pipeline.report.store import read_jsonl, write_json
from pipeline.stages.evaluation import INCOMPLETE
from pipeline.training.checkpoint import CheckpointError, newest, write_atomically


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    more = ("cluster=slurm", "evaluation.every=2", "training.checkpoint_every=2", "training.updates=12")
    return settings(tmp_path / "run", *more)


class Trainer:
    """What the hook sees of a training."""

    def __init__(self, config: Config) -> None:
        self.config, self.run = config, made(config, ())
        self.said: list[tuple[str, str, bool]] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.full = False
        self.evaluations = CheckpointEvaluations(
            config, self.run, self._export, lambda *entry: self.logged.append(entry), lambda *it: self.said.append(it)
        )

    def _export(self, place: Path) -> None:
        if self.full:
            raise CheckpointError("no space left")
        export(place)

    def save(self, *updates: int) -> None:
        for update in updates:
            number = 1 + len(list(self.run.checkpoints.iterdir())) if self.run.checkpoints.exists() else 1
            place = self.run.checkpoints / f"{number:06d}-update-{update:06d}"
            write_atomically(place, lambda draft: (draft / "x").write_text("") and None)
            self.evaluations.saved(update)
            if self.evaluations._worker is not None:
                self.evaluations._worker.join(60)

    @property
    def exports(self) -> list[int]:
        return sorted(int(path.name[-6:]) for path in self.run.models.glob("*"))

    @property
    def alarms(self) -> list[str]:
        return [text for _, text, alarm in self.said if alarm]


def test_every_kth_checkpoint_is_exported_and_submitted_once(config: Config, slurm: FakeSlurm) -> None:
    trainer = Trainer(config)
    trainer.save(0, 2, 3, 4, 4, 6, 8, 12)
    assert trainer.exports == [4, 8], "every second one; the last one's weights are those of the evaluation after"
    assert slurm.submitted == 2
    assert trainer.alarms == []
    name = newest(trainer.run.checkpoints)
    assert name is not None and "#SBATCH --dependency=singleton" in slurm.script
    assert f"#SBATCH --job-name={job_name(trainer.run)}" in slurm.script
    assert "#SBATCH --array=0-1%2" in slurm.script, "one task a harness"
    programs = [
        pickle.loads(path.read_bytes()).function for path in (trainer.run.root / "jobs").glob("7*_*_submitted.pkl")
    ]
    pairs = sorted((program.job["weights"][-1], *program.job["harnesses"]) for program in programs)
    assert pairs == [("4", "codex"), ("4", "pi"), ("8", "codex"), ("8", "pi")]


def test_a_submission_does_not_see_the_job_around_it(
    config: Config, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_MEM_PER_NODE", "SUBMITIT_EXECUTOR", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    Trainer(config).save(4)
    assert not {"SLURM_MEM_PER_NODE", "SUBMITIT_EXECUTOR", "WORLD_SIZE"} & set(slurm.environment)


def test_with_too_many_waiting_nothing_is_submitted(config: Config, slurm: FakeSlurm) -> None:
    trainer = Trainer(replace(config, evaluation=replace(config.evaluation, max_jobs=2)))
    slurm.queue("60|PENDING", "60|RUNNING")
    trainer.save(4)
    slurm.queue("60|PENDING", "60|PENDING", "60|RUNNING")
    trainer.save(8)
    assert slurm.submitted == 1 and trainer.exports == [4, 8]
    assert "not evaluated: 2 evaluation jobs wait already; yoke evaluate" in trainer.said[-1][1]
    assert job_name(trainer.run) in (slurm.root / "asked").read_text()


def test_what_fails_is_an_alarm_and_no_end(config: Config, slurm: FakeSlurm) -> None:
    trainer = Trainer(config)
    slurm.refuse("sbatch: error: invalid partition specified: gpu")
    trainer.save(4)
    assert "invalid partition" in trainer.alarms[0] and "yoke evaluate run_dir=" in trainer.alarms[0]
    trainer.full = True
    trainer.save(8)
    assert "no space left" in trainer.alarms[1] and trainer.exports == [4]
    trainer.evaluations.close()


def test_exports_stay_while_their_jobs_are_in_the_queue(config: Config, slurm: FakeSlurm) -> None:
    trainer = Trainer(replace(config, evaluation=replace(config.evaluation, keep_exports=1)))
    slurm.queue("71|PENDING", "71|RUNNING")  # of the first checkpoint
    trainer.save(4, 6, 8, 10)
    trainer.evaluations.config = replace(trainer.config, training=replace(config.training, updates=99))
    trainer.save(12)
    assert trainer.exports == [4, 12]
    slurm.queue()
    trainer.save(16)
    assert trainer.exports == [16]


def test_exports_of_each_kth_update_are_made_and_stay(config: Config, slurm: FakeSlurm) -> None:
    training = replace(config.training, keep_every=6, updates=99)
    evaluation = replace(config.evaluation, keep_exports=1)
    config = replace(config, training=training, evaluation=evaluation)
    trainer = Trainer(config)
    trainer.save(6)
    assert trainer.exports == [6] and slurm.submitted == 0, "it is kept, but not evaluated: evaluation.every says 4, 8"
    trainer.evaluations.config = replace(config, cluster=replace(config.cluster, name="local"))
    trainer.save(8, 10, 12, 14, 16)
    assert trainer.exports == [6, 8, 12, 16], "without Slurm they wait for the end of the training"
    name = next(path.name for path in trainer.run.models.iterdir() if path.name.endswith("08"))
    for harness in config.mix.harnesses:
        write_json(place(trainer.run, name, harness).root / FINISHED, {})
    trainer.save(20)
    assert trainer.exports == [6, 12, 16, 20]


def test_results_that_come_in_are_logged_at_their_update(
    config: Config, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch)
    trainer = Trainer(config)
    trainer.save(4)
    name = next(trainer.run.models.iterdir()).name
    evaluate(config, trainer.run, EvaluationJob(name, name, ("pi", "codex")))
    trainer.save(8)
    trainer.evaluations.close()
    assert [update for update, _ in trainer.logged] == [4]
    assert trainer.logged[0][1]["eval/codex/pass@1"] == 1.0


def test_without_slurm_they_wait_for_the_end_of_the_training(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(replace(config, cluster=replace(config.cluster, name="local")))
    monkeypatch.setattr(checkpoint_evaluations.evaluation_jobs, "queue", lambda run: pytest.fail("Slurm was asked"))
    trainer.save(4, 8)
    assert trainer.exports == [4, 8] and trainer.said == []
    started = fake_engine(monkeypatch)
    jobs._evaluate_exports(trainer.config, trainer.run)
    assert len(started) == 2


# --- by hand


def test_by_hand_one_array_over_all_checkpoints_and_harnesses(
    config: Config, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(monkeypatch)
    monkeypatch.setattr("pipeline.launch.preflight.check_settings", lambda *_, **__: None)
    run = made(config)
    config = replace(config, stage=replace(config.stage, checkpoint="all"))
    assert jobs.evaluate(replace(config, dry_run=True)) == 0
    assert "4 array tasks" in capsys.readouterr().out and not slurm.submitted
    assert jobs.evaluate(config) == 0
    assert "submitted array 71: 2 checkpoints × 2 harnesses" in capsys.readouterr().out
    assert "#SBATCH --array=0-3%4" in slurm.script
    pins = [json.loads((run.evaluation(name) / "weights.json").read_text())["weights"] for name in NAMES]
    assert pins == list(NAMES)


def test_evaluation_jobs_have_settings_of_their_own(config: Config) -> None:
    own = replace(config, evaluation=replace(config.evaluation, cluster={"partition": "short", "timeout_min": 9}))
    cluster = evaluation_cluster(replace(own, cluster=replace(own.cluster, nodes=4, account="a")))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.account) == (1, 1, "a")
    assert (cluster.partition, cluster.timeout_min) == ("short", 9)
    with pytest.raises(UserError, match=r"evaluation\.cluster has no time;"):
        evaluation_cluster(replace(config, evaluation=replace(config.evaluation, cluster={"time": 9})))


def test_a_run_from_an_allocation_is_evaluated_on_slurm(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = replace(config, cluster=replace(config.cluster, name="allocation"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert on_slurm(config) and on_slurm(allocation)
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert on_slurm(config) and not on_slurm(allocation)


@pytest.mark.parametrize(("passed", "code"), [(True, None), (None, INCOMPLETE)])
def test_the_program_ends_as_its_cells_are(
    config: Config, monkeypatch: pytest.MonkeyPatch, passed: bool | None, code: int | None
) -> None:
    fake_engine(monkeypatch, passed=passed)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    run = made(config)
    program = EvaluationProgram(asdict(config), str(run.root), asdict(EvaluationJob(NAMES[0], NAMES[0], ("pi",))))
    if code is None:
        program()
    else:
        with pytest.raises(SystemExit) as ended:
            program()
        assert ended.value.code == code
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(config.cluster.max_requeues))
    assert program.checkpoint() is None, "restarts are bounded"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert program.checkpoint() is not None


def test_the_run_directory_alone_is_enough_to_submit(config: Config, slurm: FakeSlurm) -> None:
    run = RunDirectory(made(config).root)
    said = evaluation_jobs.submit_from_run(run, NAMES[0])
    assert said == f"evaluation of {NAMES[0]} submitted as array 71"


@pytest.mark.slow
def test_the_trainer_exports_submits_and_writes_it_down(
    config: Config, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank itself, without an engine: a checkpoint is saved, and its export holds the trained weights."""
    run = made(config, ())
    rank = TrainerRank(config, run.attempt(1), EndRequest())
    with torch.no_grad():
        next(parameter for _, parameter in rank.trainer.named_weights()).add_(1.0)
    rank.flow.state.update = rank.trainer.updates = 4
    with rank._phase("train"):
        rank.save()
    rank.evaluations.close()
    rank.coordinator.stop()  # writes the ledger out
    rank.metrics.close()
    rank.team.close()
    (export,) = run.models.iterdir()
    name, trained = next(rank.trainer.named_weights())
    assert torch.equal(load_file(export / "model.safetensors")[name], trained)
    assert slurm.submitted == 1
    (entry,) = read_jsonl(run.attempt(1).ledger)
    assert entry["checkpoint"] == export.name and entry["reason"].endswith("submitted as array 71")
