"""The trainer ranks of all nodes as one: rank 0 gives an order, every rank carries it out at the same moment.

An order is a broadcast, so that all ranks make the same collective calls. Weights do not leave their node: each rank
pushes them into its own node's engine.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.engine.transfer import SyncTimings, Transfer, TransferError, Weights, make_transfer
from pipeline.launch.preflight_check import Forward
from pipeline.launch.preflight_engine import forward_of
from pipeline.launch.rpc import RpcClient, RpcError
from pipeline.launch.run_directory import Attempt
from pipeline.records import PolicyVersion, TrainGroup
from pipeline.training import distributed
from pipeline.training.checkpoint import CheckpointError
from pipeline.training.trainer import Trainer

log = logging.getLogger("yoke.trainer")

REST_S = 10.0  # an order at least this often, so that a rank without work notices when rank 0 is gone
END = "end"


@dataclass(frozen=True)
class Target:
    """An engine that lacks the current weights. ``fresh``: its vLLM was started since the last push."""

    name: str
    url: str
    control_url: str
    fresh: bool


@dataclass(frozen=True)
class Pushed:
    """What became of a push: ``timings``, or None and the engine was told to start again."""

    name: str
    timings: SyncTimings | None


class TrainerTeam:
    """One trainer rank's part in the team. Rank 0 calls the methods; the others `follow`."""

    def __init__(self, config: Config, attempt: Attempt, node: int, trainer: Trainer) -> None:
        self.config, self.attempt, self.node, self.trainer = config, attempt, node, trainer
        self.scratch = attempt.new_scratch(f"weights-node{node}")
        self._transfer: Transfer | None = None
        self._last_order = time.monotonic()
        self._orders: dict[str, Callable[..., Any]] = {
            "update": self._update,
            "save": self._save,
            "export": trainer.export,
            "push": self._push,
            "forward": self._forward,
            "rest": lambda: None,
        }

    # --- rank 0

    def update(self, groups: Sequence[TrainGroup], version: PolicyVersion) -> dict[str, float]:
        """See `Trainer.update`; ``version`` is that of the weights being updated."""
        metrics: dict[str, float] = self._order("update", {"version": version}, groups=groups)
        return metrics

    def save(self, root: Path, state: dict[str, Any]) -> None:
        """See `Trainer.save`."""
        self._order("save", {"root": root}, state=state)

    def export(self, target: Path) -> None:
        """See `Trainer.export`."""
        self._order("export", {"target": target})

    def push(self, targets: Sequence[Target], version: PolicyVersion) -> list[Pushed]:
        """The current weights into each target, by the rank on its node."""
        results: list[Pushed] = self._order("push", {"targets": list(targets), "version": version})
        return results

    def forward(self, prompt: Sequence[int], sampled: Sequence[int]) -> Forward:
        """See `forward_of`: the trainer's view of one sequence."""
        found: Forward = self._order("forward", {"prompt": list(prompt), "sampled": list(sampled)})
        return found

    def rest(self) -> None:
        """To be called in every wait: tells the other ranks now and then that rank 0 is alive."""
        if self.trainer.ranks > 1 and time.monotonic() - self._last_order > REST_S:
            self._order("rest", {})

    def end(self) -> None:
        """The other ranks may leave."""
        distributed.from_rank_zero((END, {}))

    def _order(self, name: str, arguments: Mapping[str, Any], **own: Any) -> Any:
        """``own`` is what only rank 0 has to know."""
        self._last_order = time.monotonic()
        distributed.from_rank_zero((name, arguments))
        return self._orders[name](**arguments, **own)

    # --- the other ranks

    def follow(self) -> None:
        """Carry out rank 0's orders until the last one. Raises when rank 0 is gone, or what an order raises."""
        unseen: tuple[str, dict[str, Any]] = (END, {})  # what this rank passes is not looked at
        while True:
            name, arguments = distributed.from_rank_zero(unseen)
            if name == END:
                return
            try:
                self._orders[name](**arguments)
            except CheckpointError as error:  # the same on every rank: rank 0 decides what follows
                log.warning("%s", error)

    # --- every rank

    def _update(self, version: PolicyVersion, groups: Sequence[TrainGroup] | None = None) -> dict[str, float]:
        self.trainer.policy_version = version
        return self.trainer.update(groups)

    def _save(self, root: Path, state: dict[str, Any] | None = None) -> None:
        self.trainer.save(root, state or {}, self.attempt.check_fence)

    def _forward(self, prompt: Sequence[int], sampled: Sequence[int]) -> Forward:
        return forward_of(self.trainer, prompt, sampled)

    def _push(self, targets: Sequence[Target], version: PolicyVersion) -> list[Pushed]:
        began = time.monotonic()
        weights = list(self.trainer.named_weights())  # under ZeRO-3 all ranks gather them, whether they push or not
        own = next((target for target in targets if target.name == f"node{self.node}"), None)
        gather_s = time.monotonic() - began
        timings = self._push_own(own, weights, version) if own else None
        pushed = Pushed(own.name, timings and timings.gathered(gather_s)) if own else None
        return [result for result in distributed.from_all_ranks(pushed) if result is not None]

    def _push_own(self, target: Target, weights: Weights, version: PolicyVersion) -> SyncTimings | None:
        control = RpcClient(target.control_url, self._token())
        try:
            transfer = self._transfer_to(target)
            return transfer.push(weights, version, before_resume=lambda: self._rename(control, version))
        except (TransferError, RpcError) as error:
            log.warning("weights %s did not reach %s: %s", version, target.name, error)
            self.forget_transfer()
            self._restart(target, control)
            return None
        finally:
            control.close()

    def _rename(self, control: RpcClient, version: PolicyVersion) -> None:
        """New calls of the engine rank's shards are salted with ``version`` from now on."""
        control.call("policy_version", self.config.engine.sync_timeout_s, version=str(version))

    def _restart(self, target: Target, control: RpcClient) -> None:
        """A failed sync leaves an engine in doubt: its rank restarts vLLM, unless it is at it, and registers anew."""
        try:
            control.call("restart_engine", 30.0)
        except RpcError as error:
            log.warning("%s could not be told to restart its engine: %s", target.name, error)

    def _transfer_to(self, target: Target) -> Transfer:
        """Connected once per start of the engine's vLLM."""
        if target.fresh:
            self.forget_transfer()
        if self._transfer is None:
            engine = self.config.engine
            transfer = make_transfer(engine.weight_transfer, target.url, self.scratch, engine.sync_timeout_s)
            transfer.connect()
            self._transfer = transfer
        return self._transfer

    def close(self) -> None:
        """Leave nothing on this node."""
        self.forget_transfer()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def forget_transfer(self) -> None:
        """Give the connection to this node's engine back."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _token(self) -> str:
        record = self.attempt.read("coordinator")
        assert record is not None
        return str(record["token"])
