"""Stage sft: a model taught by a teacher's recordings, for RL to start from.

Recorded turns become rows once, in ``<run_dir>/sft``; TRL's trainer learns them on every rank; the model is exported to
``<run_dir>/model``. The same command goes on where a killed one was.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError, check_sft, check_training
from pipeline.hub import local_model
from pipeline.records import Row
from pipeline.report.bar import Bar
from pipeline.report.metrics import MetricsLog
from pipeline.report.store import write_json
from pipeline.report.wandb_log import check_wandb
from pipeline.stages.recording import read_rollouts, recordings_in
from pipeline.stages.sft_rows import RowRules, Rows, write_rows

ROWS, MADE_WITH, COUNTS = "rows.arrow", "made_with.json", "rows.json"
FREE = ("ranks", "checkpoint_every")  # of `sft`: may differ between two starts
ROWS_S = 6 * 3600.0  # that other ranks wait for the first to have made the rows


def run_sft(config: Config) -> int:
    """Make ``<run_dir>/model`` from recordings; nothing is done again. Raises UserError for a wrong setting."""
    out, place = model_path(config), Path(config.run_dir).absolute() / "sft"
    ranks = _ranks(config)
    _check(config, ranks)
    if _rank() == 0:
        _open(config, place, out)
        if out.exists():
            _say(f"the model is in {out}; fresh=true makes it again")
            return 0
        if not (place / COUNTS).exists():
            make_rows(config, place)
    _await_rows(place)
    if ranks > 1 and not _launched():
        _spawn(config, place, out, ranks)
    else:
        learn(config, place, out)
    if _rank() == 0:
        _say(f"the model is in {out}; RL starts from it: yoke train model.path={out} …")
    return 0


def model_path(config: Config) -> Path:
    """Where the model goes."""
    return Path(config.run_dir).absolute() / "model"


def make_rows(config: Config, place: Path) -> Counter[str]:
    """Write the rows of all recordings, and what became of the turns. Raises UserError when there is no row."""
    from transformers import AutoTokenizer, GenerationConfig

    source = local_model(config.model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        defaults = GenerationConfig.from_pretrained(source).eos_token_id if _has_defaults(source) else None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path={config.model.path} has no tokenizer that transformers reads: {error}") from error
    ends = [tokenizer.eos_token_id, *(defaults if isinstance(defaults, list) else [defaults])]
    rows = Rows(tokenizer, [end for end in ends if end is not None], rules(config))
    write_rows(place / ROWS, _all_rows(config, rows))
    if not rows.counts["rows"]:
        raise UserError(f"no row to learn from in {_data(config)}: {_told(rows.counts)}")
    write_json(place / COUNTS, dict(rows.counts))
    _say(f"{place / ROWS}: {_told(rows.counts)}")
    return rows.counts


def rules(config: Config) -> RowRules:
    """How a configuration makes rows of turns."""
    chosen = config.sft
    return RowRules(
        chosen.rows,
        config.model.max_model_len if chosen.max_length is None else chosen.max_length,
        chosen.reasoning,
        config.harness.sampling.thinking,
    )


def learn(config: Config, place: Path, out: Path) -> None:
    """Train on the rows in ``place`` and export to ``out``; collective over the ranks."""
    from pipeline.training.supervised import Supervised

    metrics = MetricsLog(place, config.logging, asdict(config), job="sft") if _rank() == 0 else None
    teller = _Teller(metrics, config.logging.progress)
    try:
        model = Supervised(
            config.model.path, place / ROWS, place, config.training, config.sft, config.seed, teller.step
        )
        model.train()
        model.export(out)
    finally:
        teller.close()


class _Teller:
    """Metrics of every step to the log, and a bar."""

    def __init__(self, metrics: MetricsLog | None, progress: bool) -> None:
        self._metrics, self._progress = metrics, progress
        self._bar: Bar | None = None
        self._done = 0

    def step(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        if self._bar is None:
            self._bar = Bar("sft", steps, self._progress)
            self._bar.__enter__()
        if self._metrics is not None:
            self._metrics.log(step, values)
        self._bar.advance(step - self._done, f"loss {values['sft/loss']:.4f}")
        self._done = step

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
        if self._metrics is not None:
            self._metrics.close()


def _all_rows(config: Config, rows: Rows) -> Iterator[Row]:
    told = time.monotonic()
    for path in recordings_in(_data(config)):
        for turns in read_rollouts(path):
            yield from rows.of_rollout(turns)
            if config.logging.progress and time.monotonic() - told > 10:
                told = time.monotonic()
                _say(f"{path.name}: {_told(rows.counts)}")


def _data(config: Config) -> Path:
    return Path(config.sft.data).expanduser() if config.sft.data else Path(config.run_dir).absolute() / "collect"


def _has_defaults(source: Path) -> bool:
    return (source / "generation_config.json").exists()


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items()) or "nothing"


def _open(config: Config, place: Path, out: Path) -> None:
    """Begin, or go on. Raises UserError when another start had other settings."""
    if config.fresh:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    wanted = _made_with(config)
    path = place / MADE_WITH
    if not path.exists():
        if out.exists():
            raise UserError(f"{out} is there, and `yoke sft` did not make it: choose another run_dir")
        place.mkdir(parents=True, exist_ok=True)
        write_json(path, wanted)
        return
    made = json.loads(path.read_text())
    differing = sorted(key for key in made.keys() | wanted.keys() if made.get(key) != wanted.get(key))
    if differing:
        raise UserError(f"{place} was begun with another {', '.join(differing)}: fresh=true starts over")


def _made_with(config: Config) -> dict[str, Any]:
    """What decides about the model, as JSON has it."""
    chosen = {f"sft.{key}": value for key, value in asdict(config.sft).items() if key not in FREE}
    optimiser = ("betas", "weight_decay", "max_grad_norm", "zero_stage", "offload")
    chosen |= {f"training.{key}": getattr(config.training, key) for key in optimiser}
    chosen |= {
        "model.path": config.model.path,
        "seed": config.seed,
        "ranks": _ranks(config),
        "rows": asdict(rules(config)),
    }
    chosen["data"] = [[path.name, path.stat().st_size] for path in recordings_in(_data(config))]
    found: dict[str, Any] = json.loads(json.dumps(chosen))
    return found


def _await_rows(place: Path) -> None:
    """Raises TimeoutError when the first rank has not made them in time."""
    deadline = time.monotonic() + ROWS_S
    while not (place / COUNTS).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank has not made {place / ROWS} within {ROWS_S:.0f} s")
        time.sleep(1.0)


def _ranks(config: Config) -> int:
    """Processes in all: as torchrun says, as the settings say, or one a GPU."""
    if given := _launched():
        return given
    if config.sft.ranks:
        return config.sft.ranks
    import torch

    return max(1, torch.cuda.device_count())


def _rank() -> int:
    return int(os.environ["RANK"]) if _launched() else 0


def _launched() -> int:
    """How many processes torchrun started, 0 if it did not: accelerate sets the variable too, to 1."""
    given = int(os.environ.get("WORLD_SIZE", "1"))
    return given if given > 1 else 0


def _spawn(config: Config, place: Path, out: Path, ranks: int) -> None:
    """Be the parent of this node's ranks. Raises RuntimeError when one fails; the others are then ended."""
    import torch.distributed as dist
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        start_processes(_be_rank, (config, place, out, ranks, store.port), ranks, start_method="spawn")
    except ProcessRaisedException as error:
        raise RuntimeError(f"a rank of yoke sft failed: {str(error).strip().splitlines()[-1]}") from error
    except ProcessExitedException as error:
        raise RuntimeError(f"a rank of yoke sft ended: {error}") from error


def _be_rank(rank: int, config: Config, place: Path, out: Path, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    from pipeline.training.distributed import join_group

    join_group(torch.cuda.is_available(), dist.TCPStore("127.0.0.1", port), rank, ranks)
    learn(config, place, out)


def _check(config: Config, ranks: int) -> None:
    check_training(config.training)
    check_sft(config.sft, ranks)
    check_wandb(config.logging, Path(config.run_dir).absolute() / "sft")
    if config.training.lora.rank is not None:
        raise UserError("yoke sft trains all weights: training.lora.rank must be null (adapters are for yoke train)")


def _say(text: str) -> None:
    print(text, flush=True)
