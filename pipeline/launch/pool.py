"""Several engines on one node that serve the same weights, each on GPUs of its own: an evaluation uses the whole node.

Each takes cells as it has free slots. One that dies gives its cells back and is started again; one that cannot be kept
alive is left out, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.config import Config, UserError, check_replicas
from pipeline.engine.device import on_gpu, visible_devices
from pipeline.launch.engine_rank import EngineRank
from pipeline.launch.run_directory import FencedOff

FATAL = (UserError, FencedOff)  # with these no other engine would fare better

log = logging.getLogger("yoke.pool")


@dataclass(frozen=True)
class Replica:
    """One engine of a pool: its settings, and its GPUs as CUDA_VISIBLE_DEVICES names them (None on a CPU)."""

    config: Config
    devices: str | None


def replicas(config: Config) -> list[Replica]:
    """The engines of this node: as many as ``evaluation.replicas`` says, with GPUs and slots shared out among them.

    Raises UserError when there are fewer GPUs or slots than engines.
    """
    gpus = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if on_gpu() else None
    asked = config.evaluation.replicas
    count = asked or min(len(gpus or [""]), config.concurrency)
    if gpus is not None and count > len(gpus):
        raise UserError(f"evaluation.replicas={asked}: this node shows {len(gpus)} GPUs ({','.join(gpus)})")
    check_replicas(config)
    slots, devices = share(config.concurrency, count), share(len(gpus or []), count)
    found = []
    for number in range(count):
        first = sum(devices[:number])
        own = None if gpus is None else ",".join(gpus[first : first + devices[number]])
        found.append(Replica(_of_one(config, number, count, slots[number]), own))
    return found


def share(whole: int, parts: int) -> list[int]:
    """``whole`` as ``parts`` numbers that differ by one at most."""
    return [whole // parts + (number < whole % parts) for number in range(parts)]


def _of_one(config: Config, number: int, count: int, slots: int) -> Config:
    engine = config.engine
    own = replace(
        engine,
        omp_threads=max(1, engine.omp_threads // count),
        port=engine.port + number if engine.port else 0,
    )
    return replace(config, concurrency=slots, engine=own)


async def serve(ranks: Sequence[EngineRank], retire: Callable[[str], object]) -> None:
    """Run engines to their end. One that fails is left out (``retire`` is told its name) while another one lives.

    Raises the failure of the last one, and what no other engine would fare better with at once.
    """
    running = {asyncio.create_task(rank.run()): rank for rank in ranks}
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                rank, error = running.pop(task), task.exception()
                if error is None:
                    continue
                if isinstance(error, FATAL) or not running:
                    raise error
                log.warning("%s is left out, %d engines go on: %s", rank.name, len(running), error)
                retire(rank.name)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
