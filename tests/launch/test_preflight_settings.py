"""Settings that pass each by itself and would stall a run, or spoil it, together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preflight_helpers import assert_refused, composed, outcome, settings

from pipeline.capture import delivery
from pipeline.config import Config
from pipeline.launch import preflight_settings
from pipeline.launch.preflight_check import Grounds
from pipeline.launch.preflight_settings import BUDGETS
from pipeline.report.store import write_json

REFUSED = {
    "budgets": [
        (["engine.extra_args=[--max-model-len=4096]"], "--max-model-len, of which only vLLM would know; set model.max"),
        (["engine.extra_args=[--max_num_seqs,2]"], "--max-num-seqs, of which only vLLM would know"),
        (["engine.extra_args=[--logprobs-mode=raw_logprobs]"], "--logprobs-mode"),
    ],
    "groups": [
        (["algorithm.group_size=128"], "group_size=128 is larger than algorithm.max_outstanding_rollouts=96"),
        (["algorithm.groups_per_update=13"], "13 groups of 8 = 104 rollouts"),
        (["engine.max_num_seqs=3"], "max_num_seqs=3 is below concurrency=4"),
        (["algorithm.max_outstanding_rollouts=1000"], "algorithm.max_staleness=2 would drop it"),
        (["algorithm.refill_factor=-1"], "refill_factor=-1 is negative"),
    ],
    "context": [
        (["model.max_model_len=64"], "max_tokens=64 leaves no room for a prompt in model.max_model_len=64"),
        (["model.max_model_len=100000"], "the model knows 65536 positions"),
        (["harness.sampling.max_session_tokens=64"], "max_session_tokens=64 ends a session with its first call"),
    ],
    "waits": [
        (["harness.timeout_s=900"], "a group of 8 may take 1800 s (harness.timeout_s=900, concurrency=4)"),
        (["algorithm.stale_wait_s=1800"], "algorithm.stale_wait_s=1800 must be"),
        (["algorithm.stale_wait_s=-1"], "algorithm.stale_wait_s=-1 must be"),
        (["engine.sync_timeout_s=300"], "engine.request_timeout_s=300 ends it"),
        (["mix.harnesses=[openhands]", "engine.request_timeout_s=301"], "openhands gives an answer up after 300 s"),
        (
            ["cluster.name=slurm", "cluster.timeout_min=9"],
            "cluster.timeout_min=9 less cluster.signal_s=120 is",
        ),
        (
            ["cluster.name=slurm", "evaluation.every=1", "evaluation.cluster={timeout_min: 8}"],
            "evaluation.cluster.timeout_min=8 less cluster.signal_s=120 is shorter than",
        ),
    ],
}
PASSING = {
    "budgets": [["engine.extra_args=[--gpu-memory-utilization=0.85]"]],
    "groups": [
        ["algorithm.group_size=96", "algorithm.groups_per_update=1"],
        ["engine.max_num_seqs=4"],
        ["algorithm.max_outstanding_rollouts=1000", "training.updates=3"],  # all of it is trained before it is too old
    ],
    "context": [["model.max_model_len=65"], ["model.max_model_len=65536"]],
    "waits": [
        ["harness.timeout_s=899"],
        ["engine.sync_timeout_s=299"],
        ["mix.harnesses=[openhands]"],
        ["cluster.name=slurm", "cluster.timeout_min=10"],
        ["cluster.name=slurm", "evaluation.cluster={timeout_min: 8}"],
    ],
}


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No harness was checked on this machine. Returns where the results would lie."""
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    preflight_settings._measured.cache_clear()
    return tmp_path / "home" / "harness-check.json"


def rows(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, row, id=f"{name}-{index}") for name in table for index, row in enumerate(table[name])]


@pytest.mark.parametrize(("name", "row"), rows(REFUSED))
def test_what_is_refused(name: str, row: tuple[list[str], str]) -> None:
    assert_refused(outcome(name, Grounds(settings(*row[0]))), row[1])


@pytest.mark.parametrize(("name", "words"), [*rows(PASSING), *((name, []) for name in PASSING)])
def test_what_passes(name: str, words: list[str]) -> None:
    result = outcome(name, Grounds(settings(*words)))
    assert result.result == "ok", result


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=smoke"],
        ["+experiment=warm_start"],
        ["+experiment=four_harness"],
        ["+experiment=quickstart", "mix=ten"],
    ],
    ids=" ".join,
)
def test_what_comes_along_passes(words: list[str]) -> None:
    grounds = Grounds(composed(*words))
    assert {name: outcome(name, grounds).result for name in REFUSED} == dict.fromkeys(REFUSED, "ok")


CHANGES: dict[str, Callable[[Config], Config]] = {
    "engine.request_timeout_s": lambda config: replace(config, engine=replace(config.engine, request_timeout_s=301.0)),
    "harness.timeout_s": lambda config: replace(config, harness=replace(config.harness, timeout_s=121.0)),
    "model.max_model_len": lambda config: replace(config, model=replace(config.model, max_model_len=4096)),
    **{
        f"harness.sampling.{key}": lambda config, key=key: replace(
            config, harness=replace(config.harness, sampling=replace(config.harness.sampling, **{key: 9}))
        )
        for key in ("max_tokens", "max_calls", "max_session_tokens", "max_wall_s", "max_concurrent")
    },
}


def test_every_budget_is_compared() -> None:
    assert CHANGES.keys() == BUDGETS.keys()


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_evaluation_jobs_with_another_budget_are_refused(name: str) -> None:
    config = settings()
    assert outcome("budgets", Grounds(config, made_with=config)).result == "ok"
    result = outcome("budgets", Grounds(config, made_with=CHANGES[name](config)))
    assert_refused(result, f"{name} is {BUDGETS[name](config)} in training, ")


def test_a_flag_in_the_evaluation_jobs_alone_is_refused() -> None:
    config, made_with = settings(), settings("engine.extra_args=[--dtype=half]")
    assert_refused(outcome("budgets", Grounds(config, made_with=made_with)), "--dtype")


def test_a_prompt_that_was_measured_must_fit(unmeasured: Path) -> None:
    scenes = {"real vLLM": {"prompt_tokens": 10_000}}
    write_json(unmeasured, {"codex": {"scenes": scenes}})
    words = ["mix.harnesses=[pi,codex]", "model.max_model_len=4064"]
    assert outcome("context", Grounds(settings(*words))).result == "ok"
    result = outcome("context", Grounds(settings(*words[:1], "model.max_model_len=4063")))
    assert_refused(result, "codex's first prompt takes at least 4000 tokens")


def test_headers_must_come_before_a_harness_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("mix.harnesses=[gemini-cli]")
    assert outcome("waits", Grounds(config)).result == "ok"
    monkeypatch.setattr(delivery, "HEADERS_AFTER_S", 60.0)
    assert_refused(outcome("waits", Grounds(config)), "gemini-cli gives up after 60 s without headers")
    assert outcome("waits", Grounds(settings())).result == "ok"
