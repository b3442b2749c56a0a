"""A node whose slurmd dies keeps its processes: the job starts again elsewhere beside its own ghost. The ghost must not
write to the run directory any more, and must end by itself.
"""

from __future__ import annotations

import signal
from fnmatch import fnmatch
from pathlib import Path

import pytest
from run_helpers import assert_every_group_ended_once
from slurm_helpers import Testbed, alive, kill, wait_until
from slurm_run import SlurmRun, assert_all_files_are_whole

from pipeline.training.checkpoint import checkpoints

UPDATES = 6
START_S = 400.0
REQUEUE_S = 200.0
GHOST_S = 200.0
# What a ghost may still write, and nobody takes for a result: its own words, what it had begun in the directory of its
# own attempt (its successor has looked through that when it began), and a checkpoint that it cannot publish.
HARMLESS = ("attempts/{own}/*", "jobs/*_log.out", "checkpoints/.partial-*")

SETTINGS = [
    f"training.updates={UPDATES}",
    "algorithm.groups_per_update=6",  # long updates: a ghost that works must not be done before it is replaced
    "evaluation.before=false",
    "evaluation.after=false",
    "logging.wandb=disabled",
]

Files = dict[str, tuple[int, int]]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_ghost_cannot_write_and_ends(slurm: Testbed, tmp_path: Path) -> None:
    """Twice in one run: a ghost that works all the while, and one that was asleep (stopped) until it was replaced."""
    run = SlurmRun(slurm, tmp_path / "run", SETTINGS)
    run.submit()
    ghosts: list[int] = []
    try:
        for asleep in (False, True):
            run.wait_for_updates(run.updates + 1, START_S)
            ghosts += haunt(run, asleep)
        run.finish(START_S)
    finally:
        for pid in ghosts:
            kill(pid)
        slurm.start()
    # A ghost's srun that slept through its end has "step 0 of the job" cancelled, which is its successor's by now. That
    # is Slurm's way; it costs the successor one more start.
    assert 3 <= len(run.attempts) <= 5
    assert_every_group_ended_once(run.root, UPDATES)
    assert_all_files_are_whole(run.root)


def haunt(run: SlurmRun, asleep: bool) -> list[int]:
    """Make the newest attempt a ghost and watch what it does once another has begun. Returns its processes' ids."""
    own, node = run.attempts[-1], run.nodes()[0]
    ghost = run.bed.node_processes(node)
    if asleep:
        send(ghost, signal.SIGSTOP)
    run.bed.kill_node(node, ghost=True)
    run.bed.give_up(node)
    wait_until(lambda: (run.attempt(own + 1) / "job.json").exists(), REQUEUE_S, f"attempt {own + 1}")
    assert node not in run.nodes()
    successor = run.bed.node_processes(run.nodes()[0])
    send(successor, signal.SIGSTOP)  # whatever changes now, the ghost has written
    try:
        before = files(run.root)
        writers = [pid for pid in ghost if alive(pid)]
        send(ghost, signal.SIGCONT)
        wait_until(lambda: not any(map(alive, ghost)), GHOST_S, "the end of the ghost")
        after = files(run.root)
    finally:
        send(successor, signal.SIGCONT)
    assert writers, "the ghost was there when its successor began"
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    harmless = {path for path in changed for place in HARMLESS if fnmatch(path, place.format(own=f"{own:04d}"))}
    harmless |= {path for path in before.keys() - after.keys() if is_superseded(run.root, path)}
    assert changed == harmless, f"a ghost has written {sorted(changed - harmless)}"
    return ghost


def send(processes: list[int], number: int) -> None:
    for pid in processes:
        kill(pid, number)


def is_superseded(root: Path, path: str) -> bool:
    """Whether it was of an older checkpoint: a ghost that had begun to delete one goes on, and nobody misses it."""
    parts = Path(path).parts
    return parts[0] == "checkpoints" and parts[1] < checkpoints(root / "checkpoints")[-1].name


def files(root: Path) -> Files:
    """Every file with its size and time of change. A link is not looked through: its file is there by its own name."""
    found: Files = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            found[str(path.relative_to(root))] = (stat.st_size, stat.st_mtime_ns)
    return found
