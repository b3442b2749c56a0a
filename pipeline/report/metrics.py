"""Metrics of a run: what they are (one function a family), metrics.jsonl in the run directory, and W&B beside it
(wandb_log.py).

Names are those of TRL and prime-rl where the meaning is the same, so that runs can be laid side by side.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from pipeline.config import LoggingConfig
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TrainGroup
from pipeline.report.store import append_jsonl, point, read_jsonl, write_text
from pipeline.report.wandb_log import WandbLog

METRICS_FILE = "metrics.jsonl"
EQUAL = 1e-9
FAILURES = tuple(outcome for outcome in Outcome if outcome not in (Outcome.SOLVED, Outcome.UNSOLVED))


def graded(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """The rollouts whose verifier spoke."""
    return [record for record in records if record.verdict.correctness is not None]


def solved(record: RolloutRecord) -> bool:
    """Whether the verifier gave full marks. Raises ValueError on an ungraded rollout."""
    if record.verdict.correctness is None:
        raise ValueError(f"rollout {record.rollout_id} is ungraded")
    return record.verdict.correctness >= 1.0 - EQUAL


def pass_rate(records: Iterable[RolloutRecord]) -> float | None:
    """The share of graded rollouts that solved their task; None when none is graded."""
    return _mean(float(solved(record)) for record in graded(records))


def mean_tool_calls(records: Iterable[RolloutRecord]) -> float | None:
    """Well-formed tool calls a graded rollout."""
    return _mean(record.verdict.tool_calls for record in graded(records))


def malformed_rate(records: Iterable[RolloutRecord]) -> float | None:
    """The share of model calls whose answer held a malformed tool call, over graded rollouts."""
    known = graded(records)
    calls = sum(record.calls for record in known)
    return sum(record.malformed for record in known) / calls if calls else None


def log_difference(records: Iterable[RolloutRecord]) -> float | None:
    """The share of graded rollouts whose tool calls are not those of the harness's own log; None without a log."""
    known = (record.info.get("tool_calls_differ") for record in graded(records))
    return _mean(float(differs) for differs in known if differs is not None)


def by_harness(records: Iterable[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    """Rollouts by harness, harnesses sorted."""
    parts: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        parts[record.harness].append(record)
    return dict(sorted(parts.items()))


def rollout_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Reward and outcome of every closed group since the last update, those without contrast too; then by harness."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.verdict.reward is not None:
            groups[record.group_id].append(record.verdict.reward)
    rewards = [reward for own in groups.values() for reward in own]
    values: dict[str, float | None] = {
        "reward": _mean(rewards),
        "reward_std": _mean(pstdev(own) for own in groups.values()),
        "frac_reward_zero_std": _mean(float(max(own) - min(own) <= EQUAL) for own in groups.values()),
        "pass_rate": pass_rate(records),
        "tool_calls": mean_tool_calls(records),
        "malformed_rate": malformed_rate(records),
        "ungraded_rate": _mean(float(record.verdict.correctness is None) for record in records),
        "reward_failed_rate": _mean(float("reward_failed" in record.info) for record in graded(records)),
    }
    for harness, own in by_harness(records).items():
        values |= {f"{harness}/{name}": value for name, value in _harness_values(own).items()}
    return _known(values)


def group_metrics(
    groups: Sequence[TrainGroup], version: PolicyVersion, weights: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Size and age of what one update trains on, and each harness's share. ``version``: the weights being updated;
    ``weights``: of one trained token, [group][rollout], as the loss has them.
    """
    rollouts = [record for group in groups for record in group.rollouts]
    ages = [version.n - record.version.n for record in rollouts]
    rows, tokens = _rows(rollouts), _tokens(rollouts)
    loss = _loss_weights(groups, weights)
    whole = sum(loss.values())
    values: dict[str, float | None] = {
        "sample/staleness_min": min(ages, default=None),
        "sample/staleness_mean": _mean(ages),
        "sample/staleness_max": max(ages, default=None),
        "batch/groups_per_step": len(groups),
        "batch/samples_per_step": rows,
        "batch/rollouts_per_step": len(rollouts),
        "batch/trained_tokens_per_step": tokens,
    }
    for harness, own in by_harness(rollouts).items():
        values |= {
            f"{harness}/rollout_share": len(own) / len(rollouts),
            f"{harness}/row_share": _rows(own) / rows if rows else None,
            f"{harness}/token_share": _tokens(own) / tokens if tokens else None,
            f"{harness}/loss_weight_share": loss[harness] / whole if whole else None,
            f"{harness}/rows_per_rollout": _rows(own) / len(own),
        }
    return _known(values)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One entry an update, in order. What was logged again counts as logged last.

    Each attempt writes a file of its own, which begins with the history that it resumed from; the newest counts, so
    neither what a dead attempt had beyond its checkpoint nor what its ghost adds is seen.
    """
    return _merged(_newest_file(run_dir))


def begin_metrics(run_dir: Path, place: Path, source: int | None, update: int) -> None:
    """Begin an attempt's file at ``place``: the history up to ``update`` of attempt ``source``, whose checkpoint it
    resumes from (None: it starts afresh). The run's metrics.jsonl becomes a link to it.
    """
    of_source = run_dir / "attempts" / f"{source:04d}" / METRICS_FILE if source else None
    known = of_source if of_source is not None and of_source.exists() else run_dir / METRICS_FILE
    history = _merged(known) if source is not None else []
    write_text(place, "".join(json.dumps(entry) + "\n" for entry in history if entry["update"] <= update))
    point(run_dir / METRICS_FILE, place.relative_to(run_dir))


def _newest_file(run_dir: Path) -> Path:
    return max(run_dir.glob(f"attempts/*/{METRICS_FILE}"), default=run_dir / METRICS_FILE)


def _merged(path: Path) -> list[dict[str, Any]]:
    merged: dict[int, dict[str, Any]] = {}
    for entry in read_jsonl(path):
        merged.setdefault(entry["update"], {}).update(entry)
    return [merged[update] for update in sorted(merged)]


class MetricsLog:
    """The one writer of metrics.jsonl, with W&B as a mirror that may fail without stopping the run."""

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        settings: Mapping[str, Any] | None = None,
        place: Path | None = None,
        append: Callable[[Path, dict[str, Any]], object] = append_jsonl,
        job: str = "train",
    ) -> None:
        """``settings`` is the composed configuration, for W&B's run page; ``place`` the file, METRICS_FILE in
        ``run_dir`` by default; ``append`` adds a line to it, at once or later; ``job``: as W&B shall call it.
        """
        self._path, self._append = place or run_dir / METRICS_FILE, append
        self._wandb: WandbLog | None = None
        if config.wandb != "disabled":
            self._wandb = WandbLog(run_dir, config, settings or {}, lambda: _merged(self._path), job)

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an update (0: before the first). The file leaves out values that are not finite."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._append(self._path, {"update": update, "time": time.time(), **finite})
        if self._wandb:
            self._wandb.log(update, metrics)

    def rollouts(self, update: int, label: str, read: Callable[[], Iterable[RolloutRecord]]) -> None:
        """Show some rollouts of the evaluation ``label`` on W&B; ``read`` is called later, if at all."""
        if self._wandb:
            self._wandb.rollouts(update, label, read)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Put the closing figures on W&B's run page."""
        if self._wandb:
            self._wandb.summary(values)

    def close(self) -> None:
        """Let W&B finish, for a while. metrics.jsonl needs no closing."""
        if self._wandb:
            self._wandb.close()
            self._wandb = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _harness_values(own: Sequence[RolloutRecord]) -> dict[str, float | None]:
    return {
        "reward": _mean(record.verdict.reward for record in own if record.verdict.reward is not None),
        "pass_rate": pass_rate(own),
        "tool_calls": mean_tool_calls(own),
        "malformed_rate": malformed_rate(own),
        "turns": _mean(record.calls for record in graded(own)),
        "rollout_s": _mean(record.wall_s for record in graded(own)),
        "tool_log_difference": log_difference(own),
        **{f"{outcome}_rate": _mean(float(record.outcome is outcome) for record in own) for outcome in FAILURES},
    }


def _loss_weights(groups: Sequence[TrainGroup], weights: Sequence[Sequence[float]]) -> dict[str, float]:
    """What all trained tokens of a harness weigh together."""
    sums: dict[str, float] = defaultdict(float)
    for group, own in zip(groups, weights, strict=True):
        sums[group.harness] += sum(w * _tokens([record]) for w, record in zip(own, group.rollouts, strict=True))
    return sums


def _rows(records: Iterable[RolloutRecord]) -> int:
    return sum(len(record.rows) for record in records)


def _tokens(records: Iterable[RolloutRecord]) -> int:
    return sum(row.trained_tokens for record in records for row in record.rows)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
