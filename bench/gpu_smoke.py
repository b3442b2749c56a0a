"""`make gpu-smoke`: what tests on a CPU cannot see, looked at on one GPU in under ten minutes. docs/gpu.md explains it.

Each step is a function of a device and a type, so that tests run the same code on a CPU with tiny sizes. Exit codes:
0 = every limit holds, 1 = one does not or a step failed, 2 = a wrong option, 3 = no GPU here.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import gpu_engine
from bench.gpu_figures import Figure, Setting
from bench.gpu_models import KINDS, SHAPES, make_model
from pipeline.records import Row
from pipeline.training.batch import RowBatch, WeightedRow, collate, plan
from pipeline.training.forward import PolicyModel

NO_GPU = 3
DEVICES = Path("/dev")
FLOOR = 1e-4  # of an error relative to the float32 norm: what counts as equal
ROUNDED = 0.02  # of hidden states in bf16
ROUNDINGS = 2.0  # how many times the rounding of a plain forward in the same type the trainer's way may show


# --- packing: the trainer's forwards against plain ones


def forking_rows(vocabulary: int, scale: int, seed: int = 0) -> list[WeightedRow]:
    """Rows of one rollout that rewrote its history: long common prefixes, forks, several spans of trained tokens."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, vocabulary, 4 * scale)
    rows = []
    for kept in (4, 5, 6, 4):
        history = np.concatenate([history[: kept * scale], rng.integers(0, vocabulary, 3 * scale)])
        places = np.arange(len(history))
        trained = (places >= 4 * scale) & (places % scale >= scale // 2)
        rows.append(weighted(history, trained))
    return rows


def weighted(ids: np.ndarray, trained: np.ndarray) -> WeightedRow:
    """A row whose behaviour logprobs are of no interest."""
    row = Row(ids.astype(np.int32), trained, np.zeros(len(ids), np.float32))
    return WeightedRow(row, 1.0, 1.0, True, "rollout", 0)


@dataclass(frozen=True)
class Result:
    """Logprobs of the trained tokens, row by row, and the gradient of their weighted sum."""

    logprobs: Tensor
    gradients: dict[str, Tensor]

    def distance(self, exact: Result) -> tuple[float, float]:
        """Errors of both against ``exact``, relative to its norm."""
        squares = [
            (float((value.float() - exact.gradients[name]).square().sum()), float(exact.gradients[name].square().sum()))
            for name, value in self.gradients.items()
        ]
        wrong, whole = (sum(column) for column in zip(*squares, strict=True))
        return float((self.logprobs - exact.logprobs).norm() / exact.logprobs.norm()), (wrong / whole) ** 0.5


def coefficients(count: int, device: torch.device) -> Tensor:
    """A factor of its own for every trained token, so that no two can be swapped unseen."""
    return torch.cos(torch.arange(count, device=device))


def row_by_row(model: PreTrainedModel, rows: Sequence[WeightedRow]) -> Result:
    """One plain transformers forward a row."""
    parts, start = [], 0
    for own in rows:
        ids = torch.from_numpy(own.row.input_ids.astype(np.int64)).to(model.device)
        scores = model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        trained = torch.from_numpy(own.row.loss_mask[1:]).to(model.device)
        values = scores.gather(1, ids[1:, None])[:, 0][trained]
        factors = coefficients(start + len(values), model.device)[start:]
        (values * factors).sum().backward()
        parts.append(values.detach())
        start += len(values)
    return Result(torch.cat(parts), _gradients(model))


def as_trained(model: PreTrainedModel, rows: Sequence[WeightedRow], budget: int) -> Result:
    """The trainer's own way: packed with shared prefixes where the model allows it, else padded."""
    policy = PolicyModel(model)
    starts = np.cumsum([0, *(own.row.trained_tokens for own in rows)])
    factors = coefficients(int(starts[-1]), model.device)
    found = torch.empty(len(factors), device=model.device)
    for batch in plan(rows, budget, policy.packs)[0]:
        numbers = [next(index for index, row in enumerate(rows) if row is own) for own in batch.rows]
        places = torch.cat([torch.arange(int(starts[n]), int(starts[n + 1])) for n in numbers]).to(model.device)
        values, _ = policy(collate(batch).to(model.device))
        (values * factors[places]).sum().backward()
        found[places] = values.detach()
    return Result(found, _gradients(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def load(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in ``path`` on ``device``."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(device)


def packing(setting: Setting, kind: str, path: Path) -> list[Figure]:
    """Is the trainer's way as near to float32 as a plain forward of the same type is?"""
    exact_model = load(path, torch.float32, setting.device)
    rows = forking_rows(exact_model.config.vocab_size, setting.scale)
    exact = row_by_row(exact_model, rows)
    plain = row_by_row(load(path, setting.dtype, setting.device), rows).distance(exact)
    own = as_trained(load(path, setting.dtype, setting.device), rows, 64 * setting.scale).distance(exact)
    figures = []
    for what, mine, other in zip(("logprobs", "gradient"), own, plain, strict=True):
        figures.append(Figure(f"{what} as trained, error against float32", mine, "", ROUNDINGS * other + FLOOR))
        figures.append(Figure(f"{what} row by row, error against float32", other, ""))
    return figures


# --- fused: rows of a hybrid model in one line, kept apart by the fused kernels


def fused(setting: Setting, kind: str, path: Path) -> list[Figure]:
    """Do the fused kernels keep the convolution from running over from row to row? Then hybrids could be packed too."""
    model = load(path, setting.dtype, setting.device)
    rng = np.random.default_rng(0)
    lengths = torch.tensor([0, 3 * setting.scale, 2 * setting.scale], dtype=torch.int32, device=setting.device)
    ids = torch.from_numpy(rng.integers(0, model.config.vocab_size, 5 * setting.scale)).to(setting.device)
    border = 3 * setting.scale
    hints = {
        "position_ids": torch.cat([torch.arange(length, device=setting.device) for length in lengths[1:].tolist()])[
            None
        ],
        "seq_idx": torch.arange(2, dtype=torch.int32, device=setting.device).repeat_interleave(lengths[1:])[None],
        "cu_seq_lens_q": lengths.cumsum(0, dtype=torch.int32),
    }
    with torch.no_grad():
        packed = model.base_model(ids[None], use_cache=False, **hints).last_hidden_state[0, border:].float()
        alone = model.base_model(ids[None, border:], use_cache=False).last_hidden_state[0].float()
    leak = float((packed[:2] - alone[:2]).norm() / alone[:2].norm())
    installed = has_fused_kernels(setting.device)
    limit = ROUNDED if installed else None  # without the kernels it runs over, which is why such models are not packed
    return [Figure(f"packed {'with' if installed else 'without'} fused kernels, leak over a border", leak, "", limit)]


def has_fused_kernels(device: torch.device) -> bool:
    """Whether transformers runs short convolutions by the package causal-conv1d."""
    return device.type == "cuda" and importlib.util.find_spec("causal_conv1d") is not None


# --- memory


def memory(setting: Setting, kind: str, path: Path) -> list[Figure]:
    """Forward and backward of one row, half of its tokens trained, with gradient checkpointing; no optimizer state."""
    policy = PolicyModel(load(path, setting.dtype, setting.device), gradient_checkpointing=True)
    figures = []
    for length in (setting.length // 16, setting.length // 4, setting.length):
        ids = np.random.default_rng(0).integers(0, policy.model.config.vocab_size, length)
        batch = collate(RowBatch((weighted(ids, np.arange(length) % 2 == 1),), policy.packs, length))
        policy.zero_grad()
        _reset_peak(setting.device)
        started = time.perf_counter()
        policy(batch.to(setting.device))[0].sum().backward()
        peak = _peak_gib(setting.device)
        seconds = time.perf_counter() - started
        figures.append(Figure(f"row of {length:,} tokens: peak memory", peak, "GiB"))
        figures.append(Figure(f"row of {length:,} tokens: tokens a second", length / seconds, "1/s"))
    return figures


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def _peak_gib(device: torch.device) -> float:
    """Of the device; on a CPU the largest size that this process ever had."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# --- the whole

Step = Callable[[Setting, str, Path], list[Figure]]
STEPS: dict[str, tuple[tuple[str, ...], Step]] = {
    "packing": (KINDS, packing),
    "fused": (("lfm2",), fused),
    "engine": (KINDS, gpu_engine.engine),
    "memory": (KINDS, memory),
}


@dataclass
class Outcome:
    """What a step found for one kind of model."""

    step: str
    kind: str
    seconds: float
    figures: list[Figure] = field(default_factory=list)
    error: str = ""

    @property
    def holds(self) -> bool:
        return not self.error and all(figure.holds for figure in self.figures)


def run_step(name: str, step: Step, setting: Setting, kind: str, path: Path) -> Outcome:
    """A step that raises is a failed one; the others still run."""
    started = time.perf_counter()
    figures, error = [], ""
    try:
        figures = step(setting, kind, path)
    except Exception as failure:  # whatever a driver, a kernel or vLLM may raise
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}".splitlines()[0]
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return Outcome(name, kind, time.perf_counter() - started, figures, error)


def run_all(setting: Setting, models: dict[str, Path], steps: Sequence[str]) -> Iterator[Outcome]:
    """Each step for each model that it is for."""
    for name in steps:
        kinds, step = STEPS[name]
        for kind in (kind for kind in kinds if kind in models):
            yield run_step(name, step, setting, kind, models[kind])


def show(outcome: Outcome) -> None:
    """The step's part of the table."""
    verdict = "ok" if outcome.holds else "FAILED"
    print(f"\n{outcome.step}, {outcome.kind}: {verdict} ({outcome.seconds:.0f} s) {outcome.error}")
    for figure in outcome.figures:
        limit = "" if figure.limit is None else f"  limit {figure.limit:.3g}{'' if figure.holds else '  EXCEEDED'}"
        print(f"  {figure.name:<66} {figure.value:>12.4g} {figure.unit:<4}{limit}")


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    facts: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    facts |= {f"has {name}": importlib.util.find_spec(name) is not None for name in ("causal_conv1d", "fla", "vllm")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}
    return facts


def why_no_gpu() -> str | None:
    """Why torch sees no GPU; None when it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs; docs/install.md says how a GPU node is set up"
    if not any(DEVICES.glob("nvidia[0-9]*")):
        return "there is no /dev/nvidia0"
    return "torch sees none: the driver is too old for it, or CUDA_VISIBLE_DEVICES hides the GPU"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options. Exits with 2 for a wrong one."""
    parser = argparse.ArgumentParser(prog="bench.gpu_smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", default=[], metavar="KIND=DIR", help="a checkpoint for a kind")
    parser.add_argument("--size", choices=tuple(SHAPES), default="real", help="of the random models for other kinds")
    parser.add_argument("--length", type=int, default=131_072, help="tokens of the longest row (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of %(default)s")
    parser.add_argument("--transfer", choices=("file", "nccl"), default="file", help="nccl needs a second GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-smoke.json"))
    options = parser.parse_args(words)
    options.steps = options.steps.split(",")
    options.model = dict(word.partition("=")[::2] for word in options.model)
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"--steps: {', '.join(unknown)} is none of {', '.join(STEPS)}")
    if unknown := [word for word, place in options.model.items() if word not in KINDS or not Path(place).is_dir()]:
        parser.error(f"--model: {', '.join(unknown)}: give KIND=DIR, with KIND one of {', '.join(KINDS)}")
    return options


def make_models(options: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Given checkpoints, and random ones for the other kinds."""
    given = {kind: Path(place) for kind, place in options.model.items()}
    others = [kind for kind in KINDS if kind not in given]
    return given | {kind: make_model(kind, options.size, 0, scratch / kind) for kind in others}


def main(words: Sequence[str] | None = None) -> int:
    """See the module."""
    options = parse(words)
    if reason := why_no_gpu():
        print(f"no GPU here: {reason}. Nothing was run.", file=sys.stderr)
        return NO_GPU
    torch.backends.cudnn.allow_tf32 = False  # float32 is what the others are held against
    return run(options, torch.device("cuda"), torch.bfloat16)


def run(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> int:
    """The steps, the table and the JSON; the exit code."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as place:
        scratch = Path(place)
        setting = Setting(device, dtype, scratch, options.length, transfer=options.transfer)
        for outcome in run_all(setting, make_models(options, scratch), options.steps):
            show(outcome)
            outcomes.append(outcome)
    passed = all(outcome.holds for outcome in outcomes)
    steps = [asdict(outcome) | {"holds": outcome.holds} for outcome in outcomes]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"passed": passed, "machine": machine(device), "steps": steps}, indent=1) + "\n")
    print(f"\n{'every limit holds' if passed else 'NOT every limit holds'}; figures in {options.out}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
