"""The cohort of an evaluation is written when it begins and checked when it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation_helpers import NAMES, fake_engine, graded, made, settings
from logged import ours

from pipeline.config import Config, UserError
from pipeline.harness.base import HarnessRecipe, get_harness
from pipeline.launch import cohort, evaluation, jobs
from pipeline.launch.cohort import describe, pin_cohort, read_cohort
from pipeline.launch.evaluation import EvaluationJob, evaluate, labels
from pipeline.launch.run_directory import RunDirectory
from pipeline.stages.evaluation import write_cell


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path / "run")


@pytest.fixture
def run(config: Config) -> RunDirectory:
    return made(config)


def upgraded(patch: pytest.MonkeyPatch, name: str, version: str) -> None:
    def recipe(asked: str) -> HarnessRecipe:
        found = get_harness(asked)
        return replace(found, version=version) if asked == name else found

    patch.setattr(cohort, "get_harness", recipe)


def test_what_is_pinned(config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch)
    evaluate(config, run, EvaluationJob("mine", NAMES[0], ("pi",)))
    found = read_cohort(run, "mine")
    assert found == describe(config, run, ("pi",))
    assert found is not None and list(found["tasks"]) == ["test-0000", "test-0001"]
    assert found["tasks"]["test-0000"]["difficulty"] is None
    assert found["harnesses"] == {"pi": get_harness("pi").version} and found["rollouts_per_task"] == 2
    limits = found["limits"]
    assert (limits["max_tokens"], limits["max_calls"], limits["temperature"]) == (512, 40, 1.0)
    assert (limits["context_tokens"], limits["timeout_s"]) == (config.model.max_model_len, 120.0)
    evaluate(config, run, EvaluationJob("mine", NAMES[0], ("codex",)))
    assert read_cohort(run, "mine") == describe(config, run, ("pi", "codex"))


def test_the_hashes_are_of_the_tasks_and_of_their_graders(config: Config, run: RunDirectory) -> None:
    before = describe(config, run, ())
    tests = sorted((run.root / "tasks").glob("test-*/test-0001/tests/test.sh"))
    (script,) = tests
    script.write_text(script.read_text() + "# other\n")
    after = describe(config, run, ())
    assert after["sha256"] == before["sha256"] and after["graders_sha256"] != before["graders_sha256"]


CHANGES = {
    "instruction.md": r"task test-0001 is not what it was \(its instruction, environment or limits\)",
    "tests/test.sh": r"task test-0001 is not what it was \(its tests\)",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_task_is_refused_by_name(
    config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engines = fake_engine(monkeypatch, passed=None)
    job = EvaluationJob("mine", NAMES[0], ("pi",))
    evaluate(config, run, job)
    (file,) = (run.root / "tasks").glob(f"test-*/test-0001/{name}")
    kept = file.read_text()
    file.write_text(kept + "\n# more\n")
    with pytest.raises(UserError, match=CHANGES[name] + r"; put that back, .* stage\.label=") as refused:
        evaluate(config, run, job)
    assert "\n" not in str(refused.value) and len(engines) == 1
    evaluate(config, run, replace(job, label="again"))
    file.write_text(kept)
    evaluate(config, run, job)
    with pytest.raises(UserError, match=r"run_dir="):
        pin_cohort(config, run, "before", ("pi",))
        file.write_text(kept + "\n# more\n")
        pin_cohort(config, run, "before", ("pi",))


def test_tasks_that_are_gone_or_new_are_named() -> None:
    two: dict[str, Any] = {"tasks": {name: {"content": "c", "grader": "g"} for name in "ab"}}
    settings_ = {"harnesses": {}, "limits": {}, "rollouts_per_task": 1}
    one = {"tasks": {"a": two["tasks"]["a"]}}
    assert cohort.changed(two | settings_, one | settings_) == "task b is gone"
    assert cohort.changed(one | settings_, two | settings_) == "task b is new"


def test_another_version_of_a_harness_is_refused_where_it_ran(
    config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch, passed=None)
    pi, codex = EvaluationJob("mine", NAMES[0], ("pi", "codex")).by_harness()
    evaluate(config, run, pi)
    upgraded(monkeypatch, "pi", "99.0")
    with pytest.raises(UserError, match=rf"harness pi was {get_harness('pi').version} and is 99\.0"):
        evaluate(config, run, pi)
    evaluate(config, run, codex)
    upgraded(monkeypatch, "codex", "98.0")
    with pytest.raises(UserError, match=r"harness codex was .* and is 98\.0"):
        evaluate(config, run, codex)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("harness.sampling.max_tokens=99", "max_tokens was 512 and is 99"),
        ("harness.sampling.temperature=0.5", "temperature was 1.0 and is 0.5"),
        ("model.max_model_len=2048", r"context_tokens was \d+ and is 2048"),
        ("evaluation.rollouts_per_task=3", "rollouts_per_task was 2 and is 3"),
    ],
)
def test_other_limits_are_refused(config: Config, run: RunDirectory, override: str, said: str) -> None:
    pin_cohort(config, run, "mine", ("pi",))
    with pytest.raises(UserError, match=said):
        pin_cohort(settings(run.root, override), run, "mine", ("pi",))


def test_a_refusal_costs_no_attempt_and_no_file(
    config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(monkeypatch, passed=None)
    monkeypatch.setattr(evaluation, "refuse_living", lambda *_: None)  # this process is still alive
    asked = replace(config, stage=replace(config.stage, label="mine"))
    jobs.evaluate(asked)
    (file,) = (run.root / "tasks").glob("test-*/test-0000/instruction.md")
    file.write_text("Something else.\n")
    before = sorted(run.root.rglob("*"))
    with pytest.raises(UserError, match="task test-0000"):
        jobs.evaluate(asked)
    assert sorted(run.root.rglob("*")) == before


def test_an_evaluation_from_before_cohorts_goes_on(
    config: Config, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    write_cell(run.evaluation("before") / "pi--test-0000.parquet", [graded("test-0000", "pi", 0)])
    assert read_cohort(run, "before") is None
    with caplog.at_level("WARNING", "yoke.evaluation"):
        pin_cohort(config, run, "before", ("pi",))
    assert any("evaluation before began before cohorts were pinned" in record.getMessage() for record in ours(caplog))
    assert json.loads((run.evaluation("before") / "cohort.json").read_text())["harnesses"]


def test_each_task_of_an_array_pins_all_harnesses_and_only_its_own_weights(
    config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else tasks that begin at once would overwrite each other's word, or name weights that nobody evaluates."""
    fake_engine(monkeypatch)
    for name, value in {"JOB_ID": "9", "TASK_MIN": "0", "TASK_ID": "0", "TASK_COUNT": "4"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    jobs.evaluate(replace(config, stage=replace(config.stage, checkpoint="all")))
    found = read_cohort(run, NAMES[0])
    assert found is not None and list(found["harnesses"]) == ["pi", "codex"]
    assert labels(run) == [NAMES[0]]
