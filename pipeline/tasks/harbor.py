"""Reads Harbor task directories (task.toml, instruction.md, environment/, tests/, solution/) and lays out workspaces.

Running a task's verifier and checking its oracle are left to stages/.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from pipeline.config import UserError
from pipeline.records import TaskRef

BUILD_FILES = ("Dockerfile*", "*.Dockerfile", "*compose*.y*ml", ".dockerignore")
ANSWERS = ("solution", "task.toml")  # authors copy these into environment/ by mistake


class _Section(BaseModel):
    """A table of task.toml. Harbor's format grows, so keys that Yoke does not know are let through."""

    model_config = ConfigDict(extra="ignore")


class _TaskSection(_Section):
    name: str | None = None


class _AgentSection(_Section):
    timeout_sec: PositiveFloat = 600.0


class _VerifierSection(_Section):
    timeout_sec: PositiveFloat = 600.0
    env: dict[str, str] = {}


class _EnvironmentSection(_Section):
    workdir: str | None = None
    docker_image: str | None = None


class _TaskFile(_Section):
    schema_version: str = "1.0"
    task: _TaskSection = _TaskSection()
    metadata: dict[str, Any] = {}
    agent: _AgentSection = _AgentSection()
    verifier: _VerifierSection = _VerifierSection()
    environment: _EnvironmentSection = _EnvironmentSection()


@dataclass(frozen=True)
class HarborTask:
    """One task as read from disk.

    ``metadata`` is task.toml's own table and may hold the answer: it stays on the host. ``tests`` is the directory that
    only the verifier's sandbox sees; ``solution`` is solution/solve.sh, or None.
    """

    ref: TaskRef
    instruction: str
    tests: Path
    solution: Path | None
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    image: str = ""  # environment.docker_image as an address: docker://…
    metadata: dict[str, Any] = field(default_factory=dict)


def load_task(path: Path | str) -> HarborTask:
    """Read one task directory. Raises UserError that names the directory and what is wrong with it."""
    root = Path(path).resolve()
    if not root.is_dir():
        raise UserError(f"task {root}: no such directory")
    config = _read_task_file(root)
    if not (root / "tests").is_dir():
        raise UserError(f"task {root}: tests/ is missing, so nothing could score it; Harbor tasks need tests/test.sh")
    _require_file(root, "tests/test.sh")
    solution = root / "solution" / "solve.sh"
    return HarborTask(
        ref=TaskRef(root.name, root),
        instruction=_read_instruction(root),
        tests=root / "tests",
        solution=solution if solution.is_file() else None,
        agent_timeout_s=config.agent.timeout_sec,
        verifier_timeout_s=config.verifier.timeout_sec,
        verifier_env=_literal_env(root, config.verifier.env),
        workdir=config.environment.workdir,
        image=f"docker://{config.environment.docker_image}" if config.environment.docker_image else "",
        metadata=config.metadata,
    )


def load_tasks(directory: Path | str) -> list[HarborTask]:
    """Every task directory under ``directory``, sorted by name; hidden entries and plain files are passed over.

    Raises UserError when there is none, or at the first task that cannot be read.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"task set {root}: no such directory")
    tasks = [load_task(path) for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not tasks:
        raise UserError(f"task set {root}: no task directories in it (<task>/task.toml, instruction.md, tests/)")
    return tasks


def prepare_workspace(task: HarborTask, directory: Path) -> None:
    """Fill ``directory`` as the agent finds it: environment/workspace/, else environment/ without its build files.

    Neither task.toml nor the solution enters, not even as a copy that the author left in environment/.
    Raises UserError when a link leads out of the environment.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = task.ref.path / "environment"
    answers = {_digest(path) for path in (task.ref.path / "task.toml", task.solution) if path is not None}
    if (environment / "workspace").is_dir():
        _copy_tree(environment / "workspace", directory, (), answers)
    elif environment.is_dir():
        _copy_tree(environment, directory, BUILD_FILES + ANSWERS, answers)


def _read_task_file(root: Path) -> _TaskFile:
    path = _require_file(root, "task.toml")
    try:
        return _TaskFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"task {root}: task.toml is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"task {root}: task.toml: {key} = {first['input']!r}: {first['msg']}") from None


def _read_instruction(root: Path) -> str:
    text = _require_file(root, "instruction.md").read_text(encoding="utf-8").strip()
    if not text:
        raise UserError(f"task {root}: instruction.md is empty")
    return text


def _require_file(root: Path, name: str) -> Path:
    path = root / name
    if not path.is_file():
        raise UserError(f"task {root}: {name} is missing")
    return path


def _literal_env(root: Path, env: dict[str, str]) -> dict[str, str]:
    """Harbor fills ``${NAME}`` from the host's environment; here nothing of the host enters a sandbox."""
    for name, value in env.items():
        if "${" in value:
            raise UserError(f"task {root}: task.toml: verifier.env.{name} = {value!r} asks for a variable of the host")
    return env


def _copy_tree(source: Path, target: Path, left_out: tuple[str, ...], answers: set[bytes]) -> None:
    """Copy the tree, but no top-level name that matches ``left_out`` and no file whose digest is in ``answers``."""
    for path in _entries(source, left_out):
        destination = target / path.relative_to(source)
        if path.is_symlink():
            _copy_link(source, path, destination)
        elif path.is_dir():
            destination.mkdir(parents=True, exist_ok=True)
        elif _digest(path) not in answers:
            shutil.copyfile(path, destination)
            destination.chmod(path.stat().st_mode & 0o777 | 0o600)


def _entries(source: Path, left_out: tuple[str, ...]) -> Iterator[Path]:
    """Everything below ``source``, parents first, in a fixed order; links to directories are not walked into."""
    for folder, folders, files in os.walk(source):
        if Path(folder) == source:
            folders[:] = _without(folders, left_out)
            files = _without(files, left_out)
        folders.sort()
        yield from (Path(folder) / name for name in [*folders, *sorted(files)])


def _without(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


def _copy_link(source: Path, link: Path, destination: Path) -> None:
    target = os.readlink(link)
    if os.path.isabs(target) or not link.resolve().is_relative_to(source.resolve()):
        raise UserError(f"task environment {source}: the link {link.relative_to(source)} leads outside, to {target}")
    destination.symlink_to(target)


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes(), digest_size=20).digest()
