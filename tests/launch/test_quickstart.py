"""A shortened quick start, all parts real: it learns, its report is whole, its stages run by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from run_helpers import ENVIRONMENT, endings, start
from wandb_files import history, offline_files, table_of

from pipeline.report.metrics import read_metrics
from pipeline.report.wandb_log import COLUMNS
from pipeline.report.wandb_panels import missing
from tools.reproduce import STEPS

SETTINGS = [
    "+experiment=quickstart",
    "training.updates=5",
    "tasks.train_size=36",
    "tasks.test_size=75",
    "evaluation.rollouts_per_task=1",
]
FEW = ["tasks.train_size=8", "tasks.test_size=8"]
FLOOR = 0.5  # mean reward of the last two updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    done = start(run_dir, *SETTINGS)
    try:
        assert done.wait(600) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        done.kill()
    return run_dir


@pytest.fixture(scope="module")
def results(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "report" / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def metrics(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward" in line]


def yoke(job: str, run_dir: Path, *overrides: str) -> str:
    command = [sys.executable, "-m", "pipeline", job, f"run_dir={run_dir}", *SETTINGS, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_learns(results: dict[str, Any], metrics: list[dict[str, float]]) -> None:
    before, after = results["before"], results["after"]
    assert 0.15 <= before["pass@1"] <= 0.70
    assert after["pass@1"] > before["pass@1"]
    assert sum(m["reward"] for m in metrics[-2:]) / 2 >= FLOOR
    assert metrics[-1]["pi/malformed_rate"] <= metrics[0]["pi/malformed_rate"] + 0.1


def test_the_report_is_whole(results: dict[str, Any], run_dir: Path) -> None:
    assert results["updates"] == 5 and results["seed"] == 0 and results["provisional"] is False
    assert results["rollouts"] >= 5 * 6 * 8
    for side in ("before", "after"):
        assert results[side]["n"] == 75
        assert results[side]["harnesses"]["pi"]["n"] == 75
        assert {"pass@1", "n", "interval", "tool_calls"} <= set(results[side])
    assert 0 <= results["max_staleness"] <= 2
    assert 0 < results["sync_s"] < 60
    assert {"train", "evaluate_before", "evaluate_after"} <= set(results["wall_s"])
    versions = results["versions"]
    assert versions["harness"] == {"pi": "1.6.0"} and all(versions[name] for name in ("vllm", "torch", "deepspeed"))
    assert results["git_commit"]
    assert (run_dir / "report" / "curve.png").stat().st_size > 10_000


def test_wandb_has_the_run_and_every_panel_a_metric(run_dir: Path) -> None:
    assert missing(["pi"], read_metrics(run_dir)) == []
    (path,) = offline_files(run_dir)
    assert [row["update"] for row in history(path) if "reward" in row] == [1, 2, 3, 4, 5]
    for label in ("before", "after"):
        rows = table_of(path, f"rollouts/{label}")["data"]
        traces = [row[COLUMNS.index("trace")].partition("#")[0] for row in rows]
        assert rows and all((run_dir / trace).is_file() for trace in traces)


def test_trainer_and_engine_agree_on_fresh_tokens(metrics: list[dict[str, float]]) -> None:
    compared = [m["logprob_diff_max"] for m in metrics if "logprob_diff_max" in m]
    assert compared and max(compared) <= 1e-3, "sampled and recomputed logprobs of the same weights"


def test_every_group_ended_and_rows_are_whole(run_dir: Path) -> None:
    ended = endings(run_dir)
    assert ended["trained"] >= 5 * 6 - ended["skipped"] and ended["abandoned"] == 0
    for path in run_dir.glob("attempts/*/groups/*.parquet"):
        for record in pq.read_table(path).to_pylist():
            trained = sum(sum(row["loss_mask"]) for row in record["rows"])
            assert trained == record["sampled_tokens"] or record["undelivered"], path


@pytest.mark.timeout(1200)
def test_every_step_of_the_reference_experiment_small(run_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "reproduce"
    small = ["--root", str(root), "--pilot", str(run_dir), "--quick", "--harnesses", "pi"]
    command = [sys.executable, "-m", "tools.reproduce", *small, *SETTINGS[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((root / "steps.json").read_text())["done"]
    assert list(steps) == [name for name, _ in STEPS]
    assert "(it was done)" in steps["Pilot"]["said"], "the same command does not train again"
    assert "Held-out pass@1" in (root / "logs" / "report.log").read_text()


def test_stages_alone(run_dir: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert "2 groups" in yoke("rollout", alone, *FEW, "stage.groups=2")
    kept = list((alone / "stages" / "workspaces").glob("*/*/answer.txt"))
    assert kept, "workspaces are kept"
    before = solved(alone, "rollout")
    assert yoke("verify", alone, *FEW).count("solved") == 2
    assert solved(alone, "verification") == before, "the same workspaces score the same"
    kept[0].write_text("spoilt\n")
    yoke("verify", alone, *FEW)
    spoilt = solved(alone, "verification")
    assert sum(before) - sum(spoilt) in (0.0, 1.0), "verification looks at the workspace, not at an old verdict"
    assert "advantages" in yoke("advantage", alone, *FEW)
    assert "checkpoint" in yoke("update", alone, *FEW)


def solved(run_dir: Path, stage: str) -> list[float]:
    paths = sorted((run_dir / "stages" / stage).glob("*.parquet"))
    return [value for path in paths for value in pq.read_table(path).column("correctness").to_pylist()]
