"""Harbor directories are read as written, wrong ones are named, and answers never reach a workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.tasks.harbor import load_task, load_tasks, prepare_workspace

TOML = """
schema_version = "1.4"
future_key = true
[task]
name = "org/pick"
[metadata]
gold_answer = "forty-two"
[verifier]
timeout_sec = 12.5
env = { LANG = "C" }
[agent]
timeout_sec = 30
[environment]
workdir = "/app"
cpus = 2
"""


def make_task(root: Path, name: str = "pick", toml: str = TOML) -> Path:
    path = root / name
    files = {
        "task.toml": toml,
        "instruction.md": "Write 42 to answer.txt.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "environment/docker-compose.yaml": "services: {}\n",
        "environment/data/list.txt": "42\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "echo 42 > answer.txt\n",
    }
    for relative, text in files.items():
        (path / relative).parent.mkdir(parents=True, exist_ok=True)
        (path / relative).write_text(text)
    return path


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def test_every_field_is_read(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    task = load_task(path)
    assert (task.ref.task_id, task.ref.path) == ("pick", path)
    assert task.instruction == "Write 42 to answer.txt."
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.workdir) == (30.0, 12.5, "/app")
    assert task.verifier_env == {"LANG": "C"}
    assert task.metadata == {"gold_answer": "forty-two"}
    assert task.tests == path / "tests"
    assert task.solution == path / "solution" / "solve.sh"


def test_optional_parts_have_harbors_defaults(tmp_path: Path) -> None:
    path = make_task(tmp_path, toml='version = "1.0"\n')
    (path / "solution" / "solve.sh").unlink()
    task = load_task(path)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.solution) == (600.0, 600.0, None)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("tests/test.sh", "tests/test.sh is missing"),
        ("instruction.md", "instruction.md is missing"),
        ("task.toml", "task.toml is missing"),
    ],
)
def test_a_missing_file_is_named_with_its_directory(tmp_path: Path, broken: str, said: str) -> None:
    path = make_task(tmp_path)
    (path / broken).unlink()
    with pytest.raises(UserError, match=said) as error:
        load_task(path)
    assert str(path) in str(error.value)


def test_a_directory_without_tests_is_named(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    (path / "tests" / "test.sh").unlink()
    (path / "tests").rmdir()
    with pytest.raises(UserError, match="tests/ is missing") as error:
        load_tasks(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[task]\nname = oops\n", "line 2"),
        ("[agent]\ntimeout_sec = -3\n", r"agent\.timeout_sec = -3"),
        ('[agent]\ntimeout_sec = "soon"\n', r"agent\.timeout_sec = 'soon'"),
        ("[[steps]]\nname = 'first'\n", "several steps"),
    ],
)
def test_a_bad_line_of_the_task_file_is_named(tmp_path: Path, toml: str, said: str) -> None:
    path = make_task(tmp_path, toml=toml)
    with pytest.raises(UserError, match=said) as error:
        load_task(path)
    assert str(path) in str(error.value)


def test_an_empty_instruction_is_refused(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    (path / "instruction.md").write_text("\n")
    with pytest.raises(UserError, match=r"instruction\.md is empty"):
        load_task(path)


def test_a_set_is_sorted_and_passes_over_files_and_hidden_entries(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_task(tmp_path, name)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README.md").write_text("x")
    assert [task.ref.task_id for task in load_tasks(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_set_without_tasks_is_refused(tmp_path: Path, empty: bool) -> None:
    with pytest.raises(UserError, match="no task directories" if empty else "no such directory"):
        load_tasks(tmp_path if empty else tmp_path / "missing")


def test_the_workspace_is_the_environment_without_its_build_files(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    (path / "environment" / "data" / "Dockerfile").write_text("the agent's own\n")
    prepare_workspace(load_task(path), tmp_path / "ws")
    assert names(tmp_path / "ws") == {"data/list.txt", "data/Dockerfile"}


def test_a_workspace_folder_wins_over_the_rest_of_the_environment(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    script = path / "environment" / "workspace" / "run.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o555)
    prepare_workspace(load_task(path), tmp_path / "ws")
    assert names(tmp_path / "ws") == {"run.sh"}
    assert (tmp_path / "ws" / "run.sh").stat().st_mode & 0o777 == 0o755


def test_a_task_without_environment_starts_empty(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    (path / "environment").rename(tmp_path / "elsewhere")
    prepare_workspace(load_task(path), tmp_path / "ws")
    assert names(tmp_path / "ws") == set()


def test_answers_left_in_the_environment_stay_out(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    environment = path / "environment"
    (environment / "solution").mkdir()
    (environment / "solution" / "other.sh").write_text("echo 42\n")
    (environment / "task.toml").write_text("anything")
    (environment / "data" / "renamed.sh").write_bytes((path / "solution" / "solve.sh").read_bytes())
    (environment / "data" / "copy.toml").write_text(TOML)
    prepare_workspace(load_task(path), tmp_path / "ws")
    assert names(tmp_path / "ws") == {"data/list.txt"}


@pytest.mark.parametrize("target", ["../../solution/solve.sh", "/etc/hostname"])
def test_a_link_out_of_the_environment_is_refused(tmp_path: Path, target: str) -> None:
    path = make_task(tmp_path)
    (path / "environment" / "data" / "peek").symlink_to(target)
    with pytest.raises(UserError, match="data/peek leads outside"):
        prepare_workspace(load_task(path), tmp_path / "ws")


def test_a_link_inside_the_environment_is_kept_as_a_link(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    (path / "environment" / "data" / "alias").symlink_to("list.txt")
    (path / "environment" / "folder").symlink_to("data")
    prepare_workspace(load_task(path), tmp_path / "ws")
    assert (tmp_path / "ws" / "data" / "alias").readlink() == Path("list.txt")
    assert (tmp_path / "ws" / "folder").is_symlink()


# --- sets


def ids(directory: Path) -> list[str]:
    return [task.ref.task_id for task in load_tasks(directory)]


@pytest.mark.parametrize("home", ["", "tasks", "data/v1/tasks"])
def test_tasks_may_lie_deeper(tmp_path: Path, home: str) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("b", "a"):
        make_task(tmp_path / home, name)
    assert ids(tmp_path) == ["a", "b"]


def test_a_task_is_a_set_of_one(tmp_path: Path) -> None:
    assert ids(make_task(tmp_path, "only")) == ["only"]


def test_what_is_meant_to_be_a_task_but_lacks_a_part_is_named_wherever_it_lies(tmp_path: Path) -> None:
    make_task(tmp_path / "deep" / "er", "fine")
    (make_task(tmp_path / "deep" / "er", "torn") / "task.toml").unlink()
    with pytest.raises(UserError, match=r"deep/er/torn: task\.toml is missing"):
        load_tasks(tmp_path)


def test_tasks_of_the_same_name_are_told_apart_by_the_way_to_them(tmp_path: Path) -> None:
    for folder, name in (("one", "same"), ("two", "same"), ("two", "other")):
        make_task(tmp_path / folder, name)
    assert ids(tmp_path) == ["one__same", "other", "two__same"]
    make_task(tmp_path, "one__same")
    with pytest.raises(UserError, match="would both be called one__same"):
        load_tasks(tmp_path)


def test_links_to_tasks_are_followed_under_their_own_names_and_never_in_a_circle(tmp_path: Path) -> None:
    kept = make_task(tmp_path / "store", "0f3a")
    place = tmp_path / "set"
    place.mkdir()
    (place / "linked").symlink_to(kept)
    (place / "circle").symlink_to(place)
    (place / "broken").symlink_to(tmp_path / "nowhere")
    assert ids(place) == ["linked"]
    assert load_tasks(place)[0].ref.path == kept


def test_tests_that_are_links_to_elsewhere_are_refused(tmp_path: Path) -> None:
    path = make_task(tmp_path)
    script = path / "tests" / "test.sh"
    script.rename(tmp_path / "blob")
    script.symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match=r"tests/test\.sh is a link out of tests/"):
        load_task(path)
    script.unlink()
    (path / "tests" / "real.sh").write_text("#!/bin/sh\n")
    script.symlink_to("real.sh")
    assert load_task(path).tests == path / "tests"


@pytest.mark.parametrize(
    ("value", "kept", "asked"),
    [
        ('"${SECRET}"', {}, ("SECRET",)),
        ('"a ${SECRET} b ${OTHER}"', {}, ("SECRET", "OTHER")),
        ('"${SECRET:-none}"', {"KEY": "none"}, ()),
        ('"x${SECRET:-}y"', {"KEY": "xy"}, ()),
        ('"$SECRET"', {"KEY": "$SECRET"}, ()),
        ("3", {"KEY": "3"}, ()),
        ("0.5", {"KEY": "0.5"}, ()),
    ],
)
def test_a_verifier_gets_nothing_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, kept: dict[str, str], asked: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SECRET", "of the host")
    path = make_task(tmp_path, toml=f"[verifier.env]\nKEY = {value}\n")
    task = load_task(path)
    assert (task.verifier_env, task.host_env) == (kept, asked)
    if asked:
        with pytest.raises(UserError, match=r"asks for a variable of the host, SECRET.*tasks\.host_env=\[SECRET"):
            load_tasks(tmp_path)
    assert load_tasks(tmp_path, host_env=asked)[0].verifier_env == kept


@pytest.mark.parametrize(
    "toml",
    [
        'version = "1.0"\n',
        "version = 1.0\n",
        "schema_version = 2\n",
        'schema_version = "1.2"\nartifacts = []\n[task]\nname = "a/b"\nauthors = []\n[solution.env]\n',
        '[environment]\nmemory = "4G"\nmcp_servers = []\n[environment.healthcheck]\ncommand = "true"\n',
    ],
)
def test_every_version_of_the_task_file_is_read(tmp_path: Path, toml: str) -> None:
    assert load_task(make_task(tmp_path, toml=toml)).agent_timeout_s == 600.0
