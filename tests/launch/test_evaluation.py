"""Checkpoint evaluation: which weights, whose cells, and that of two jobs on the same cells one alone goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_helpers import NAMES, fake_engine, finished, graded, made, settings

from pipeline.cli import compose_config, compose_over_saved
from pipeline.config import Config, UserError
from pipeline.launch import jobs
from pipeline.launch.cohort import read_cohort
from pipeline.launch.data import evenly
from pipeline.launch.evaluation import (
    EvaluationJob,
    evaluate,
    late_results,
    own_part,
    place,
    plan,
    prune_exports,
    records,
    refuse_living,
    share,
)
from pipeline.launch.local import claim
from pipeline.launch.reporting import report_run, run_results
from pipeline.launch.run_directory import FencedOff, RunDirectory
from pipeline.report.metrics import read_metrics
from pipeline.report.store import read_jsonl, write_group
from pipeline.stages.evaluation import INCOMPLETE
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import load_tasks


def staged(config: Config, **stage: object) -> Config:
    return replace(config, stage=replace(config.stage, **stage))  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path / "run")


def test_the_plan_names_weights_and_harnesses(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    assert plan(config, run) == [EvaluationJob(NAMES[1], NAMES[1], ("pi", "codex"))]
    both = plan(staged(config, checkpoint="all", harnesses=["codex"]), run)
    assert both == [EvaluationJob(name, name, ("codex",)) for name in NAMES]
    assert plan(staged(config, checkpoint="base", label="again-0"), run)[0].weights == "base"
    with pytest.raises(UserError, match="for one checkpoint only"):
        plan(staged(config, checkpoint="all", label="mine"), run)
    for wrong in ("../mine", ".mine", "before"):
        with pytest.raises(UserError, match=r"stage\.label"):
            plan(staged(config, label=wrong), run)
    with pytest.raises(UserError, match="name each harness once"):
        plan(staged(config, harnesses=["pi", "pi"]), run)


def test_a_label_means_one_set_of_weights(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    evaluate(config, run, EvaluationJob("mine", NAMES[0], ("pi",)))
    with pytest.raises(UserError, match=f"is of {NAMES[0]}"):
        plan(staged(config, label="mine"), run)


def test_jobs_of_two_harnesses_fill_one_directory(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = fake_engine(monkeypatch)
    run = made(config)
    attempts = run.attempt_numbers()
    first, second = EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex")).by_harness()
    assert evaluate(config, run, first).coverage().complete
    files = {path: path.read_bytes() for path in run.evaluation(NAMES[0]).glob("*.parquet")}
    evaluate(config, run, second)
    assert {path: path.read_bytes() for path in files} == files, "the other job's cells are left alone"
    assert len(records(run, NAMES[0])) == 8
    assert finished(run, NAMES[0], "codex")["graded"] == 4
    assert run.attempt_numbers() == attempts, "the training is not fenced off"
    assert len({engine.seed for engine in engines}) == 2, "two evaluations do not sample the same numbers"
    evaluate(config, run, first)
    assert len(engines) == 2, "nothing is left to grade, so no engine starts"


def test_only_ungraded_cells_are_tried_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = made(config), EvaluationJob(NAMES[0], NAMES[0], ("pi",))
    fake_engine(monkeypatch, passed=None)
    assert jobs.evaluate(staged(config, checkpoint=NAMES[0], harnesses=["pi"])) == INCOMPLETE
    file = min(run.evaluation(NAMES[0]).glob("*.parquet"))
    task = file.stem.removeprefix("pi--")
    write_group(file, [graded(task, "pi", 0, False), graded(task, "pi", 1, None)])
    fake_engine(monkeypatch)
    assert evaluate(config, run, job).coverage().complete
    kept = [record.verdict.correctness for record in records(run, NAMES[0]) if record.task_id == task]
    assert kept == [0.0, 1.0], "the first graded result stands"


def test_of_two_jobs_on_the_same_cells_the_newer_goes_on(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = made(config), EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex"))
    fake_engine(monkeypatch, before=lambda *_: place(run, NAMES[0], "codex").new_attempt() and None)
    with pytest.raises(FencedOff):
        evaluate(config, run, job)
    assert not records(run, NAMES[0]), "a job that lost one of its harnesses writes no more"


def test_a_second_command_on_this_machine_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = made(config), EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex"))
    refuse_living(run, [job])
    claim(place(run, NAMES[0], "codex").new_attempt(), os.getpid())
    with pytest.raises(UserError, match=f"process {os.getpid()} is evaluating {NAMES[0]} in codex"):
        refuse_living(run, [job])


def test_tasks_of_an_array_share_the_pairs_as_the_first_saw_them(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(Path(config.run_dir))
    seen = [EvaluationJob(name, name, ("pi", "codex")) for name in NAMES]
    later = [*seen[1:], EvaluationJob("000003-update-000006", "000003-update-000006", ("pi", "codex"))]
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    assert own_part(run, seen) == seen
    for name, value in {"JOB_ID": "9", "TASK_MIN": "1", "TASK_COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    parts = []
    for number, asked in ((1, seen), (3, later), (2, later)):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        parts += own_part(run, asked)
    assert sorted(parts, key=str) == sorted(share(seen, 0, 1), key=str), "each pair once"


def test_it_goes_on_beside_a_living_training(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    claim(run.attempt(1), os.getpid())
    run.attempt(1).check_fence()
    assert jobs.evaluate(config) == 0
    run.attempt(1).check_fence()
    with pytest.raises(UserError, match=r"in use .*attempt 1"):
        jobs.evaluate(replace(config, fresh=True))


def test_the_saved_settings_are_the_base(tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path / 'run'}"
    made(settings(tmp_path / "run", "training.updates=3", "cluster=slurm", "cluster.partition=gpu", "fresh=true"))
    config = compose_over_saved([run_dir, "concurrency=9", "stage.checkpoint=all"])
    assert (config.training.updates, config.cluster.partition, config.mix.harnesses) == (3, "gpu", ["pi", "codex"])
    assert (config.concurrency, config.stage.checkpoint, config.fresh) == (9, "all", False)
    assert compose_over_saved([run_dir, "cluster=local"]).cluster == compose_config([run_dir]).cluster
    nowhere = f"run_dir={tmp_path / 'none'}"
    assert compose_over_saved([nowhere, "seed=3"]).training.updates == compose_config([]).training.updates
    with pytest.raises(UserError, match=r"there is no run in .*/none"):  # a slip of the pen makes no run
        compose_over_saved([nowhere, "stage.checkpoint=all", "cluster=slurm", "dry_run=true"])
    with pytest.raises(UserError, match="nothing"):
        compose_over_saved([run_dir, "nothing=1"])


def test_how_evaluations_run_may_change_later_but_not_what_they_are(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    run = made(config)
    freely = replace(config.evaluation, every=2, keep_exports=1, max_jobs=1, cluster={"partition": "short"})
    run.save_config(replace(config, evaluation=freely))
    with pytest.raises(UserError, match=r"evaluation\.rollouts_per_task"):
        run.save_config(replace(config, evaluation=replace(config.evaluation, rollouts_per_task=9)))


def test_an_evaluation_without_training_keeps_its_settings(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    monkeypatch.setattr("pipeline.launch.preflight.check_settings", lambda *_, **__: None)
    assert jobs.evaluate(config) == 0
    with pytest.raises(UserError, match="seed"):
        jobs.evaluate(replace(config, seed=7))


def test_results_become_metrics_once_and_only_when_the_jobs_have_ended(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    pi, codex = EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex")).by_harness()
    evaluate(config, run, pi)
    assert late_results(config, run, []) == []
    evaluate(config, run, codex)
    evaluate(config, run, EvaluationJob("mine", NAMES[1], ("pi", "codex")))
    ((update, values),) = late_results(config, run, [])
    assert (update, values["eval/pass@1"], values["eval/coverage"], values["eval/pi/pass@1"]) == (2, 1.0, 1.0, 1.0)
    assert late_results(config, run, [{"update": 2, **values}]) == []


def test_a_report_takes_late_results_over_unless_the_training_is_alive(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch)
    run = made(config)
    evaluate(config, run, EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex")))
    claim(run.attempt(1), os.getpid())
    report_run(config, run)
    assert read_metrics(run.root) == []
    run.attempt(1).publish("job", {"pid": 1, "started": -1})
    report_run(config, run)
    report_run(config, run)
    (entry,) = read_jsonl(run.metrics)
    assert (entry["update"], entry["eval/pass@1"]) == (2, 1.0)
    assert f"| {NAMES[0]} | all | 2 | 100.0% |" in (run.report / "table.md").read_text()


def test_exports_are_pruned_but_not_those_that_jobs_need(config: Config) -> None:
    run = made(config, (*NAMES, "000003-update-000006"))
    assert prune_exports(run, 0, ()) == []
    assert prune_exports(run, 1, [NAMES[0]]) == [NAMES[1]]
    assert sorted(path.name for path in run.models.iterdir()) == [NAMES[0], "000003-update-000006"]


def test_an_evaluation_on_the_way_has_few_tasks_always_the_same_and_goes_on_with_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch)
    config = settings(tmp_path / "run", "tasks.test_size=10", "evaluation.small_tasks=3")
    run = made(config)
    jobs._evaluate_exports(config, run)
    for name in NAMES:
        assert set(read_cohort(run, name)["tasks"]) == {"test-0000", "test-0003", "test-0006"}  # type: ignore[index]
        assert len(records(run, name)) == 3 * 2 * 2
        assert finished(run, name, "pi")["planned"] == 6
    assert [values["eval/coverage"] for _, values in late_results(config, run, [])] == [1.0, 1.0]
    by_hand = evaluate(config, run, EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex")))
    assert by_hand.coverage().planned == 12, "by hand it goes on with the tasks that it began with"
    for wrong in (4, 10):
        with pytest.raises(UserError, match=f"{NAMES[0]} began with 3 tasks, stage.tasks={wrong}: leave it out"):
            plan(staged(config, checkpoint=NAMES[0], tasks=wrong), run)
    (whole,) = plan(staged(config, checkpoint=NAMES[0], label="whole"), run)
    assert evaluate(config, run, whole).coverage().planned == 40
    (small,) = plan(staged(config, checkpoint="base", tasks=3), run)
    assert evaluate(config, run, small).coverage().planned == 12
    with pytest.raises(UserError, match="whole began with all tasks"):
        plan(staged(config, checkpoint=NAMES[0], label="whole", tasks=3), run)


def test_a_small_evaluation_is_compared_with_the_base_on_its_own_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path / "run", "tasks.test_size=10")
    run = made(config)
    fake_engine(monkeypatch, passed=False)
    evaluate(config, run, EvaluationJob("base", "base", ("pi", "codex")))
    fake_engine(monkeypatch)
    evaluate(config, run, EvaluationJob(NAMES[0], NAMES[0], ("pi", "codex"), tasks=3))
    (made_of,) = [own for own in run_results(config, run, [])["checkpoints"] if own["label"] == NAMES[0]]
    assert made_of["base"]["comparable"] and made_of["base"]["difference"]["pairs"] == 6


@pytest.mark.parametrize(("count", "expected"), [(0, "abcde"), (9, "abcde"), (1, "a"), (2, "ac"), (4, "abcd")])
def test_tasks_are_drawn_evenly_and_in_any_order_the_same(tmp_path: Path, count: int, expected: str) -> None:
    tasks = load_tasks(generate_tasks(tmp_path, "test", 5, 0))
    named = [replace(task, ref=replace(task.ref, task_id=name)) for task, name in zip(tasks, "abcde", strict=True)]
    for order in (named, named[::-1]):
        assert sorted(task.ref.task_id for task in evenly(order, count)) == list(expected)
