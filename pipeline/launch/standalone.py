"""Groups without a trainer: one engine rank and a coordinator in this process, for a stage that is run by itself."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

from pipeline.config import Config
from pipeline.engine.transfer import set_version
from pipeline.launch.coordinator import Coordinator, Engine
from pipeline.launch.engine_rank import run_engine
from pipeline.launch.rpc import RpcClient, RpcServer
from pipeline.launch.run_directory import Attempt
from pipeline.records import PolicyVersion
from pipeline.stages.evaluation import Cells

CELL_S = 600.0


def work_through(
    config: Config, attempt: Attempt, model_dir: Path, cells: Cells, snapshots: Path | None = None
) -> None:
    """Roll out and verify every cell with the weights in ``model_dir``. ``snapshots``: keep the workspaces there.

    Raises what made the engine rank end, or TimeoutError.
    """
    coordinator = Coordinator(config, attempt, None)
    token = secrets.token_hex(16)
    server = RpcServer(coordinator.methods, token)
    attempt.publish("coordinator", {"url": server.url, "token": token})
    failures: list[BaseException] = []
    driver = threading.Thread(
        target=_drive, args=(coordinator, cells, token, PolicyVersion(attempt.number, 0), failures)
    )
    driver.start()
    try:
        config = replace(config, model=replace(config.model, path=str(model_dir)))
        run_engine(config, attempt, 0, snapshots)
    finally:
        coordinator.stop()
        driver.join()
        server.stop()
    if failures:
        raise failures[0]
    attempt.publish("stage_done", {})


def _drive(
    coordinator: Coordinator, cells: Cells, token: str, version: PolicyVersion, failures: list[BaseException]
) -> None:
    try:
        coordinator.evaluate(cells)
        deadline = time.monotonic() + CELL_S + CELL_S * cells.counts()["total"]
        while not (cells.done or coordinator.stopped or coordinator.interrupted):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cells were not done in time: {cells.counts()}")
            for engine in coordinator.unsynced(str(version)):
                _name_weights(coordinator, engine, token, version)
            coordinator.wait(0.5)
    except BaseException as error:  # handed to the main thread
        failures.append(error)
    finally:
        coordinator.stop()


def _name_weights(coordinator: Coordinator, engine: Engine, token: str, version: PolicyVersion) -> None:
    """The engine loaded its weights from disk: it only has to be told what they are called."""
    set_version(engine.url, version)
    control = RpcClient(engine.control_url, token)
    try:
        control.call("policy_version", version=str(version))
    finally:
        control.close()
    coordinator.set_weights(engine, str(version))
