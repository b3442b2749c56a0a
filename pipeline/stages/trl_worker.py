"""TRL as the trainer: its ``RolloutWorkerProtocol`` on Yoke's rollouts, for ``AsyncGRPOTrainer`` (docs/trl.md).

TRL owns the model, the update and the weights in vLLM. Here are the proxy in front of that vLLM, the harnesses, the
verifier, rewards and advantages, all in one thread of the trainer's process; the work is in processes of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from pipeline.capture.continuity import SelfTest
from pipeline.capture.dialects.base import ApiError
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.capture.upstream import Engine
from pipeline.config import Config, UserError
from pipeline.harness.base import get_harness, harness_root
from pipeline.records import GroupSpec, PolicyVersion, RolloutRecord, TrainGroup
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.advantage import (
    configured_reward,
    enough_graded,
    graded_rewards,
    reward_failures,
    score,
    to_train_group,
    why_ungraded,
)
from pipeline.stages.flow import Ending, FlowState, GroupFlow, oldest_version
from pipeline.stages.outcome import harness_failed
from pipeline.stages.rollout import Workshop
from pipeline.stages.schedule import make_schedule
from pipeline.stages.trl_samples import check_settings, samples
from pipeline.tasks.harbor import HarborTask

log = logging.getLogger(__name__)

START_S = 300.0
STOP_S = 60.0
GREET_S = 20.0
TICK_S = 0.2
OUTAGE_S = 120.0  # a harness's call outlives a weight sync of this length
METRICS_KEPT = 4096
MOST_FRUITLESS = 100  # groups in a row, at least; more where there are more tasks
ENDLESS = 1_000_000_000


class YokeRolloutWorker:
    """Implements ``trl.experimental.async_grpo``'s ``RolloutWorkerProtocol`` (TRL 1.16).

    Groups are scheduled, tried again and set aside as in `yoke train`; at most ``algorithm.max_outstanding_rollouts``
    are under way or in ``rollout_buffer``, so a trainer that does not keep up holds rollouts back.
    """

    def __init__(self, config: Config, tasks: Sequence[HarborTask], engine_url: str, first_group: int = 0) -> None:
        """``engine_url``: the vLLM that TRL syncs. ``first_group``: where in the schedule a resumed training goes on.

        Starts nothing, as every rank makes one and only the first uses it. Raises UserError for a setting that TRL
        cannot follow, or when a harness is missing.
        """
        check_settings(config)
        for name in config.mix.harnesses:
            get_harness(name).check_installed(harness_root(config.harness.home))
        self.config, self.engine_url = config, engine_url
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()  # bounded by the flow's credits
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(METRICS_KEPT)
        self._prompts = {task.ref.task_id: task.instruction for task in tasks}
        schedule = make_schedule([task.ref for task in tasks], config)
        self.flow = GroupFlow(
            schedule, config.algorithm, ENDLESS, FlowState(), attempt=0, set_aside_after=config.mix.set_aside_after
        )
        self.flow.state.next_index = first_group
        self._reward = configured_reward(config)
        self._version = 0
        self._rows = 0  # ever put into the buffer
        self._marks: deque[int] = deque()  # of each group in flow.ready: that count when its last row was put
        self._handed = 0
        self._fruitless = 0  # groups in a row of which TRL got nothing
        self._workshop: Workshop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._alive = 0.0

    # --- TRL's side, in the trainer's thread

    def start(self) -> None:
        """Returns when rollouts are being made. Raises what is in their way, or TimeoutError."""
        if self._thread is not None:
            raise RuntimeError("this worker was started before: make another one for another training")
        self._thread = threading.Thread(target=self._serve, name="yoke-rollouts", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S):
            self.stop()
            raise TimeoutError(f"waited {START_S:g} s for the proxy in front of {self.engine_url}")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Kill what runs and remove its files. Never raises: TRL calls it while another error is on its way."""
        if self._thread is None or not self._thread.is_alive():
            return
        if self._main is not None:
            with suppress(RuntimeError):  # it has just ended by itself
                self._main.get_loop().call_soon_threadsafe(self._main.cancel)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("rollouts did not end within %g s", STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """TRL's vLLM now serves ``model_version``: every later call is of it. Raises what hinders the shards."""
        self._version = model_version
        if self._workshop is None or self._main is None or self._main.done():
            return  # not yet or no longer at work; check_health tells why
        timeout_s = self.config.engine.sync_timeout_s
        change = self._workshop.supervisor.set_policy_version(PolicyVersion(0, model_version), timeout_s)
        try:
            asyncio.run_coroutine_threadsafe(change, self._main.get_loop()).result(timeout_s + TICK_S)
        except TimeoutError as error:
            raise TimeoutError(f"waited {timeout_s:g} s for the rollouts to take version {model_version}") from error

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError when no rollouts are being made, with the cause, or when their thread is silent."""
        if self._failure is not None:
            raise RuntimeError(f"rollouts ended: {self._failure}") from self._failure
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the rollout worker is not running")
        silent_s = time.monotonic() - self._alive
        if silent_s > stale_after_s:
            raise RuntimeError(f"the rollouts' thread was silent for {silent_s:.0f} s")

    # --- the thread of the rollouts

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            log.info("rollouts were stopped")
        except BaseException as error:  # the trainer's thread raises it
            self._failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self._main = asyncio.current_task()
        async with self._open() as workshop:
            self._workshop = workshop
            await workshop.supervisor.set_policy_version(PolicyVersion(0, self._version))
            self._alive = time.monotonic()
            self._ready.set()
            await self._produce(workshop)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Workshop]:
        """The proxy in front of TRL's vLLM, and what rollouts share."""
        config, url = self.config, self.engine_url
        model, window = await asyncio.to_thread(_served, url)
        await _check_engine(url, model)
        scratch = Path(tempfile.mkdtemp(prefix=f"yoke-trl-{os.getpid()}-"))
        supervisor = ShardSupervisor(
            url, config.engine.shards, scratch / "journal", model, config.engine.request_timeout_s, OUTAGE_S,
            named_weights=False,
        )  # fmt: skip
        try:
            await supervisor.start()
            home = harness_root(config.harness.home)
            yield Workshop(make_sandbox(config.sandbox), supervisor, config.harness, scratch, home, window)
        finally:
            await supervisor.stop()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _produce(self, workshop: Workshop) -> None:
        """Keep as many groups under way as there are credits, until this is cancelled."""
        slots = asyncio.Semaphore(self.config.concurrency)
        groups: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._alive = time.monotonic()
                self._settle()
                while lease := self.flow.lease("trl", PolicyVersion(0, self._version)):
                    groups.add(asyncio.create_task(self._roll_out(workshop, lease.spec, slots)))
                if not groups and self.flow.stranded:
                    raise RuntimeError(f"every harness keeps failing: {self.flow.state.set_aside}")
                if not groups:
                    await asyncio.sleep(TICK_S)
                    continue
                done, groups = await asyncio.wait(groups, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in groups:
                task.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def _roll_out(self, workshop: Workshop, spec: GroupSpec, slots: asyncio.Semaphore) -> None:
        async def one(index: int) -> RolloutRecord:
            async with slots:
                return await workshop.roll_out(spec, index)

        async with asyncio.TaskGroup() as rollouts:
            tasks = [rollouts.create_task(one(index)) for index in range(spec.size)]
        records = [task.result() for task in tasks]
        self._close(spec, await asyncio.to_thread(score, records, self._reward))  # the user's function may be slow

    def _close(self, spec: GroupSpec, records: Sequence[RolloutRecord]) -> None:
        """A group's rollouts have ended: into the buffer, out, or once more. Raises when it leads nowhere."""
        reasons = why_ungraded(records)
        if self.flow.judge_harness(spec.harness, harness_failed(records, spec.size), reasons):
            log.error("%s is set aside: %s", spec.harness, self.flow.state.set_aside[spec.harness])
        group = to_train_group(records, spec.size, self.config.algorithm.normalize_std)
        if group is not None:
            ending = "handed_over"
            self._hand_over(group, self._prompts[spec.task.task_id])
        elif enough_graded(records, spec.size):
            ending, reasons = "without_contrast", "no contrast"
            self.flow.skip(spec.group_id, reasons)
        else:
            ending = "rolled_again" if self.flow.fail(spec.group_id, reasons) else "abandoned"
        self._measure(records, f"rollout/groups_{ending}_total")
        self._judge(group is not None, reasons, failures=reward_failures(records))

    def _judge(self, fruitful: bool, reasons: str, failures: Sequence[str]) -> None:
        """Raise instead of letting the trainer wait for ever."""
        self._fruitless = 0 if fruitful else self._fruitless + 1
        if failures and not fruitful:
            raise UserError(f"reward.fn={self.config.reward.fn} failed: {failures[0]}")
        if self._fruitless >= max(MOST_FRUITLESS, len(self._prompts)):
            raise RuntimeError(f"nothing to learn from {self._fruitless} groups in a row, the last one: {reasons}")

    def _hand_over(self, group: TrainGroup, prompt: str) -> None:
        made = samples(group, self._handed, prompt, self.config)
        for sample in made:
            self.rollout_buffer.put_nowait(sample)
        self._handed += 1
        self._rows += len(made)
        self._marks.append(self._rows)
        self.flow.admit(group, oldest_version(group))

    def _settle(self) -> None:
        """Groups of which TRL took the last row have ended; their credits are free."""
        taken = self._rows - self.rollout_buffer.qsize()
        while self._marks and self._marks[0] <= taken:
            self._marks.popleft()
            group_id = self.flow.ready.pop(0).group.group_id
            self.flow.state.ended[group_id] = [Ending.TRAINED.value, "taken by TRL"]

    def _measure(self, records: Sequence[RolloutRecord], ending: str) -> None:
        """Means over rollouts, as (sum, count): TRL's own of ``sample.metrics`` are over rows."""
        rewards = graded_rewards(records)
        reward = (sum(rewards), len(rewards))
        rows = (sum(len(record.rows) for record in records), len(records))
        metrics = {"rollout/reward": reward, "rollout/rows": rows, ending: 1.0}
        metrics[f"rollout/{records[0].harness}/reward"] = reward
        metrics["rollout/ungraded_total"] = float(len(records) - len(rewards))
        metrics["rollout/outstanding"] = float(self.flow.outstanding_rollouts)
        with suppress(queue.Full):  # nobody reads them
            self.metrics_queue.put_nowait(metrics)


def _served(url: str) -> tuple[str, int]:
    """(name, context window) of the one model that a vLLM serves. Raises UserError."""
    try:
        reply = httpx.get(f"{url}/v1/models", timeout=GREET_S, trust_env=False).raise_for_status()
        models = [(model["id"], int(model["max_model_len"] or 0)) for model in reply.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no list of models from {url}/v1/models: {error!r}") from error
    if len(models) != 1:
        names = ", ".join(name for name, _ in models) or "nothing"
        raise UserError(f"{url} serves {names}: it must serve the base model only, without --enable-lora")
    return models[0]


async def _check_engine(url: str, model: str) -> None:
    """Raise UserError for a vLLM that takes no token ids; warn of a chat template that breaks continuity."""
    try:
        found = await SelfTest(Engine(url, model, GREET_S, GREET_S)).run()
    except ApiError as error:
        raise UserError(f"{url}: {error.message}; was vLLM started with --enable-scale-out?") from error
    if found.problem:
        log.warning("every call becomes a row of its own, as the chat template is not understood: %s", found.problem)
    if not found.processed_logprobs:
        raise UserError(f"{url}: start vLLM with --logprobs-mode processed_logprobs")
