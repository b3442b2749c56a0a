"""Long runs: many random kills in one run, and how steady repeated evaluations of the same weights are."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from run_helpers import ENVIRONMENT, assert_every_group_ended_once, kill, processes, start, updates_done
from scipy.stats import chi2
from test_crashes import PARTS

EVALUATIONS = 4
SOAK_S = 3000.0
KILL_EVERY_S = 40.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


def test_repeated_evaluations_scatter_no_more_than_binomial(tmp_path: Path) -> None:
    rates = []
    for number in range(EVALUATIONS):
        settings = ["+experiment=quickstart", f"run_dir={tmp_path / 'run'}", f"stage.label=again-{number}"]
        subprocess.run([sys.executable, "-m", "pipeline", "evaluate", *settings], check=True, env=ENVIRONMENT)
        paths = (tmp_path / "run" / "evaluation" / f"again-{number}").glob("*.parquet")
        rates.append([value for path in paths for value in pq.read_table(path).column("correctness").to_pylist()])
    counts = [len(rate) for rate in rates]
    pooled = sum(map(sum, rates)) / sum(counts)
    spread = sum(
        (sum(rate) - n * pooled) ** 2 / (n * pooled * (1 - pooled)) for rate, n in zip(rates, counts, strict=True)
    )
    print(f"pass@1 {[sum(rate) / len(rate) for rate in rates]}, chi2 {spread:.2f} on {EVALUATIONS - 1} df")
    assert spread < chi2.ppf(0.99, EVALUATIONS - 1)


def test_a_run_under_constant_fire_ends(tmp_path: Path) -> None:
    run_dir, rng = tmp_path / "run", random.Random(time.time_ns())
    settings = ["+experiment=smoke", "training.updates=8", "evaluation.before=false", "cluster.max_attempts=100"]
    launcher, kills = start(run_dir, *settings), 0
    deadline = time.monotonic() + SOAK_S
    try:
        while time.monotonic() < deadline and updates_done(run_dir) < 8:
            time.sleep(rng.uniform(0.5, 1.5) * KILL_EVERY_S)
            part = rng.choice([*PARTS, "engine"])
            if part == "launcher":
                launcher.send_signal(signal.SIGKILL)
                launcher.wait()
                launcher = start(run_dir, *settings)
            else:
                kills += kill(run_dir, part, 5.0)
        assert launcher.wait(600) == 0
    finally:
        launcher.kill()
        for pid, _, _ in list(processes(run_dir)):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
    print(f"{kills} kills")
    assert_every_group_ended_once(run_dir, updates=8)
