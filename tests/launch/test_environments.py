"""`yoke tasks build`: built once, resumed, what fails is named; with programs that stand in for the builders."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config import UserError
from pipeline.sandbox.builds import complaint, find_build
from pipeline.tasks.builders import choose_builder
from pipeline.tasks.harbor import load_task

PODMAN = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/said"
case "$1 $2" in
"build --tag") if grep -q FAILS "$4/Dockerfile"; then echo "Error: no such package" >&2; exit 1; fi ;;
"pull "*) case "$2" in *secret*) echo "Error: denied" >&2; exit 125 ;; esac ;;
"image inspect") echo '[{"Config": {"Env": ["PATH=/opt/bin:/usr/bin", "A=b c"], "WorkingDir": "/app"}}]' ;;
create*) echo container-1 ;;
"export --output") cp "$here/root.tar" "$3" ;;
esac
"""
BUILDAH = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/said"
case "$1" in
from) echo container-1 ;;
inspect) echo '{"OCIv1": {"config": {"Env": ["PATH=/opt/bin:/usr/bin", "A=b c"], "WorkingDir": "/app"}}}' ;;
unshare) shift; exec "$@" ;;
mount) echo "$here/root" ;;
esac
"""
APPTAINER = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/said"
case "$1 $2" in
"build --sandbox") cat "$4" >> "$here/definitions" 2> /dev/null; cp -R "$here/root" "$3" ;;
"build "*) echo sif > "$2" ;;
"--silent exec") printf 'PATH=/opt/bin:/usr/bin\\0A=b c\\0HOME=/root\\0APPTAINER_NAME=x\\0' ;;
"--version "*) echo apptainer version 1.4.5 ;;
esac
"""
BUILDERS = {"podman": PODMAN, "docker": PODMAN, "buildah": BUILDAH, "apptainer": APPTAINER}
TASKS = {  # Dockerfile, or an image of a registry
    "one": "FROM base\nCOPY data /app/\n",
    "same": "FROM base\nCOPY data /app/\n",
    "other": "FROM base\nRUN true\n",
    "image": "registry.example/image:1",
    "bare": "",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tasks, and one with programs, which is in PATH."""
    for name, text in TASKS.items():
        write_task(tmp_path / "tasks" / name, text)
    root = tmp_path / "bin" / "root"
    (root / "app").mkdir(parents=True)
    (root / "app/data").write_text("prefetched")
    (root / "app/program").write_text("x")
    (root / "app/program").chmod(0o6755)
    os.mkfifo(root / "app/pipe")
    with tarfile.open(tmp_path / "bin/root.tar", "w") as archive:
        archive.add(root, ".")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shutil, "which", only_in(tmp_path / "bin"))
    return tmp_path


def only_in(folder: Path):  # type: ignore[no-untyped-def]
    """A `which` that sees no builder of this machine's own."""
    return lambda name, *_, **__: str(folder / name) if (folder / name).is_file() else None


def write_task(place: Path, text: str) -> None:
    for name in ("tests", "environment"):
        (place / name).mkdir(parents=True)
    (place / "tests/test.sh").write_text("true")
    (place / "instruction.md").write_text("Do it.")
    (place / "environment/data").write_text("prefetched")
    is_image = text and not text.startswith("FROM")
    (place / "task.toml").write_text(f'[environment]\ndocker_image = "{text}"\n' if is_image else "")
    if text and not is_image:
        (place / "environment/Dockerfile").write_text(text)


def provide(place: Path, name: str) -> None:
    (place / "bin" / name).write_text(BUILDERS[name])
    (place / "bin" / name).chmod(0o755)


def yoke(place: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", *words, "tasks=harbor", f"tasks.train={place / 'tasks'}"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def said(place: Path, word: str) -> list[str]:
    path = place / "bin/said"
    return [line for line in path.read_text().splitlines() if line.startswith(word)] if path.exists() else []


@pytest.mark.parametrize("program", BUILDERS)
def test_each_builder_gives_the_same(place: Path, program: str) -> None:
    provide(place, program)
    assert yoke(place, "build") == 0
    for name in ("one", "other", "image"):
        build = find_build(load_task(place / "tasks" / name).image)
        assert build is not None and complaint(build) is None
        assert (build.builder, build.form, build.env) == (program, "root", {"PATH": "/opt/bin:/usr/bin", "A": "b c"})
        assert build.workdir == ("/app" if program != "apptainer" else "/" if name != "image" else "")
        assert (build.path / "app/data").read_text() == "prefetched"
        assert (build.path / "app/program").stat().st_mode & 0o7777 == 0o755
        assert not (build.path / "app/pipe").exists()
    assert sorted(path.name[:4] for path in (place / "home/images").iterdir() if not path.name.startswith(".")) == [
        *["env-"] * 3,
        "last",
    ]


def test_equal_environments_are_built_once_and_only_what_is_missing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provide(place, "podman")
    assert yoke(place, "build", "--list") == 1
    assert "not built: docker://registry.example/image:1 (image)" in capsys.readouterr().out
    assert said(place, "build") == []
    assert yoke(place, "build") == 0
    assert "3 of 3 environments are built, 3 of them now" in capsys.readouterr().out
    assert len(said(place, "build")) == 2 and len(said(place, "pull")) == 1
    write_task(place / "tasks/new", "FROM base\nRUN new\n")
    assert yoke(place, "build") == 0
    assert "4 of 4 environments are built, 1 of them now" in capsys.readouterr().out
    assert len(said(place, "build")) == 3
    assert yoke(place, "build", "--list") == 0
    assert "run on the system of the machine: bare" in capsys.readouterr().out
    (place / "tasks/one/environment/data").write_text("other data")
    assert yoke(place, "build", "--list") == 1


def test_what_cannot_be_built_is_named_and_does_not_stop_the_rest(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provide(place, "podman")
    write_task(place / "tasks/broken", "FROM base\nRUN FAILS\n")
    write_task(place / "tasks/closed", "registry.example/secret:1")
    write_task(place / "tasks/several", "FROM base\n")
    (place / "tasks/several/environment/docker-compose.yaml").write_text("services: {}")
    assert yoke(place, "build") == 1
    out = capsys.readouterr().out
    assert "3 of 5 environments are built" in out and "3 tasks cannot run" in out
    assert "  broken: podman build: Error: no such package" in out
    assert "  closed: podman pull: Error: denied" in out
    assert "  several: environment/docker-compose.yaml asks for several containers" in out
    report = json.loads((place / "home/images/last-build.json").read_text())
    assert sorted(report["failed"]) == ["broken", "closed", "several"]
    assert sum(report["environments"].values()) == 3
    (place / "tasks/broken/environment/Dockerfile").write_text("FROM base\nRUN works\n")
    for name in ("closed", "several"):
        shutil.rmtree(place / "tasks" / name)
    assert yoke(place, "build") == 0


def test_apptainer_reads_dockerfiles_by_itself_and_packs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("apptainer", "mksquashfs"):
        (place / "bin" / name).write_text(APPTAINER)
        (place / "bin" / name).chmod(0o755)
    write_task(place / "tasks/staged", "FROM base AS a\nFROM b\nCOPY --from=a /x /y\n")
    assert yoke(place, "build", "sandbox=apptainer") == 1
    assert "staged: apptainer alone cannot build this Dockerfile: a second FROM (b)" in capsys.readouterr().out
    definitions = (place / "bin/definitions").read_text()
    assert "Bootstrap: docker\nFrom: base\n" in definitions and "( cd / && /bin/sh -c true )" in definitions
    build = find_build(load_task(place / "tasks/one").image)
    assert build is not None and build.form == "image.sif" and complaint(build) is None
    assert sorted(os.listdir(build.place)) == ["files.gz", "image.sif", "manifest.json"]


def test_a_base_that_is_here_is_not_fetched(place: Path) -> None:
    provide(place, "apptainer")
    write_task(place / "tasks/above", "FROM registry.example/image:1\nRUN above\n")
    assert yoke(place, "build", "tasks.build_jobs=1") == 0
    shutil.rmtree(find_build(load_task(place / "tasks/above").image).place)  # type: ignore[union-attr]
    assert yoke(place, "build") == 0
    base = find_build("docker://registry.example/image:1")
    assert base is not None
    assert f"Bootstrap: localimage\nFrom: {base.path}\n" in (place / "bin/definitions").read_text()


def test_a_build_that_takes_too_long_is_ended(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    provide(place, "podman")
    (place / "bin/podman").write_text("#!/bin/sh\n[ $1 = info ] || exec sleep 600\n")
    assert yoke(place, "build", "tasks.build_timeout_s=0.2") == 1
    assert "not done within its time limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "wanted", "expected"),
    [
        ((), "auto", r"no program here can build environments \(podman: not in PATH; .*apptainer: not in PATH\)"),
        (("apptainer",), "podman", r"podman: not in PATH"),
        ((), "kaniko", r"tasks\.builder=kaniko is unknown; choose one of: auto, podman"),
        (("docker", "apptainer"), "auto", "docker"),
        (("apptainer",), "auto", "apptainer"),
    ],
)
def test_which_builder_is_taken(place: Path, there: tuple[str, ...], wanted: str, expected: str) -> None:
    for name in there:
        provide(place, name)
    if expected in BUILDERS:
        assert choose_builder(wanted)[0].name == expected
    else:
        with pytest.raises(UserError, match=expected):
            choose_builder(wanted)


def test_one_that_does_not_answer_is_passed_over(place: Path) -> None:
    for name in ("podman", "apptainer"):
        provide(place, name)
    (place / "bin/podman").write_text("#!/bin/sh\necho 'cannot connect to Podman' >&2; exit 125\n")
    builder, why = choose_builder("auto")
    assert builder.name == "apptainer" and "podman: cannot connect to Podman" in why


def test_words_that_it_does_not_know(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert yoke(place, "bild") == 2
    assert yoke(place, "build", "--force") == 2
    assert "knows --list and settings, not --force" in capsys.readouterr().err
