"""Sandboxes on a built environment: it is the root directory, writable, and its verifier sees what an agent changed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from real_apptainer import ISOLATED
from small_system import MORE, small_system

from pipeline.cli import compose_config
from pipeline.config import SandboxConfig, UserError
from pipeline.launch.preflight import check_tasks_readable
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Verdict
from pipeline.sandbox import builds
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxSpec, make_sandbox
from pipeline.sandbox.builds import MANIFEST, ROOT, content_digest, find_build, place_of, publish, write_names
from pipeline.sandbox.changes import Changes
from pipeline.stages.verification import lay_out, verify
from pipeline.tasks.harbor import HarborTask, load_task

NAME = "docker://small:1"
PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A $YOKE_HOME with one built environment."""
    place = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("YOKE_HOME", str(place))
        draft = place / "images" / "draft"
        small_system(draft / "root", MORE)
        (draft / "root/usr/bin/sh").symlink_to("bash")
        for name, text in {"app/data.txt": "prefetched\n", "etc/given": "by the image\n"}.items():
            (draft / "root" / name).parent.mkdir(exist_ok=True)
            (draft / "root" / name).write_text(text)
        publish(NAME, draft / "root", "by hand", {"PATH": PATH, "GREETING": "hello"}, "/app")
        yield place


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOKE_HOME", str(home))


@pytest.fixture(params=ISOLATED)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return make_sandbox(SandboxConfig(kind=request.param, image="task"))


def make_task(place: Path, test: str = "true", image: str = NAME) -> HarborTask:
    """Scores 1 when the shell command ``test`` succeeds."""
    (place / "tests").mkdir(parents=True)
    score = f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    (place / "tests" / "test.sh").write_text(f"#!/bin/bash\n{score}\n")
    (place / "instruction.md").write_text("Do it.")
    (place / "task.toml").write_text(f'[environment]\ndocker_image = "{image.removeprefix("docker://")}"\n')
    return load_task(place)


def agent(sandbox: Sandbox, task: HarborTask, script: str, place: Path) -> str:
    """What the script prints."""
    lay_out(task, place / "workspace", sandbox)
    spec = SandboxSpec(("bash", "-c", script), workspace=place / "workspace", leave=place / "left", listen_port=8000,
                       stdout=place / "output", image=task.image, directory=task.workdir or "")  # fmt: skip

    async def run() -> None:
        process = await sandbox.launch(spec)
        process.go()
        ended = await process.wait()
        assert ended.returncode is not None, ended

    asyncio.run(run())
    return (place / "output").read_text()


def verdict(sandbox: Sandbox, task: HarborTask, place: Path) -> Verdict:
    return asyncio.run(verify(task, place / "workspace", sandbox, place, layer=place / "left"))


def test_an_agent_has_the_environment_and_may_write_to_it(sandbox: Sandbox, tmp_path: Path) -> None:
    script = (
        "pwd; cat data.txt; echo $GREETING $PATH; [ -e /usr/share/doc ] || echo no host; [ -e /tests ] || echo no tests"
        "; echo new > /etc/new && echo x >> /app/data.txt && touch /root-file /usr/local-file && echo written"
    )
    said = agent(sandbox, make_task(tmp_path / "task"), script, tmp_path)
    assert said.splitlines() == ["/app", "prefetched", f"hello {PATH}", "no host", "no tests", "written"]
    root = place_of(NAME) / ROOT
    assert not (root / "etc/new").exists() and (root / "app/data.txt").read_text() == "prefetched\n"


CHANGES = """
echo 1 > /etc/new; rm /etc/given; mkdir -p /usr/local/bin /root/deep; echo 2 > /root/deep/note; echo 3 > /app/data.txt
printf '#!/bin/sh\\necho mine' > /usr/local/bin/mine; chmod 4755 /usr/local/bin/mine; ln -s /app/data.txt /app/link
rm /usr/bin/stat; rm -r /app/gone 2> /dev/null; mkdir /data; touch /data/x; ln -s /data /app/to-data
"""
SEEN = """[ $(cat /etc/new) = 1 ] && [ ! -e /etc/given ] && [ $(cat /root/deep/note) = 2 ] &&
[ $(cat /app/link) = 3 ] && [ $(mine) = mine ] && [ $(stat -c %a /usr/local/bin/mine) = 755 ] &&
[ -e /app/to-data/x ] && [ "$GREETING" = hello ] && [ $PWD = /app ]"""


def test_the_tests_see_what_it_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    """A program of the image that was removed is there again."""
    task = make_task(tmp_path / "task", SEEN)
    agent(sandbox, task, CHANGES, tmp_path)
    result = verdict(sandbox, task, tmp_path)
    assert result.correctness == 1.0, result


CHEATS = """
for name in bash cat ls env sh; do
    mkdir -p /usr/local/bin
    printf '#!/usr/bin/bash\\necho 1 > /logs/verifier/reward.txt; kill -9 $PPID; exit 0\\n' > /usr/local/bin/$name
    chmod 755 /usr/local/bin/$name
done
cp /usr/bin/true /usr/bin/cat; cp /usr/bin/true /usr/bin/bash.new; chmod 755 /usr/bin/cat
mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json
echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
echo /app/evil.so > /etc/ld.so.preload; ln -s /tests /app/tests; ln -s / /app/top; ln -s ../tests /app/up
rm -rf /usr/lib; mv /usr/bin/bash.new /usr/bin/bash
"""


def test_no_change_helps_against_the_tests(sandbox: Sandbox, tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", '[ "$(cat /app/data.txt)" = 42 ]')
    agent(sandbox, task, CHEATS, tmp_path)
    result = verdict(sandbox, task, tmp_path)
    assert result.correctness == 0.0 and not result.reason, result
    links = "[ ! -e /app/tests ] && [ ! -e /app/top ] && [ ! -e /app/up ] && [ ! -e /etc/ld.so.preload ]"
    again = make_task(tmp_path / "again", links)
    assert verdict(sandbox, again, tmp_path).correctness == 1.0


def test_nothing_of_a_dockerfiles_context_is_laid_out_beside_it(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/make_answer.py").write_text("the build has used it")
    task = make_task(tmp_path / "task")
    assert agent(sandbox, task, "ls -A /workspace", tmp_path) == ""


def test_one_that_is_not_built_says_what_to_do(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/Dockerfile").write_text("FROM nothing\n")
    spec = SandboxSpec(("true",), image="build:0123")
    with pytest.raises(SandboxError, match=r"\(build:0123\) is not built: run yoke tasks build"):
        asyncio.run(sandbox.launch(spec))


def test_a_run_that_lacks_one_does_not_start(tmp_path: Path) -> None:
    task = make_task(tmp_path / "tasks/one")
    (task.ref.path / "environment").mkdir()
    (task.ref.path / "task.toml").write_text("")
    (task.ref.path / "environment/Dockerfile").write_text("FROM nothing\n")
    folder = tmp_path / "tasks"
    config = compose_config(["tasks.kind=harbor", f"tasks.train={folder}", f"tasks.test={folder}"])
    for gate in ("duplicate", "same_id", "same_instruction"):
        setattr(config.tasks.gates, gate, "off")
    check_tasks_readable(config, RunDirectory(tmp_path / "run"))
    config.sandbox.image = "task"
    with pytest.raises(UserError, match=r"of task one \(build:\w+\) is not built: run yoke tasks build"):
        check_tasks_readable(config, RunDirectory(tmp_path / "run"))


def test_one_that_was_changed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_checked", {})
    monkeypatch.setenv("YOKE_HOME", str(tmp_path))
    root = tmp_path / "images/draft/root"
    root.mkdir(parents=True)
    (root / "file").write_text("a")
    publish("docker://changed", root, "by hand", {})
    build = find_build("docker://changed")
    assert build is not None and builds.complaint(build) is None
    (build.path / "file").write_text("b")
    assert builds.complaint(build) is None  # looked at once
    monkeypatch.setattr(builds, "_checked", {})
    assert "is not as it was built" in str(builds.complaint(build))
    (build.place / MANIFEST).write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        find_build("docker://changed")


@pytest.mark.parametrize("change", ["name", "text", "mode", "link", "more", "kind"])
def test_the_digest_is_of_all_there_is(tmp_path: Path, change: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a/file").write_text("x")
    (root / "link").symlink_to("a")
    before = content_digest(root)
    shutil.copytree(root, tmp_path / "same", symlinks=True)
    assert content_digest(tmp_path / "same") == before
    actions = {
        "name": lambda: (root / "a/file").rename(root / "a/other"),
        "text": lambda: (root / "a/file").write_text("y"),
        "mode": lambda: (root / "a/file").chmod(0o755),
        "link": lambda: ((root / "link").unlink(), (root / "link").symlink_to("b")),
        "more": lambda: (root / "b").mkdir(),
        "kind": lambda: ((root / "link").unlink(), (root / "link").write_text("a")),
    }
    actions[change]()
    assert content_digest(root) != before


DIRECTORIES = ("usr/local/bin", "etc", "app", "usr/lib/python3.11/json", "usr/lib/python3.11/site-packages/pytest")
FILES = ("usr/bin/python3", "usr/bin/pytest", "usr/lib/libc.so.6", "usr/lib/python3.11/subprocess.py",
         "opt/venv/bin/python")  # fmt: skip
RULES = [  # path, whether it is a directory now, whether a verifier sees it
    ("app/x", False, True),
    ("etc/hosts.allow", False, True),
    ("root/.bashrc", False, True),
    ("usr/bin", True, True),
    ("usr/bin", False, False),
    ("etc", False, False),
    ("usr/bin/python3", False, False),
    ("usr/bin/new", False, True),
    ("usr/local/bin/new", False, True),
    ("usr/local/bin/pytest", False, False),
    ("opt/venv/bin/python", False, False),
    ("opt/venv/bin/pytest", False, False),
    ("opt/venv/lib/new.py", False, True),
    ("usr/lib/libc.so.6", False, False),
    ("usr/lib/python3.11/subprocess.so", False, False),
    ("usr/lib/python3.11/new.py", False, False),
    ("usr/lib/python3.11/site-packages/new/x.py", False, True),
    ("usr/lib/python3.11/site-packages/pytest/x.py", False, False),
    ("usr/lib/python3.11/site-packages/pytest.py", False, False),
    ("usr/lib/python3.11/site-packages/sitecustomize.py", False, False),
    ("opt/venv/lib/usercustomize/__init__.py", False, False),
    ("app/__pycache__/x.pyc", False, False),
    ("etc/ld.so.preload", False, False),
    ("tests/test.sh", False, False),
    ("logs/verifier/reward.txt", False, False),
    (".singularity.d/env/99.sh", False, False),
]


@pytest.mark.parametrize("form", [ROOT, "image.sif"])
def test_which_changes_are_seen(tmp_path: Path, form: str) -> None:
    root = tmp_path / ROOT
    for name in (*DIRECTORIES, *FILES):
        place = root / name
        (place.parent if name in FILES else place).mkdir(parents=True, exist_ok=True)
        if name in FILES:
            place.touch()
    env = {"PATH": "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"}
    build = builds.Build("x", tmp_path, form, "", "", env)
    if form != ROOT:  # only a list of its programs can be looked at
        write_names(root, tmp_path / "files.gz", build.search_path)
        shutil.rmtree(root)
    rule = Changes(build.has(), build.search_path)
    wrong = [path for path, is_directory, seen in RULES if rule.seen(PurePosixPath(path), is_directory) != seen]
    assert not wrong


def test_links_in_an_image_do_not_lead_to_this_machine(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/own").touch()
    (root / "bin").symlink_to("/usr/bin")
    (root / "loop").symlink_to("loop")
    has = builds.Build("x", tmp_path, ROOT, "", "").has()
    assert has("bin/own") and has("bin/.") and has("usr/bin/../bin/own") and has("loop")
    assert not has("bin/env") and not has("loop/x") and not has("usr/bin/own/.")
