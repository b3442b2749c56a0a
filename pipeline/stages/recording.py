"""Recordings of a teacher: one row a model request, as messages, tools and the answer; a rollout's rows together.

They are text: a teacher gives no token ids that mean anything to the student. Also read: data of others with
``messages`` and ``tools`` columns, one conversation a row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import UserError
from pipeline.records import RolloutRecord, Trace

Message = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("rollout", pa.string()),
        ("task_id", pa.string()),
        ("harness", pa.string()),
        ("call", pa.int32()),
        ("reward", pa.float64()),
        ("messages", pa.string()),  # JSON, as are the next two
        ("tools", pa.string()),
        ("answer", pa.string()),
    ]
)
# The requests of a rollout repeat each other: one page holds many of them, and the window of level 9 spans 4 MiB.
COMPACT: dict[str, Any] = {"compression": "zstd", "compression_level": 9, "data_page_size": 2**26}
SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Turn:
    """One model request and the answer that is learnt, in Chat Completions form."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    answer: Message


def rows_of(rollout: str, record: RolloutRecord, trace: Trace) -> list[dict[str, Any]]:
    """One row a call worth learning: delivered to the harness, well-formed and not cut off."""
    head = {
        "rollout": rollout,
        "task_id": record.task_id,
        "harness": record.harness,
        "reward": record.verdict.correctness,
    }
    return [
        head | {"call": call.call_id} | {name: json.dumps(text) for name, text in entry.items()}
        for call, entry in zip(trace.calls, trace.transcript, strict=True)
        if call.delivered and not call.foreign and not call.malformed and call.finish_reason != "length"
    ]


def write_rows(place: Path, rows: Iterable[list[dict[str, Any]]], about: dict[str, str]) -> None:
    """A Parquet file with a row group a rollout, whole or absent; ``about`` becomes its metadata."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.partial")
    schema = SCHEMA.with_metadata(about)
    with pq.ParquetWriter(draft, schema, **COMPACT) as writer:
        for part in rows:
            writer.write_table(pa.Table.from_pylist(part, schema))
    os.replace(draft, place)


def about(place: Path) -> dict[str, str]:
    """The metadata that ``write_rows`` gave a file."""
    return {key.decode(): value.decode() for key, value in (pq.read_schema(place).metadata or {}).items()}


def fingerprint(rows: Iterable[dict[str, Any]]) -> str:
    """The same for two rollouts in which a teacher said the same in the same harness and task.

    White space, ids of tool calls and the spelling of their arguments' JSON do not count, nor what the tools gave.
    """
    digest = hashlib.sha256()
    for row in rows:
        answer = json.loads(row["answer"])
        calls = [call["function"] for call in answer.get("tool_calls") or []]
        said = [" ".join(str(answer.get(name) or "").split()) for name in ("reasoning", "content")]
        called = [[call["name"], json.loads(call["arguments"] or "{}")] for call in calls]
        digest.update(json.dumps([row["task_id"], row["harness"], said, called], sort_keys=True).encode())
    return digest.hexdigest()


def recordings_in(place: Path) -> list[Path]:
    """The files of a folder, or the file itself. Raises UserError when there is none."""
    found = (
        sorted(path for path in place.glob("[!.]*") if path.suffix in SUFFIXES and path.is_file())
        if place.is_dir()
        else [place]
    )
    if not found or not all(path.is_file() and path.suffix in SUFFIXES for path in found):
        raise UserError(
            f"no recordings ({' or '.join(SUFFIXES)}) at {place}: make them with `yoke collect`, or name yours "
            "(sft.data=…)"
        )
    return found


def read_rollouts(path: Path) -> Iterator[list[Turn]]:
    """The turns of each rollout, or of each conversation in others' data. Raises UserError for what it cannot read."""
    try:
        for _, rows in groupby(enumerate(rows_in(path)), lambda pair: pair[1].get("rollout") or pair[0]):
            yield [turn for _, row in rows for turn in _turns(row)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # a pyarrow error is a ValueError
        raise UserError(f"{path} does not hold messages and tools in Chat Completions form: {error!r}") from error


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as they are. Raises OSError, ValueError for one that cannot be read."""
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_pylist()
    else:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _turns(row: dict[str, Any]) -> Iterator[Turn]:
    """A row of ours is one turn; in a conversation each assistant message is one."""
    messages, tools = parsed(row["messages"]), parsed(row.get("tools")) or []
    if row.get("answer") is not None:
        yield Turn(messages, tools, parsed(row["answer"]))
        return
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            yield Turn(messages[:at], tools, message)


def parsed(value: Any) -> Any:
    """JSON text or a nested column, which Parquet fills up with nulls."""
    return json.loads(value) if isinstance(value, str) else _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
