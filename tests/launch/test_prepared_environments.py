"""`yoke tasks build` runs a task's health check once, with a network, and sandboxes have what it fetched."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_apptainer import ISOLATED
from small_system import MORE, small_system

from pipeline.cli import main
from pipeline.config import SandboxConfig
from pipeline.sandbox import builds
from pipeline.sandbox.base import SandboxSpec, make_sandbox
from pipeline.sandbox.builds import MANIFEST, complaint, find_build, place_of, publish
from pipeline.stages.verification import lay_out, verify
from pipeline.tasks.harbor import load_task

BASE = "docker://small:1"
FETCH = "set -e; mkdir -p /data/$PREFIX; cat < /dev/tcp/127.0.0.1/$PORT > /data/$PREFIX/table.csv; rm /etc/given"
KEY = "not-for-sandboxes"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A $YOKE_HOME in which the bare environment is built."""
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HUB_KEY", KEY)
    build_base(tmp_path / "home/images/draft")
    return tmp_path / "home"


def build_base(draft: Path, given: str = "by the image") -> None:
    small_system(draft / "root", MORE)
    (draft / "root/usr/bin/sh").symlink_to("bash")
    (draft / "root/etc/given").write_text(given)
    publish(BASE, draft / "root", "by hand", {"PATH": "/usr/bin:/bin"})


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that sends a line to whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"fetched\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def write_task(place: Path, port: int, prefix: str = "boxes", command: str = FETCH) -> Path:
    """Scores 1 when its tests find the data."""
    (place / "tests").mkdir(parents=True, exist_ok=True)
    test = f'[ "$(cat /data/{prefix}/table.csv)" = fetched ] && [ "$PREFIX" = {prefix} ] && [ -z "$HUB_KEY" ]'
    (place / "tests/test.sh").write_text(f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n")
    (place / "instruction.md").write_text("Do it.")
    (place / "task.toml").write_text(
        f'[environment]\ndocker_image = "small:1"\n[environment.env]\nPREFIX = "{prefix}"\nPORT = {port}\n'
        f'HUB_KEY = "${{HUB_KEY}}"\n[environment.healthcheck]\ncommand = {json.dumps(command)}\nretries = 3\n'
    )
    return place


def build(tasks: Path, *more: str) -> int:
    words = ["tasks", "build", "tasks=harbor", f"tasks.train={tasks}", "tasks.host_env=[HUB_KEY]", *more]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("kind", ISOLATED)
def test_agent_and_tests_have_what_was_fetched(kind: str, home: Path, tmp_path: Path, port: int) -> None:
    """Though neither has a network, nor the key that the fetching had."""
    task = load_task(write_task(tmp_path / "tasks/one", port, command=f"{FETCH}; [ $HUB_KEY = {KEY} ]"))
    assert build(tmp_path / "tasks") == 0
    sandbox = make_sandbox(SandboxConfig(kind=kind, image="task"))
    lay_out(task, tmp_path / "workspace", sandbox)
    script = "cat /data/boxes/table.csv; env; ls /etc /data; echo changed > /data/note"
    spec = SandboxSpec(("bash", "-c", script), workspace=tmp_path / "workspace", leave=tmp_path / "left",
                       listen_port=8000, stdout=tmp_path / "output", image=task.image)  # fmt: skip

    async def run() -> None:
        process = await sandbox.launch(spec)
        process.go()
        assert (await process.wait()).returncode == 0

    asyncio.run(run())
    said = (tmp_path / "output").read_text().splitlines()
    assert said[0] == "fetched" and "PREFIX=boxes" in said and "given" not in said and KEY not in "".join(said)
    verdict = asyncio.run(verify(task, tmp_path / "workspace", sandbox, tmp_path, layer=tmp_path / "left"))
    assert verdict.correctness == 1.0, verdict
    layer = find_build(task.image)
    assert layer is not None and not (layer.path / "upper/data/note").exists()
    assert KEY not in (layer.place / MANIFEST).read_text()


def test_equal_preparations_are_made_once_above_one_base(
    home: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, prefix in (("one", "boxes"), ("same", "boxes"), ("other", "bags")):
        write_task(tmp_path / "tasks" / name, port, prefix)
    assert build(tmp_path / "tasks", "--list") == 1
    assert f"above {BASE} (one and 1 more)" in capsys.readouterr().out
    assert build(tmp_path / "tasks") == 0
    assert "2 of 2 environments are built, 2 of them now" in capsys.readouterr().out
    assert len(list((home / "images").glob("env-*"))) == 3
    assert build(tmp_path / "tasks") == 0
    assert "2 of 2 environments are built, 0 of them now" in capsys.readouterr().out


def test_a_base_that_was_built_anew_is_prepared_anew(home: Path, tmp_path: Path, port: int) -> None:
    task = load_task(write_task(tmp_path / "tasks/one", port))
    assert build(tmp_path / "tasks") == 0
    shutil.rmtree(place_of(BASE))
    assert find_build(task.image) is None
    build_base(home / "images/draft", "by another image")
    assert find_build(task.image) is None, "what lies there is a layer above another base"
    assert build(tmp_path / "tasks") == 0
    found = find_build(task.image)
    assert found is not None and complaint(found) is None
    (found.path / "upper/data/boxes/table.csv").write_text("changed")
    builds._checked.clear()
    assert "is not as it was built" in str(complaint(found))


def test_one_that_fails_is_named_and_does_not_stop_the_rest(
    home: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "tasks/one", port)
    write_task(tmp_path / "tasks/two", port, command="echo tried; echo 'Error: no such bucket' >&2; exit 3")
    assert build(tmp_path / "tasks") == 1
    said = capsys.readouterr().out
    assert "1 of 2 environments are built" in said and "two: bwrap" in said and "no such bucket" in said
    log = next((home / "images").glob("*.log"))
    assert log.read_text().count("no such bucket") == 2 * 3 and KEY not in log.read_text(), "tried three times"


def test_without_a_builder_nothing_is_prepared_above_a_base_that_is_missing(
    home: Path, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "tasks/one", port)
    shutil.rmtree(place_of(BASE))
    monkeypatch.setattr(shutil, "which", lambda name, *_, **__: None)
    assert build(tmp_path / "tasks") == 2
    assert "no program here can build environments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ('docker_image = "small:1"', "docker://small:1"),
        ('docker_image = "small:1"\n[environment.healthcheck]\ncommand = "true"', "prepared:"),
        ('docker_image = "small:1"\n[environment.env]\nA = 1', "prepared:"),
        ('docker_image = "small:1"\n[environment.env]\nA = "${KEY}"', "docker://small:1"),
        ('[environment.healthcheck]\ncommand = "true"', ""),  # the machine's own system is never prepared
    ],
)
def test_what_an_environment_is(tmp_path: Path, section: str, kind: str) -> None:
    place = write_task(tmp_path / "task", 1)
    (place / "task.toml").write_text(f"[environment]\n{section}\n")
    assert load_task(place).image.startswith(kind) and bool(load_task(place).image) == bool(kind)
