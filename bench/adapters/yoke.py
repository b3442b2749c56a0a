"""Our proxy alone, as `yoke proxy` runs it; traces are read as Arrow."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pyarrow as pa
from numpy.typing import NDArray

from bench.contract import Opened, Place, ReadCall, ReadRow, expect_status
from bench.wire import Connection

PREFIX, HEALTH = "", "/health"


class _Session(msgspec.Struct):
    api_key: str
    base_url: str


def start_cmd(place: Place) -> list[str]:
    return [
        sys.executable, "-m", "pipeline", "proxy", "--llm-url", place.upstream, "--model", "fake",
        "--port", str(place.port), "--shards", str(place.shards), "--dir", str(place.directory),
    ]  # fmt: skip


async def register(control: Connection, number: int) -> Opened:
    reply = await control.request("POST", "/sessions", body=msgspec.json.encode({"metadata": {"number": number}}))
    expect_status(reply.status, reply.body, 201)
    session = msgspec.json.decode(reply.body, type=_Session)
    host, _, port = session.base_url.rpartition("/")[2].partition(":")
    return Opened(session.api_key, host, int(port))


async def read_trace(control: Connection, key: str) -> list[ReadCall]:
    reply = await control.request("GET", f"/sessions/{key}/calls")
    expect_status(reply.status, reply.body, 200)
    table = pa.ipc.open_stream(reply.body).read_all()
    prompts, sampled = _lists(table, "prompt_ids"), _lists(table, "sampled_ids")
    logprobs, delivered = _lists(table, "logprobs"), table.column("delivered").to_pylist()
    return [
        ReadCall(prompt, ids, probabilities, bool(flag))
        for prompt, ids, probabilities, flag in zip(prompts, sampled, logprobs, delivered, strict=True)
    ]


async def read_rows(control: Connection, key: str) -> list[ReadRow]:
    reply = await control.request("GET", f"/sessions/{key}/rows")
    expect_status(reply.status, reply.body, 200)
    table = pa.ipc.open_stream(reply.body).read_all()
    pairs = zip(_lists(table, "input_ids"), _lists(table, "loss_mask"), strict=True)
    return [ReadRow(ids, int(mask.sum())) for ids, mask in pairs]


async def delete(control: Connection, key: str) -> None:
    reply = await control.request("DELETE", f"/sessions/{key}")
    expect_status(reply.status, reply.body, 204)


def _lists(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """The lists of a column; numbers are not copied."""
    return [
        chunk[row].values.to_numpy(zero_copy_only=False)
        for chunk in table.column(name).chunks
        for row in range(len(chunk))
    ]


# The first conversion imports pandas where there is one: a second that must not fall into the load.
_lists(pa.table({"warm": [[1]]}), "warm")
