"""Ways to interrupt a run on the testbed, each with what has to happen until it counts as recovered."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_helpers import ENDED, Testbed, kill, wait_until
from slurm_run import SlurmRun

from pipeline.launch.rpc import RpcClient, RpcError

PATIENCE_S = 600.0
FULL_S = 20.0
AWAY_S = 60.0
KIB = 1024
MIB = 1024 * KIB


class Disk:
    """A small file system of its own, which can be filled and frozen; not ``mounted`` where that is not allowed."""

    def __init__(self, directory: Path) -> None:
        self.image, self.root = directory / "disk.img", directory / "disk"
        self.mounted = self._mount()

    def _mount(self) -> bool:
        if os.getuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "fsfreeze", "mount"))):
            return False
        self.root.mkdir(parents=True)
        with self.image.open("wb") as file:
            file.truncate(1600 * MIB)  # sparse; a run wants 1 GB
        make = ["mkfs.ext4", "-q", "-m", "0", str(self.image)]
        mount = ["mount", "-o", "loop,noatime", str(self.image), str(self.root)]
        return all(subprocess.run(command, check=False).returncode == 0 for command in (make, mount))

    def unmount(self) -> None:
        if not self.mounted:
            return
        subprocess.run(["fsfreeze", "--unfreeze", self.root], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["umount", "--lazy", self.root], check=False)

    def fill(self, seconds: float) -> None:
        """Leave no free byte for a while."""
        filler = self.root / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.root).free - 16 * MIB)
                file.seek(0, os.SEEK_END)
                for size in (MIB, KIB):  # what no large piece fits into
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
            time.sleep(seconds)
        finally:
            filler.unlink(missing_ok=True)

    def freeze(self, seconds: float) -> None:
        """Let every write hang for a while, as a file server does that is away."""
        subprocess.run(["fsfreeze", "--freeze", self.root], check=True, timeout=60)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", self.root], check=True)


@dataclass
class Scene:
    """What a strike may touch."""

    run: SlurmRun
    disk: Disk
    rng: random.Random

    @property
    def bed(self) -> Testbed:
        return self.run.bed

    def any_node(self) -> str:
        return self.rng.choice(self.run.nodes())


Strike = Callable[[Scene], str | None]  # returns the engine that has to close a group before all is well; None = any


def warn(scene: Scene) -> None:
    """What Slurm sends before the time limit: USR2 to all ranks, but not to the batch script."""
    scene.bed.run("scancel", "--signal=USR2", scene.run.job)


def preempt(scene: Scene) -> None:
    """A job with a right of way takes three of the four nodes for a moment."""
    options = ["--partition=normal", "--nodes=3", "--gpus-per-node=2", "--time=5", "--output=/dev/null"]
    scene.bed.sbatch(*options, "--wrap=sleep 2")


def requeue(scene: Scene) -> None:
    scene.bed.run("scontrol", "requeue", scene.run.job)


def fail_node(scene: Scene) -> None:
    """A node dies with all that runs on it, and comes back once Slurm has taken the job off it."""
    restarts = scene.bed.restarts(scene.run.job)
    scene.bed.kill_node(scene.any_node())
    wait_until(lambda: scene.bed.restarts(scene.run.job) > restarts, PATIENCE_S, "a requeue after a node's death")
    scene.bed.start()


def cancel(scene: Scene) -> None:
    """The user changes their mind twice."""
    scene.bed.run("scancel", scene.run.job)
    scene.bed.wait_for(scene.run.job, ENDED, PATIENCE_S)
    scene.run.submit()


def crash(part: str) -> Strike:
    def strike(scene: Scene) -> str | None:
        run, node = scene.run, scene.any_node()
        wait_until(lambda: run.find(node, part), PATIENCE_S, f"{part} on {node}")
        victim = run.find(node, part)
        assert victim is not None
        kill(victim)
        if part == "vllm":
            gone = (None, victim)
            wait_until(lambda: run.done or run.find(node, part) not in gone, PATIENCE_S, f"another vLLM on {node}")
            return f"node{run.nodes().index(node)}"
        return None

    return strike


@dataclass(frozen=True)
class Kind:
    """``ends_attempt``: None where either is right. ``by_hand``: the user may have to give the same command again."""

    name: str
    strike: Strike
    ends_attempt: bool | None = True
    by_hand: bool = False
    needs_disk: bool = False


KINDS = (
    Kind("time limit", warn),
    Kind("preemption", preempt),
    Kind("requeue", requeue),
    Kind("node failure", fail_node),
    Kind("scancel, then again", cancel),
    Kind("trainer kill -9", crash("trainer")),
    Kind("vLLM kill -9", crash("vllm"), ends_attempt=False),
    Kind("disk full for 20 s", lambda scene: scene.disk.fill(FULL_S), None, by_hand=True, needs_disk=True),
    Kind("file system away for 60 s", lambda scene: scene.disk.freeze(AWAY_S), None, needs_disk=True),
)


@dataclass
class Interruption:
    """One line of the table."""

    kind: str
    at_s: float
    update: int
    in_flight: int | None
    recovery_s: float = 0.0
    attempts: str = ""
    by_hand: bool = False

    def row(self) -> str:
        flying = "?" if self.in_flight is None else self.in_flight
        hand = "yes" if self.by_hand else ""
        cells = (self.kind, f"{self.at_s:.0f}", self.update, flying, f"{self.recovery_s:.0f}", self.attempts, hand)
        return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| kind | at s | after update | in flight | recovered after s | attempts | by hand |\n|---|---|---|---|---|---|---|"
)


def interrupt(scene: Scene, kind: Kind, started: float) -> Interruption:
    """Strike, and wait for the next progress: a group closed by the run as it stands afterwards."""
    run, moment = scene.run, time.time()
    before = run.attempts[-1]
    mark = Interruption(kind.name, moment - started, run.updates, in_flight(run))
    engine = kind.strike(scene)
    since = time.time()

    def recovered() -> bool:
        if scene.bed.state(run.job) in ENDED and not run.done:
            assert kind.by_hand, f"after '{kind.name}' the job is {scene.bed.state(run.job)}\n{run.last_words()}"
            mark.by_hand = True
            run.submit()
        fresh = run.attempts[-1] > before
        if fresh and run.ledger(run.attempts[-1]):
            return True
        return run.done or (not fresh and kind.ends_attempt is not True and run.closed_since(since, engine))

    try:
        wait_until(recovered, PATIENCE_S, f"progress after '{kind.name}'", every_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.last_words()}") from error
    after = run.attempts[-1]
    assert kind.ends_attempt is not False or after == before, f"'{kind.name}' cost an attempt\n{run.last_words()}"
    mark.recovery_s, mark.attempts = time.time() - moment, f"{before} → {after}"
    return mark


def in_flight(run: SlurmRun) -> int | None:
    """Rollouts that have begun and not ended, as the coordinator knows; None when it does not answer."""
    path = run.attempt(run.attempts[-1]) / "coordinator.json"
    if not path.exists():
        return None
    record = run.read(path)
    client = RpcClient(record["url"], record["token"])
    try:
        return int(client.call("overview", 10.0)["rollouts"]["in_flight"])
    except RpcError:
        return None
    finally:
        client.close()
