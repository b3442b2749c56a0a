"""kill -9 at random points of a run on recorded rollouts: it ends with the weights of one that nobody disturbed."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import CONTEXT, DEADLINE_S, fork
from recorded_run import record, run_attempt
from run_helpers import assert_every_group_ended_once, checkpoint_state
from safetensors.torch import load_file

from pipeline.launch.run_directory import RunDirectory
from pipeline.report.store import read_figures

LONGEST_DELAY_S = 0.05  # so that it dies inside what is no such event too: a forward, the writing of a file


def attempt(run_dir: Path, recorded: Path, updates: int, kill_at: int = 0, delay_s: float = 0.0) -> None:
    """One attempt of the run: to its end, or killed ``delay_s`` after its event number ``kill_at``."""
    listening, line = CONTEXT.Pipe(duplex=False)
    log = run_dir.with_suffix(".log")
    process = fork(log, run_attempt, run_dir, recorded, updates, line, kill_at)
    line.close()
    try:
        if kill_at:
            assert listening.poll(DEADLINE_S), "it went on for too long"
            time.sleep(delay_s)
            process.kill()
        process.join(DEADLINE_S)
    finally:
        process.kill()
    assert process.exitcode == (-signal.SIGKILL if kill_at else 0), log.read_text()[-3000:]


def assert_only_old_tokens_are_gone(place: Path) -> None:
    """Of groups that had ended before the older of the two kept checkpoints only figures are left; none is lost."""
    run = RunDirectory(place)
    older = min(run.checkpoints.glob("[0-9]*"))
    flow = json.loads((older / "state.json").read_text())["state"]["flow"]
    whole = {path.stem for path in run.attempts.glob("*/groups/[!.]*.parquet")}
    thinned = {path.stem for path in run.attempts.glob("*/figures/[!.]*.parquet")}
    ended = checkpoint_state(place)["flow"]["ended"]
    assert {name for name, (ending, _) in ended.items() if ending == "trained"} <= whole | thinned
    assert thinned <= set(flow["ended"]) and not whole & set(flow["ended"])
    assert all(read_figures(path) for path in run.attempts.glob("*/figures/[!.]*.parquet"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "updates"), [(3, 9), pytest.param(20, 60, marks=pytest.mark.soak)])
def test_killed_at_random_points_a_run_ends_with_the_same_weights(tmp_path: Path, kills: int, updates: int) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    rng, recorded = random.Random(seed), tmp_path / "recorded"
    recorded.mkdir()
    record(recorded, 3 * updates)
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    attempt(quiet, recorded, updates)
    events = int((quiet / "events").read_text())
    for _ in range(kills):
        attempt(disturbed, recorded, updates, rng.randint(1, 2 * events // kills), rng.uniform(0, LONGEST_DELAY_S))
    attempt(disturbed, recorded, updates)
    assert len(list((disturbed / "attempts").iterdir())) == kills + 1
    assert_every_group_ended_once(disturbed, updates)
    endings = [checkpoint_state(place)["flow"]["ended"] for place in (quiet, disturbed)]
    assert endings[0] == endings[1]
    assert {ending for ending, _ in endings[0].values()} == {"trained", "abandoned"}
    for place in (quiet, disturbed):
        assert_only_old_tokens_are_gone(place)
    expected, found = (load_file(place / "model" / "model.safetensors") for place in (quiet, disturbed))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
