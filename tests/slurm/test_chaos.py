"""Random interruptions at random moments of one two-node run: it ends all the same, with nothing lost or doubled."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import HEAD, KINDS, Disk, Interruption, Kind, Scene, interrupt
from run_helpers import assert_every_group_ended_once, checkpoint_state
from slurm_helpers import Testbed, wait_until
from slurm_run import SlurmRun, assert_all_files_are_whole

from pipeline.launch.run_directory import RunDirectory
from pipeline.records import RolloutRecord
from pipeline.report.store import read_group
from pipeline.stages.evaluation import is_graded
from pipeline.stages.flow import is_ancestor

UPDATES_EACH = 4  # for every interruption, so that the run outlasts them all: one dead vLLM does not hold it up
SPARE_UPDATES = 2
RANDOM_S = 10.0
START_S = 400.0
STALENESS = 2
SETTINGS = [
    "cluster.nodes=2",
    "cluster.partition=preempt",
    "evaluation.before=false",
    "evaluation.after=false",
    f"algorithm.max_staleness={STALENESS}",
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.unmount()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_random_interruptions(slurm: Testbed, tmp_path: Path, disk: Disk) -> None:
    run_under_fire(slurm, tmp_path, disk, 2)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_ten_random_interruptions(slurm: Testbed, tmp_path: Path, disk: Disk) -> None:
    run_under_fire(slurm, tmp_path, disk, 10)


def run_under_fire(bed: Testbed, tmp_path: Path, disk: Disk, count: int) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    root = (disk.root if disk.mounted else tmp_path) / "run"
    updates = UPDATES_EACH * count + SPARE_UPDATES
    run = SlurmRun(bed, root, [*SETTINGS, f"training.updates={updates}"])
    kinds = choose(rng, count, disk)
    print(f"\nseed {seed}: {', '.join(kind.name for kind in kinds)}")
    started = time.time()
    run.submit()
    wait_until(lambda: run.closed_since(started), START_S, "the first group")
    marks: list[Interruption] = []
    try:
        for number, kind in enumerate(kinds):
            run.wait_for_updates(number)
            wait_a_moment(run, rng.uniform(0.0, RANDOM_S))
            marks.append(interrupt(Scene(run, disk, rng), kind, started))
        run.finish(START_S)
    finally:
        print("\n".join([HEAD, *(mark.row() for mark in marks)]))
    print(f"{updates} updates, {len(run.attempts)} attempts, {time.time() - started:.0f} s")
    assert len(marks) == count
    assert_all_is_well(run, updates)


def wait_a_moment(run: SlurmRun, seconds: float) -> None:
    """At most until the next update."""
    deadline, before = time.monotonic() + seconds, run.updates
    while time.monotonic() < deadline and run.updates == before:
        time.sleep(0.1)
    assert not run.done, "the run was over before every interruption had come"


def choose(rng: random.Random, count: int, disk: Disk) -> list[Kind]:
    """Every kind once before any comes twice, in random order."""
    possible = [kind for kind in KINDS if disk.mounted or not kind.needs_disk]
    for kind in KINDS:
        if kind not in possible:
            print(f"left out, this machine mounts nothing: {kind.name}")
    chosen: list[Kind] = []
    while len(chosen) < count:
        chosen += rng.sample(possible, min(len(possible), count - len(chosen)))
    return chosen


def assert_all_is_well(run: SlurmRun, updates: int) -> None:
    assert_every_group_ended_once(run.root, updates)
    assert_all_files_are_whole(run.root)
    assert_no_finished_rollout_was_repeated(run.root)
    done = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert {int(line["update"]) for line in done if "perf/step_s" in line} == set(range(1, updates + 1))
    identity = (run.root / "wandb_id").read_text().strip()
    runs = list(run.root.glob("wandb/offline-run-*"))
    assert runs and all(path.name.endswith(f"-{identity}") for path in runs), "one W&B run over all attempts"


def assert_no_finished_rollout_was_repeated(root: Path) -> None:
    """An interruption costs the rollouts in flight and no more: a finished one is rolled out again only if it is too
    old, or of weights that a crash has undone.
    """
    lineage = checkpoint_state(root)["flow"]["lineage"]
    for first, second in _twice(root):
        of_these_weights = all(is_ancestor(v, lineage) for v in (first.version, first.newest_version))
        fresh = first.version.n >= second.newest_version.n - STALENESS
        assert not (of_these_weights and fresh), f"{first.group_id}-{first.index}: {first.version}, {second.version}"


def _twice(root: Path) -> Iterator[tuple[RolloutRecord, RolloutRecord]]:
    """Graded rollouts of an attempt, each with the one that a later attempt made in its place."""
    latest: dict[tuple[str, int], RolloutRecord] = {}
    run = RunDirectory(root)
    for attempt in map(run.attempt, run.attempt_numbers()):
        own = [record for path in attempt.root.glob("[gr]*/*.parquet") for record in read_group(path)]
        for record in filter(is_graded, own):
            place = (record.group_id, record.index)
            if place in latest and latest[place].rollout_id != record.rollout_id:
                yield latest[place], record
            latest[place] = record
