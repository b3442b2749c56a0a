"""What packing rows as a forest of shared prefixes saves: one made-up rollout of eight rows, a tiny model, the CPU.

`python -m bench.packing` prints both times and their ratio; `--memory` prints the peak memory of one long row instead.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.records import Row
from pipeline.training.batch import RowBatch, WeightedRow, collate, plan
from pipeline.training.forward import PolicyModel

SYSTEM = 4_000  # tokens of system prompt, tools and task, equal in all rows
TURN, ANSWER = 400, 100  # tokens of a turn (tool result and answer), and of its answer
TURNS = (3, 5, 6, 8, 10, 11, 13, 14)  # turns of each row
FORKED = (0, 2, 4, 5, 7, 9, 10, 12)  # turns that a row shares with the one before: it forks where history was rewritten


def model(vocabulary: int, hidden: int = 128, layers: int = 4) -> Qwen3ForCausalLM:
    """A tiny pure-attention model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).float()


def forking_rollout(vocabulary: int, seed: int = 0) -> list[WeightedRow]:
    """Rows as a harness leaves them that rewrites its history: each forks from the last and trains its own answers."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, SYSTEM)
    rows = []
    for turns, forked in zip(TURNS, FORKED, strict=True):
        kept = SYSTEM + forked * TURN
        ids = np.concatenate([ids[:kept], rng.integers(0, vocabulary, (turns - forked) * TURN)])
        places = np.arange(len(ids))
        trained = (places >= kept) & ((places - SYSTEM) % TURN >= TURN - ANSWER)
        row = Row(ids.astype(np.int32), trained, np.where(trained, -1.0, 0.0).astype(np.float32))
        rows.append(WeightedRow(row, 1.0, 1.0, True, "rollout", 0))
    return rows


def train_once(policy: PolicyModel, batches: Sequence[RowBatch]) -> float:
    """Seconds of forward and backward over all of ``batches``."""
    policy.zero_grad()
    started = time.perf_counter()
    for batch in batches:
        policy(collate(batch))[0].sum().backward()
    return time.perf_counter() - started


def compare(rounds: int) -> None:
    """Row by row and packed, in turns, the best of ``rounds`` each."""
    policy, rows = PolicyModel(model(3_072)), forking_rollout(3_072)
    ways = {
        "row by row": [RowBatch((row,), True, len(row)) for row in rows],
        "packed": plan(rows, 40_960, True)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    gradients = {}
    for _ in range(rounds):
        for name, batches in ways.items():
            times[name].append(train_once(policy, batches))
            gradients[name] = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    difference = float((gradients["packed"] - gradients["row by row"]).norm() / gradients["row by row"].norm())
    for name, batches in ways.items():
        print(f"{name}: {sum(batch.tokens for batch in batches):,} tokens, {min(times[name]):.2f} s")
    print(f"{min(times['row by row']) / min(times['packed']):.1f} times faster; gradients differ by {difference:.1e}")


def peak(length: int, vocabulary: int) -> None:
    """Print the peak memory of this process in MB, less what it had with the model, for a row trained on half of it."""
    policy = PolicyModel(model(vocabulary), gradient_checkpointing=True)
    ids = np.random.default_rng(0).integers(0, vocabulary, length).astype(np.int32)
    trained = np.arange(length) % 2 == 1
    row = WeightedRow(Row(ids, trained, np.zeros(length, np.float32)), 1.0, 1.0, True, "rollout", 0)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    policy(collate(RowBatch((row,), True, length)))[0].sum().backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


def memory() -> None:
    """Each case in a process of its own."""
    print("tokens  vocabulary  MB")
    for vocabulary in (8_192, 65_536):
        for length in (4_096, 8_192, 16_384):
            command = [sys.executable, "-m", "bench.packing", "--peak", str(length), str(vocabulary)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
            print(f"{length:6,}  {vocabulary:10,}  {answer.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", type=int, nargs=2, metavar=("TOKENS", "VOCABULARY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        peak(*options.peak)
    elif options.memory:
        memory()
    else:
        compare(options.rounds)


if __name__ == "__main__":
    main()
