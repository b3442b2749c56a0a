"""The reference: the capture server of OpenEnv 0.10.0, in an environment of its own (`make bench-reference`)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from bench.contract import NotInstalled, Opened, Place, ReadCall, expect_status
from bench.wire import Connection

PREFIX, HEALTH = "", "/health"
PYTHON = Path(__file__).resolve().parents[2] / ".venv-openenv" / "bin" / "python"


class _Entry(msgspec.Struct):
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]


class _Trace(msgspec.Struct):
    entries: list[_Entry]


def start_cmd(place: Place) -> list[str]:
    if not PYTHON.exists():
        raise NotInstalled("openenv is not installed; `make bench-reference` does it")
    return [
        str(PYTHON), "-m", "openenv.core.harness.capture.server", "--llm-url", f"{place.upstream}/v1",
        "--model", "fake", "--port", str(place.port), "--capture-level", "tokens",
    ]  # fmt: skip


async def register(control: Connection, number: int) -> Opened:
    reply = await control.request("POST", "/sessions", body=msgspec.json.encode({"metadata": {"number": number}}))
    expect_status(reply.status, reply.body, 200)
    return Opened(msgspec.json.decode(reply.body)["session_id"], control.host, control.port)


async def read_trace(control: Connection, key: str) -> list[ReadCall]:
    reply = await control.request("GET", f"/sessions/{key}/trace_entries")
    expect_status(reply.status, reply.body, 200)
    return [
        ReadCall(
            np.asarray(entry.prompt_token_ids, dtype=np.int32),
            np.asarray(entry.completion_token_ids, dtype=np.int32),
            np.asarray(entry.per_token_logps, dtype=np.float32),
        )
        for entry in msgspec.json.decode(reply.body, type=_Trace).entries
    ]


async def delete(control: Connection, key: str) -> None:
    await control.request("DELETE", f"/sessions/{key}")
