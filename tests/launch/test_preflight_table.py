"""The table of checks: who makes which when, what is skipped, and what `yoke train` makes of a failure."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from engine_threads import engine_thread
from preflight_helpers import assert_refused, outcome, settings

from pipeline.config import Config, UserError
from pipeline.engine.scripted import FakeEngine, Scripted, Template, logprob
from pipeline.engine.server import EngineError
from pipeline.launch import jobs, preflight, preflight_engine, preflight_job, preflight_table, slurm
from pipeline.launch.engine_rank import EngineRank
from pipeline.launch.preflight_check import NEEDS, Check, Forward, Grounds, NotHere, Refused, examine
from pipeline.launch.preflight_table import CHECKS, chosen, refuse_at_start, refuse_trainer
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.trainer_rank import TrainerRank

DOCS = Path(__file__).parents[2] / "docs" / "preflight.md"


def check(name: str, needs: str = "config", error: Exception | None = None, opens: tuple[str, ...] = ()) -> Check:
    def look(grounds: Grounds) -> str:
        if error:
            raise error
        return "seen"

    return Check(name, f"what {name} looks at", needs, f"cure of {name}", look, opens)


def results(*checks: Check, skip: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    return [(r.name, r.result, r.said) for r in examine(checks, Grounds(settings()), skip)]


# --- running checks


def test_every_check_is_made_although_one_fails() -> None:
    found = results(check("a", error=Refused("bad")), check("b", error=NotHere("not here")), check("c"))
    assert found == [("a", "failed", "bad"), ("b", "skipped", "not here"), ("c", "ok", "seen")]


def test_what_an_earlier_check_should_have_opened_is_not_looked_at() -> None:
    later = check("later", "engine", error=AssertionError("looked"))
    assert results(check("first", error=UserError("bad"), opens=("engine",)), later, check("other"))[1:] == [
        ("later", "skipped", "first comes first"),
        ("other", "ok", "seen"),
    ]
    assert results(check("first", error=NotHere("no node"), opens=("engine",)), later)[1][2] == "no node"


def test_a_skipped_check_is_a_warning_in_the_log_and_opens_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    first = check("first", error=AssertionError("looked"), opens=("engine",))
    with caplog.at_level(logging.WARNING, "yoke.preflight"):
        assert results(first, check("later", "engine"), skip=("first",)) == [
            ("first", "skipped", "as preflight.skip says"),
            ("later", "ok", "seen"),
        ]
    said = [record.getMessage() for record in caplog.records if record.name == "yoke.preflight"]
    assert said == ["the check first is skipped, as preflight.skip says: nobody looks at what first looks at"]


@pytest.mark.parametrize(
    ("error", "made"), [(OSError("gone"), False), (ValueError("what"), False), (Refused("x"), True)]
)
def test_a_check_that_breaks_has_failed(error: Exception, made: bool) -> None:
    (result,) = examine([check("a", error=error)], Grounds(settings()))
    assert (result.result, result.made, str(error) in result.said) == ("failed", made, True)


def test_only_failures_have_a_cure_and_stand_in_the_complaint() -> None:
    made = examine([check("a"), check("b", error=Refused("bad"))], Grounds(settings()))
    assert [result.cure for result in made] == ["", "cure of b"]
    assert "cure" not in made[0].as_json() and made[1].as_json()["cure"] == "cure of b"
    with pytest.raises(
        UserError, match=r"^b: bad \(cure of b\)\. All checks: yoke preflight; preflight\.skip=\[NAME\]"
    ):
        preflight_table._refuse(made)


# --- the table


def test_names_are_different_and_every_check_says_all_there_is_to_say() -> None:
    assert len({row.name for row in CHECKS}) == len(CHECKS)
    assert all(row.looks_at and row.cure and row.needs in NEEDS for row in CHECKS)
    assert [row.needs for row in CHECKS] == sorted((row.needs for row in CHECKS), key=NEEDS.index)


def test_the_docs_hold_the_table() -> None:
    text = DOCS.read_text()
    for row in CHECKS:
        assert f"| `{row.name}` | {row.looks_at} | {row.needs} | {row.cure} |" in text


def test_a_name_that_no_check_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"preflight\.skip names disc; the checks are: settings, budgets"):
        refuse_at_start(settings("preflight.skip=[disc]"), RunDirectory(Path("/nowhere")))


def task(place: Path, name: str, test: str) -> None:
    """A task whose solution writes 42 into answer.txt."""
    files = {"tests/test.sh": test, "solution/solve.sh": "echo 42 > answer.txt\n", "environment/readme": "x"}
    files |= {"instruction.md": f"Write 42 ({name}).", "task.toml": ""}
    for relative, text in files.items():
        (place / name / relative).parent.mkdir(parents=True, exist_ok=True)
        (place / name / relative).write_text(text)


RIGHT = "#!/bin/sh\n[ -e answer.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
ALWAYS = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"


def test_a_verifier_that_rewards_nothing_done_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.stages.gates.CACHE", tmp_path / "cache.json")
    for name in ("a", "b", "c"):
        task(tmp_path / "train", name, RIGHT)
    task(tmp_path / "test", "d", RIGHT)
    words = ["tasks.kind=harbor", f"tasks.train={tmp_path / 'train'}", f"tasks.test={tmp_path / 'test'}"]
    words += ["tasks.train_size=0", "tasks.test_size=0"]
    assert outcome("tasks", Grounds(settings(*words), sample=2)).said.startswith("3 tasks: ")
    assert outcome("tasks", Grounds(settings(*words))).said.startswith("4 tasks: ")
    task(tmp_path / "test", "d", ALWAYS)
    assert_refused(outcome("tasks", Grounds(settings(*words), sample=2)), "d: nop gave 1 instead of 0")
    assert outcome("tasks", Grounds(settings(*words, "tasks.check=false"))).result == "skipped"
    assert outcome("tasks", Grounds(settings(*words), here=False)).result == "skipped"


def test_a_setting_that_cannot_work_is_the_first_to_fail() -> None:
    assert_refused(outcome("settings", Grounds(settings("harness.home=/nowhere"))), "yoke harness install pi")


# --- yoke train


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_engine, "OUTAGE_S", 0.2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_check_harnesses", lambda config: None)


BAD = "algorithm.max_outstanding_rollouts=1000"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("cluster", ["local", "slurm", "allocation"])
def test_training_is_refused_before_anything_is_written_or_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    monkeypatch.setattr(slurm, "send_all", Mock(side_effect=AssertionError("submitted")))
    monkeypatch.setitem(jobs.LAUNCHERS, cluster, Mock(side_effect=AssertionError("started")))
    config = settings(BAD, f"cluster.name={cluster}", run_dir=tmp_path / "run")
    for start in (jobs.train, jobs.submit, jobs.check):
        with pytest.raises(UserError, match=r"^groups: .*would drop it.* \(raise the limit"):
            start(config)
    with pytest.raises(UserError, match="would drop it"):
        jobs.train(replace(config, dry_run=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("installed")
def test_the_node_is_looked_at_where_agents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "sandbox.processes=1"
    with pytest.raises(UserError, match=r"^node: sandbox\.processes=1"):
        refuse_at_start(settings(few), RunDirectory(tmp_path))
    on_slurm = settings(few, "cluster.name=slurm")
    refuse_at_start(on_slurm, RunDirectory(tmp_path))
    with pytest.raises(UserError, match=r"^node: sandbox\.processes=1"):
        preflight_table.refuse_node(on_slurm)
    preflight_table.refuse_node(settings(few))


def engine_rank(config: Config, url: str, restarts: int = 0) -> Any:
    """What `_start_engine` needs of an engine rank."""
    server = Mock(url=url)
    return SimpleNamespace(
        config=config, server=server, restarts=restarts, up=asyncio.Event(), last_down=0.0, _engine_seed=lambda: 1
    )


def test_an_engine_rank_ends_before_it_registers_when_its_engine_is_wrong() -> None:
    thoughtful = FakeEngine(template=Template(opens_thought="always"))
    config = settings("harness.sampling.thinking=false")
    with engine_thread(thoughtful):
        rank = engine_rank(config, thoughtful.url)
        with pytest.raises(UserError, match=r"^thinking: .*open thought"):
            asyncio.run(EngineRank._start_engine(rank))
        assert not rank.up.is_set()
        again = engine_rank(config, thoughtful.url, restarts=1)  # a vLLM that died and is the same again
        asyncio.run(EngineRank._start_engine(again))
        assert again.up.is_set()
        skips = engine_rank(replace(config, preflight=replace(config.preflight, skip=["thinking"])), thoughtful.url)
        asyncio.run(EngineRank._start_engine(skips))


def test_a_trainer_compares_itself_with_the_engine_of_its_node(caplog: pytest.LogCaptureFixture) -> None:
    def forward(prompt: Any, sampled: Any) -> Forward:
        return Forward([logprob(position) + 1 for position in range(len(sampled))], "float32")

    engine = FakeEngine(answers=lambda prompt: Scripted("x" * 64))
    with engine_thread(engine):
        node = SimpleNamespace(url=engine.url)
        rank: Any = SimpleNamespace(
            config=settings(),
            team=SimpleNamespace(forward=forward),
            coordinator=SimpleNamespace(engines={"node0": node}),
        )
        with pytest.raises(UserError, match=r"^trainer: largest difference 1, mean 1, over 64 tokens"):
            TrainerRank._compare_with_engine(rank)
        with pytest.raises(UserError, match="largest difference 1"):
            refuse_trainer(rank.config, engine.url, forward)
        rank.coordinator.engines = {"node1": node}
        with caplog.at_level(logging.WARNING, "yoke.trainer"):
            TrainerRank._compare_with_engine(rank)
    assert any("not compared" in record.getMessage() for record in caplog.records if record.name == "yoke.trainer")


def test_an_engine_that_dies_during_its_checks_is_left_to_its_watcher(caplog: pytest.LogCaptureFixture) -> None:
    rank = engine_rank(settings(), "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING, "yoke.preflight"):
        asyncio.run(EngineRank._start_engine(rank))
        refuse_trainer(rank.config, rank.server.url, Mock(side_effect=AssertionError("asked")))
    said = [record.getMessage() for record in caplog.records if record.name == "yoke.preflight"]
    assert [line.split(": the check could not be made: ")[0] for line in said] == ["engine", "trainer"]
    assert rank.up.is_set()


# --- yoke preflight


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, installed: None) -> FakeEngine:
    """Starts when the job asks for it; its trainer computes the same."""
    engine = FakeEngine(answers=lambda prompt: Scripted("x" * 64))

    def start(config: Config, stack: ExitStack) -> str:
        stack.enter_context(engine_thread(engine))
        return engine.url

    def forward(config: Config, prompt: Any, sampled: Any) -> Forward:
        return Forward([logprob(position) for position in range(len(sampled))], "float32")

    monkeypatch.setattr(preflight_job, "_start_engine", start)
    monkeypatch.setattr(preflight_job, "_forward", forward)
    return engine


FAST = ["tasks.check=false"]
QUICK = {"seconds": 0.0, "made": True}


def run(words: list[str], *overrides: str, run_dir: Path) -> int:
    return preflight_job.run(settings(*FAST, *overrides, run_dir=run_dir), words)


def test_all_checks_are_shown_and_nothing_is_written(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], run_dir=tmp_path / "run") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [
        [row.name, "skipped" if row.name == "tasks" else "ok"] for row in CHECKS
    ]
    assert not (tmp_path / "run").exists()


def test_json_is_all_that_stdout_holds(tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json"], BAD, run_dir=tmp_path / "run") == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["ok"] is False
    by_name = {entry["name"]: entry for entry in found["checks"]}
    assert list(by_name) == [row.name for row in CHECKS]
    assert by_name["groups"]["result"] == "failed" and by_name["groups"]["cure"]
    assert by_name["trainer"]["result"] == "ok" and "cure" not in by_name["trainer"]
    assert by_name["tasks"] == {"name": "tasks", "result": "skipped", "said": "tasks.check=false"} | QUICK
    assert "groups" in said.err, "progress"


def test_a_failure_is_shown_with_its_cure(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], BAD, run_dir=tmp_path / "run") == 2
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("groups"))
    assert "failed" in lines[place] and lines[place + 1].strip().startswith("→ raise the limit")


def test_an_engine_that_does_not_start_is_one_failure(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_job, "_start_engine", Mock(side_effect=EngineError("the engine died")))
    assert run(["--json"], run_dir=tmp_path / "run") == 2
    ends = {entry["name"]: (entry["result"], entry["said"]) for entry in json.loads(capsys.readouterr().out)["checks"]}
    assert ends["engine"] == ("failed", "the engine died")
    assert {ends[row.name] for row in chosen(("engine", "trainer")) if row.name != "engine"} == {
        ("skipped", "engine comes first")
    }


def test_on_a_login_node_the_engine_is_left_to_the_job(
    tmp_path: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--json"], "cluster.name=slurm", run_dir=tmp_path / "run") == 0
    ends = {entry["name"]: (entry["result"], entry["said"]) for entry in json.loads(capsys.readouterr().out)["checks"]}
    later = {ends[row.name] for row in chosen(("node", "engine", "trainer"))}
    assert later == {("skipped", preflight_table.LATER)}
    assert engine.port == 0, "not started"


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--jsn"):
        run(["--jsn"], run_dir=tmp_path)
