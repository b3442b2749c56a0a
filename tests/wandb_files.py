"""Reads W&B's .wandb files back: records in LevelDB's log format, each a protocol buffer of W&B's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as pb

BLOCK, HEAD, MAGIC = 32768, 7, b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def offline_files(run_dir: Path) -> list[Path]:
    """Those that `wandb sync` would find below a run directory, oldest first."""
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def records(path: Path) -> Iterator[Any]:
    """Every record of a file, up to a torn end."""
    data, at, joined = path.read_bytes(), HEAD, b""
    assert data.startswith(MAGIC)
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at + HEAD + size > len(data):
            return
        joined += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (FULL, LAST):
            yield pb.Record.FromString(joined)
            joined = b""


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, row by row, without W&B's own columns."""
    rows = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [_row(row) for row in rows]


def _row(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in row.item:
        *above, name = list(item.nested_key) or [item.key]
        place = found
        for part in above:
            place = place.setdefault(part, {})
        place[name] = json.loads(item.value_json)
    return {key: value for key, value in found.items() if not key.startswith("_")}


def run_record(path: Path) -> Any:
    """The first word of a file about its run: id, group, job type, tags, configuration."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def config_of(path: Path) -> dict[str, Any]:
    return {
        item.key: json.loads(item.value_json)
        for item in run_record(path).config.update
        if item.key not in ("", "_wandb")
    }


def metrics_of(path: Path) -> list[Any]:
    """The definitions of metrics."""
    return [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]


def table_of(path: Path, key: str) -> dict[str, Any]:
    """The last table that was logged as ``key``."""
    told = [row[key] for row in history(path) if key in row]
    assert told, f"no table {key}"
    table: dict[str, Any] = json.loads((path.parent / "files" / told[-1]["path"]).read_text())
    return table
