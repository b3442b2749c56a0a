"""Reads Harbor task directories (task.toml, instruction.md, environment/, tests/, solution/) and lays out workspaces.

Running a task's verifier and checking its oracle are left to stages/.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from pipeline.config import UserError
from pipeline.records import TaskRef
from pipeline.tasks.environments import Environment, environment_of

BUILD_FILES = ("Dockerfile*", "*.Dockerfile", "*compose*.y*ml", ".dockerignore")
ANSWERS = ("solution", "task.toml")  # authors copy these into environment/ by mistake
SIGNS = ("task.toml", "instruction.md", "tests/test.sh")  # a directory with one of these is meant to be a task
DEPTH = 4  # directories between a set's root and its tasks
_HOST_VARIABLE = re.compile(r"\$\{(\w+)(:-)?([^}]*)\}")  # ${NAME} or ${NAME:-default}


class _Section(BaseModel):
    """A table of task.toml. Harbor's format grows, so keys that Yoke does not know are let through."""

    model_config = ConfigDict(extra="ignore")


class _AgentSection(_Section):
    timeout_sec: PositiveFloat = 600.0


class _VerifierSection(_Section):
    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    timeout_sec: PositiveFloat = 600.0
    env: dict[str, str] = {}


class _HealthcheckSection(_Section):
    command: str = ""


class _EnvironmentSection(_Section):
    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    workdir: str | None = None
    docker_image: str | None = None
    env: dict[str, str] = {}
    healthcheck: _HealthcheckSection = _HealthcheckSection()


class _TaskFile(_Section):
    steps: list[Any] = []
    metadata: dict[str, Any] = {}
    agent: _AgentSection = _AgentSection()
    verifier: _VerifierSection = _VerifierSection()
    environment: _EnvironmentSection = _EnvironmentSection()


@dataclass(frozen=True)
class HarborTask:
    """One task as read from disk.

    ``metadata`` is task.toml's own table and may hold the answer: it stays on the host. ``tests`` is the directory that
    only the verifier's sandbox sees; ``solution`` is solution/solve.sh, or None. ``host_env``: variables of the host
    that its verifier and its environment ask for; no sandbox gets them.
    """

    ref: TaskRef
    instruction: str
    tests: Path
    solution: Path | None
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_env: dict[str, str] = field(default_factory=dict)
    host_env: tuple[str, ...] = ()
    workdir: str | None = None
    environment: Environment | None = None  # None: this machine's system
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> str:
        """The name of its environment, "" for this machine's system."""
        return self.environment.name if self.environment else ""


def load_task(path: Path | str, task_id: str | None = None) -> HarborTask:
    """Read one task directory; its name is its id unless one is given.

    Raises UserError that names the directory and what is wrong with it.
    """
    root = Path(path).resolve()
    if not root.is_dir():
        raise UserError(f"task {root}: no such directory")
    config = _read_task_file(root)
    if config.steps:
        raise UserError(f"task {root}: task.toml: a task of several steps ([[steps]]) is not supported")
    if not (root / "tests").is_dir():
        raise UserError(f"task {root}: tests/ is missing, so nothing could score it; Harbor tasks need tests/test.sh")
    _require_file(root, "tests/test.sh")
    _refuse_links_out(root)
    env, host_env = _split_env(config.verifier.env)
    of_system, asked = _split_env(config.environment.env)
    command = config.environment.healthcheck.command.strip()
    solution = root / "solution" / "solve.sh"
    return HarborTask(
        ref=TaskRef(task_id or os.path.basename(os.path.abspath(path)), root),
        instruction=_read_instruction(root),
        tests=root / "tests",
        solution=solution if solution.is_file() else None,
        agent_timeout_s=config.agent.timeout_sec,
        verifier_timeout_s=config.verifier.timeout_sec,
        verifier_env=env,
        host_env=tuple(dict.fromkeys((*host_env, *asked))),
        workdir=config.environment.workdir,
        environment=environment_of(root, config.environment.docker_image, command, of_system, asked),
        metadata=config.metadata,
    )


def load_tasks(
    directory: Path | str, host_env: Collection[str] = (), only: Collection[str] | None = None
) -> list[HarborTask]:
    """Every task below ``directory``, or the one that it is, in the order of their paths.

    Tasks may lie some directories deeper; what looks like no task (SIGNS) is passed over, and so is what is hidden.
    A task's id is its directory's name, or, where two have the same, the way to it. ``host_env``: variables of the
    host that a verifier may ask for in vain. ``only``: ids; other tasks are not read. Raises UserError when there is
    no task at all, or at the first that cannot be read or asks for another variable.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"task set {root}: no such directory")
    paths = find_tasks(root)
    if not paths:
        raise UserError(f"task set {root}: no task directories in it (<task>/task.toml, instruction.md, tests/)")
    named = zip(paths, _ids(root, paths), strict=True)
    tasks = [load_task(path, task_id) for path, task_id in named if only is None or task_id in only]
    for task in tasks:
        if asked := [name for name in task.host_env if name not in host_env]:
            raise UserError(
                f"task {task.ref.path}: task.toml asks for a variable of the host, {asked[0]}, which no sandbox gets; "
                f"if the tests can do without: tasks.host_env=[{','.join(task.host_env)}]"
            )
    return tasks


def find_tasks(root: Path) -> list[Path]:
    """The task directories below ``root``, or ``root`` itself; links are followed, but not back to where they lie."""
    return [root] if _is_task(root) else list(_below(root, DEPTH, (root.resolve(),)))


def _is_task(path: Path) -> bool:
    return any((path / sign).is_file() for sign in SIGNS)


def _below(folder: Path, depth: int, above: tuple[Path, ...]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_dir() or (real := path.resolve()) in above:
            continue
        if _is_task(path):
            yield path
        elif depth:
            yield from _below(path, depth - 1, (*above, real))


def _ids(root: Path, paths: list[Path]) -> list[str]:
    uses = Counter(path.name for path in paths)
    ids = [path.name if uses[path.name] == 1 else "__".join(path.relative_to(root).parts) for path in paths]
    for task_id, count in Counter(ids).items():
        if count > 1:
            clash = [str(path) for path, other in zip(paths, ids, strict=True) if other == task_id]
            raise UserError(f"task set {root}: {clash[0]} and {clash[1]} would both be called {task_id}: rename one")
    return ids


def prepare_workspace(task: HarborTask, directory: Path, built: bool = False) -> None:
    """Fill ``directory`` as the agent finds it: environment/workspace/, else environment/ without its build files, of
    which a ``built`` environment has taken what it needs.

    Neither task.toml nor the solution enters, not even as a copy that the author left in environment/.
    Raises UserError when a link leads out of the environment.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = task.ref.path / "environment"
    answers = {_digest(path) for path in (task.ref.path / "task.toml", task.solution) if path is not None}
    if (environment / "workspace").is_dir():
        _copy_tree(environment / "workspace", directory, (), answers)
    elif environment.is_dir() and not built:
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


def _split_env(env: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(what the verifier gets, names of the host's variables that it asks for in vain).

    Harbor fills ``${NAME}`` from the host's environment; here nothing of the host enters a sandbox. Defaults
    (``${NAME:-text}``) are taken.
    """
    kept, asked = {}, []
    for name, value in env.items():
        missing = [variable for variable, has_default, _ in _HOST_VARIABLE.findall(value) if not has_default]
        asked += missing
        if not missing:
            kept[name] = _HOST_VARIABLE.sub(lambda match: match[3], value)
    return kept, tuple(dict.fromkeys(asked))


def _refuse_links_out(root: Path) -> None:
    """Only tests/ is mounted for the verifier, so a link that leads out of it would lead nowhere."""
    for folder, folders, files in os.walk(root / "tests"):
        for path in (Path(folder) / name for name in [*folders, *files]):
            if path.is_symlink() and not path.resolve().is_relative_to((root / "tests").resolve()):
                raise UserError(
                    f"task {root}: {path.relative_to(root)} is a link out of tests/; give the set as plain files "
                    "(a cache of the hub is all links: hf download … --local-dir DIR makes files)"
                )


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
