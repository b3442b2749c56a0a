"""Stage 2: score what a rollout left behind, in a fresh sandbox without network that sees ``tests/`` only now.

It starts after the agent and everything it started is dead. None means that the infrastructure failed; 0 that the agent
did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.records import Verdict
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxExit, SandboxSpec
from pipeline.sandbox.process import ProcessSandbox
from pipeline.tasks.harbor import HarborTask

SNAPSHOT_BYTES = 1 << 30
SNAPSHOT_FILES = 50_000
REWARD_BYTES = 1 << 16
REWARD_KEYS = ("correctness", "reward")  # of a reward.json with several numbers
TAIL = 500


class WorkspaceTooLarge(Exception):
    """The agent left more than a snapshot may hold."""


async def verify(task: HarborTask, workspace: Path, sandbox: Sandbox, scratch: Path) -> Verdict:
    """Run the task's tests on a snapshot of ``workspace`` and read the reward file.

    ``scratch`` is node-local and out of every agent's reach; what is made there is removed. The verdict's reward equals
    its correctness, its tool calls are 0. Both are None, with the reason, when the sandbox could not start, the tests
    ran out of time or wrote no reward. A workspace that is too large, or that drives the tests over the sandbox's
    limits, scores 0.
    """
    place = Path(tempfile.mkdtemp(prefix="verify-", dir=scratch))
    try:
        return await _verify_in(place, task, workspace, sandbox)
    except WorkspaceTooLarge as error:
        return Verdict(0.0, 0.0, 0, str(error))
    except (SandboxError, OSError) as error:
        return ungraded(f"verifier: {error}")
    finally:
        await asyncio.to_thread(remove_tree, place)


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


def snapshot(source: Path, target: Path, max_bytes: int = SNAPSHOT_BYTES, max_files: int = SNAPSHOT_FILES) -> None:
    """Copy directories, regular files and links that stay inside; leave out sockets, pipes, devices and other links.

    A link that leads out could point at the tests and pass them off as an answer. Raises WorkspaceTooLarge.
    """
    target.mkdir()
    left, files = max_bytes, 0
    for path, mode in _walk(source):
        copy = target / path.relative_to(source)
        if stat.S_ISDIR(mode):
            copy.mkdir()
            continue
        files += 1
        left -= path.lstat().st_size
        if left < 0 or files > max_files:
            raise WorkspaceTooLarge(f"the workspace holds more than {max_bytes >> 20} MB or {max_files} files")
        _copy(source, path, mode, copy)


def remove_tree(path: Path) -> None:
    """Delete a tree, also one whose directories were left without permissions, or nest deeper than Python's stack."""
    with contextlib.suppress(OSError):
        for _ in _walk(path):
            pass
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(path)], check=False, timeout=60)


async def _verify_in(place: Path, task: HarborTask, workspace: Path, sandbox: Sandbox) -> Verdict:
    await asyncio.to_thread(snapshot, workspace, place / "workspace")
    logs = place / "logs"
    for name in ("verifier", "agent", "artifacts"):
        (logs / name).mkdir(parents=True)
    places = {"/workspace": place / "workspace", "/logs": logs, "/tests": place / "tests"}
    tests = readable_inside(sandbox, task.tests, place / "tests", places)
    spec = SandboxSpec(
        argv=(shell_of(task.tests / "test.sh"), "/tests/test.sh"),
        env=task.verifier_env,
        workspace=place / "workspace",
        mounts=((tests, "/tests", False), (logs, "/logs", True)),
        stdout=place / "output",
        timeout_s=task.verifier_timeout_s,
        image=task.image,
    )
    exit_ = await run_to_end(sandbox, spec)
    if exit_.timed_out:
        return ungraded(f"verifier: not done after {task.verifier_timeout_s:g} s{tail(place / 'output')}")
    if exit_.killed:  # the oracle stays within the same limits, so it is what the agent left
        return Verdict(0.0, 0.0, 0, f"the tests went over the sandbox's limit of {exit_.killed}")
    correctness, problem = _read_reward(logs / "verifier")
    if correctness is None:
        return ungraded(f"verifier: {problem} (exit {exit_.returncode}){tail(place / 'output')}")
    return Verdict(correctness, correctness, 0)


def tail(output: Path) -> str:
    """``: `` and the end of what a command printed; empty when it printed nothing."""
    text = output.read_bytes()[-TAIL:].decode(errors="replace").strip() if output.is_file() else ""
    return f": {text}" if text else ""


def _read_reward(directory: Path) -> tuple[float | None, str]:
    """The correctness in reward.json, else in reward.txt; or None and what is wrong."""
    for name in ("reward.json", "reward.txt"):
        path = directory / name
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file() or path.stat().st_size > REWARD_BYTES:
            return None, f"{name} is not a small regular file"
        try:
            value = _number(json.loads(path.read_text()))
        except ValueError:
            value = None
        return value, "" if value is not None else f"{name} holds no number: {path.read_bytes()[:80]!r}"
    return None, "no reward file was written"


def _number(value: object) -> float | None:
    """A finite number, or the one that counts in an object of numbers."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}  # a null stands for no figure
        chosen = [value[key] for key in REWARD_KEYS if key in value] or list(value.values())
        return _number(chosen[0]) if len(chosen) == 1 or any(key in value for key in REWARD_KEYS) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _walk(root: Path) -> Iterator[tuple[Path, int]]:
    """Everything below ``root`` with its mode, parents first, links not followed; closed directories are opened.

    Without recursion: an agent may nest directories deeper than Python's stack.
    """
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        directory.chmod(directory.stat().st_mode | 0o700)
        for name in sorted(os.listdir(directory)):
            path = directory / name
            mode = path.lstat().st_mode
            yield path, mode
            if stat.S_ISDIR(mode):
                waiting.append(path)


def _copy(source: Path, path: Path, mode: int, copy: Path) -> None:
    if stat.S_ISLNK(mode):
        link = os.readlink(path)
        if not os.path.isabs(link) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
            copy.symlink_to(link)
    elif stat.S_ISREG(mode):
        path.chmod(mode | 0o400)
        shutil.copyfile(path, copy, follow_symlinks=False)
        copy.chmod(mode & 0o777 | 0o600)
