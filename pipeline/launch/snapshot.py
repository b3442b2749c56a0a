"""What a job on the cluster needs besides its run directory: a copy of the code in it, and settings without relative
paths, so that neither an edit of the checkout nor the job's working directory changes a run.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline
from pipeline.config import Config, TasksConfig
from pipeline.launch.run_directory import RunDirectory
from pipeline.tasks.hub import is_pinned

SOURCE = Path(pipeline.__file__).parents[1]  # holds pipeline/ and conf/
PARTS = ("pipeline", "conf")
LEFT_OUT = ("__pycache__", "*.pyc", ".*")
NAME_LENGTH = 12


def take_snapshot(run: RunDirectory, source: Path = SOURCE) -> tuple[Path, bool]:
    """(``run_dir/code/HASH``, whether it was made just now): a copy of pipeline/ and conf/ as they are.

    The name is a hash of the contents: the same code is copied once, other code lies beside it, and a job that runs
    keeps its own. It appears by one rename, so it is whole or absent.
    """
    target = run.root / "code" / _hash(source)
    if target.is_dir():
        return target, False
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        for part in PARTS:
            shutil.copytree(source / part, partial / part, ignore=shutil.ignore_patterns(*LEFT_OUT))
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another submission was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target, True


def _hash(source: Path) -> str:
    digest = hashlib.sha256()
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    for part in PARTS:
        for folder, folders, names in os.walk(source / part):
            out = ignored(folder, [*folders, *names])
            folders[:] = sorted(set(folders) - out)
            for path in (Path(folder) / name for name in sorted(set(names) - out)):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(source)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:NAME_LENGTH]


def with_absolute_paths(config: Config) -> Config:
    """The same settings for a process with another working directory."""
    model = config.model.path  # or the name of a model on the hub
    return replace(
        config,
        run_dir=_absolute(config.run_dir),
        model=replace(config.model, path=_absolute(model) if Path(model).expanduser().is_dir() else model),
        tasks=_tasks(config.tasks),
        harness=replace(
            config.harness,
            home=_absolute_if(config.harness.home),
            recipes=[_recipe(place) for place in config.harness.recipes],
        ),
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_if(path: str | None) -> str | None:
    return _absolute(path) if path else path


def _tasks(tasks: TasksConfig) -> TasksConfig:
    """A data set of the hub keeps its name."""
    places: dict[str, Any] = {}
    for name in ("train", "test", "train_names", "test_names", "source"):
        given = getattr(tasks, name)
        places[name] = given if is_pinned(given) else _absolute_if(given)
    return replace(tasks, **places)


def _recipe(place: str) -> str:
    """``path/to/file.py``, or the name of a module."""
    source = place.partition(":")[0]
    return _absolute(source) + place[len(source) :] if source.endswith(".py") else place
