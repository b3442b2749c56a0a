"""From a trace file to Arrow: the whole tree or the training rows. It runs in a process of its own, off every loop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.capture.rows import rows
from pipeline.capture.session import Session
from pipeline.capture.shard_process import package_environment
from pipeline.capture.trace import read_session, trace_of
from pipeline.records import Trace

NICE = 10  # below the shards, which must not wait for a reader
EXPORT_S = 300.0
BATCH_IDS = 2**20  # token ids in one record batch

IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
SCHEMAS = {
    "calls": pa.schema(
        [
            ("call_id", pa.int32()),
            ("parent", pa.int32()),
            ("prompt_ids", IDS),
            ("sampled_ids", IDS),
            ("logprobs", FLOATS),
            ("versions", pa.list_(SPAN)),
            ("finish_reason", pa.string()),
            ("delivered", pa.bool_()),
            ("trainable", pa.bool_()),
            ("malformed", pa.bool_()),
            ("tool_calls", pa.int32()),
            ("dialect", pa.string()),
            ("agent", pa.string()),
            ("seconds", pa.float64()),
            ("request", pa.string()),
            ("answer", pa.string()),
        ]
    ),
    "rows": pa.schema([("input_ids", IDS), ("loss_mask", pa.list_(pa.bool_())), ("logprobs", FLOATS)]),
}
OWN = ("versions", "dialect", "agent", "request", "answer")  # columns that are no attributes of a Call


class ExportError(Exception):
    """A trace could not be turned into Arrow."""


class Exporter:
    """Turns trace files into Arrow IPC streams, one at a time, in a process that is started when it is first needed.

    The process ends when this one does, however it dies: its standard input closes.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def write(self, kind: str, trace: Path, out: Path) -> None:
        """Write ``calls`` or ``rows`` of a trace file. Raises ExportError."""
        job = json.dumps([kind, str(trace), str(out)]).encode() + b"\n"
        async with self._turn:
            answer = await self._ask(job) or await self._ask(job)  # killed from outside: once more, in another one
        if answer != b"ok\n":
            raise ExportError(f"the {kind} of this session could not be exported: {answer.decode().strip()}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _ask(self, job: bytes) -> bytes:
        """The process's answer; nothing when it died."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pipeline.capture.export",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=package_environment(), start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(job)
            async with asyncio.timeout(EXPORT_S):
                answer = await self._process.stdout.readline()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            self.close()
            await self._process.wait()
            raise
        if not answer:
            await self._process.wait()
        return answer


def main() -> None:
    """The process: a job a line, an answer a line, until there are no more."""
    os.nice(NICE)
    for line in sys.stdin:
        kind, trace, out = json.loads(line)
        try:
            write_arrow(kind, Path(trace), Path(out))
            print("ok", flush=True)
        except (ValueError, OSError) as error:
            print(repr(error).replace("\n", " "), flush=True)


def write_arrow(kind: str, trace: Path, out: Path) -> None:
    """Write ``calls`` or ``rows`` of a trace file as an Arrow IPC stream. Raises ValueError or OSError."""
    session = read_session(trace)
    whole = trace_of(session)
    about = {"session_id": whole.session_id, "dialect": whole.dialect, "counters": json.dumps(whole.counters)}
    schema = SCHEMAS[kind].with_metadata(about)
    records = _calls(session, whole) if kind == "calls" else (vars(row) for row in rows(whole))
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(records):
            columns = [_column([record[field.name] for record in batch], field.type) for field in schema]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _calls(session: Session, whole: Trace) -> Iterator[dict[str, Any]]:
    """One record a call; ``request`` and ``answer`` are JSON where the upstream gave text instead of ids."""
    texts = whole.transcript or [None] * len(whole.calls)
    plain = [name for name in SCHEMAS["calls"].names if name not in OWN]
    for call, node, text in zip(whole.calls, session.tree.nodes, texts, strict=True):
        yield {name: getattr(call, name) for name in plain} | {
            "versions": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in call.versions
            ],
            "dialect": node.dialect,
            "agent": getattr(node, "agent", ""),
            "request": text and json.dumps({"messages": text["messages"], "tools": text["tools"]}),
            "answer": text and json.dumps(text["answer"]),
        }


def _column(values: list[Any], kind: Any) -> Any:
    """An Arrow array; lists of numbers are numpy arrays and copied as a whole."""
    if not (pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type)):
        return pa.array(values, kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), kind.value_type))


def _batches(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    ids = 0
    for record in records:
        batch.append(record)
        ids += len(record.get("prompt_ids", ())) + len(record.get("input_ids", ()))
        if ids > BATCH_IDS:
            yield batch
            batch, ids = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    main()
