"""`yoke report`: the page of a run from its directory, of two runs side by side, and what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_helpers import made, settings

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.launch import jobs, reporting
from pipeline.launch.report_page import (
    PAIRS,
    STAGES,
    TrainedGroups,
    choose,
    evaluated_views,
    find_vocabulary,
    reward_parts,
)
from pipeline.launch.reporting import compare
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.report.rollout_view import NoVocabulary
from pipeline.report.store import append_jsonl, write_group
from pipeline.report.table import against_sentences
from pipeline.stages.evaluation import INCOMPLETE


def rollout(task: str, harness: str, passed: bool, index: int = 0, **changes: Any) -> RolloutRecord:
    record = RolloutRecord(
        rollout_id=f"{task}-{harness}-{index}",
        group_id="g000000",
        index=index,
        task_id=task,
        harness=harness,
        outcome=Outcome.SOLVED if passed else Outcome.UNSOLVED,
        verdict=Verdict(None, float(passed), 5),
        rows=(Row(np.arange(4, dtype=np.int32), np.arange(4) > 1, np.array([0, 0, -1, -2], np.float32)),),
        version=PolicyVersion(1, 0),
        newest_version=PolicyVersion(1, 0),
        calls=1,
        malformed=0,
        undelivered=0,
        prompt_tokens=2,
        sampled_tokens=2,
        wall_s=1.0,
        info={"harness_version": "1"},
    )
    return replace(record, **changes)


def run_of(config: Config, after: dict[str, int]) -> RunDirectory:
    """Two tasks twice in each harness before (none solved) and after (so many solved), one group trained."""
    run = made(config, ())
    for label, solved in (("before", {"pi": 0, "codex": 0}), ("after", after)):
        for harness, right in solved.items():
            for place in range(4):
                own = rollout(f"t{place // 2}", harness, place < right, place % 2)
                own = replace(own, rollout_id=f"{label}-{harness}-{place}", group_id=f"{harness}-{place}")
                write_group(run.evaluation(label) / f"{harness}-{place}.parquet", [own])
    attempt = run.attempt(1)
    write_group(attempt.groups / "g000000.parquet", [rollout("a", "pi", index < 2, index) for index in range(4)])
    append_jsonl(attempt.ledger, {"t": 1.0, "group": "g000000", "what": "admitted", "reason": "1.0"})
    append_jsonl(attempt.ledger, {"t": 2.0, "group": "g000000", "what": "trained", "reason": "update 0"})
    append_jsonl(run.metrics, {"update": 1, "time": 3.0, "reward": 0.3, "pi/reward": 0.3})
    return run


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing curve.png takes longest, and tests of its own hold it."""
    monkeypatch.setattr(reporting, "draw_curve", lambda *_: None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path / "run")


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_shows_rewards_advantages_and_what_became_of_the_group(config: Config) -> None:
    run = run_of(config, {"pi": 4, "codex": 2})
    assert jobs.report(compose_config([]), [str(run.root)]) == 0
    data = data_of(run.report / "index.html")
    trained = [own for own in data["rollouts"] if own["stage"] == "training"]
    assert len(trained) == 4
    solved, _ = (own for own in trained if own["outcome"] == "solved")
    facts = dict(solved["facts"])
    assert (solved["reward"], facts["Reward"]) == ("1.075", "1.0750")
    assert facts["Its parts"].startswith("1.0750 by pipeline.stages.advantage:default_reward (correctness 1, tool ca")
    assert facts["Advantage"] == "+0.5375; the 4 graded of its group have 0.5375 on average"
    assert facts["Group"] == "g000000: trained, update 0"
    assert solved["calls"][0]["ids"] == [2, 3] and solved["calls"][0]["logprobs"] == [-1.0, -2.0]
    assert "4 of 4 kept training rollouts" in (run.report / "index.html").read_text()


def test_the_page_shows_the_same_tasks_before_and_after(config: Config) -> None:
    run = run_of(config, {"pi": 4, "codex": 2})
    views = list(evaluated_views(run, NoVocabulary()))
    assert len(views) == 16 and all(own["calls"] for own in views), "eight pairs, with their tokens"
    known = {own["id"]: own for own in views}
    kinds = set()
    for own in views:
        twin = known[own["twin"]]
        assert (twin["task"], twin["harness"], twin["index"]) == (own["task"], own["harness"], own["index"])
        assert twin["twin"] == own["id"] and {twin["stage"], own["stage"]} == set(STAGES.values())
        if own["stage"] == STAGES["before"]:
            kinds.add((own["harness"], own["outcome"], twin["outcome"]))
    assert kinds == {("pi", "unsolved", "solved"), ("codex", "unsolved", "solved"), ("codex", "unsolved", "unsolved")}


def test_an_evaluation_alone_is_shown_without_twins(config: Config) -> None:
    run = run_of(config, {})
    views = list(evaluated_views(run, NoVocabulary()))
    assert len(views) == PAIRS and {(own["stage"], own["twin"]) for own in views} == {(STAGES["before"], None)}
    assert list(evaluated_views(made(replace(config, run_dir=f"{config.run_dir}-2"), ()), NoVocabulary())) == []


def test_stdout_holds_json_or_markdown_and_nothing_else(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(config, {"pi": 4, "codex": 2})
    assert jobs.report(compose_config([]), [str(run.root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(run.results.read_text()) and printed["after"]["pass@1"] == 0.75
    jobs.report(compose_config([]), ["--md", str(run.root)])
    assert capsys.readouterr().out.strip() == (run.report / "table.md").read_text().strip()
    assert "- pi: +100.0 points, n = 2 pairs (every task changed alike" in (run.report / "table.md").read_text()


def test_two_runs_side_by_side(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_of(config, {"pi": 4, "codex": 2})
    other = run_of(replace(config, run_dir=str(tmp_path / "other")), {"pi": 2, "codex": 2})
    assert jobs.report(compose_config([]), [str(first.root), str(other.root)]) == 0
    shown = capsys.readouterr().out
    assert "- other against run, pi: -50.0 points, 95% interval" in shown
    page = first.report / "compare.html"
    assert "<h3>run</h3>" in page.read_text() and "<h3>other</h3>" in page.read_text()
    assert len(data_of(page)["rollouts"]) == 2 * len(data_of(other.report / "index.html")["rollouts"]) == 2 * (4 + 16)
    jobs.report(compose_config([]), [str(first.root), str(other.root), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["runs"]) == ["run", "other"] and list(printed["compared"]["other"]) == ["codex", "pi", "all"]


def test_runs_of_the_same_name_are_told_apart(config: Config, tmp_path: Path) -> None:
    first = run_of(config, {"pi": 4})
    second = run_of(replace(config, run_dir=str(tmp_path / "again" / "run")), {"pi": 4})
    assert jobs.report(compose_config([]), [str(first.root), str(second.root)]) == INCOMPLETE
    assert str(tmp_path / "again" / "run") in (first.report / "compare.html").read_text()


def test_a_comparison_needs_common_cells(config: Config, tmp_path: Path) -> None:
    first = run_of(config, {"pi": 4})
    other = run_of(replace(config, run_dir=str(tmp_path / "other")), {"codex": 2})
    assert list(against_sentences(compare(first, other))) == [
        ("all", "not told before every rollout of both is graded.")
    ]
    nothing = made(replace(config, run_dir=str(tmp_path / "nothing")), ())
    assert list(against_sentences(compare(first, nothing))) == []


@pytest.mark.parametrize("words", [["--html"], ["--json", "--md"]])
def test_wrong_words(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"yoke report RUN… \[--json \| --md\]"):
        jobs.report(compose_config([]), ["somewhere", *words])


def test_a_sweep_goes_alone(config: Config, tmp_path: Path) -> None:
    (tmp_path / "sweep-x").mkdir()
    (tmp_path / "sweep-x" / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="a sweep by itself"):
        jobs.report(compose_config([]), [str(tmp_path / "sweep-x"), str(tmp_path / "run")])


def test_a_run_of_another_version_is_refused_in_one_line(config: Config) -> None:
    run = run_of(config, {"pi": 4})
    run.config.write_text(run.config.read_text() + "brand_new: 1\n")
    with pytest.raises(UserError, match=r"config\.yaml was written by another version of Yoke: .*brand_new"):
        run.saved_config()


def test_of_two_attempts_the_newer_group_and_the_last_ending_count(config: Config) -> None:
    run = run_of(config, {"pi": 4})
    newer = run.new_attempt()
    write_group(newer.groups / "g000000.parquet", [rollout("a", "pi", False, index) for index in range(3)])
    append_jsonl(newer.ledger, {"t": 9.0, "group": "g000000", "what": "skipped", "reason": "no contrast"})
    groups = TrainedGroups(config, run)
    assert [record.outcome for _, record in groups.figures] == [Outcome.UNSOLVED] * 3
    assert groups.endings["g000000"]["what"] == "skipped"
    assert dict(next(groups.views(NoVocabulary()))["facts"])["Group"] == "g000000: skipped, no contrast"


def test_the_sample_takes_every_harness_and_outcome_in_turn() -> None:
    path = Path("g")
    many = [(path, rollout("a", "pi", True, index)) for index in range(50)]
    few = [(path, rollout("b", "codex", False)), (path, rollout("c", "pi", False))]
    chosen = [record for _, record in choose([*few, *many], 5)]
    assert [(record.harness, record.task_id) for record in chosen[:3]] == [("codex", "b"), ("pi", "a"), ("pi", "c")]
    assert [record.index for record in chosen if record.task_id == "a"] == [49, 48, 47], "newest first"
    assert len(choose(few, 5)) == 2


def test_the_parts_of_a_reward_make_its_sum(config: Config) -> None:
    reward = replace(config.reward, malformed_penalty=0.25)
    shaped = replace(config, reward=reward, algorithm=replace(config.algorithm, overlong_tokens=4, overlong_cache=4))
    record = rollout("a", "pi", True, malformed=2)
    # 2 sampled tokens of 4 with a cache of 4: −0.5. 1.075 − 2 · 0.25 − 0.5 = 0.075.
    text = reward_parts(record, 0.075, shaped)
    assert text.startswith("1.0750 by ") and text.endswith("− 0.5000 for 2 malformed calls − 0.5000 for its length")


def test_what_takes_seconds_to_import_waits_until_it_is_needed() -> None:
    heavy = ("torch", "transformers", "scipy.stats", "matplotlib.figure")
    told = f"import pipeline.launch.sweep_report, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_tokenizer_there_are_ids(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = replace(config, model=replace(config.model, path=str(tmp_path / "nowhere")))
    assert isinstance(find_vocabulary(lost, made(config, ())), NoVocabulary)
    assert "token ids instead of text" in caplog.text
