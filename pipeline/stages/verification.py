"""Stage 2: score what a rollout left behind, in a fresh sandbox without network that sees ``tests/`` only now.

It starts after the agent and everything it started is dead. None means that the infrastructure failed; 0 that the agent
did, also where its work keeps the tests from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.records import Verdict
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxExit, SandboxSpec
from pipeline.sandbox.builds import find_build
from pipeline.sandbox.layer import WorkspaceTooLarge, copy_layer, remove_tree, snapshot
from pipeline.sandbox.process import ProcessSandbox
from pipeline.tasks.harbor import HarborTask, prepare_workspace

REWARD_FILES = ("reward.json", "reward.txt")
REWARD_BYTES = 1 << 16
REWARD_KEYS = ("correctness", "reward")  # of a reward.json with several numbers
TAIL = 500
BY_SIGNAL: dict[int | None, int] = {128 + number: number for number in range(1, 32)}  # exit code → signal
OWN_CODE_ONLY = {"PYTHONNOUSERSITE": "1"}  # packages below the agent's HOME would come before the system's


class NoScore(Exception):
    """The tests ended without a number that could be trusted, for this reason."""


async def verify(
    task: HarborTask,
    workspace: Path,
    sandbox: Sandbox,
    scratch: Path,
    *,
    layer: Path | None = None,
    control: bool = True,
) -> Verdict:
    """Run the task's tests on a snapshot of ``workspace``, and of the ``layer`` that was left besides; read the reward.

    ``scratch`` is node-local and out of every agent's reach; what is made there is removed. The verdict's reward equals
    its correctness, its tool calls are 0. Both are None, with the reason, when the sandbox could not start. When the
    tests ran out of time, were killed or wrote no reward, they are run again on an untouched workspace (the
    ``control``): if they score that, it was the agent's doing, which scores 0; else both are None. A workspace that is
    too large, or that drives the tests over the sandbox's limits, scores 0.
    """
    place = Path(tempfile.mkdtemp(prefix="verify-", dir=scratch))
    try:
        return await _score(place / "first", task, workspace, layer, sandbox)
    except NoScore as failure:
        if control and await _scores_untouched(place, task, sandbox):
            return Verdict(
                0.0, 0.0, 0, f"{failure}; an untouched workspace is scored, so the agent has brought it about"
            )
        return ungraded(f"verifier: {failure}")
    except WorkspaceTooLarge as error:
        return Verdict(0.0, 0.0, 0, str(error))
    except (SandboxError, OSError) as error:
        return ungraded(f"verifier: {error}")
    finally:
        await asyncio.to_thread(remove_tree, place)


async def _scores_untouched(place: Path, task: HarborTask, sandbox: Sandbox) -> bool:
    """Whether the tests end with a score where no agent has been."""
    try:
        await asyncio.to_thread(lay_out, task, place / "untouched", sandbox)
        await _score(place / "control", task, place / "untouched", None, sandbox)
    except (NoScore, WorkspaceTooLarge, SandboxError, OSError):
        return False
    return True


def lay_out(task: HarborTask, workspace: Path, sandbox: Sandbox) -> None:
    """Fill ``workspace`` as the agent finds it. Raises UserError."""
    own = bool(task.image) and bool(getattr(sandbox, "of_tasks", False))
    prepare_workspace(task, workspace, built=own and find_build(task.image) is not None)


def ungraded(reason: str) -> Verdict:
    """The verdict on a rollout that the infrastructure spoilt."""
    return Verdict(None, None, 0, reason)


async def run_to_end(sandbox: Sandbox, spec: SandboxSpec) -> SandboxExit:
    """Launch a command without a listener and wait for its end; nothing is left alive, even when this is cancelled."""
    process = await sandbox.launch(spec)
    try:
        return await process.wait()
    except BaseException:
        process.kill()
        await process.wait()
        raise


def kept_layer(workspace: Path) -> Path:
    """Where the layer lies that belongs to a kept workspace."""
    return workspace.with_name(f"{workspace.name}.layer")


def shell_of(script: Path) -> str:
    """/bin/bash for a script whose first line asks for it, else /bin/sh."""
    with script.open("rb") as file:
        first = file.readline(200)
    return "/bin/bash" if first.startswith(b"#!") and b"bash" in first else "/bin/sh"


def readable_inside(sandbox: Sandbox, scripts: Path, copy: Path, places: Mapping[str, Path]) -> Path:
    """What to mount for ``scripts``. Without isolation the paths inside do not exist: a copy that names the host's.

    ``places``: path inside → path on the host.
    """
    if not isinstance(sandbox, ProcessSandbox):
        return scripts
    shutil.copytree(scripts, copy)
    names = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, places))})(?![\w.-])")
    for path in filter(Path.is_file, copy.rglob("*")):
        with contextlib.suppress(UnicodeDecodeError):  # a binary names no places
            path.write_text(names.sub(lambda match: str(places[match[1]]), path.read_text(encoding="utf-8")), "utf-8")
    return copy


async def _score(place: Path, task: HarborTask, workspace: Path, layer: Path | None, sandbox: Sandbox) -> Verdict:
    """One run of the tests. Raises NoScore."""
    logs = place / "logs"
    for name in ("verifier", "agent", "artifacts"):
        (logs / name).mkdir(parents=True)
    await asyncio.to_thread(snapshot, workspace, place / "workspace")
    if layer is not None:
        await asyncio.to_thread(copy_layer, layer, place / "layer", find_build(task.image))
    places = {"/workspace": place / "workspace", "/logs": logs, "/tests": place / "tests"}
    tests = readable_inside(sandbox, task.tests, place / "tests", places)
    spec = SandboxSpec(
        argv=(shell_of(task.tests / "test.sh"), "/tests/test.sh"),
        env={**OWN_CODE_ONLY, **task.verifier_env},
        workspace=place / "workspace",
        mounts=((tests, "/tests", False), (logs, "/logs", True)),
        stdout=place / "output",
        timeout_s=task.verifier_timeout_s,
        image=task.image,
        directory=task.workdir or "",
        layer=place / "layer" if layer is not None else None,
    )
    exit_ = await run_to_end(sandbox, spec)
    if exit_.killed:  # the oracle stays within the same limits, so it is what the agent left
        return Verdict(0.0, 0.0, 0, f"the tests went over the sandbox's limit of {exit_.killed}")
    correctness = _judge(exit_, logs / "verifier", task.verifier_timeout_s, tail(place / "output"))
    return Verdict(correctness, correctness, 0)


def _judge(exit_: SandboxExit, directory: Path, limit_s: float, said: str) -> float:
    """The reward of tests that ended by themselves. Raises NoScore."""
    if exit_.timed_out:
        raise NoScore(f"not done after {limit_s:g} s{said}")
    correctness, problem = _read_reward(directory)
    if correctness is None:
        raise NoScore(f"{problem} (exit {exit_.returncode}){said}")
    if correctness and (signal := BY_SIGNAL.get(exit_.returncode)):  # what killed them may have written it
        raise NoScore(f"the tests were ended by signal {signal}{said}")
    return correctness


def tail(output: Path) -> str:
    """``: `` and the end of what a command printed; empty when it printed nothing."""
    text = output.read_bytes()[-TAIL:].decode(errors="replace").strip() if output.is_file() else ""
    return f": {text}" if text else ""


def _read_reward(directory: Path) -> tuple[float | None, str]:
    """The correctness in reward.json or reward.txt; or None and what is wrong. Where both are, the lower one: tests
    write one of them, and what they test might write the other.
    """
    values = []
    for path in filter(os.path.lexists, (directory / name for name in REWARD_FILES)):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > REWARD_BYTES:
            return None, f"{path.name} is not a small regular file"
        try:
            value = _number(json.loads(path.read_text()))
        except (ValueError, RecursionError):
            value = None
        if value is None:
            return None, f"{path.name} holds no number: {path.read_bytes()[:80]!r}"
        values.append(value)
    return (min(values), "") if values else (None, "no reward file was written")


def _number(value: object) -> float | None:
    """A finite number, or the one that counts in an object of numbers."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}  # a null stands for no figure
        chosen = [value[key] for key in REWARD_KEYS if key in value] or list(value.values())
        return _number(chosen[0]) if len(chosen) == 1 or any(key in value for key in REWARD_KEYS) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
