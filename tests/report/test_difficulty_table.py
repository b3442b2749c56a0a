"""The table of training tasks, from made-up figures."""

from __future__ import annotations

import io

from rich.console import Console

from pipeline.report.difficulty_table import print_difficulty, sentence


def figures(groups: int, rate: float | None, no_contrast: int = 0, abandoned: int = 0) -> dict[str, object]:
    return {
        "groups": groups, "rollouts": 8 * groups, "pass_rate": rate, "mean_reward": rate, "no_contrast": no_contrast,
        "abandoned": abandoned, "last_version": "1.2",
    }  # fmt: skip


def shown(found: dict[str, object]) -> list[str]:
    stream = io.StringIO()
    print_difficulty(found, Console(file=stream, width=120))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines() if line.strip()]


def test_a_row_a_harness_and_a_sentence_about_tasks() -> None:
    rates = [0.0, 0.0, 0.5, 1.0, None]
    found = {
        "update": 7,
        "harnesses": {"codex": figures(4, 0.25, 1), "pi": figures(0, None, 0, 2)},
        "tasks": {f"t{number}": figures(1, rate) for number, rate in enumerate(rates)},
    }
    lines = shown(found)
    assert "codex 4 25.0% 0.250 25% 0" in lines and "pi 0 – – – 2" in lines
    assert lines[-1] == sentence(found)
    assert sentence(found) == "Of 5 training tasks up to update 7, no rollout solved 2 and every rollout solved 1."


def test_nothing_before_the_first_group() -> None:
    assert shown({"update": 0, "harnesses": {}, "tasks": {}}) == []
