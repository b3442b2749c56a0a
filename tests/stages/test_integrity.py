"""What a task set's files give away is found and named; what only looks like it is let through."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import GatesConfig, UserError
from pipeline.stages.integrity import check_gates, inspect, leaks
from pipeline.tasks.harbor import HarborTask, load_task

TEST = """\
#!/bin/sh
# compares the file with what it must hold
expected=$(cat /tests/expected.txt)
found=$(cat /workspace/report.txt)
if [ "$found" = "$expected" ]; then score=1; else score=0; fi
mkdir -p /logs/verifier
echo "$score" > /logs/verifier/reward.txt
"""
SOLVE = """\
#!/bin/sh
sort /workspace/list.txt > /tmp/sorted
uniq -c /tmp/sorted > /tmp/counted
head -n 3 /tmp/counted > /workspace/report.txt
echo "three most frequent lines written"
"""
TOML = '[metadata]\ngold_answer = "{answer}"\nsource = "{source}"\n'


def make_task(root: Path, name: str = "pick", **files: str) -> HarborTask:
    """A harmless task; ``files`` are further ones, by path with __ for / and _dot_ for a dot."""
    path = root / name
    given = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    whole = {
        "task.toml": TOML.format(answer="a rather long answer", source=f"book of {name}"),
        "instruction.md": f"Count the lines of {name}.\n",
        "environment/Dockerfile": "FROM scratch\nCOPY list.txt .\n",
        "environment/list.txt": f"{name}\n",
        "tests/test.sh": TEST,
        "tests/expected.txt": "3 x\n",
        "solution/solve.sh": SOLVE,
        **given,
    }
    for relative, text in whole.items():
        (path / relative).parent.mkdir(parents=True, exist_ok=True)
        (path / relative).write_text(text)
    return load_task(path)


def found(train: Sequence[HarborTask], test: Sequence[HarborTask] = (), **gates: object) -> list[tuple[str, str]]:
    return [(finding.kind, finding.text) for finding in inspect(train, test, replace(GatesConfig(), **gates))]


def test_an_honest_set_has_no_findings(tmp_path: Path) -> None:
    train = [make_task(tmp_path / "train", name) for name in ("a", "b")]
    assert found(train, [make_task(tmp_path / "test", "c")]) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("environment__notes_dot_md", SOLVE, "notes.md is a copy of solution/solve.sh"),
        ("environment__deep__er__x", TEST, "deep/er/x is a copy of tests/test.sh"),
        ("environment__y", TEST.replace("# comp", "# Comp") + "\n\n", "y holds nearly all lines of tests/test.sh"),
        ("environment__z", f"first of all\n{SOLVE}\nthe end\n", "z holds nearly all lines of solution/solve.sh"),
        ("environment__solution__anything", "x", "solution/anything has the name of what"),
        ("environment__app__solve_dot_sh", "x", "app/solve.sh has the name of what"),
        ("environment__task_dot_toml", "x", "task.toml has the name of what"),
        ("environment__tests__test_dot_sh", "x", "tests/test.sh has the name of what"),
        ("environment__README", "It is: a rather long answer!\n", "README holds the answer, gold_answer of task.toml"),
        ("environment__Dockerfile", "FROM x\nCOPY tests /tests\n", "Dockerfile copies tests into the image"),
        ("environment__Dockerfile", "FROM x\nADD --chown=1 a ./solution/ /b/\n", "copies ./solution/ into the image"),
        ("environment__Dockerfile", 'FROM x\nCOPY ["../tests", "/t"]\n', "copies ../tests into the image"),
        ("environment__Dockerfile", "FROM x\ncopy a \\\n  solve.sh /t\n", "copies solve.sh into the image"),
        ("environment__Dockerfile", "FROM x\nRUN echo a rather long answer\n", "Dockerfile holds the answer"),
    ],
)
def test_a_leak_is_named_with_its_file(tmp_path: Path, name: str, text: str, said: str) -> None:
    (leak,) = leaks(make_task(tmp_path, **{name: text}))
    assert leak.startswith(str(tmp_path / "pick" / "environment"))
    assert said in leak


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("environment__fixed_dot_sh", SOLVE.replace("sort ", "sort -r ")),  # the bug that the solution mends
        ("environment__tests__test_other_dot_py", "def test_it(): ...\n"),  # tests that the agent may see
        ("environment__start_dot_sh", "\n".join(TEST.splitlines()[:5])),  # three of five lines that tell something
        ("environment__data_dot_csv", "name,what\nit,a rather long answer\n"),  # data has answers in it
        ("environment__expected_dot_txt", "3 x\n"),  # too small to be anyone's secret
        ("environment__Dockerfile", "FROM x AS built\nFROM y\nCOPY --from=built /tests /x\nCOPY src/tests.py .\n"),
        ("environment__Dockerfile", "FROM x\n# COPY tests /tests\nRUN cp -r /opt/tests /y\n"),
        ("environment__blob", "\0" + SOLVE),
    ],
)
def test_what_only_looks_like_a_leak_is_let_through(tmp_path: Path, name: str, text: str) -> None:
    assert list(leaks(make_task(tmp_path, **{name: text}))) == []


def test_a_short_answer_may_stand_anywhere(tmp_path: Path) -> None:
    toml = TOML.format(answer="42", source="x")
    assert list(leaks(make_task(tmp_path, task_dot_toml=toml, environment__README="see page 42 of 142\n"))) == []


def test_large_files_are_only_compared_whole(tmp_path: Path) -> None:
    large = "\n".join(f"line number {number} of many" for number in range(20_000))
    task = make_task(tmp_path, tests__data_dot_txt=large, environment__same=large, environment__other=large + "\n")
    assert [text.partition("environment/")[2] for text in leaks(task)] == ["same is a copy of tests/data.txt"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task.ref.path / "environment" / "link").symlink_to("../tests/test.sh")
    assert list(leaks(task)) == []


@pytest.mark.parametrize(
    ("pattern", "left"), [("pick:keep/*", 0), ("p*:keep/x", 0), ("other:keep/x", 1), ("pick:x", 1)]
)
def test_a_leak_that_is_none_can_be_allowed(tmp_path: Path, pattern: str, left: int) -> None:
    task = make_task(tmp_path, environment__keep__x=TEST)
    assert len(found([task], allow=[pattern])) == left


def test_the_same_question_about_the_same_things_is_a_duplicate(tmp_path: Path) -> None:
    first = make_task(tmp_path, "a", environment__list_dot_txt="x", instruction_dot_md="Do  it.\n")
    again = make_task(tmp_path, "b", environment__list_dot_txt="x", instruction_dot_md="do it.")
    other = make_task(tmp_path, "c", environment__list_dot_txt="y", instruction_dot_md="Do it.")
    assert [text for _, text in found([first, other])] == []
    ((kind, text),) = found([first, other, again])
    assert kind == "duplicate"
    assert text.startswith(f"{again.ref.path} is the task {first.ref.path} again")


def test_what_both_splits_have_in_common_is_counted_and_one_pair_named(tmp_path: Path) -> None:
    same = TOML.format(answer="", source="one book")
    train = [make_task(tmp_path / "train", name, task_dot_toml=same) for name in ("a", "b")]
    test = [
        make_task(tmp_path / "test", "a", instruction_dot_md="Another question."),
        make_task(tmp_path / "test", "c", instruction_dot_md="count THE lines\nof b."),
        make_task(tmp_path / "test", "d", task_dot_toml=same),
    ]
    texts = dict(found(train, test))
    assert list(texts) == ["same_id", "same_instruction", "same_source"]
    assert texts["same_id"] == (
        f"1 of 3 test tasks have the id of a training task: {test[0].ref.path} that of {train[0].ref.path}"
    )
    assert f"{test[1].ref.path} that of {train[1].ref.path}" in texts["same_instruction"]
    assert texts["same_source"].startswith(f"1 of 3 test tasks have the source of a training task: {test[2].ref.path}")


def test_questions_about_one_notebook_have_one_source(tmp_path: Path) -> None:
    tasks = [
        make_task(tmp_path, name, task_dot_toml=f'[metadata]\nsource_row_id = "7/8.ipynb_qa_{name}"\n')
        for name in ("1", "2")
    ]
    assert [kind for kind, _ in found(tasks[:1], tasks[1:], source_keys=["source_row_id"])] == ["same_source"]
    assert found(tasks[:1], tasks[1:]) == []


@pytest.mark.parametrize("kind", ["duplicate", "same_id", "same_instruction", "same_source", "leak"])
def test_a_gate_that_is_off_finds_nothing(tmp_path: Path, kind: str) -> None:
    leaky, again = make_task(tmp_path / "a", environment__copy=TEST), make_task(tmp_path / "b", environment__copy=TEST)
    kinds = {kind for kind, _ in found([leaky, again], [leaky])}
    assert kinds == {"duplicate", "same_id", "same_instruction", "same_source", "leak"}
    assert {kind for kind, _ in found([leaky, again], [leaky], **{kind: "off"})} == kinds - {kind}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"leak": "fatal"}, "tasks.gates.leak=fatal is unknown"), ({"allow": ["x"]}, "must be TASK:FILE")],
)
def test_gates_that_are_none_are_refused(wrong: dict[str, object], said: str) -> None:
    check_gates(GatesConfig())
    with pytest.raises(UserError, match=said):
        check_gates(replace(GatesConfig(), **wrong))


def test_a_file_that_nobody_may_read_is_no_crash_of_the_walk(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    os.mkfifo(task.ref.path / "environment" / "pipe")
    assert list(leaks(task)) == []
