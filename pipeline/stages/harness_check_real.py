"""The last scene of `yoke harness check`: a short rollout of every harness with the tiny model on a real vLLM.

The rows that training would take are scored anew by the engine. Were an id another than the sampled one, its logprob
and all that follow would differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config, HarnessConfig, SessionPolicy
from pipeline.engine.server import SERVED_MODEL_NAME, EngineServer
from pipeline.engine.transfer import set_version
from pipeline.harness.base import HarnessRecipe, harness_root
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Row, TaskRef, Trace
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.harness_check_result import Result, Tell
from pipeline.stages.harness_check_tasks import write_task
from pipeline.stages.rollout import Workshop

REAL = "real vLLM"
AT_ONCE = 2
LIMITS = HarnessConfig(timeout_s=240.0, retries=0, sampling=SessionPolicy(max_tokens=64, max_calls=3))
TOLERANCE = 0.01  # of a logprob: the same weights in other batches
SCORE_S = 120.0


@dataclass(frozen=True)
class Scored:
    """A rollout and how far its logprobs are from those of a second look, at most; None without a trained token."""

    record: RolloutRecord
    trace: Trace
    difference: float | None


@asynccontextmanager
async def real_engine(config: Config, scratch: Path) -> AsyncIterator[str]:
    """A vLLM that serves the configured model; its URL."""
    engine = EngineServer(config.engine, config.model, scratch / "vllm.log", scratch)
    try:
        engine.start(config.model.path)
        await asyncio.to_thread(engine.wait_ready)
        await asyncio.to_thread(engine.warm_up)
        set_version(engine.url, PolicyVersion(0, 0))
        yield engine.url
    finally:
        await asyncio.to_thread(engine.close)


async def check_real(config: Config, recipes: Sequence[HarnessRecipe], scratch: Path, tell: Tell) -> dict[str, Result]:
    """One rollout of every harness, by name."""
    async with real_engine(config, scratch) as url:
        supervisor = ShardSupervisor(url, 2, scratch / "journal", SERVED_MODEL_NAME)
        await supervisor.start(60)
        try:
            home, window = harness_root(config.harness.home), config.model.max_model_len
            workshop = Workshop(make_sandbox(config.sandbox), supervisor, LIMITS, scratch, home, window)
            rehearsal = Rehearsal(workshop, url, tell)
            results = await asyncio.gather(*map(rehearsal.check, recipes))
        finally:
            await supervisor.stop()
    return {recipe.name: result for recipe, result in zip(recipes, results, strict=True)}


class Rehearsal:
    """Rollouts on one engine, a few at once."""

    def __init__(self, workshop: Workshop, url: str, tell: Tell) -> None:
        self._workshop, self._url, self._tell = workshop, url, tell
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def check(self, recipe: HarnessRecipe) -> Result:
        """One harness's."""
        async with self._gate:
            self._tell(recipe.name, REAL, None)
            task = write_task(self._workshop.scratch / recipe.name, recipe.name, {"answer.txt": "42"})
            group = GroupSpec(recipe.name, TaskRef(recipe.name, task), recipe.name, 0, 1)
            record, trace = await self._workshop.roll_out_traced(group, 0)
            scored = Scored(record, trace, await _difference(self._url, record.rows))
            result = Result(REAL, tuple(_complaints(scored)), _facts(scored))
            self._tell(recipe.name, REAL, result)
            return result


async def _difference(url: str, rows: Sequence[Row]) -> float | None:
    """The largest difference between the rows' logprobs and those that the engine gives the same ids as a prompt."""
    async with httpx.AsyncClient(base_url=url, timeout=SCORE_S, trust_env=False) as client:
        differences = [np.abs(await _logprobs(client, row) - row.logprobs)[row.loss_mask].max() for row in rows]
    return round(float(max(differences)), 6) if differences else None


async def _logprobs(client: httpx.AsyncClient, row: Row) -> np.ndarray:
    ids = row.input_ids.tolist()
    body: dict[str, Any] = {"model": SERVED_MODEL_NAME, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    reply = await client.post("/v1/completions", json=body)
    reply.raise_for_status()
    entries = reply.json()["choices"][0]["prompt_logprobs"]
    return np.array([entry[str(token)]["logprob"] if entry else 0.0 for token, entry in zip(ids, entries, strict=True)])


def _complaints(scored: Scored) -> list[str]:
    record, trace = scored.record, scored.trace
    trained = sum(row.trained_tokens for row in record.rows)
    trainable = sum(len(call.sampled_ids) for call in trace.calls if call.delivered and call.trainable)
    foreign = sum(call.foreign for call in trace.calls)
    seen = {
        "outcome: expected a graded one, saw infrastructure: " + record.verdict.reason: (
            record.outcome is Outcome.INFRASTRUCTURE
        ),
        f"undelivered answers: expected 0, saw {record.undelivered}": record.undelivered > 0,
        f"answers to something else than the harness: expected 0, saw {foreign}": foreign > 0,
        f"trained tokens: expected {trainable}, saw {trained}": trained != trainable or not trained,
        f"drift: expected 0, saw {trace.counters.get('drift')}": bool(trace.counters.get("drift")),
        f"logprobs scored anew: expected within {TOLERANCE}, saw {scored.difference}": (
            scored.difference is not None and not scored.difference <= TOLERANCE
        ),
    }
    return [line for line, wrong in seen.items() if wrong]


def _facts(scored: Scored) -> dict[str, Any]:
    record, calls = scored.record, scored.trace.calls
    return {
        "outcome": str(record.outcome),
        "calls": record.calls,
        "rows": len(record.rows),
        "drift": int(scored.trace.counters.get("drift", 0)),
        "prompt_tokens": len(calls[0].prompt_ids) if calls else 0,
        "trained_tokens": sum(row.trained_tokens for row in record.rows),
        "logprob_difference": scored.difference,
        "wall_s": round(record.wall_s, 1),
    }
