"""Made-up runs for the report's page, with text in them that would harm a page that did not escape it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from report_records import make_rollout

from pipeline.records import RolloutRecord, Row
from pipeline.report.page import PageRun
from pipeline.report.results import Meta, build_results, checkpoint_summary
from pipeline.report.rollout_view import view

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
HARNESSES = ("mini-swe-agent", "pi")

HARD = {"pass_rate": 0.25, "mean_reward": 0.3, "groups": 4, "no_contrast": 1, "abandoned": 0}


class EvilVocabulary:
    """Every token spells HTML."""

    def token(self, token_id: int) -> str:
        return EVIL if token_id % 7 == 0 else f"<b>{token_id}</b> "

    def text(self, ids: Any) -> str:
        return "".join(map(self.token, ids))


def row(parts: list[tuple[list[int], str]]) -> Row:
    """A row of (ids, kind): "read", "trained", or "sampled" for what an earlier row trains."""
    ids = [token for own, _ in parts for token in own]
    kinds = [kind for own, kind in parts for _ in own]
    return Row(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array([kind == "trained" for kind in kinds]),
        logprobs=np.array(
            [0.0 if kind == "read" else -0.1 * (1 + token % 60) for kind, token in zip(kinds, ids, strict=True)],
            np.float32,
        ),
    )


def forked() -> RolloutRecord:
    """Two calls in a chain, a third that forks after the first, and a history of its own."""
    first: list[tuple[list[int], str]] = [([1, 2, 3], "read"), ([4, 5, 6], "trained")]
    again = [first[0], (first[1][0], "sampled")]
    rows = (
        row([*first, ([7, 8], "read"), ([9, 10], "trained")]),
        row([*again, ([11], "read"), ([12, 13], "trained")]),
        row([([20, 21], "read"), ([22], "trained")]),
    )
    record = make_rollout("task-1", "pi", True, tool_calls=2)
    return replace(record, rows=rows, info={"cause": EVIL})


def evaluation(passes: dict[str, int], tasks: int, tool_calls: int) -> list[RolloutRecord]:
    """``passes[harness]`` of ``tasks`` tasks solved."""
    return [
        make_rollout(f"t{task}", harness, task < solved, tool_calls=tool_calls)
        for harness, solved in passes.items()
        for task in range(tasks)
    ]


def metrics(updates: int) -> list[dict[str, float]]:
    """Two harnesses that get better."""
    return [
        {"update": update, "reward": 0.1 * update, "sample/staleness_mean": 0.5, "sample/staleness_max": 1.0}
        | {"batch/rollouts_per_step": 32.0, "batch/samples_per_step": 40.0, "batch/trained_tokens_per_step": 900.0}
        | {"perf/trained_tok_s_wall_clock": 90.0 + update, "perf/step_s": 20.0, "perf/rollout_wait_s": 12.0}
        | {f"{name}/{key}": value for name in HARNESSES for key, value in _own(update).items()}
        for update in range(1, updates + 1)
    ]


def _own(update: int) -> dict[str, float]:
    shares = {"rollout_share": 0.5, "row_share": 0.5, "token_share": 0.5, "loss_weight_share": 0.5}
    return {"reward": 0.05 * update, "pass_rate": 0.04 * update, "tool_calls": 3.0, "malformed_rate": 0.02, **shares}


def page_run(name: str = "one", updates: int = 12) -> PageRun:
    """A whole one, whose text is evil wherever text from a run is shown."""
    before = evaluation({"pi": 4, "mini-swe-agent": 6}, 20, 4)
    after = evaluation({"pi": 12, "mini-swe-agent": 10}, 20, 3)
    planned = dict.fromkeys(HARNESSES, 20)
    middle = checkpoint_summary(
        "0001-000004-update-000006", 6, evaluation({"pi": 8, "mini-swe-agent": 8}, 20, 3), planned
    )
    meta = Meta(
        seed=0, rollouts=96, wall_s={"train": 60.0}, harness_versions={"pi": "1"}, set_aside={"vibe": EVIL}, planned=40
    )
    return PageRun(
        name=name,
        facts=[("Model", EVIL)],
        results=build_results(before, after, metrics(updates), meta, [middle]),
        metrics=metrics(updates),
        outcomes={"pi": {"solved": 40, "agent_timeout": 3}, "mini-swe-agent": {"solved": 30, "unsolved": 10}},
        causes=[("pi", EVIL, 3)],
        groups={"trained": 10, "skipped": 2},
        rollouts=[
            view(
                replace(forked(), rollout_id=f"r{place}", task_id=EVIL, index=place),
                EvilVocabulary(),
                [("Group", EVIL)],
            )
            for place in range(3)
        ]
        + [
            view(replace(forked(), rollout_id=own), EvilVocabulary(), [], f"the evaluation {own} training", twin)
            for own, twin in (("before", "after"), ("after", "before"))
        ],
        kept=83,
        comparisons=[("pi", EVIL)],
        difficulty={
            "update": 12,
            "tasks": {EVIL: {"pass_rate": 0.0}, "t": {"pass_rate": 0.5}},
            "harnesses": {EVIL: HARD},
        },
    )
