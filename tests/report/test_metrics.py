"""Metrics by hand computation; metrics.jsonl across restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import LoggingConfig
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TrainGroup
from pipeline.report.measures import evaluation_metrics
from pipeline.report.metrics import MetricsLog, group_metrics, read_metrics, rollout_metrics

Make = Callable[..., RolloutRecord]
SILENT = LoggingConfig(wandb="disabled")


def test_rollout_metrics_by_hand(rollout: Make) -> None:
    records = [
        rollout("a", "pi", True, group="g1", reward=1.1, tool_calls=1, calls=4, malformed=1),
        rollout("a", "pi", False, group="g1", reward=0.0, tool_calls=3, calls=4),
        rollout("b", "codex", True, group="g2", reward=1.0, calls=2),
        rollout("b", "codex", True, group="g2", reward=1.0, calls=2),
        rollout("b", "codex", None, group="g2", calls=50, malformed=50, tool_calls=99),
    ]
    values = rollout_metrics(records)
    assert values["reward"] == pytest.approx(3.1 / 4)
    assert values["reward_std"] == pytest.approx((0.55 + 0.0) / 2)
    assert values["frac_reward_zero_std"] == 0.5
    assert values["pass_rate"] == 0.75
    assert values["ungraded_rate"] == pytest.approx(0.2)
    assert values["malformed_rate"] == pytest.approx(1 / 12)
    assert (values["pi/reward"], values["pi/pass_rate"], values["pi/tool_calls"]) == (pytest.approx(0.55), 0.5, 2.0)
    assert values["pi/malformed_rate"] == pytest.approx(1 / 8)
    assert (values["codex/pass_rate"], values["codex/tool_calls"], values["codex/malformed_rate"]) == (1.0, 1.0, 0.0)


def test_nothing_graded_gives_no_rates(rollout: Make) -> None:
    values = rollout_metrics([rollout(passed=None)])
    rates = {f"pi/{name}_rate": 0.0 for name in ("agent_timeout", "agent_crash", "call_budget", "loop_guard")}
    assert values == {"ungraded_rate": 1.0, "pi/infrastructure_rate": 1.0, **rates}
    assert rollout_metrics([]) == {}


def test_partial_credit_is_no_pass(rollout: Make) -> None:
    record = rollout(passed=True)
    half = record.__class__(**{**vars(record), "verdict": record.verdict.__class__(0.5, 0.5, 1)})
    assert rollout_metrics([half])["pass_rate"] == 0.0


def test_group_metrics_by_hand(rollout: Make) -> None:
    pi = TrainGroup("g1", "pi", (rollout(rows=(5, 5), version=3), rollout(rows=(10,), version=5)), (0.5, -0.5))
    codex = TrainGroup("g2", "codex", (rollout(harness="codex", rows=(60, 10, 10), version=4),), (0.0,))
    values = group_metrics([pi, codex], PolicyVersion(1, 5), [[0.03, 0.01], [0.005]])
    assert values["sample/staleness_mean"] == pytest.approx(1.0)
    assert (values["sample/staleness_min"], values["sample/staleness_max"]) == (0.0, 2.0)
    assert values["batch/groups_per_step"] == 2
    assert values["batch/samples_per_step"] == 6
    assert values["batch/rollouts_per_step"] == 3
    assert values["batch/trained_tokens_per_step"] == 100
    assert values["pi/rollout_share"] == pytest.approx(2 / 3)
    assert (values["pi/row_share"], values["pi/token_share"]) == (0.5, 0.2)
    # 0.03 · 10 + 0.01 · 10 against 0.005 · 80
    assert values["pi/loss_weight_share"] == values["codex/loss_weight_share"] == pytest.approx(0.5)
    assert (values["codex/rows_per_rollout"], values["pi/rows_per_rollout"]) == (3.0, 1.5)


def test_evaluation_metrics_by_hand(rollout: Make) -> None:
    records = [rollout("a"), rollout("b", passed=False), rollout("c", "codex"), rollout("d", passed=None)]
    values = evaluation_metrics(records, planned=6)
    assert values["eval/pass@1"] == pytest.approx(2 / 3)
    assert (values["eval/pi/pass@1"], values["eval/codex/pass@1"]) == (0.5, 1.0)
    assert values["eval/coverage"] == 0.5


def test_a_restarted_run_overwrites_what_it_repeats(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, SILENT) as metrics:
        metrics.log(0, {"eval/pass@1": 0.3})
        metrics.log(1, {"reward": 0.1})
        metrics.log(2, {"reward": 0.2, "kl": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"update": 3, "rew')
    with MetricsLog(tmp_path, SILENT) as metrics:
        metrics.log(2, {"reward": 0.25})
        metrics.log(2, {"eval/pass@1": 0.6})
    entries = [{name: value for name, value in entry.items() if name != "time"} for entry in read_metrics(tmp_path)]
    assert entries == [
        {"update": 0, "eval/pass@1": 0.3},
        {"update": 1, "reward": 0.1},
        {"update": 2, "reward": 0.25, "eval/pass@1": 0.6},
    ]


def test_outcomes_and_log_differences_by_harness(rollout: Make) -> None:
    ends = [Outcome.AGENT_TIMEOUT, Outcome.LOOP_GUARD, Outcome.LOOP_GUARD, Outcome.SOLVED]
    records = [replace(rollout(index=index), outcome=outcome) for index, outcome in enumerate(ends)]
    logs = [{"tool_calls_differ": True}, {"tool_calls_differ": False}, {}, {"tool_calls_differ": False}]
    records = [replace(record, info=info) for record, info in zip(records, logs, strict=True)]
    values = rollout_metrics([*records, rollout(harness="codex")])
    assert (values["pi/agent_timeout_rate"], values["pi/loop_guard_rate"]) == (0.25, 0.5)
    assert values["pi/tool_log_difference"] == pytest.approx(1 / 3), "of those that have a log"
    assert "codex/tool_log_difference" not in values
    assert evaluation_metrics(records)["eval/pi/tool_log_difference"] == pytest.approx(1 / 3)
