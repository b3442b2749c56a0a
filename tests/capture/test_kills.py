"""Shards are killed at random while harnesses work: every harness finishes, and every token of every trace is right."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from harness_clients import (
    RECIPES,
    Agent,
    Stage,
    by_key,
    check_samples,
    check_texts,
    eight_calls,
    number_of,
    numbers_in,
    play_of,
)
from proxy_helpers import Proxies, Proxy
from scripted_engine import FakeEngine, Template

from pipeline.capture.rows import rows
from pipeline.records import Trace

SHARDS = 4


@dataclass
class Load:
    """Harnesses at work, one rollout after another, until enough kills have happened."""

    proxy: Proxy
    plays: dict[str, list[Any]]
    pace: float
    over: bool = False
    finished: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    numbers: Any = field(default_factory=itertools.count)
    sampled: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    async def rollouts(self, name: str) -> None:
        while not self.over:
            await self.rollout(name)

    def samples(self, play: str) -> list[Any]:
        """What the engine answered in a play, and no longer keeps."""
        for sample in self.proxy.engine.samples:
            self.sampled[play_of(sample.prompt)].append(sample)
        self.proxy.engine.samples.clear()
        return self.sampled.pop(play)

    async def rollout(self, name: str) -> None:
        play = f"{name}-{next(self.numbers)}"
        self.plays[play] = eight_calls(name)
        async with self.proxy.session(play, max_tokens=2000) as harness:
            agent = Agent(name, play, harness.http, play, self.pace)
            await agent.run()
            trace = await self.proxy.supervisor.close_session(play)
        check(trace, agent, self.samples(play))
        self.finished += 1
        self.retried[name] += agent.retried
        del self.plays[play]


def check(trace: Trace, agent: Agent, samples: list[Any]) -> None:
    """Nothing made up, nothing lost, nothing twice, and nothing trained that the harness never got."""
    check_samples(trace, by_key(samples))
    check_texts(trace, agent.asked)
    in_tree = [number for call in trace.calls for number in numbers_in(call.sampled_ids)]
    assert len(in_tree) == len(set(in_tree)), "a sample stands twice in the tree"
    trained = [number for row in rows(trace) for number in trained_in(row)]
    assert len(trained) == len(set(trained)), "a sample is trained twice"
    got = {number_of(asked.said) for asked in agent.asked}
    assert set(trained) <= got, "a sample is trained that nobody got"
    answered = {number_of(asked.said) for asked in agent.asked[:-1]}
    assert answered <= set(trained), "a sample that the harness went on from is not trained"


def trained_in(row: Any) -> set[int]:
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0))
    spans = zip(edges[::2], edges[1::2], strict=True)
    return {number for start, end in spans for number in numbers_in(row.input_ids[start:end].tolist())}


async def kill_shards(proxy: Proxy, kills: int, every_s: float, dice: random.Random) -> None:
    """Kill a random shard of those that serve, again and again, at random moments."""
    while kills:
        await asyncio.sleep(dice.uniform(0, 2 * every_s))
        serving = [shard.pid for shard in proxy.supervisor._shards if shard.ready.is_set()]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(dice.choice(serving), signal.SIGKILL)
            kills -= 1


async def under_fire(proxies: Proxies, kills: int, every_s: float, seed: int) -> tuple[Load, dict[str, Any]]:
    dice, plays = random.Random(seed), {}
    stage = Stage(plays, delay=lambda: dice.uniform(0, 0.15))
    engine = FakeEngine(template=Template(gap="\n"), answers=stage)
    async with proxies.run(shards=SHARDS, engine=engine) as proxy:
        load = Load(proxy, plays, pace=0.05)
        clients = [asyncio.create_task(load.rollouts(name)) for name in [*RECIPES] * 2]
        killer = asyncio.create_task(kill_shards(proxy, kills, every_s, dice))
        await asyncio.wait([killer, *clients], return_when=asyncio.FIRST_COMPLETED)
        load.over = True
        if not killer.done():  # a client failed
            killer.cancel()
        for task in (*clients, killer):
            await task
        return load, proxy.supervisor.stats()


@pytest.mark.slow
def test_fifty_kills_cost_nothing(proxies: Proxies) -> None:
    load, stats = asyncio.run(under_fire(proxies, kills=50, every_s=0.4, seed=1))
    assert stats["shard_restarts"] >= 45  # a shard may be killed before it is up again: one restart for two
    assert load.finished > 100 and load.retried.total() > 50, (load.finished, load.retried)


@pytest.mark.soak
def test_a_thousand_kills_cost_nothing(proxies: Proxies) -> None:
    started = time.monotonic()
    load, stats = asyncio.run(under_fire(proxies, kills=1000, every_s=0.5, seed=int(started)))
    print(f"{stats['shard_restarts']} restarts, {load.finished} rollouts, {load.retried.total()} retries")
    assert stats["shard_restarts"] >= 900
