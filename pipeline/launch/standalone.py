"""Groups without a trainer: engine ranks and a coordinator in this process, for a stage that is run by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config import Config
from pipeline.engine.transfer import TransferError, set_version
from pipeline.launch import pool
from pipeline.launch.coordinator import Coordinator, Engine
from pipeline.launch.engine_rank import EngineRank
from pipeline.launch.hosted_rank import HostedRank
from pipeline.launch.rpc import RpcClient, RpcError, RpcServer
from pipeline.launch.run_directory import Attempt
from pipeline.records import PolicyVersion
from pipeline.report.bar import Bar
from pipeline.stages.evaluation import Cells
from pipeline.stages.hosted import HostedModel

CELL_S = 600.0
NAME_TRIES = 20

log = logging.getLogger("yoke.standalone")


def work_through(
    config: Config, attempt: Attempt, model_dir: Path, cells: Cells, snapshots: Path | None = None
) -> None:
    """Roll out and verify every cell with the weights in ``model_dir``, on the engines of `pool.replicas`.

    ``snapshots``: keep the workspaces there. Raises what made the last engine rank end, or TimeoutError.
    """
    config = replace(config, model=replace(config.model, path=str(model_dir)))
    found = pool.replicas(config)
    ranks = [
        EngineRank(one.config, attempt, number, snapshots, one.devices, pooled=len(found) > 1)
        for number, one in enumerate(found)
    ]
    drive(config, attempt, cells, ranks, _load)


def work_through_hosted(config: Config, attempt: Attempt, hosted: HostedModel, cells: Cells) -> None:
    """The same with a model at a URL. Raises UserError when it does not answer."""
    drive(config, attempt, cells, [HostedRank(config, attempt, hosted)], lambda engine, version: None)


Load = Callable[[Engine, PolicyVersion], None]


def drive(config: Config, attempt: Attempt, cells: Cells, ranks: Sequence[EngineRank], load: Load) -> None:
    """Have ``ranks`` do the cells. ``load`` tells an engine that has come up what its weights are called."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    coordinator = Coordinator(config, attempt, None)
    token = secrets.token_hex(16)
    server = RpcServer(coordinator.methods, token)
    attempt.publish("coordinator", {"url": server.url, "token": token})
    failures: list[BaseException] = []
    version = PolicyVersion(attempt.number, 0)
    driver = threading.Thread(target=_drive, args=(coordinator, cells, token, version, load, failures))
    driver.start()
    try:
        asyncio.run(pool.serve(ranks, coordinator.retire))
    finally:
        coordinator.stop()
        driver.join()
        server.stop()
    if failures:
        raise failures[0]
    attempt.publish("stage_done", {})


def _drive(
    coordinator: Coordinator,
    cells: Cells,
    token: str,
    version: PolicyVersion,
    load: Load,
    failures: list[BaseException],
) -> None:
    try:
        coordinator.evaluate(cells)
        total = cells.counts()["total"]
        deadline = time.monotonic() + CELL_S + CELL_S * total
        names = _Names(coordinator, token, version, load)
        with Bar("cells", total, coordinator.config.logging.progress) as bar:
            shown = 0
            while not (cells.done or coordinator.stopped or coordinator.interrupted):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the cells were not done in time: {cells.counts()}")
                names.give()
                coordinator.wait(0.5)
                done = cells.counts()["done"]
                bar.advance(done - shown, f"{len(coordinator.engines)} engines up")
                shown = done
    except BaseException as error:  # handed to the main thread
        failures.append(error)
    finally:
        coordinator.stop()


class _Names:
    """Tells engines that have come up what their weights are called."""

    def __init__(self, coordinator: Coordinator, token: str, version: PolicyVersion, load: Load) -> None:
        self._coordinator, self._token, self._version, self._load = coordinator, token, version, load
        self._failures: Counter[str] = Counter()

    def give(self) -> None:
        """To every engine that has none. One that does not take it has died just now, and registers again.

        Raises what it said when it does not take it again and again.
        """
        for engine in self._coordinator.unsynced(str(self._version)):
            try:
                self._load(engine, self._version)
                self._name(engine)
            except (TransferError, RpcError) as error:
                self._failures[engine.name] += 1
                if self._failures[engine.name] > NAME_TRIES:
                    raise
                log.warning("%s does not take the name of its weights: %s", engine.name, error)
                self._coordinator.drop_engine(engine)

    def _name(self, engine: Engine) -> None:
        control = RpcClient(engine.control_url, self._token)
        try:
            control.call("policy_version", version=str(self._version))
        finally:
            control.close()
        self._coordinator.set_weights(engine, str(self._version))


def _load(engine: Engine, version: PolicyVersion) -> None:
    """It loaded its weights from disk: it only has to be told what they are called."""
    set_version(engine.url, version)
