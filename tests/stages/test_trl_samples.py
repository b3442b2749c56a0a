"""Groups as TRL's samples: exact ids and logprobs, and in TRL's own loss the weights and gradients of ours."""

from __future__ import annotations

import queue
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl_helpers import rollout, row, settings, tiny_qwen3, trl_on_cpu

from pipeline.config import Config, UserError
from pipeline.records import GroupSpec, PolicyVersion, Row, TaskRef, TrainGroup, Verdict
from pipeline.stages.trl_samples import check_settings, samples, trl_settings
from pipeline.training.batch import RowBatch, WeightedRow, collate, make_minibatch, plan
from pipeline.training.forward import PolicyModel
from pipeline.training.loss import LOSSES
from pipeline.training.loss_inputs import loss_inputs
from pipeline.training.loss_weights import token_weights, trained_tokens

pytestmark = pytest.mark.slow  # TRL takes seconds to import
POSSIBLE = ("group_mean", "rollout_mean", "token_mean")
FORKING = 8  # rows of a rollout of a harness that rewrites its history
TOLERANCE = 1e-5  # of a norm


def group(number: int, rows_each: int, length: int, size: int = 4) -> TrainGroup:
    """Rollouts of ``rows_each`` rows of ``length`` trained tokens and more; behaviour logprobs near the model's."""
    rng = np.random.default_rng(number)
    spec = GroupSpec(f"g{number:06}", TaskRef("t", Path("t")), f"harness-{number}", 0, size)
    rollouts = [
        replace(
            rollout(spec, index, 1.0, PolicyVersion(0, 3 + number + index)),
            rows=tuple(row(rng, length + index) for _ in range(rows_each)),
            verdict=Verdict(float(index), 1.0, index),
        )
        for index in range(size)
    ]
    advantages = rng.normal(size=size)
    return TrainGroup(spec.group_id, spec.harness, tuple(rollouts), tuple(advantages - advantages.mean()))


def mixed() -> list[TrainGroup]:
    """Four harnesses with a group each: the second forks, the third's rollouts are long."""
    return [group(0, 1, 4), group(1, FORKING, 4), group(2, 1, 17), group(3, 2, 5)]


def with_aggregation(tmp_path: Path, aggregation: str) -> Config:
    return settings(tmp_path, f"algorithm.aggregation={aggregation}", "algorithm.constant_tokens=40")


def trl_batch(groups: list[TrainGroup], config: Config) -> dict[str, Tensor]:
    """What TRL's queue data set, planner and collator make of the samples: one micro-batch."""
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )

    made = [sample for number, each in enumerate(groups) for sample in samples(each, number, "do it", config)]
    buffer: queue.Queue[Any] = queue.Queue()
    for sample in made:
        buffer.put(sample)
    dataset = RolloutQueueDataset(buffer, lambda: 3, lambda stale_after_s: None, 1.0, defaultdict(list))
    micro_batch = next(iter(FixedCountBatcher(dataset, 1, len(made))))
    return DataCollatorForRollout(pad_token_id=0, num_processes=1).torch_call([micro_batch])


def test_a_sample_is_its_row_and_nothing_else(tmp_path: Path) -> None:
    given = group(5, 3, 4)
    made = samples(given, 7, "do it", with_aggregation(tmp_path, "token_mean"))
    pairs = [(record, own) for record in given.rollouts for own in record.rows]
    for sample, (record, own) in zip(made, pairs, strict=True):
        assert sample.input_ids.tolist() == own.input_ids.tolist()
        assert sample.completion_mask.tolist() == own.loss_mask.astype(int).tolist()
        assert (sample.old_log_probs == np.where(own.loss_mask, own.logprobs, 0)).all()
        assert own.logprobs[3] != 0 == sample.old_log_probs[3], "a sampled token that is context here"
        types = [field.dtype for field in (sample.input_ids, sample.completion_mask, sample.old_log_probs)]
        assert types == [np.int64, np.int64, np.float32]
        assert sample.advantage == given.advantages[record.index]
        assert (sample.group_id, sample.model_version) == (7, 8), "the oldest version of the group's rollouts"
        assert sample.metrics["reward"] == record.index and sample.metrics["tools/call_frequency"] == record.index
        assert sample.metrics["reward_std"] == pytest.approx(np.std([0, 1, 2, 3]))
        assert sample.prompt == [{"role": "user", "content": "do it"}] and sample.enqueued_at is not None


def test_a_group_without_a_trained_token_gives_no_sample(tmp_path: Path) -> None:
    given = group(5, 3, 4)
    empty = replace(given, rollouts=tuple(replace(record, rows=()) for record in given.rollouts))
    for aggregation in POSSIBLE:
        assert samples(empty, 0, "", with_aggregation(tmp_path, aggregation)) == []


def owners(groups: list[TrainGroup]) -> dict[float, tuple[int, int]]:
    """(group, rollout) of each trained token, which its logprob tells."""
    return {
        float(logprob): (g, i)
        for g, each in enumerate(groups)
        for i, record in enumerate(each.rollouts)
        for own in record.rows
        for logprob in own.logprobs[own.loss_mask]
    }


@pytest.mark.parametrize("aggregation", POSSIBLE)
def test_a_rollout_weighs_in_trl_s_loss_what_it_weighs_in_ours(aggregation: str, tmp_path: Path) -> None:
    """All that multiplies ℓ, per rollout, in one micro-batch: TRL's is ours times one number, C/T̄."""
    config = with_aggregation(tmp_path, aggregation)
    groups = [replace(each, advantages=(1.0,) * len(each.rollouts)) for each in mixed()]
    batch = trl_batch(groups, config)
    owner, total = owners(groups), float(batch["global_n_tokens"][0])
    theirs: dict[tuple[int, int], float] = defaultdict(float)
    for logprob, scale in zip(batch["old_log_probs"][0].tolist(), batch["advantages"][0].tolist(), strict=True):
        theirs[owner[logprob]] += scale / total
    weights = token_weights(groups, config.algorithm)
    ours = {
        (g, i): weights[g][i] * trained_tokens(record)
        for g, each in enumerate(groups)
        for i, record in enumerate(each.rollouts)
    }
    size = size_of_step(groups, config)
    assert {key: theirs[key] / size for key in ours} == pytest.approx(ours, rel=1e-6)
    share = {g: sum(part for (own, _), part in theirs.items() if own == g) for g in range(len(groups))}
    shares = [share[g] / sum(share.values()) for g in share]
    if aggregation == "token_mean":
        assert shares[1] > 0.4 and shares[0] < 0.1
    else:
        assert shares == pytest.approx([0.25] * 4, rel=1e-6)


def size_of_step(groups: list[TrainGroup], config: Config) -> float:
    """TRL's loss over ours."""
    if config.algorithm.aggregation == "token_mean":
        return 1.0
    lengths = [trained_tokens(record) for each in groups for record in each.rollouts]
    return config.algorithm.constant_tokens / float(np.mean(lengths))


@cache
def trl_trainer(temperature: float, low: float, high: float) -> SimpleNamespace:
    """What compute_loss asks of its trainer and of accelerate on one process."""
    alone = SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value)
    return SimpleNamespace(
        epsilon_low=low, epsilon_high=high, accelerator=alone, current_gradient_accumulation_steps=1,
        aux_loss_enabled=False, _metrics={"train": defaultdict(list)}, _step_forward_tokens=0.0,
        _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0, _step_forward_s=0.0,
    )  # fmt: skip


def trl_gradients(groups: list[TrainGroup], config: Config) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by TRL's data set, packing, attention, head and loss."""
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, register_tree_attention
    from trl.trainer.utils import add_fused_lm_head

    arguments = trl_settings(config)
    register_tree_attention()
    model = tiny_qwen3()
    model.set_attn_implementation(TREE_ATTENTION)
    add_fused_lm_head(model, temperature=arguments["temperature"], outputs=("log_probs", "entropy"))
    trainer = trl_trainer(arguments["temperature"], arguments["epsilon"], arguments["epsilon_high"])
    loss = AsyncGRPOTrainer.compute_loss(trainer, model, trl_batch(groups, config))
    loss.backward()
    return loss.item(), gradients(model)


def our_gradients(groups: list[TrainGroup], config: Config) -> tuple[float, dict[str, Tensor]]:
    """The same by ours, in several micro-batches."""
    model = tiny_qwen3()
    policy = PolicyModel(model, config.harness.sampling.temperature)
    total = 0.0
    for batch in plan(make_minibatch(groups, config.algorithm, None).rows, 120, True)[0]:
        micro = collate(batch)
        inputs = loss_inputs(micro, *policy(micro), config.algorithm)
        outputs = LOSSES["ppo_clip"](inputs, config.algorithm.clip_low, config.algorithm.clip_high)
        outputs.loss.backward()
        total += outputs.loss.item()
    return total, gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def near_the_policy(groups: list[TrainGroup], config: Config) -> list[TrainGroup]:
    """The same groups with behaviour logprobs close to the model's, so that some ratios are clipped and some not."""
    policy = PolicyModel(tiny_qwen3(), config.harness.sampling.temperature)
    rng = np.random.default_rng(0)

    def moved(row: Row) -> Row:
        weighted = WeightedRow(row, 1.0, 1.0, True, "r", 0)
        with torch.no_grad():
            logprobs, _ = policy(collate(RowBatch((weighted,), True, len(row.input_ids))))
        values = row.logprobs.copy()
        values[row.loss_mask] = logprobs.numpy() + rng.normal(scale=0.3, size=row.trained_tokens)
        return replace(row, logprobs=values)

    return [
        replace(each, rollouts=tuple(replace(r, rows=tuple(map(moved, r.rows))) for r in each.rollouts))
        for each in groups
    ]


@pytest.mark.parametrize("aggregation", POSSIBLE)
def test_trl_s_loss_and_gradients_are_ours(aggregation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_on_cpu(monkeypatch)
    config = with_aggregation(tmp_path, aggregation)
    config.harness.sampling.temperature = 0.8
    config.algorithm.clip_high = 0.28
    groups = near_the_policy(mixed(), config)
    size = size_of_step(groups, config)
    loss, expected = trl_gradients(groups, config)
    own, found = our_gradients(groups, config)
    whole = torch.sqrt(torch.stack([value.pow(2).sum() for value in expected.values()]).sum())
    assert own * size == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert found.keys() == expected.keys() and whole > 1e-3
    for name, value in expected.items():
        assert (found[name] * size - value).norm() <= TOLERANCE * whole, name
    metrics = trl_trainer(0.8, 0.2, 0.28)._metrics["train"]
    assert 0 < metrics["clip_ratio/region_mean"][-1] < 1


@pytest.mark.parametrize(
    "wrong",
    [
        "algorithm.loss=gspo", "algorithm.decoupled=true", "algorithm.aggregation=constant", "curriculum.enabled=true",
        "training.lora.rank=8",
    ],
)  # fmt: skip
def test_what_trl_cannot_do_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=wrong.partition("=")[0]):
        check_settings(settings(tmp_path, wrong))
    check_settings(settings(tmp_path))


def test_trl_knows_every_setting_that_it_is_given(tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    given = trl_settings(settings(tmp_path, "harness.sampling.temperature=0.7", "algorithm.clip_high=0.3"))
    arguments = AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    assert {name: getattr(arguments, name) for name in given} == given
    assert (arguments.temperature, arguments.epsilon_high) == (0.7, 0.3)
