"""Plays the scenes with one harness: scripted engine, real proxy, real sandbox, real harness, real verifier."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config, HarnessConfig, SessionPolicy
from pipeline.engine.scripted import FakeEngine
from pipeline.engine.server import SERVED_MODEL_NAME
from pipeline.harness.base import HarnessRecipe, harness_root
from pipeline.records import GroupSpec, TaskRef, Verdict
from pipeline.sandbox.base import Sandbox, make_sandbox
from pipeline.stages.harness_check_result import Result, Tell
from pipeline.stages.harness_check_scenes import SCENES, Director, Party, Scene, digits, plays
from pipeline.stages.harness_check_tasks import write_task
from pipeline.stages.harness_check_verdict import Played, complaints, facts
from pipeline.stages.rollout import Workshop
from pipeline.stages.verification import verify
from pipeline.tasks.harbor import load_task

AT_ONCE = 4
TOGETHER = "four at once"
PATIENT_S = 60.0
MAX_TOKENS = 4096
ROOM = 60_000  # tokens beyond the first prompt, where a harness must compact
OWN_ROOM = 10_000  # of one without tools, which counts tokens by itself, several bytes each
HANG_S = 15.0  # at least; more where a harness is slow


class Stage:
    """One harness's engine and proxy."""

    def __init__(self, config: Config, recipe: HarnessRecipe, scratch: Path, tell: Tell) -> None:
        self._recipe = recipe
        self._scratch = scratch
        self._tell = tell
        self._home = harness_root(config.harness.home)
        self._sandbox: Sandbox = make_sandbox(config.sandbox)
        self._director = Director()
        self._engine = FakeEngine(answers=self._director)

    async def play_all(self) -> list[Result]:
        """Every scene that this harness can play: the first alone, for its figures, the others four at once."""
        await self._engine.start()
        try:
            async with self._supervisor("patient", PATIENT_S, 2) as supervisor:
                return await self._play_all(supervisor)
        finally:
            await self._engine.stop()

    async def _play_all(self, supervisor: ShardSupervisor) -> list[Result]:
        first, *rest = [scene for scene in SCENES.values() if scene.needs(self._recipe)]
        alone = await self._play(first, supervisor)
        if not alone.facts["calls"]:
            return [alone]
        slow = alone.facts["wall_s"]
        context = alone.facts["prompt_tokens"] + (ROOM if self._recipe.shell.tool else OWN_ROOM)
        party = Party(sum(scene.together for scene in rest))
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(scene: Scene) -> Result:
            async with gate:
                timeout_s = HANG_S + 2 * slow if scene.name == "hang" else scene.timeout_s
                return await self._play(replace(scene, timeout_s=timeout_s), supervisor, party, context)

        rest.sort(key=lambda scene: not scene.together)
        results = await asyncio.gather(*map(one, rest))
        together = _together(party)
        self._tell(self._recipe.name, TOGETHER, together)
        return [alone, *results, together]

    @asynccontextmanager
    async def _supervisor(self, name: str, outage_s: float, shards: int) -> AsyncIterator[ShardSupervisor]:
        journal = self._scratch / f"journal-{name}"
        supervisor = ShardSupervisor(self._engine.url, shards, journal, SERVED_MODEL_NAME, outage_s=outage_s)
        try:
            await supervisor.start(60)
            yield supervisor
        finally:
            await supervisor.stop()

    async def _play(
        self, scene: Scene, supervisor: ShardSupervisor, party: Party | None = None, context_tokens: int = 200_000
    ) -> Result:
        self._tell(self._recipe.name, scene.name, None)
        if scene.faulty:
            async with self._supervisor(scene.name, 0.0, 1) as own:
                played = await self._roll_out(scene, own, party, context_tokens)
        else:
            played = await self._roll_out(scene, supervisor, party, context_tokens)
        result = Result(scene.name, tuple(complaints(played)), facts(played))
        self._tell(self._recipe.name, scene.name, result)
        return result

    async def _roll_out(
        self, scene: Scene, supervisor: ShardSupervisor, party: Party | None, context_tokens: int
    ) -> Played:
        tag = f"{scene.name}-{secrets.randbelow(10**9):09}"
        conversations = list(plays(scene, self._recipe, tag, lambda: _kill_shard(supervisor)))
        conversations[0].party = party if scene.together else None
        self._director.plays |= {play.tag: play for play in conversations}
        task = write_task(self._scratch / "tasks" / tag, tag, scene.files)
        snapshots = self._scratch / "snapshots"
        limits = HarnessConfig(
            timeout_s=scene.timeout_s, retries=0, sampling=SessionPolicy(max_tokens=MAX_TOKENS, max_calls=0)
        )
        workshop = Workshop(
            self._sandbox, supervisor, limits, self._scratch, self._home, context_tokens, snapshots=snapshots
        )
        group = GroupSpec(tag, TaskRef(tag, task), self._recipe.name, 0, 1)
        record, trace = await workshop.roll_out_traced(group, 0)
        correctness = record.verdict.correctness
        if scene.faulty:
            correctness = (await self._verify(task, snapshots / tag / "0")).correctness
        return Played(
            recipe=self._recipe,
            scene=scene,
            plays=conversations,
            record=record,
            trace=trace,
            samples=self._engine.samples,
            correctness=correctness,
            alive=alive(digits(tag)),
            restarts=supervisor.stats()["shard_restarts"],
            timeout_s=scene.timeout_s,
        )

    async def _verify(self, task: Path, workspace: Path) -> Verdict:
        """The verdict on a workspace of a rollout that is not graded."""
        return await verify(load_task(task), workspace, self._sandbox, self._scratch)


def _together(party: Party) -> Result:
    seen = len(party.arrived)
    failures = () if party.complete.is_set() else (f"instances at once: expected {party.size}, saw {seen}",)
    return Result(TOGETHER, failures, {"instances": seen})


def _kill_shard(supervisor: ShardSupervisor) -> None:
    for shard in supervisor.figures():
        if shard.pid is not None:
            os.kill(shard.pid, signal.SIGKILL)


def alive(word: str) -> int:
    """Processes of this machine, zombies aside, that have ``word`` in their command line."""
    count = 0
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                count += word.encode() in (place / "cmdline").read_bytes()
    return count
