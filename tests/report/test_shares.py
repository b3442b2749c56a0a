"""Shares over a run by hand."""

from __future__ import annotations

import pytest

from pipeline.report.shares import harness_shares


def test_shares_weigh_updates_by_what_they_held_and_the_loss_by_update() -> None:
    metrics = [
        {
            "update": 1,
            "batch/rollouts_per_step": 8.0,
            "batch/trained_tokens_per_step": 100.0,
            **{"pi/rollout_share": 1.0, "pi/token_share": 1.0, "pi/loss_weight_share": 1.0},
        },
        {
            "update": 2,
            "batch/rollouts_per_step": 8.0,
            "batch/trained_tokens_per_step": 300.0,
            **{"pi/rollout_share": 0.5, "pi/token_share": 0.2, "pi/loss_weight_share": 0.4},
            **{"codex/rollout_share": 0.5, "codex/token_share": 0.8, "codex/loss_weight_share": 0.6},
        },
        {"update": 3, "reward": 0.1},
    ]
    found = harness_shares(metrics)
    assert list(found) == ["codex", "pi"]
    assert found["pi"] == pytest.approx({"rollouts": 0.75, "tokens": 0.4, "loss weight": 0.7})
    assert found["codex"] == pytest.approx({"rollouts": 0.25, "tokens": 0.6, "loss weight": 0.3})


def test_a_run_without_updates_has_no_shares() -> None:
    assert harness_shares([]) == {} and harness_shares([{"update": 0, "eval/pass@1": 0.5}]) == {}
