"""A group of rollouts made on the spot for trace_one_rollout.ipynb: a scripted model, the real capture proxy, and a
small harness that speaks the Anthropic dialect. No sandbox, no weights, no GPU.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pipeline.capture.canonical import Memo
from pipeline.capture.dialects import find
from pipeline.capture.rows import rows
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import SessionPolicy
from pipeline.engine.scripted import ASSISTANT, END, MARKS, FakeEngine, Scripted
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Trace, Verdict

GROUP, TASK, HARNESS = "g000000", "sum-a-column", "made-up"
SYSTEM = "Work in the shell. Write the answer to answer.txt."
INSTRUCTION = "What is the sum of the column `price` in data.csv?"
TOOL = {"name": "bash", "description": "Run a command.", "input_schema": {"type": "object"}}
VERSION = PolicyVersion(1, 4)


@dataclass(frozen=True)
class Plot:
    """What the model says call by call, whether the last answer but one is thrown away, and what came of it."""

    says: tuple[str, ...]
    solved: bool
    rewrites: bool = False  # the harness drops its last exchange, and asks again: a fork


def run_command(command: str) -> str:
    """A tool call as the scripted model's template spells it."""
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'


SUM = "awk -F, '{s+=$2} END {print s}' data.csv > answer.txt"
PLOTS = (
    Plot((run_command(SUM), "Done."), solved=True),
    Plot((run_command("head data.csv"), run_command(SUM), "The answer is in answer.txt."), solved=True),
    Plot((run_command("cat data.csv"), "I cannot.", "It is about 40, I think."), solved=False, rewrites=True),
    Plot(("It is 42.",), solved=False),
)


@dataclass(frozen=True)
class Recorded:
    """One rollout: the bodies of its requests as they came over the wire, and the trace that the proxy made of it."""

    plot: Plot
    requests: tuple[bytes, ...]
    trace: Trace


async def record_group(plots: Sequence[Plot] = PLOTS) -> list[Recorded]:
    """Run every rollout through the proxy, one after the other."""
    engine = FakeEngine(version=str(VERSION))
    await engine.start()
    with tempfile.TemporaryDirectory() as place:
        proxy = ShardSupervisor(engine.url, 1, Path(place), "policy")
        try:
            await proxy.start(60)
            await proxy.set_policy_version(VERSION)
            return [await _roll_out(proxy, engine, plot, f"sk-{place}") for place, plot in enumerate(plots)]
        finally:
            await proxy.stop()
            await engine.stop()


async def _roll_out(proxy: ShardSupervisor, engine: FakeEngine, plot: Plot, key: str) -> Recorded:
    engine.script.extend(Scripted(text) for text in plot.says)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        await proxy.open_session(key, SessionPolicy(max_tokens=1000), listener)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        requests = await _be_the_harness(client, plot, key)
    return Recorded(plot, tuple(requests), await proxy.close_session(key))


async def _be_the_harness(client: httpx.AsyncClient, plot: Plot, key: str) -> list[bytes]:
    """Ask, run the tool that the model calls, ask again; returns what was sent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": INSTRUCTION}]
    sent = []
    for number in range(len(plot.says)):
        body = {"model": "any", "max_tokens": 500, "system": SYSTEM, "messages": messages, "tools": [TOOL]}
        sent.append(json.dumps(body).encode())
        reply = await client.post("/v1/messages", content=sent[-1], headers={"x-api-key": key})
        reply.raise_for_status()
        answer = reply.json()["content"]
        if plot.rewrites and number == len(plot.says) - 2:
            continue  # as if it had not been said
        messages = [*messages, {"role": "assistant", "content": answer}, *_results(answer)]
    return sent


def _results(answer: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    used = [block for block in answer if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"} for block in used]
    return [{"role": "user", "content": results}] if results else []


def canonical(body: bytes) -> list[dict[str, Any]]:
    """A wire request as the proxy understands it: Chat Completions messages."""
    dialect, _ = find("POST", "/v1/messages")
    assert dialect is not None
    messages: list[dict[str, Any]] = dialect.parse(body, Memo()).messages()
    return messages


def as_record(recorded: Recorded, index: int) -> RolloutRecord:
    """The rollout as training takes it. Here the plot says what a verifier would find."""
    calls = recorded.trace.calls
    return RolloutRecord(
        rollout_id=f"{GROUP}-{index}",
        group_id=GROUP,
        index=index,
        task_id=TASK,
        harness=HARNESS,
        outcome=Outcome.SOLVED if recorded.plot.solved else Outcome.UNSOLVED,
        verdict=Verdict(None, float(recorded.plot.solved), sum(call.tool_calls for call in calls)),
        rows=rows(recorded.trace),
        version=min(call.version for call in calls),
        newest_version=max(call.version for call in calls),
        calls=len(calls),
        malformed=sum(call.malformed for call in calls),
        undelivered=sum(not call.delivered for call in calls),
        prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
        wall_s=0.0,
    )


def text(ids: Sequence[int]) -> str:
    """Token ids of the scripted model: bytes, and a few marks."""
    parts = [MARKS.get(int(token)) or bytes([int(token)]).decode("latin-1") for token in ids]
    return "".join(parts)


__all__ = ["ASSISTANT", "END", "PLOTS", "Plot", "Recorded", "as_record", "canonical", "record_group", "text"]
