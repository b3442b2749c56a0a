"""Files of a run directory: Parquet for closed groups, JSONL for ledgers. One writer a file; atomic renames."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import UserError
from pipeline.records import ROLLOUT_SCHEMA, Outcome, PolicyVersion, RolloutRecord, Row, Verdict

T = TypeVar("T")

_PLAIN = ("rollout_id", "group_id", "index", "task_id", "harness", "calls", "malformed", "undelivered")
_FIGURES = ("prompt_tokens", "sampled_tokens", "wall_s")


Content = bytes | Callable[[Path], object]  # of a file: itself, or what writes it


def publish(path: Path, content: Content, mode: int = 0o644) -> None:
    """Write a temporary file beside ``path``, then rename it there: readers see all of it or nothing.

    On an error nothing is left behind, and the error goes on.
    """
    with _draft(path, content, mode) as draft:
        os.replace(draft, path)


def publish_new(path: Path, content: Content) -> bool:
    """Like `publish`, unless there is a file at ``path`` already: that one stays, and False is returned.

    By a hard link, so that of several writers on several nodes exactly one succeeds.
    """
    with _draft(path, content, 0o644) as draft:
        try:
            os.link(draft, path)
            return True
        except FileExistsError:
            return os.stat(draft).st_nlink > 1  # ours after all: NFS had lost the answer and asked again
        finally:
            draft.unlink()


@contextmanager
def _draft(path: Path, content: Content, mode: int) -> Iterator[Path]:
    """A file beside ``path``, written and flushed to disk; removed if anything goes wrong meanwhile.

    The directory is made only if it is missing, and nothing is removed that was renamed: a shared file system counts.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        descriptor = _opened(draft, lambda: os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with open(descriptor, "wb", buffering=0) as file:
            if isinstance(content, bytes):
                _write_all(file, content)
            else:
                content(draft)
            os.fsync(descriptor)
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _write_all(file: io.FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _opened(path: Path, opening: Callable[[], T]) -> T:
    """What ``opening`` gives, once the directory of ``path`` is there."""
    try:
        return opening()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return opening()


def point(link: Path, target: Path) -> None:
    """Let ``link`` be a symbolic link to ``target``, in one step."""
    draft = link.with_name(f".{link.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        draft.symlink_to(target)
        os.replace(draft, link)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Publish ``text`` in UTF-8."""
    publish(path, text.encode(), mode)


def write_json(path: Path, value: Any) -> None:
    """Publish ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_group(path: Path, records: Sequence[RolloutRecord]) -> None:
    """Publish the rollouts of one group as a Parquet file after ROLLOUT_SCHEMA."""
    publish(path, _to_bytes(records))


def write_new_group(path: Path, records: Sequence[RolloutRecord]) -> bool:
    """`write_group`, unless there is a file at ``path`` already: that one stays, and False is returned."""
    return publish_new(path, _to_bytes(records))


def _to_bytes(records: Sequence[RolloutRecord]) -> bytes:
    """In memory, since pyarrow writes a file in a hundred pieces."""
    buffer = pa.BufferOutputStream()
    pq.write_table(_to_table(records), buffer, compression="zstd")
    content: bytes = buffer.getvalue().to_pybytes()
    return content


def read_group(path: Path) -> tuple[RolloutRecord, ...]:
    """The rollouts of a file that write_group made, rows included. Raises UserError when it is not such a file."""
    try:
        with pq.ParquetFile(pa.BufferReader(path.read_bytes())) as file:  # half the CPU time of pq.read_table
            table = file.read(use_threads=False).cast(ROLLOUT_SCHEMA)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise UserError(f"cannot read the rollouts in {path}: {error}") from error
    rows = _rows_of(table.column("rows").combine_chunks())
    plain = table.drop_columns(["rows"]).to_pylist()
    return tuple(_to_record(fields, own) for fields, own in zip(plain, rows, strict=True))


def read_figures(path: Path) -> tuple[RolloutRecord, ...]:
    """As `read_group`, but the rows are left out: a few kilobytes are read, however long the rollouts are."""
    schema = pa.schema([field for field in ROLLOUT_SCHEMA if field.name != "rows"])
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            table = file.read(schema.names, use_threads=False).cast(schema)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the rollouts in {path}: {error}") from error
    return tuple(_to_record(fields, ()) for fields in table.to_pylist())


def append_jsonl(path: Path, entry: dict[str, Any]) -> None:
    """Add one line to a ledger, in one write. A line that an earlier crash tore is cut off first."""
    append_lines(path, [entry])


def append_lines(path: Path, entries: Iterable[dict[str, Any]], keep: int | None = None) -> int:
    """Add lines to a ledger, in one write, and return its new size. A torn last line is cut off first.

    ``keep``: the size after the last good write; what a failed one left beyond it is cut off. One writer a ledger.
    """
    data = b"".join(json.dumps(entry, allow_nan=False).encode() + b"\n" for entry in entries)
    with _opened(path, lambda: open(path, "ab+", buffering=0)) as file:
        if keep is not None and file.seek(0, os.SEEK_END) > keep:
            file.truncate(keep)
        _mend_tail(file)
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return file.seek(0, os.SEEK_END)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The entries of a ledger, oldest first; [] when there is no file. A torn last line is passed over.

    Raises UserError for a bad line anywhere else: that is damage, not a crash in the middle of a write.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    entries = [_parse(line) for line in lines[:-1]]
    for number, entry in enumerate(entries, 1):
        if entry is None:
            raise UserError(f"{path}, line {number}: not a JSON object; the ledger is damaged")
    last = _parse(lines[-1])
    return [entry for entry in [*entries, last] if entry is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _mend_tail(file: Any) -> None:
    """End the file with a newline: complete a whole last line, cut off a torn one."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    start = content.rfind(b"\n") + 1
    if _parse(content[start:]) is None:
        file.truncate(start)
    else:
        file.write(b"\n")


def _to_table(records: Sequence[RolloutRecord]) -> pa.Table:
    columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in (*_PLAIN, *_FIGURES)}
    for name in ("reward", "correctness", "tool_calls", "reason"):
        columns[name] = [getattr(record.verdict, name) for record in records]
    columns["outcome"] = [record.outcome.value for record in records]
    columns["version"] = [str(record.version) for record in records]
    columns["newest_version"] = [str(record.newest_version) for record in records]
    columns["info"] = [json.dumps(record.info) for record in records]
    arrays = [pa.array(columns[field.name], field.type) for field in ROLLOUT_SCHEMA if field.name != "rows"]
    return pa.Table.from_arrays([*arrays, _rows_array([record.rows for record in records])], schema=ROLLOUT_SCHEMA)


def _rows_array(rows: Sequence[Sequence[Row]]) -> pa.ListArray:
    """The rows column, built from the numpy arrays without a Python object a token."""
    flat = [row for own in rows for row in own]
    type_of = ROLLOUT_SCHEMA.field("rows").type.value_type
    offsets = _offsets([len(row.input_ids) for row in flat])
    fields = [
        pa.ListArray.from_arrays(offsets, _values([getattr(row, field.name) for row in flat], field.type.value_type))
        for field in type_of
    ]
    structs = pa.StructArray.from_arrays(fields, fields=list(type_of))
    return pa.ListArray.from_arrays(_offsets([len(own) for own in rows]), structs)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _values(arrays: Sequence[np.ndarray], type_of: pa.DataType) -> pa.Array:
    dtype = type_of.to_pandas_dtype()
    joined = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.array(np.ascontiguousarray(joined, dtype=dtype), type_of)


def _rows_of(column: pa.ListArray) -> list[tuple[Row, ...]]:
    structs = column.flatten()
    names = ("input_ids", "loss_mask", "logprobs")
    lists = {name: structs.field(name) for name in names}
    parts = {name: _split(lists[name]) for name in names}
    flat = [Row(*fields) for fields in zip(*(parts[name] for name in names), strict=True)]
    bounds = column.offsets.to_numpy() - (column.offsets[0].as_py() if len(column) else 0)
    return [tuple(flat[start:end]) for start, end in pairwise(bounds)]


def _split(column: pa.ListArray) -> list[np.ndarray]:
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1]) if len(column) else []


def _to_record(fields: dict[str, Any], rows: tuple[Row, ...]) -> RolloutRecord:
    verdict = Verdict(fields["reward"], fields["correctness"], fields["tool_calls"], fields["reason"])
    return RolloutRecord(
        **{name: fields[name] for name in (*_PLAIN, *_FIGURES)},
        outcome=Outcome(fields["outcome"]),
        verdict=verdict,
        rows=rows,
        version=PolicyVersion.parse(fields["version"]),
        newest_version=PolicyVersion.parse(fields["newest_version"]),
        info=json.loads(fields["info"]),
    )
