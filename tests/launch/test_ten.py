"""One update over all ten harnesses, all parts real: rows of each are in its batch. Short: two rollouts a group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from harness_installs import provided
from run_helpers import checkpoint_state, start

from pipeline.cli import compose_config
from pipeline.records import TaskRef
from pipeline.report.store import read_group
from pipeline.stages.flow import Ending
from pipeline.stages.schedule import make_schedule

COMMAND = ["+experiment=quickstart", "mix=ten", "reward=test", "training.updates=1"]
SHORT = ["algorithm.group_size=2", "tasks.train_size=10", "tasks.test_size=1", "harness.sampling.max_calls=6"]
INSTALL_S, RUN_S = 900, 900


def test_the_command_takes_a_group_of_each_and_evaluates_nothing() -> None:
    config = compose_config(COMMAND)
    tasks = [TaskRef(f"t{number}", Path(f"/tasks/t{number}")) for number in range(config.tasks.train_size)]
    schedule = make_schedule(tasks, config)
    update = [schedule.group(index).harness for index in range(config.algorithm.groups_per_update)]
    assert sorted(update) == sorted(config.mix.harnesses) and len(update) == 10
    assert not config.evaluation.before and not config.evaluation.after


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_one_update_holds_rows_of_each_of_ten_harnesses(tmp_path: Path) -> None:
    config = compose_config(COMMAND)
    for name in config.mix.harnesses:
        provided(name)
    run_dir = tmp_path / "run"
    launcher = start(run_dir, *COMMAND, *SHORT)
    try:
        assert launcher.wait(RUN_S) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        launcher.kill()
    (metrics,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert metrics["batch/groups"] == 10 and metrics["steps"] == config.algorithm.minibatches
    assert metrics["logprob_diff_max"] <= 1e-3, "engine and trainer agree, thousands of tokens into a prompt too"
    trained = rows_of_trained_groups(run_dir)
    assert trained.keys() == set(config.mix.harnesses)
    assert all(rows > 0 and metrics[f"{name}/row_share"] > 0 for name, rows in trained.items())
    assert metrics["batch/rows"] == trained.total()


def rows_of_trained_groups(run_dir: Path) -> Counter[str]:
    """By harness, the rows with a trained token of the groups that the newest checkpoint calls trained."""
    ended = checkpoint_state(run_dir)["flow"]["ended"]
    rows: Counter[str] = Counter()
    for path in run_dir.glob("attempts/*/groups/*.parquet"):
        for record in read_group(path):
            if ended[path.stem][0] == Ending.TRAINED:
                rows[record.harness] += sum(bool(row.trained_tokens) for row in record.rows)
    return rows
