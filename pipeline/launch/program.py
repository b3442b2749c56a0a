"""The one program of a run, the same on this machine and on Slurm: local rank 0 trains, local rank 1 serves and
rolls out.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import submitit
from omegaconf import OmegaConf

from pipeline.config import Config
from pipeline.harness.base import register
from pipeline.launch.run_directory import Attempt, RunDirectory


class YokeProgram(submitit.helpers.Checkpointable):
    """What submitit starts on every rank.

    Holds plain data only; where to go on is read from the run directory at start.
    """

    def __init__(self, config: dict[str, Any], run_dir: str, attempt: int) -> None:
        self.config, self.run_dir, self.attempt = config, run_dir, attempt

    def __call__(self) -> None:
        environment = submitit.JobEnvironment()
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)
        config = to_config(self.config)
        attempt = RunDirectory(Path(self.run_dir)).attempt(self.attempt)
        rank = "trainer" if environment.local_rank == 0 else "engine"
        try:
            self._run(rank, config, attempt, environment.node)
        except BaseException as error:
            attempt.fail(rank, error)
            raise

    def _run(self, rank: str, config: Config, attempt: Attempt, node: int) -> None:
        register(config.harness.recipes)  # the command line did so in another process
        if rank == "trainer":
            from pipeline.launch.trainer_rank import run_trainer

            os.environ["OMP_NUM_THREADS"] = str(config.training.threads)
            run_trainer(config, attempt)
        else:
            from pipeline.launch.engine_rank import run_engine

            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            run_engine(config, attempt, node)


def to_config(data: dict[str, Any]) -> Config:
    """The typed configuration behind its plain form."""
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(data)))
    assert isinstance(config, Config)
    return config
