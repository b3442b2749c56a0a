"""From a trace file to Arrow: the whole tree or the training rows. It runs in a process of its own, off every loop."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.capture.rows import rows
from pipeline.capture.session import Session
from pipeline.capture.trace import read_session, trace_of
from pipeline.records import Trace

NICE = 10  # below the shards, which must not wait for a reader
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


class Exporter:
    """Turns trace files into Arrow IPC streams, one at a time, in a process that is started when it is first needed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def write(self, kind: str, trace: Path, out: Path) -> None:
        """Write ``calls`` or ``rows`` of a trace file. Raises ValueError or OSError."""
        try:
            await self._submit(kind, trace, out)
        except BrokenProcessPool:  # killed from outside: once more, in another one
            self.close()
            await self._submit(kind, trace, out)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _submit(self, kind: str, trace: Path, out: Path) -> None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_step_back)
        await asyncio.get_running_loop().run_in_executor(self._pool, write_arrow, kind, trace, out)


def _step_back() -> None:
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_arrow(kind: str, trace: Path, out: Path) -> None:
    """Write ``calls`` or ``rows`` of a trace file as an Arrow IPC stream. Raises ValueError or OSError."""
    session = read_session(trace)
    whole = trace_of(session)
    about = {"session_id": whole.session_id, "dialect": whole.dialect, "counters": json.dumps(whole.counters)}
    schema = SCHEMAS[kind].with_metadata(about)
    records = _calls(session, whole) if kind == "calls" else (vars(row) for row in rows(whole))
    with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(records):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))


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
