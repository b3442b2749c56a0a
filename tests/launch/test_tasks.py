"""`yoke tasks`: a set is counted and looked through without a run; what a start refuses is refused with its file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from logged import ours

from pipeline import cli
from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.launch import preflight
from pipeline.launch.gates import SOUND
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import with_absolute_paths

TEST = "#!/bin/sh\n[ -e answer.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def make_task(place: Path, name: str, level: str = "", **files: str) -> None:
    whole = {
        "task.toml": f'[metadata]\ndifficulty = "{level}"\nsource = "{name[0]}"\n',
        "instruction.md": f"Write {name} into answer.txt.\n",
        "environment/list.txt": "x\n",
        "tests/test.sh": TEST,
        **files,
    }
    for relative, text in whole.items():
        (place / name / relative).parent.mkdir(parents=True, exist_ok=True)
        (place / name / relative).write_text(text)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("pipeline.stages.gates.CACHE", tmp_path / "cache.json")
    for name, level in (("a1", "hard"), ("b1", "easy"), ("c1", "hard")):
        make_task(tmp_path / "train", name, level)
    make_task(tmp_path / "test", "a2")
    make_task(tmp_path / "test", "d1", **{"solution/solve.sh": "echo 1 > answer.txt\n"})
    return ["tasks=harbor", f"tasks.train={tmp_path / 'train'}", f"tasks.test={tmp_path / 'test'}"]


def yoke(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tasks", *words])
    return int(str(ended.value.code))


def test_list_counts_the_levels_and_tells_what_it_found(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    leak = tmp_path / "train" / "b1" / "environment" / "notes"
    leak.write_text(TEST)
    assert yoke("list", *words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["train: 3 (1 easy, 2 hard)", "test:  2"]
    assert said[2].startswith("warning: 1 of 2 test tasks have the source of a training task")
    assert said[3:] == [f"error: {leak} is a copy of tests/test.sh"]


def test_one_set_is_looked_at_by_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert yoke("list", *words[:2]) == 0
    assert capsys.readouterr().out == "train: 3 (1 easy, 2 hard)\ntest:  0\n"


def test_check_runs_the_oracle_and_an_idle_agent(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert yoke("check", *words) == 0
    told = capsys.readouterr().out
    assert told == f"5 tasks: {SOUND} (4 have no solution to try)\n"


@pytest.mark.parametrize("given", [[], ["burn"], ["list", "check"]])
def test_another_word_is_refused(given: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert yoke(*given, *words) == 2
    assert "yoke tasks list" in capsys.readouterr().err


def test_a_start_refuses_a_leak_with_its_file_and_only_warns_of_a_source(
    tmp_path: Path, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        assert preflight.check_tasks_readable(compose_config(words), run) == (
            "3 (1 easy, 2 hard) for training, 2 held out"
        )
    (record,) = [record for record in ours(caplog) if record.name == "yoke.gates"]
    assert "have the source of a training task" in record.getMessage()
    leak = tmp_path / "test" / "a2" / "environment" / "solve.sh"
    leak.write_text("true\n")
    with pytest.raises(UserError, match=rf"1 faults in the task set \(tasks\.gates\.leak\): {leak} has the name"):
        preflight.check_tasks_readable(compose_config(words), run)
    allowed = compose_config([*words, "tasks.gates.allow=['a*:solve.sh']"])
    assert preflight.check_tasks_readable(allowed, run)


def test_a_data_set_of_the_hub_keeps_its_name_and_a_path_gets_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    words = ["tasks=smoldata", "tasks.test=some/tasks", "tasks.train_names=names.json"]
    tasks = with_absolute_paths(compose_config(words)).tasks
    assert tasks.train == compose_config(["tasks=smoldata"]).tasks.train
    assert (tasks.test, tasks.train_names, tasks.test_names) == ("/some/tasks", "/names.json", None)
