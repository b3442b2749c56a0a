"""A data set of the hub is fetched once, whole or not at all; without the hub one line says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_server import serve
from smoldata_skeleton import make_task

from pipeline.config import TasksConfig, UserError
from pipeline.tasks.hub import fetch_dataset, is_pinned, wanted
from pipeline.tasks.sets import load_set

NAME, REVISION = "made-up/boxes", "0123456789abcdef0123456789abcdef01234567"
GIVEN = f"{NAME}@{REVISION}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "home" / "tasks"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The data set as the hub has it: three tasks among other files."""
    for number in (1, 2, 3):
        make_task(tmp_path / "store", number=number)
    (tmp_path / "store" / "README.md").write_text("about it\n")
    return tmp_path / "store"


def test_a_data_set_is_fetched_once_and_read(store: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = TasksConfig(kind="smoldata", train=GIVEN, train_size=0, host_env=["OPENAI_API_KEY"])
    with serve(store, NAME, REVISION) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert [task.ref.task_id for task in load_set(chosen, "train", store)] == [f"0001_2_qa_{n}" for n in (1, 2, 3)]
        assert len(asked) == 3 * 6
    assert len(load_set(chosen, "train", store)) == 3, "the hub is not asked again"
    assert [path.name for path in home.iterdir()] == ["made-up--boxes--0123456789ab"]
    assert {path.name for path in (home / "made-up--boxes--0123456789ab").iterdir()} == {"tasks"}


def test_only_the_named_tasks_are_fetched(
    store: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names"
    names.write_text(json.dumps([{"name": "0001_2_qa_3"}]))
    chosen = TasksConfig(kind="smoldata", test=GIVEN, test_names=str(names), host_env=["OPENAI_API_KEY"])
    with serve(store, NAME, REVISION) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert [task.ref.task_id for task in load_set(chosen, "test", store)] == ["0001_2_qa_3"]
        assert {file.split("/")[1] for file in asked} == {"0001_2_qa_3"}


def test_a_fetch_that_broke_off_goes_on_where_it_was(store: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"tasks/0001_2_qa_3/tests/test.sh"}
    with serve(store, NAME, REVISION, broken) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr("pipeline.tasks.hub.WORKERS", 1)
        with pytest.raises(UserError, match="cannot be had from the hub"):
            fetch_dataset("tasks.train", GIVEN)
        assert not [path for path in home.iterdir() if not path.name.startswith(".")], "nothing half-fetched is a set"
        broken.clear()
        before = len(asked)
        fetch_dataset("tasks.train", GIVEN)
        assert asked[before:] == ["tasks/0001_2_qa_3/tests/test.sh"]


@pytest.mark.parametrize("why", ["no network", "offline", "not there", "no tasks"])
def test_one_line_says_what_to_do_without_the_hub(
    store: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (tmp_path / "empty").mkdir()
    name = "nobody/nothing" if why == "not there" else NAME
    with serve(tmp_path / "empty" if why == "no tasks" else store, NAME, REVISION) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9" if why == "no network" else address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", why == "offline")
        with pytest.raises(UserError) as error:
            fetch_dataset("tasks.test", f"{name}@{REVISION}")
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"tasks.test: {name} cannot be had from the hub")
    assert text.endswith(
        f"hf download {name} --repo-type dataset --revision {REVISION} --local-dir DIR; then tasks.test=DIR"
    )
    assert not [path for path in home.glob("*") if not path.name.startswith(".")]


def test_only_whole_tasks_are_wanted() -> None:
    files = ["README.md", "x/a/task.toml", "x/a/tests/t/y", "x/ab/z", "b/task.toml", "b/solution/s", "x/notes"]
    assert wanted(files, None) == ["x/a/task.toml", "x/a/tests/t/y", "b/task.toml", "b/solution/s"]
    assert wanted(files, ["b", "c"]) == ["b/task.toml", "b/solution/s"]


@pytest.mark.parametrize(
    ("given", "pinned"), [(GIVEN, True), (NAME, False), (f"{NAME}@main", False), (None, False), ("/a/b", False)]
)
def test_only_a_commit_pins(given: str | None, pinned: bool) -> None:
    assert is_pinned(given) is pinned
