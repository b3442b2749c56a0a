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

import pytest
from harness_clients import (
    RECIPES,
    Agent,
    Stage,
    check_samples,
    check_texts,
    eight_calls,
    number_of,
    numbers_in,
    play_of,
    trained_numbers,
)
from proxy_helpers import Proxies, Proxy

from pipeline.engine.scripted import FakeEngine, Template
from pipeline.records import Trace

SHARDS = 4
GRACE_S = 0.8


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
    check_samples(trace, samples)
    check_texts(trace, agent.asked)
    ids = [call.id for asked in agent.asked for call in asked.said.calls]
    assert len(ids) == len(set(ids)), "a call's id was given twice"
    in_tree = [number for call in trace.calls for number in numbers_in(call.sampled_ids)]
    assert len(in_tree) == len(set(in_tree)), "a sample stands twice in the tree"
    trained = trained_numbers(trace)
    assert len(trained) == len(set(trained)), "a sample is trained twice"
    got = {number_of(asked.said) for asked in agent.asked}
    assert set(trained) <= got, "a sample is trained that nobody got"
    answered = {number_of(asked.said) for asked in agent.asked[:-1]}
    assert answered <= set(trained), "a sample that the harness went on from is not trained"


class Killer:
    """Kills random shards at random moments.

    A victim has served for as long as it took to start, so that a slow machine does not let a harness of four tries be
    struck at each of them; every tenth is any shard, also one that is only starting.
    """

    def __init__(self, proxy: Proxy, dice: random.Random) -> None:
        self._shards, self._dice = proxy.supervisor._shards, dice
        self._born: dict[int, float] = {}  # process -> when it was first seen
        self._ready: dict[int, float] = {}

    async def run(self, kills: int, every_s: float) -> None:
        for kill in range(kills):
            later = time.monotonic() + self._dice.uniform(0, 2 * every_s)
            while not (victims := self._victims(choosy=kill % 10 > 0)) or time.monotonic() < later:
                await asyncio.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._dice.choice(victims), signal.SIGKILL)

    def _victims(self, choosy: bool) -> list[int]:
        now = time.monotonic()
        for shard in self._shards:
            if shard.pid:
                self._born.setdefault(shard.pid, now)
            if shard.pid and shard.ready.is_set():
                self._ready.setdefault(shard.pid, now)
        alive = [shard.pid for shard in self._shards if shard.pid]
        served = [pid for pid in alive if pid in self._ready and now - self._ready[pid] > self._grace(pid)]
        return served if choosy else alive

    def _grace(self, pid: int) -> float:
        return max(GRACE_S, self._ready[pid] - self._born[pid])


async def under_fire(proxies: Proxies, kills: int, every_s: float, seed: int) -> tuple[Load, dict[str, Any]]:
    dice, plays = random.Random(seed), {}
    stage = Stage(plays, delay=lambda: dice.uniform(0, 0.15))
    engine = FakeEngine(template=Template(gap="\n"), answers=stage)
    async with proxies.run(shards=SHARDS, engine=engine) as proxy:
        load = Load(proxy, plays, pace=0.3)
        clients = [asyncio.create_task(load.rollouts(name)) for name in [*RECIPES] * 2]
        killer = asyncio.create_task(Killer(proxy, dice).run(kills, every_s))
        async with asyncio.timeout(20 + 3 * kills):
            await asyncio.wait([killer, *clients], return_when=asyncio.FIRST_COMPLETED)
            load.over = True
            if not killer.done():  # a client failed
                killer.cancel()
            await asyncio.gather(*clients, killer)
        return load, proxy.supervisor.stats()


@pytest.mark.slow
def test_fifty_kills_cost_nothing(proxies: Proxies) -> None:
    load, stats = asyncio.run(under_fire(proxies, kills=50, every_s=0.2, seed=1))
    assert stats["shard_restarts"] >= 40  # a shard may be killed again before its death was seen
    assert load.finished > 60 and load.retried.total() > 50, (load.finished, load.retried)


@pytest.mark.soak
def test_a_thousand_kills_cost_nothing(proxies: Proxies) -> None:
    started = time.monotonic()
    load, stats = asyncio.run(under_fire(proxies, kills=1000, every_s=0.5, seed=int(started)))
    print(f"{stats['shard_restarts']} restarts, {load.finished} rollouts, {load.retried.total()} retries")
    assert stats["shard_restarts"] >= 900
