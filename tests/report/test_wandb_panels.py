"""W&B's workspace: every panel's metric is one that runs have, and the definition in docs/ is the one that is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.launch.trainer_rank import sync_metrics
from pipeline.records import RolloutRecord
from pipeline.report import wandb_panels
from pipeline.report.measures import evaluation_metrics
from pipeline.report.metrics import rollout_metrics
from pipeline.report.wandb_panels import OWN, SHARED, definition, missing, sections

FOUR = ["opencode", "claude-code", "codex", "mini-swe-agent"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "wandb-workspace.json"


def test_a_metric_that_no_run_has_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [{name: 0.0} for _, panels in sections(["pi"]) for _, own in panels for name in own]
    assert missing(["pi"], names) == []
    assert missing(["pi"], names[1:]) == [next(iter(names[0]))]
    assert missing(["pi", "codex"], names), "those of a harness that did not run"
    wrong = {**SHARED, "Learning": (wandb_panels.Panel("Loss", ("los",)),)}
    monkeypatch.setattr(wandb_panels, "SHARED", wrong)
    assert missing(["pi"], names) == ["los"]


def test_rewards_outcomes_and_evaluations_are_named_as_they_are_logged(rollout: Callable[..., RolloutRecord]) -> None:
    """The whole is held against a trained run in tests/launch/test_quickstart.py."""
    logged = {**rollout_metrics([rollout()]), **evaluation_metrics([replace(rollout(), info={"cut": 0})])}
    families = ("eval/", "pi/", "reward", "pass_rate", "ungraded")
    shares = {f"pi/{what}_share" for what in ("rollout", "row", "token", "loss_weight")}
    wrong = [name for name in missing(["pi"], [logged]) if name.startswith(families) and name not in shares]
    assert wrong == []
    assert sync_metrics.__doc__ and "perf/weight_sync_s" in {n for panel in SHARED["Throughput"] for n in panel.metrics}


def test_every_harness_has_a_section_of_its_own() -> None:
    made = dict(sections(["pi", "codex"]))
    assert list(made)[-2:] == ["pi", "codex"]
    assert [names for _, names in made["codex"]][1] == ["codex/reward"]
    assert len(made["pi"]) == len(OWN)
    (panel,) = (names for panel, names in made["Held-out tasks"] if panel.title.startswith("pass@1"))
    assert panel == ["eval/pass@1", "eval/pi/pass@1", "eval/codex/pass@1"]


def test_the_definition_in_docs_is_the_one_that_is_made() -> None:
    kept = json.loads(DOCUMENT.read_text())
    assert kept == definition(FOUR), "yoke wandb workspace --json mix=four > docs/wandb-workspace.json"
    shown = kept["section"]["panelBankConfig"]["sections"]
    plots = [panel["config"] for section in shown for panel in section["panels"] if "metrics" in panel["config"]]
    assert [plot["metrics"] for plot in plots] == [names for _, panels in sections(FOUR) for _, names in panels]
    assert {plot["xAxis"] for plot in plots} == {"update"}


def test_wandb_takes_the_definition() -> None:
    from wandb_workspaces.workspaces.internal import WorkspaceViewspec

    spec = WorkspaceViewspec.model_validate_json(DOCUMENT.read_text())
    assert [section.name for section in spec.section.panel_bank_config.sections] == [*SHARED, *FOUR, "Rollouts"]
