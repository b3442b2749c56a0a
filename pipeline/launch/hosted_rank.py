"""Rollouts with a model at a URL: an engine rank without an engine, whose proxy is in text mode.

Its records hold no token ids, so nothing can be trained on them.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config
from pipeline.engine.server import Server
from pipeline.launch.engine_rank import OUTAGE_S, EngineRank
from pipeline.launch.run_directory import Attempt
from pipeline.stages.hosted import HostedModel, greet


class Elsewhere:
    """A server that others start and keep alive."""

    def __init__(self, url: str) -> None:
        self.url, self.log_path = url, Path("/dev/null")

    def start(self, model_dir: Path | str, seed: int = 0) -> None:
        """Nothing: it runs."""

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Nothing."""

    def warm_up(self, timeout_s: float | None = None) -> None:
        """Nothing."""

    def alive(self) -> bool:
        """The proxy waits out its outages, and counts what it could not serve."""
        return True

    def stop(self) -> None:
        """Nothing: it is not ours."""

    def close(self) -> None:
        """Nothing."""


class HostedRank(EngineRank):
    """``concurrency`` rollouts at once against one API."""

    def __init__(self, config: Config, attempt: Attempt, hosted: HostedModel) -> None:
        self.hosted = hosted
        super().__init__(config, attempt, 0)

    def _make_server(self, node: int, devices: str | None) -> Server:
        return Elsewhere(self.hosted.url)

    def _make_supervisor(self) -> ShardSupervisor:
        engine = self.config.engine
        return ShardSupervisor(
            self.hosted.url, engine.shards, self.scratch / "journal", self.hosted.model, engine.request_timeout_s,
            OUTAGE_S, upstream="text", upstream_key=self.hosted.key,
        )  # fmt: skip

    async def _start_engine(self) -> None:
        await greet(self.hosted, {"temperature": self.config.harness.sampling.temperature})
        self.up.set()
