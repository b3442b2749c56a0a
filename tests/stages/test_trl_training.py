"""examples/trl_async_grpo.py on a CPU: TRL's trainer on rollouts of a real harness before a scripted engine.

What has no counterpart without a GPU is put in its place: FlashAttention, and the transfer of weights to vLLM.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_threads import engine_thread
from harness_installs import provided
from trl_helpers import accelerate_of_its_own, save_tiny, settings, trl_on_cpu

from pipeline.config import UserError
from pipeline.engine.scripted import FakeEngine, Sample, Scripted, Template, parsed
from pipeline.stages.harness_check_tasks import write_task
from pipeline.stages.trl_worker import YokeRolloutWorker
from pipeline.tasks.harbor import load_tasks

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"
HARNESS = "pi"
STEPS = 2


class NoTransfer:
    """The engine is scripted and takes no weights; the syncs are counted."""

    def __init__(self) -> None:
        self.syncs = 0
        self.names: list[str] = []
        self.destroyed = False

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.syncs += 1
        self.names = [name for name, _ in iterator]

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        self.destroyed = True


def two_of_three_solve() -> Callable[[list[int]], Scripted]:
    """Writes the answer in two conversations, and says something else in the third, and so on."""
    shell = provided(HARNESS).shell.filled(command="printf 42 > answer.txt")
    act = f"<tool_call>{json.dumps({'name': shell.tool, 'arguments': dict(shell.arguments)})}</tool_call>"
    turns = itertools.count()

    def answer(ids: list[int]) -> Scripted:
        if any(role == "assistant" for role, _ in parsed(ids, Template())):
            return Scripted("Done.", seed=next(turns))
        number = next(turns)
        return Scripted("I will not." if number % 3 == 2 else act, seed=number)

    return answer


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("trl_async_grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """(start, end) of each run of trained tokens."""
    edges = [place for place in range(len(mask) + 1) if [*mask, 0][place] != [0, *mask][place]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def check_sampled(sample: Any, engine: list[Sample]) -> None:
    """Each run of trained tokens is an answer of the engine, id for id and logprob for logprob, to what is before."""
    ids, logprobs = sample.input_ids.tolist(), sample.old_log_probs.tolist()
    runs = spans(sample.completion_mask.tolist())
    assert runs
    for start, end in runs:
        assert Sample(ids[:start], ids[start:end], logprobs[start:end]) in engine


def test_trl_trains_on_a_real_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_on_cpu(monkeypatch)
    for name in ("a", "b"):
        write_task(tmp_path / "tasks" / name, name, {"answer.txt": "42"})
    tasks = load_tasks(tmp_path / "tasks")
    config = settings(
        tmp_path, f"model.path={save_tiny(tmp_path / 'model')}", f"mix.harnesses=[{HARNESS}]", "concurrency=3",
        "algorithm.group_size=3", "algorithm.max_outstanding_rollouts=6", "training.learning_rate=1e-3",
    )  # fmt: skip
    alone = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "token_budget": 0, "report_to": []}
    engine, transfer, came = FakeEngine(version="default", answers=two_of_three_solve()), NoTransfer(), []
    with engine_thread(engine), accelerate_of_its_own():
        trainer = load_example().make_trainer(
            config, tasks, engine.url, transfer, **alone, per_device_train_batch_size=3, max_steps=STEPS,
            save_strategy="no",
        )  # fmt: skip
        worker = trainer.rollout_worker
        put = worker.rollout_buffer.put_nowait
        monkeypatch.setattr(worker.rollout_buffer, "put_nowait", lambda sample: (came.append(sample), put(sample)))
        before = [value.detach().clone() for value in trainer.model.parameters()]
        trainer.train()
    after = list(trainer.model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert len(came) >= STEPS * 3
    for sample in came:
        check_sampled(sample, engine.samples)
        assert 1 <= sample.model_version <= STEPS + 1
    assert transfer.syncs == STEPS + 1 and transfer.destroyed and len(transfer.names) == len(before)
    logged = trainer.state.log_history
    steps = [entry for entry in logged if "loss" in entry]
    assert len(steps) == STEPS and all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in steps)
    assert steps[0]["rollout/pi/reward"] > 0 and max(entry["sample/staleness_max"] for entry in steps) <= 2
    assert not worker._thread.is_alive() and not list(Path(tempfile.gettempdir()).glob(f"yoke-trl-{os.getpid()}-*"))


def test_the_docs_show_the_example_as_it_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLE.parents[1] / "docs" / "trl.md").read_text(), re.DOTALL)
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    assert {line.strip() for line in block.splitlines()} <= {*lines, *(line.removeprefix("return ") for line in lines)}
    with pytest.raises(UserError, match="no such directory"):
        load_example().main("http://127.0.0.1:9", "tasks=harbor", "tasks.train=/nowhere")
    with pytest.raises(UserError, match=r"tasks\.train is not given"):
        load_example().main("http://127.0.0.1:9")


def test_an_engine_that_trl_does_not_sync_as_needed_is_refused(tmp_path: Path) -> None:
    provided(HARNESS)
    config = settings(tmp_path, f"mix.harnesses=[{HARNESS}]")
    write_task(tmp_path / "tasks" / "a", "a", {"answer.txt": "42"})
    tasks = load_tasks(tmp_path / "tasks")
    engines = {
        "it must serve the base model only": WithAdapter(),
        "was vLLM started with --enable-scale-out": WithoutTokens(),
        "start vLLM with --logprobs-mode processed_logprobs": RawLogprobs(),
    }
    for text, engine in engines.items():
        with engine_thread(engine), pytest.raises(UserError, match=text):
            YokeRolloutWorker(config, tasks, engine.url).start()
    with pytest.raises(UserError, match="no list of models"):
        YokeRolloutWorker(config, tasks, "http://127.0.0.1:9").start()


class WithAdapter(FakeEngine):
    """As TRL leaves a vLLM to which it sends an adapter."""

    async def _answer(self, path: str, body: Any, reader: Any) -> tuple[Any, ...] | None:
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": 99} for name in ("base", "trl-policy-v1")]}
        return await super()._answer(path, body, reader)


class WithoutTokens(FakeEngine):
    """vLLM without --enable-scale-out."""

    async def _answer(self, path: str, body: Any, reader: Any) -> tuple[Any, ...] | None:
        if path == "/v1/models":
            return await super()._answer(path, body, reader)
        return 403, {"error": {"message": "Scale-out endpoints are disabled.", "type": "Forbidden", "code": 403}}


class RawLogprobs(FakeEngine):
    """vLLM whose logprobs are those of temperature 1."""

    async def _generate(self, body: Any, reader: Any) -> tuple[Any, ...] | None:
        body["sampling_params"].pop("temperature", None)
        return await super()._generate(body, reader)
