"""Apptainer's command lines, the cache of images, and which kind of sandbox `auto` takes.

The command lines are kept in apptainer_commands.txt. After a change that is meant:
    PYTHONPATH=.:tests python tests/sandbox/test_apptainer.py
What a sandbox does on a real Apptainer is tested with the other kinds, in test_sandbox_*.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_apptainer import needs_apptainer
from small_system import small_system

from pipeline.cli import compose_config
from pipeline.config import SandboxConfig, UserError
from pipeline.launch.preflight import check_tasks_readable
from pipeline.launch.run_directory import RunDirectory
from pipeline.sandbox import SandboxError, SandboxSpec, images, make_sandbox
from pipeline.sandbox.apptainer import ETC, FIRST, ApptainerSandbox, Program, find_apptainer
from pipeline.sandbox.base import choose_sandbox
from pipeline.sandbox.bubblewrap import BubblewrapSandbox
from pipeline.sandbox.images import Image, kept_as

GOLDEN = Path(__file__).with_name("apptainer_commands.txt")
PROGRAM = Program("apptainer", "1.4.5", ("--userns",), frozen=("/proc/sys", "/proc/irq"), hidden=("/proc/keys",))
HOST = Image(Path("/yoke/images/host-0"), (("/usr", "/usr"), ("/etc/ssl/certs", "/etc/ssl/certs")), "/usr/bin/python3")
VERIFIER = SandboxSpec(
    ("bash", "/tests/test.sh"),
    workspace=Path("/scratch/copy"),
    mounts=((Path("/tasks/a/tests"), "/tests", False), (Path("/scratch/verdict"), "/logs/verifier", True)),
)
ROLLOUT = SandboxSpec(
    ("harness", "prompt"),
    env={"API_KEY": "never in a command line"},
    workspace=Path("/scratch/workspace"),
    home_files={"settings.json": "never in a command line"},
    read_only=(Path("/opt/python-3.12"),),
    mounts=((Path("/yoke/harnesses/pi/0.1"), "/opt/harness/pi", False),),
    listen_port=8000,
)
CASES = {
    "a rollout, on the system of the machine": (PROGRAM, HOST, ROLLOUT),
    "its verifier": (PROGRAM, HOST, VERIFIER),
    "a rollout in an image, set-user-id": (replace(PROGRAM, mode=()), Image(Path("/yoke/images/0.sif")), ROLLOUT),
    "no workspace, and paths with odd characters": (
        PROGRAM,
        HOST,
        SandboxSpec(("true",), mounts=((Path('/a,b:c "d"'), "/inside, here", True),)),
    ),
}


def rendered() -> str:
    """Every case's command line, an option a line."""
    parts = [f"Regenerate with: PYTHONPATH=.:tests python tests/sandbox/{Path(__file__).name}"]
    for title, (program, image, spec) in CASES.items():
        words = program.command_line(image, spec, Path("/scratch/yoke-0"), (7, 9, 11))
        new_line = [word.startswith("--") or word == str(image.path) for word in words]
        line = "".join(
            f"\n    {word}" if new else f" {shlex.quote(word)}" for word, new in zip(words, new_line, strict=True)
        )
        parts.append(f"## {title}\n{line[1:]}")
    package = str(FIRST.parent)
    return "\n\n".join(parts).replace(str(ETC), "PACKAGE/etc").replace(package, "PACKAGE") + "\n"


def test_command_lines_are_the_recorded_ones() -> None:
    assert rendered() == GOLDEN.read_text()


def test_no_secret_is_in_a_command_line() -> None:
    assert "never" not in rendered()


# --- a stand-in for the program

STAND_IN = """#!/bin/bash
here=$(dirname "$0")
case $* in
*--version) cat "$here/version" ;;
pull*) echo "$*" >>"$here/pulls"; part=$3 name=$4; . "$here/pull" ;;
*) . "$here/exec" ;;
esac
"""


class StandIn:
    """An `apptainer` in PATH that does as it is told. Its scripts may use $part and $name."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "apptainer").write_text(STAND_IN)
        (folder / "apptainer").chmod(0o755)
        self.does(version="apptainer version 1.4.5", pull='echo image >"$part"', exec="exit 255")
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("YOKE_HOME", str(folder / "home"))

    def does(self, **scripts: str) -> None:
        for name, text in scripts.items():
            (self.folder / name).write_text(text)

    @property
    def pulls(self) -> list[str]:
        path = self.folder / "pulls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(images, "WAIT_S", 0.05)
    return StandIn(tmp_path, monkeypatch)


NAME = "docker://debian:12"


def find(timeout_s: float = 60.0) -> Image:
    return images.find(NAME, "apptainer", timeout_s)


def left() -> list[str]:
    return sorted(os.listdir(images.folder()))


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("apptainer version 1.4.5", None),
        ("apptainer version 1.1.0-rc.2+12-gabc", None),
        ("apptainer version 1.0.3", "apptainer 1.0.3: 1.1 or newer"),
        ("singularity version 0.9.9", "0.9.9: 1.1 or newer"),
        ("what?", "says no version: what?"),
        ("", "says no version"),
    ],
)
def test_versions(stand_in: StandIn, says: str, expected: str | None) -> None:
    stand_in.does(version=says)
    if expected is None:
        assert find_apptainer().version == says.split()[-1]
    else:
        with pytest.raises(UserError, match=expected):
            find_apptainer()


def test_an_image_is_fetched_once(stand_in: StandIn) -> None:
    assert find() == find() == Image(kept_as(NAME))
    assert len(stand_in.pulls) == 1
    assert left() == [kept_as(NAME).name]
    assert kept_as(NAME).read_text() == "image\n"
    assert kept_as(NAME) != kept_as(NAME + ".1")


def test_two_builders_fetch_it_once_and_never_show_a_part(stand_in: StandIn) -> None:
    """Two on this machine; the second waits for the first, and both then have the whole."""
    stand_in.does(pull='printf ha >"$part"; sleep 1; printf lf >>"$part"')
    found: list[str] = []
    builders = [threading.Thread(target=lambda: found.append(find().path.read_text())) for _ in range(4)]
    for builder in builders:
        builder.start()
    while any(builder.is_alive() for builder in builders):
        assert not kept_as(NAME).exists() or kept_as(NAME).read_text() == "half"
        time.sleep(0.01)
    assert found == ["half"] * 4
    assert len(stand_in.pulls) == 1
    assert left() == [kept_as(NAME).name]


def test_builders_that_do_not_see_each_others_claim_still_publish_whole_images(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.does(pull='printf ha >"$part"; sleep 0.5; printf lf >>"$part"')
    monkeypatch.setattr(images, "_claimed", lambda claim: True)
    builders = [threading.Thread(target=find) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert len(stand_in.pulls) == 3
    assert (left(), kept_as(NAME).read_text()) == ([kept_as(NAME).name], "half")


def test_a_dead_builders_claim_is_taken_over(stand_in: StandIn) -> None:
    images.folder().mkdir(parents=True)
    claim = kept_as(NAME).with_suffix(".claim")
    claim.write_text("n1 process 7")
    with pytest.raises(UserError, match=r"n1 process 7 has not fetched docker://debian:12 within 0 s"):
        find(timeout_s=0.3)
    os.utime(claim, (0, time.time() - 2 * images.CLAIM_S))
    assert find().path.exists()
    assert left() == [kept_as(NAME).name]


OFFLINE = 'FATAL: pinging container registry: Get "https://r.example/v2/": dial tcp: lookup r.example: no such host'
FAILURES = {
    "no network": (f"echo '{OFFLINE}' >&2; exit 255", r"no such host; this machine does not reach the registry\. On "
                   r"one that does, run: apptainer pull \w+\.sif docker://debian:12 +then copy the file to /.*\.sif"),
    "no such image": ("echo 'FATAL: manifest unknown' >&2; exit 255", "there is no such image, or it needs a login"),
    "disk full": ("echo 'FATAL: write /x: no space left on device' >&2; exit 255", "disk is full: free .*YOKE_HOME"),
    "no mksquashfs": ("echo 'FATAL: while searching for mksquashfs' >&2; exit 255", "install squashfs-tools"),
    "killed": ("kill -9 $$", "exit -9; try by hand: apptainer pull"),
    "says it worked": ("exit 0", "try by hand"),
    "something else": ("echo 'FATAL: what?' >&2; exit 3", r"what\?; try by hand"),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_fetch_is_one_line_with_what_to_do(stand_in: StandIn, failure: str) -> None:
    script, expected = FAILURES[failure]
    stand_in.does(pull=script if script == "exit 0" else f'echo half >"$part"; {script}')
    with pytest.raises(UserError, match=expected) as raised:
        find()
    assert "\n" not in str(raised.value)
    assert [name for name in left() if not name.endswith(".log")] == []
    stand_in.does(pull='echo image >"$part"')
    assert find().path.exists()  # nothing is in the way of the next try


def test_a_fetch_has_a_time_limit_and_leaves_nothing(stand_in: StandIn) -> None:
    stand_in.does(pull='echo half >"$part"; exec sleep 600')
    began = time.monotonic()
    with pytest.raises(UserError, match=r"longer than sandbox\.pull_timeout_s.*apptainer pull"):
        find(timeout_s=1.0)
    assert time.monotonic() - began < 60
    assert [name for name in left() if not name.endswith(".log")] == []


def test_a_place_that_takes_no_image_is_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    (stand_in.folder / "file").touch()
    monkeypatch.setenv("YOKE_HOME", str(stand_in.folder / "file"))
    with pytest.raises(UserError, match=r"cannot keep docker://debian:12 in .*; set YOKE_HOME"):
        find()
    with pytest.raises(UserError, match=r"cannot make .*: set YOKE_HOME"):
        images.host_system("python3", ())


def test_a_submission_fetches_the_image_or_says_how(stand_in: StandIn) -> None:
    """For nodes without a network."""
    images.fetch_image(SandboxConfig())
    assert stand_in.pulls == []
    (stand_in.folder / "apptainer").rename(stand_in.folder / "hidden")
    with pytest.raises(UserError, match=r"no apptainer in PATH.*run: apptainer pull \w+\.sif docker://debian:12 "):
        images.fetch_image(SandboxConfig(image=NAME))
    (stand_in.folder / "hidden").rename(stand_in.folder / "apptainer")
    images.fetch_image(SandboxConfig(image=NAME))
    (stand_in.folder / "apptainer").unlink()
    images.fetch_image(SandboxConfig(image=NAME))
    assert len(stand_in.pulls) == 1


def test_a_missing_file_is_named(stand_in: StandIn) -> None:
    with pytest.raises(UserError, match=r"sandbox\.image=/no/such\.sif: no such file"):
        make_sandbox(SandboxConfig(kind="apptainer", image="/no/such.sif"))


def test_a_sandbox_that_cannot_be_built_is_told_in_apptainers_words(stand_in: StandIn) -> None:
    stand_in.does(exec="echo 'FATAL: no user namespaces for you' >&2; exit 255")
    with pytest.raises(UserError, match=r": --userns and set-user-id: .*no user namespaces for you$"):
        make_sandbox(SandboxConfig(kind="apptainer"))


def test_a_program_that_hangs_is_given_up(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.sandbox.apptainer.START_S", 2.0)
    mark = f"hung-{os.getpid()}"
    stand_in.does(exec=f"echo waiting >&2; exec -a {mark} sleep 600")
    with pytest.raises(UserError, match="no word from the sandbox within 2 s: waiting"):
        make_sandbox(SandboxConfig(kind="apptainer"))
    seen = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in seen


# --- the choice

WORKS, FAILS, OLD, MISSING = "works", "fails", "old", "missing"


def no_bubblewrap() -> str:
    raise UserError("no bubblewrap: install it")


@pytest.mark.parametrize(
    ("kind", "image", "bubblewrap", "apptainer", "expected"),
    [
        ("auto", "", WORKS, WORKS, r"^bubblewrap \(it works here\)$"),
        ("auto", "", WORKS, MISSING, r"^bubblewrap \(it works here\)$"),
        ("auto", "", FAILS, WORKS, r"^apptainer 1\.4\.5, on the system of this machine \(bubblewrap: .*Permission"),
        ("auto", "", MISSING, WORKS, r"^apptainer 1\.4\.5.*\(bubblewrap: no bubblewrap"),
        ("auto", "x.sif", WORKS, WORKS, r"^apptainer 1\.4\.5, /.*x\.sif \(bubblewrap: it has no images"),
        ("auto", "x.sif", WORKS, MISSING, r"!^apptainer: no apptainer in PATH"),
        ("auto", "", FAILS, MISSING, r"!bubblewrap: .*Permission.*apptainer: no apptainer in PATH.*sandbox=process"),
        ("auto", "", FAILS, OLD, r"!Permission.*1\.0\.3: 1\.1 or newer.*unprivileged_userns.*sandbox=process"),
        ("auto", "", FAILS, FAILS, r"!Permission.*apptainer: it cannot build a sandbox here: no luck"),
        ("bubblewrap", "", FAILS, WORKS, r"!bubblewrap: .*Permission"),
        ("bubblewrap", "x.sif", WORKS, WORKS, r"!bubblewrap: it has no images"),
        ("apptainer", "", WORKS, WORKS, r"^apptainer 1\.4\.5, on the system of this machine \(as set\)$"),
        ("apptainer", "", WORKS, MISSING, r"!^apptainer: no apptainer in PATH \(on many clusters"),
        ("process", "", WORKS, WORKS, r"^process: agents run WITHOUT isolation"),
        ("docker", "", WORKS, WORKS, r"!sandbox\.kind=docker is unknown.*auto, bubblewrap, apptainer, process$"),
    ],
)
def test_the_choice(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    image: str,
    bubblewrap: str,
    apptainer: str,
    expected: str,
) -> None:
    """A "!" before what is expected: no sandbox, and that message."""
    if image:
        image = str(stand_in.folder / image)
        Path(image).touch()
    answers: dict[str, Callable[[object], str | None]] = {WORKS: lambda _: None, FAILS: lambda _: "Permission denied"}
    if bubblewrap == MISSING:
        monkeypatch.setattr("pipeline.sandbox.bubblewrap.find_bwrap", no_bubblewrap)
    else:
        monkeypatch.setattr(BubblewrapSandbox, "probe", answers[bubblewrap])
    monkeypatch.setattr(ApptainerSandbox, "probe", lambda _: None if apptainer == WORKS else "no luck")
    if apptainer == OLD:
        stand_in.does(version="apptainer version 1.0.3")
    if apptainer == MISSING:
        (stand_in.folder / "apptainer").unlink()
    config = SandboxConfig(kind=kind, image=image)
    if expected.startswith("!"):
        with pytest.raises(UserError, match=expected[1:]) as raised:
            choose_sandbox(config)
        assert "\n" not in str(raised.value)
    else:
        sandbox, why = choose_sandbox(config)
        assert why.startswith(type(sandbox).__name__.removesuffix("Sandbox").lower())
        assert re.search(expected, why), why


# --- a real image

NEEDED = ("mksquashfs", "squashfuse")
lacks = [name for name in NEEDED if shutil.which(name) is None]
needs_images = pytest.mark.skipif(
    bool(lacks) or not os.access("/dev/fuse", os.W_OK) or Path(sys.base_prefix).is_relative_to("/usr"),
    reason=f"needs {' and '.join(NEEDED)}, /dev/fuse, and a Python outside of /usr, which images do not hide",
)


@needs_apptainer
@needs_images
def test_a_rollout_in_a_real_image(tmp_path: Path) -> None:
    """It sees the image's system, its PATH and what is mounted, and nothing of the host's."""
    small_system(tmp_path / "root")
    image, workspace, harness = (tmp_path / name for name in ("image.sif", "workspace", "harness"))
    build = ["apptainer", "--silent", "build", str(image), str(tmp_path / "root")]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    workspace.mkdir()
    harness.mkdir()
    (harness / "there").touch()
    script = "ls -d /of-the-image /usr/share /opt/harness/*; ls /usr/bin; echo $PATH $LEFT_OUT; echo > made; echo > /x"

    async def inner() -> None:
        sandbox, why = choose_sandbox(SandboxConfig(image=str(image)))
        assert why.startswith("apptainer") and str(image) in why
        mounts = ((harness, "/opt/harness/h", False),)
        log = tmp_path / "log"
        spec = SandboxSpec(("bash", "-c", script), workspace=workspace, mounts=mounts, listen_port=8000, stdout=log)
        process = await sandbox.launch(spec)
        process.go()
        assert (await process.wait()).returncode == 1

    asyncio.run(inner())
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:-2] == [
        "ls: cannot access '/usr/share': No such file or directory",
        *("/of-the-image", "/opt/harness/h", "bash", "env", "ls", "true"),
    ]
    assert lines[-2].startswith("/usr/bin:/image/bin") and not lines[-2].endswith("1")
    assert "Read-only file system" in lines[-1]
    assert os.listdir(workspace) == ["made"]


@needs_apptainer
@needs_images
def test_each_task_has_its_own_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fetched before; a task that names none has this machine's system; one that was not fetched says what to do."""
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    small_system(tmp_path / "root")
    images.folder().mkdir(parents=True)
    build = ["apptainer", "--silent", "build", str(kept_as(NAME)), str(tmp_path / "root")]
    subprocess.run(build, check=True, capture_output=True, timeout=120)

    async def seen(image: str) -> str:
        sandbox = make_sandbox(SandboxConfig(kind="apptainer", image="task"))
        log = tmp_path / f"log{len(image)}"
        spec = SandboxSpec(("bash", "-c", "[ -e /of-the-image ] && echo image || echo host"), stdout=log, image=image)
        await (await sandbox.launch(spec)).wait()
        return log.read_text().strip()

    assert asyncio.run(seen(NAME)) == "image"
    assert asyncio.run(seen("")) == "host"
    with pytest.raises(SandboxError, match=r"docker://other is not at hand: run yoke check sandbox\.image=task"):
        asyncio.run(seen("docker://other"))


def test_the_check_of_tasks_fetches_their_images(stand_in: StandIn, tmp_path: Path) -> None:
    for name, line in {"one": 'docker_image = "debian:12"', "two": "", "three": 'docker_image = "debian:12"'}.items():
        for file in ("tests/test.sh", "instruction.md", "environment/x"):
            (tmp_path / "tasks" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name / file).write_text("x")
        (tmp_path / "tasks" / name / "task.toml").write_text(f"[environment]\n{line}\n")
    place = tmp_path / "tasks"
    config = compose_config(["+experiment=smoke", "tasks.kind=harbor", f"tasks.train={place}", f"tasks.test={place}"])
    for gate in ("duplicate", "same_id", "same_instruction"):
        setattr(config.tasks.gates, gate, "off")
    check_tasks_readable(config, RunDirectory(tmp_path / "run"))
    assert stand_in.pulls == []
    config.sandbox.image = "task"
    check_tasks_readable(config, RunDirectory(tmp_path / "run"))
    assert len(stand_in.pulls) == 1 and stand_in.pulls[0].endswith(" docker://debian:12")


if __name__ == "__main__":
    GOLDEN.write_text(rendered())
