"""Hashes of a task: what the agent meets, and what grades it. Two tasks of equal hashes are the same task.

Left out: where the task lies, its solution, and what task.toml only says about it (author, tags, difficulty …).
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.tasks.harbor import HarborTask

ABOUT = ("author", "category", "created", "description", "difficulty", "expert_time", "junior_time", "keywords", "tags")
LEVEL_KEYS = ("difficulty_level", "difficulty")
OF_GRADER = ("verifier",)  # tables of task.toml; [metadata] too, for it may hold the answer
OF_NOBODY = ("schema_version", "version", "task", "metadata", "solution", "source")


def content_hash(task: HarborTask) -> str:
    """SHA-256 of instruction.md, environment/ and the tables of task.toml that shape what the agent meets."""
    root, table = task.ref.path, _table(task)
    tables = {name: value for name, value in table.items() if name not in (*OF_GRADER, *OF_NOBODY)}
    return _digest([_json(tables), *_files(root, "instruction.md"), *_files(root, "environment")])


def grader_hash(task: HarborTask) -> str:
    """SHA-256 of tests/, and of what the verifier may go by in task.toml: [verifier], and [metadata] without ABOUT."""
    table = _table(task)
    tables: dict[str, Any] = {name: table.get(name, {}) for name in OF_GRADER}
    tables["metadata"] = {key: value for key, value in task.metadata.items() if not key.startswith(ABOUT)}
    return _digest([_json(tables), *_files(task.ref.path, "tests")])


def difficulty_level(task: HarborTask) -> str | None:
    """What task.toml calls its difficulty, or None."""
    found = (task.metadata.get(key) for key in LEVEL_KEYS)
    return next((str(level) for level in found if level not in (None, "")), None)


def _table(task: HarborTask) -> dict[str, Any]:
    return tomllib.loads((task.ref.path / "task.toml").read_text(encoding="utf-8"))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _files(root: Path, name: str) -> Iterator[bytes]:
    """For each file below ``name``, in the order of their paths: path, kind and a digest of its content."""
    top = root / name
    found = [top] if top.is_file() else [Path(at, entry) for at, _, files in os.walk(top) for entry in files]
    links = [Path(at, entry) for at, folders, _ in os.walk(top) for entry in folders if Path(at, entry).is_symlink()]
    for path in sorted([*found, *links]):
        yield _json([str(path.relative_to(root)), *_described(path)])


def _described(path: Path) -> tuple[str, str]:
    if path.is_symlink():
        return "link", os.readlink(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "program" if os.access(path, os.X_OK) else "file", digest


def _digest(parts: list[bytes]) -> str:
    """Of all parts, each with its length before it."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
