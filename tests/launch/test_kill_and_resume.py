"""kill -9 at random points of a run on recorded rollouts: it ends with the weights of one that nobody disturbed."""

from __future__ import annotations

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
    expected, found = (load_file(place / "model" / "model.safetensors") for place in (quiet, disturbed))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
