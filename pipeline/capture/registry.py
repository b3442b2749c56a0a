"""What `yoke proxy` remembers of its sessions across restarts: a small file each, beside the shards' journals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pipeline.capture.session import file_name


class Entry(msgspec.Struct):
    """One session. ``figures`` are those at its end; times are Unix seconds."""

    session_id: str
    shard: int
    opened: float
    policy: dict[str, Any]
    model_name: str
    metadata: dict[str, Any]
    closed: float | None = None
    reason: str = ""  # why it was closed
    figures: dict[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether calls are answered."""
        return self.closed is None


class Registry:
    """All sessions, open and closed, until they are deleted. A file name tells nothing of the key inside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "sessions"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.entries = {entry.session_id: entry for entry in self._load()}

    def save(self, entry: Entry) -> None:
        """Keep an entry's present state. Raises OSError."""
        path = self._path(entry)
        draft = path.with_suffix(".tmp")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(entry))
        draft.replace(path)
        self.entries[entry.session_id] = entry

    def remove(self, entry: Entry) -> None:
        """Forget a session."""
        self._path(entry).unlink(missing_ok=True)
        self.entries.pop(entry.session_id, None)

    def _load(self) -> list[Entry]:
        return [msgspec.json.decode(path.read_bytes(), type=Entry) for path in self._directory.glob("*.json")]

    def _path(self, entry: Entry) -> Path:
        return self._directory / file_name(entry.session_id).replace(".trace", ".json")
