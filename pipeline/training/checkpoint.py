"""Checkpoints and exports that are whole or absent: written beside their place, flushed to disk, then renamed.

A checkpoint is a directory ``0002-000007-update-000024`` (attempt, sequence, updates done) with a manifest of its
files, written last. Attempt and sequence order them: what a dead attempt's ghost writes late stays below the newer
attempt's.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pipeline.config import UserError
from pipeline.records import NO_CHECKPOINT, checkpoint_order

MANIFEST = "manifest.json"
STATE_FILE = "state.json"
PARTIAL = ".partial-"
WRITE_FAILURES = (OSError, RuntimeError, SafetensorError)  # torch and safetensors hide the OSError of a full disk
MIB = 1024 * 1024


class CheckpointError(UserError):
    """A checkpoint or an export could not be written or read; older ones are untouched."""


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under ``root``, oldest first; half-written or damaged ones are passed over."""
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir(), key=_order) if _order(path) > NO_CHECKPOINT and is_complete(path)]


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``, or None."""
    return next(reversed(checkpoints(root)), None)


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file that it lists has the size that it had when written."""
    try:
        files: dict[str, int] = json.loads((path / MANIFEST).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def next_name(root: Path, update: int, attempt: int = 0) -> str:
    """A name that sorts after every checkpoint of ``root``, complete or not, that is not of a newer attempt."""
    taken = [_order(path)[1] for path in root.iterdir()] if root.is_dir() else []
    return f"{attempt:04d}-{max(taken, default=0) + 1:06d}-update-{update:06d}"


def _order(path: Path) -> tuple[int, int]:
    return checkpoint_order(path.name)


def partial_path(target: Path) -> Path:
    """Where to write ``target`` before it is published; unique, in the same directory."""
    return target.parent / f"{PARTIAL}{target.name}-{uuid.uuid4().hex[:8]}"


def publish(partial: Path, target: Path, fence: Callable[[], None] = lambda: None) -> None:
    """Write the manifest, flush everything to disk and rename ``partial`` to ``target``, replacing what is there.

    ``fence`` is called when only the renaming is left and may raise.
    """
    seal(partial)
    fence()
    replaced = None
    if target.exists():
        replaced = partial_path(target)
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def seal(root: Path) -> None:
    """List every file of a finished directory in its manifest, and flush all of it to disk."""
    written = [path for path in sorted(root.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(root)): path.stat().st_size for path in written}
    (root / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    sync_tree(root)


def sync_tree(root: Path) -> None:
    """Flush every file and directory under ``root`` to disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a directory, then publish it as ``target``. Raises CheckpointError if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(target)
    try:
        partial.mkdir()
        write(partial)
        publish(partial, target)
    except WRITE_FAILURES as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise write_error(target, str(error)) from error


def write_error(target: Path, cause: str) -> CheckpointError:
    """The error for a directory that could not be written, with the space that is left (torch hides the errno)."""
    free = shutil.disk_usage(target.parent).free / MIB
    return CheckpointError(
        f"could not write {target} ({free:.0f} MiB free on that disk): {cause.splitlines()[0]}. "
        "Checkpoints written before it are intact; make room or point run_dir elsewhere, then start again to resume."
    )


def prune(root: Path, keep: int, attempt: int = 0) -> None:
    """Delete all but the newest ``keep`` complete checkpoints, incomplete older ones, and abandoned partials.

    Only the one writer of ``attempt`` may call this, with no write in progress. A newer one's partials are not touched.
    """
    kept = checkpoints(root)[-max(1, keep) :]
    oldest_kept = _order(kept[0]) if kept else NO_CHECKPOINT
    for path in root.iterdir():
        superseded = NO_CHECKPOINT < _order(path) < oldest_kept
        if superseded or _is_abandoned(path, attempt):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, attempt: int) -> bool:
    target = path.name.removeprefix(PARTIAL).rpartition("-")[0]
    return path.name.startswith(PARTIAL) and _order(Path(target))[0] <= attempt


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``."""
    value: dict[str, Any] = json.loads(path.read_text())
    return value
