"""The speed of an update beside the same work in a plain loop of transformers and torch: a tiny model, the CPU.

`python -m bench.update` makes up rows that share nothing and are equally long, so that neither packing nor padding
changes the work, gives both the same micro-batches and optimizer steps, and prints the ratio of each round's times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bench.groups import group_of
from bench.packing import model
from pipeline.config import AlgorithmConfig, TrainingConfig
from pipeline.records import Row, TrainGroup
from pipeline.training.batch import RowBatch, make_minibatch, plan, split_minibatches
from pipeline.training.trainer import Trainer


@dataclass(frozen=True)
class Work:
    """``groups`` of four rollouts of one row each."""

    vocabulary: int = 3_072
    length: int = 1_024
    groups: int = 3
    rows_per_forward: int = 4

    @property
    def tokens(self) -> int:
        """Of an update."""
        return self.groups * 4 * self.length


def made_up_groups(work: Work, seed: int = 0) -> list[TrainGroup]:
    """Random rows, of the last three quarters of each every other 32 tokens are trained."""
    rng = np.random.default_rng(seed)
    return [_group(f"g{number}", work, rng) for number in range(work.groups)]


def _group(name: str, work: Work, rng: np.random.Generator) -> TrainGroup:
    return group_of(name, [_row(work, rng) for _ in range(4)], (1.0, 0.5, -0.5, -1.0))


def _row(work: Work, rng: np.random.Generator) -> Row:
    places = np.arange(work.length)
    trained = (places >= work.length // 4) & (places % 64 >= 32)
    logprobs = np.where(trained, -np.log(work.vocabulary), 0.0).astype(np.float32)
    return Row(rng.integers(0, work.vocabulary, work.length).astype(np.int32), trained, logprobs)


class PlainLoop:
    """What one would write by hand: whole logits, PPO-clip, AdamW, clipping."""

    def __init__(self, path: Path, training: TrainingConfig) -> None:
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.training = training
        betas = (training.betas[0], training.betas[1])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=training.learning_rate, betas=betas, weight_decay=training.weight_decay
        )

    def update(self, steps: Sequence[Sequence[RowBatch]]) -> None:
        """An optimizer step for each of ``steps``, a forward and backward for each of its micro-batches."""
        for batches in steps:
            for batch in batches:
                self._loss(batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _loss(self, batch: RowBatch) -> Tensor:
        ids, trained, behaviour = (
            torch.from_numpy(np.stack([getattr(row.row, name) for row in batch.rows]))
            for name in ("input_ids", "loss_mask", "logprobs")
        )
        scores = self.model(ids.long(), use_cache=False).logits[:, :-1].log_softmax(-1)
        logprobs = scores.gather(-1, ids[:, 1:, None].long())[..., 0]
        ratio = (logprobs - behaviour[:, 1:]).exp()
        advantages, weights = (
            torch.tensor([getattr(row, name) for row in batch.rows])[:, None] for name in ("advantage", "weight")
        )
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(surrogate * weights * trained[:, 1:]).sum()


class Rivals:
    """Yoke's trainer and the plain loop, from the same weights, with the same work."""

    def __init__(self, path: Path, work: Work) -> None:
        budget = work.rows_per_forward * work.length
        training = TrainingConfig(token_budget=budget, learning_rate=1e-4, decay_fraction=0.0)
        algorithm = AlgorithmConfig()
        self.groups = made_up_groups(work)
        parts = [
            make_minibatch(part, algorithm, None) for part in split_minibatches(self.groups, algorithm.minibatches)
        ]
        self.steps = [plan(part.rows, budget, True)[0] for part in parts]
        self.trainer = Trainer(path, training, algorithm, 0, 1_000)
        self.plain = PlainLoop(path, training)

    def yoke(self) -> None:
        """One update by the trainer."""
        self.trainer.update(self.groups)

    def by_hand(self) -> None:
        """The same update by the plain loop."""
        self.plain.update(self.steps)

    def difference(self) -> float:
        """Between the weights of both, relative to their norm."""
        own, other = (
            torch.cat([value.detach().flatten() for value in trained.parameters()])
            for trained in (self.trainer.policy.model, self.plain.model)
        )
        return float((own - other).norm() / other.norm())


def seconds(update: Callable[[], None]) -> float:
    """CPU seconds of this process, which has one thread: what else runs on the machine then matters little."""
    started = time.process_time()
    update()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    work = Work()
    with tempfile.TemporaryDirectory() as path:
        model(work.vocabulary).save_pretrained(path)
        rivals = Rivals(Path(path), work)
        forwards = [len(batches) for batches in rivals.steps]
        print(f"{work.tokens:,} tokens an update, forwards in its steps: {forwards}")
        rivals.yoke()  # the first of each pays for warming up
        rivals.by_hand()
        ratios = []
        for _ in range(rounds):
            own, other = seconds(rivals.yoke), seconds(rivals.by_hand)
            ratios.append(other / own)
            rates = f"yoke {work.tokens / own:,.0f} tokens/s of CPU time, plain loop {work.tokens / other:,.0f}"
            print(f"{rates}: {ratios[-1]:.2f} x", flush=True)
        print(f"median {median(ratios):.2f} x (from {min(ratios):.2f} to {max(ratios):.2f})")
        print(f"weights differ by {rivals.difference():.1e} of their norm after {rounds + 1} updates")


if __name__ == "__main__":
    main()
