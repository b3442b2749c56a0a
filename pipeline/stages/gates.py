"""The check of every task before a run: its own solution scores 1 (oracle), an untouched workspace scores 0 (nop)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.records import Verdict
from pipeline.report.store import write_json
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxSpec
from pipeline.sandbox.layer import remove_tree
from pipeline.stages.verification import lay_out, readable_inside, run_to_end, shell_of, tail, ungraded, verify
from pipeline.tasks.harbor import HarborTask

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yoke" / "gates.json"
EQUAL = 1e-9


@dataclass(frozen=True)
class GateFailure:
    """A task that its own check refuses. ``gate``: oracle or nop; ``score`` None: it could not be scored."""

    task_id: str
    gate: str
    score: float | None
    reason: str

    def __str__(self) -> str:
        wanted = {"oracle": 1, "nop": 0}[self.gate]
        got = "no score" if self.score is None else f"{self.score:g}"
        return f"{self.task_id}: {self.gate} gave {got} instead of {wanted}" + (
            f" ({self.reason})" if self.reason else ""
        )


async def check_tasks(
    tasks: Sequence[HarborTask],
    sandbox: Sandbox,
    concurrency: int,
    cache: Path = CACHE,
    system: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[GateFailure]:
    """The failures of oracle and nop over ``tasks``, in their order; a task without a solution is only checked by nop.

    Tasks that passed before with the same contents are not run again: ``cache`` holds their hashes, with the name of
    the ``system`` in which they passed, where that is not a machine's own. ``progress`` is told (done, total) after
    each task.
    """
    passed = _read_cache(cache)
    digests = [content_digest(task.ref.path) + system for task in tasks]
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def check(task: HarborTask, digest: str) -> list[GateFailure]:
        nonlocal done
        failures = []
        if digest not in passed:
            async with gate:
                failures = await _check_task(task, sandbox)
        done += 1
        progress(done, len(tasks))
        return failures

    results = await asyncio.gather(*(check(task, digest) for task, digest in zip(tasks, digests, strict=True)))
    fresh = {digest for digest, failures in zip(digests, results, strict=True) if not failures} - passed
    if fresh:
        write_json(cache, sorted(passed | fresh))
    return [failure for failures in results for failure in failures]


def content_digest(directory: Path) -> str:
    """A hash of every file's path, permission to execute, and contents below ``directory``."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name, data = str(path.relative_to(directory)).encode(), path.read_bytes()
            digest.update(b"%d %d %d " % (len(name), len(data), os.access(path, os.X_OK)) + name + data)
    return digest.hexdigest()


async def _check_task(task: HarborTask, sandbox: Sandbox) -> list[GateFailure]:
    place = Path(tempfile.mkdtemp(prefix="gate-"))
    try:
        scores = {"nop": (await _nop(task, sandbox, place), 0.0)}
        if task.solution is not None:
            scores["oracle"] = (await _oracle(task, task.solution, sandbox, place), 1.0)
    finally:
        await asyncio.to_thread(remove_tree, place)
    return [
        GateFailure(task.ref.task_id, name, verdict.correctness, verdict.reason)
        for name, (verdict, wanted) in scores.items()
        if verdict.correctness is None or abs(verdict.correctness - wanted) > EQUAL
    ]


async def _nop(task: HarborTask, sandbox: Sandbox, place: Path) -> Verdict:
    workspace = place / "nop"
    lay_out(task, workspace, sandbox)
    return await verify(task, workspace, sandbox, place, control=False)


async def _oracle(task: HarborTask, solution: Path, sandbox: Sandbox, place: Path) -> Verdict:
    workspace = place / "oracle"
    lay_out(task, workspace, sandbox)
    scripts = readable_inside(sandbox, solution.parent, place / "solution", {"/workspace": workspace})
    spec = SandboxSpec(
        argv=(shell_of(solution), "/solution/solve.sh"),
        workspace=workspace,
        mounts=((scripts, "/solution", False),),
        stdout=place / "output",
        timeout_s=task.agent_timeout_s,
        image=task.image,
        directory=task.workdir or "",
        leave=place / "left",
    )
    try:
        exit_ = await run_to_end(sandbox, spec)
    except SandboxError as error:
        return ungraded(f"solution: {error}")
    if exit_.timed_out or exit_.killed:
        limit = f"{task.agent_timeout_s:g} s" if exit_.timed_out else f"the limit of {exit_.killed}"
        return ungraded(f"solution/solve.sh went over {limit}")
    verdict = await verify(task, workspace, sandbox, place, layer=place / "left", control=False)
    if exit_.returncode and verdict.correctness != 1.0:
        return Verdict(
            None, verdict.correctness, 0, f"solution/solve.sh: exit {exit_.returncode}{tail(place / 'output')}"
        )
    return verdict


def _read_cache(cache: Path) -> set[str]:
    """Hashes of tasks that passed; empty when there is no readable cache, which costs only time."""
    try:
        value = json.loads(cache.read_text())
    except (OSError, ValueError):
        return set()
    return {entry for entry in value if isinstance(entry, str)} if isinstance(value, list) else set()
