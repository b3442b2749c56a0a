"""Every experiment composes and passes the checks of its settings, and docs/experiments.md says in what they differ."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from preflight_helpers import composed, outcome

from pipeline.cli import CONFIG_DIR
from pipeline.config import Config, check_algorithm, check_curriculum, check_sft, check_training
from pipeline.harness.base import get_harness
from pipeline.launch import preflight
from pipeline.launch.preflight_check import CONFIG, Grounds
from pipeline.launch.preflight_table import chosen

DOCS = CONFIG_DIR.parent / "docs" / "experiments.md"
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
REAL = [name for name in EXPERIMENTS if name not in ("quickstart", "smoke", "warm_start")]
PAIRS = [name for name in EXPERIMENTS if f"{name}_parity" in EXPERIMENTS]
OWN_NAME = ("experiment", "run_dir")


@cache
def experiment(name: str) -> Config:
    return composed(f"+experiment={name}")


def with_dummy_model(name: str, place: Path) -> Config:
    """With a directory that holds what a model's configuration says, and no weights."""
    config = experiment(name)
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"max_position_embeddings": config.model.max_model_len}))
    return replace(config, model=replace(config.model, path=str(place)), run_dir=str(place.parent / "run"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_opens_with_its_command_and_stands_for_itself(name: str) -> None:
    lines = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert re.match(rf"# yoke (train|sft|import|warm_start) .*\+experiment={name}( |$)", lines[1]), lines[1]
    config = experiment(name)
    assert (config.experiment, config.run_dir) == (name, f"runs/{name}")


@pytest.mark.parametrize("name", REAL)
def test_what_it_costs_and_gives_is_said_and_how_it_is_known(name: str) -> None:
    text = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()
    (cost,) = re.findall(r"^# Cost: (.*)", text, re.M)
    assert re.search(r"\d h\b|h of updates", cost) and re.search("published|estimated", cost), cost
    assert "pass@1" in text or "no number to expect" in text
    assert f"`{name}`" in DOCS.read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_passes_the_checks_of_settings(name: str, tmp_path: Path) -> None:
    config = with_dummy_model(name, tmp_path / "model")
    preflight._check_numbers(config)
    preflight._check_names(config)
    preflight._check_model(config)
    preflight._check_cluster(config.cluster)
    check_algorithm(config.algorithm)
    check_training(config.training)
    check_curriculum(config.curriculum)
    check_sft(config.sft, 1)
    checks = [check.name for check in chosen((CONFIG,)) if check.name not in ("settings", "disk")]
    results = {name: outcome(name, Grounds(config)) for name in checks}
    assert {name: result.result for name, result in results.items()} == dict.fromkeys(checks, "ok"), results


@pytest.mark.parametrize("name", REAL)
def test_a_model_of_the_hub_is_pinned_to_one_commit(name: str) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", experiment(name).model.path)


# --- ours and the reference's


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {key: item for name in value for key, item in flat(value[name], f"{prefix}.{name}".strip(".")).items()}


def differences(name: str) -> dict[str, tuple[str, str]]:
    """Setting → (ours, the reference's), as the tables have them."""
    ours, reference = (flat(asdict(experiment(which))) for which in (name, f"{name}_parity"))
    return {
        key: (str(ours[key]), str(reference[key]))
        for key in ours
        if ours[key] != reference[key] and key not in OWN_NAME
    }


def tables() -> list[dict[str, tuple[str, str]]]:
    """The two tables of docs/experiments.md: for all, and for Qwen also."""
    found: list[dict[str, tuple[str, str]]] = []
    for line in DOCS.read_text().splitlines():
        if line.startswith("| setting |"):
            found.append({})
        elif row := re.fullmatch(r"\| `([\w.]+)` \| `(.*?)` \| `(.*?)` \| (.+) \|", line):
            assert len(row[4]) > 10, "a reason"
            found[-1][row[1]] = (row[2], row[3])
    return found


def test_the_table_says_all_in_which_they_differ() -> None:
    for_all, qwen = tables()
    assert PAIRS == ["four_harness", "opencode_only", "qwen_four_harness"]
    assert differences("four_harness") == differences("opencode_only") == for_all
    assert differences("qwen_four_harness") == for_all | qwen


def test_training_and_evaluation_have_one_budget() -> None:
    for name in ("four_harness", "opencode_only", "qwen_four_harness"):
        assert experiment(name).harness.sampling.max_tokens == 4096


def test_the_versions_of_the_harnesses_are_those_that_are_locked() -> None:
    said = dict(re.findall(r"^\| ([\w-]+) \| [\d.]+ \| ([\d.]+) \|", DOCS.read_text(), re.M))
    assert said == {name: get_harness(name).version for name in experiment("four_harness").mix.harnesses}


def test_the_ablation_sweeps_over_aggregations_only() -> None:
    ours, base = (flat(asdict(experiment(name))) for name in ("ablation_loss", "four_harness"))
    changed = {key for key in ours if ours[key] != base[key]}
    assert changed == {*OWN_NAME, "training.updates"}
