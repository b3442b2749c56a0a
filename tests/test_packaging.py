"""The package as a whole: it imports, its rooms keep apart, its lock and its commands are what the files say."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"
ROOMS = ("capture", "engine", "harness", "sandbox", "tasks", "training", "report")
# What may import what; a room's own modules and these are allowed to everyone.
SHARED = {"pipeline", "pipeline.records", "pipeline.config", "pipeline.hub"}
MAY_IMPORT = {
    **{room: set() for room in ROOMS},
    "stages": set(ROOMS),
    "launch": {"stages", *ROOMS},
    "cli": {"launch", "stages", *ROOMS},
}
REGISTRY_HOSTS = re.compile(r"(pypi|pythonhosted|npmjs|npmmirror|crates|pytorch|golang|rubygems)\.(org|com|io)\b")


def modules() -> list[str]:
    """Dotted names of all modules of the package; programs for a harness's own Python are none."""
    files = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "runners")
    paths = (path.relative_to(ROOT).with_suffix("") for path in files)
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(source: str, package: str) -> Iterator[str]:
    """Every module that ``source``, a module inside ``package``, imports anywhere, functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            target = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{target}.{alias.name}" for alias in node.names)


def wrong_way(module: str, source: str) -> list[str]:
    """Imports of ``module`` that DESIGN's direction forbids."""
    room = module.split(".")[1] if "." in module else ""
    if room not in MAY_IMPORT:
        return []
    allowed = {room, *MAY_IMPORT[room]}
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    wrong = []
    for name in imported(source, package):
        parts = name.split(".")
        shared = any(name == item or name.startswith(f"{item}.") for item in SHARED - {"pipeline"})
        if parts[0] == "pipeline" and not shared and name != "pipeline.__version__" and parts[1:2] != []:
            wrong += [name] if parts[1] not in allowed else []
    return wrong


def run_python(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s)


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def requirements(text: str) -> dict[str, str]:
    """``name==version`` lines as a table."""
    return dict(re.findall(r"^\s*([a-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The package


@pytest.mark.slow
def test_every_module_imports() -> None:
    code = f"""
import importlib, traceback
failed = 0
for name in {[name for name in modules() if not name.endswith("__main__")]!r}:
    try:
        importlib.import_module(name)
    except Exception:
        failed += 1
        print(name, traceback.format_exc())
raise SystemExit(failed)
"""
    done = run_python(code, 240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_capture_loads_neither_torch_nor_vllm() -> None:
    names = [name for name in modules() if name.startswith("pipeline.capture") and not name.endswith("__main__")]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(sorted({{"torch", "vllm", "transformers"}} & set(sys.modules)))
"""
    done = run_python(code, 60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", modules())
def test_imports_point_one_way(module: str) -> None:
    assert wrong_way(module, path_of(module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("pipeline.capture.shard", "from pipeline.engine import client", True),
        ("pipeline.capture.shard", "from pipeline import training", True),
        ("pipeline.capture.shard", "from ..engine import client", True),
        ("pipeline.capture.shard", "import pipeline.stages.rollout", True),
        ("pipeline.capture.shard", "def f():\n    from pipeline.sandbox import launch", True),
        ("pipeline.stages.rollout", "from pipeline.launch import roles", True),
        ("pipeline.capture.shard", "from pipeline.records import Call\nfrom pipeline.capture import trace", False),
        ("pipeline.capture.shard", "from pipeline import __version__, config, records", False),
        ("pipeline.capture.shard", "from .trace import Tree\nimport torch", False),
        ("pipeline.stages.rollout", "from pipeline.engine import client", False),
        ("pipeline.cli", "from pipeline.stages import rollout", False),
    ],
)
def test_the_direction_check_sees_a_wrong_import(module: str, line: str, wrong: bool) -> None:
    assert bool(wrong_way(module, line)) is wrong


@pytest.mark.parametrize("module", [name for name in modules() if path_of(name).read_text().strip()])
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(path_of(module).read_text())), f"{module} has no docstring"


# The lock


def test_lock_has_every_pin_of_setup_cfg(setup: configparser.ConfigParser) -> None:
    wanted = requirements(setup["options"]["install_requires"])
    for extra in ("cpu", "dev"):
        wanted |= requirements(setup["options.extras_require"][extra])
    torch = wanted.pop("torch")
    locked = requirements((ROOT / "requirements" / "cpu.txt").read_text())
    assert {name: locked.get(name) for name in wanted} == wanted
    assert f'"torch=={torch}"' in (ROOT / "requirements" / "uv.toml").read_text()


def test_every_dependency_is_pinned(setup: configparser.ConfigParser) -> None:
    asked = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    lines = [line for block in asked for line in block.split("\n") if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []


def test_lock_leaves_out_what_needs_cuda_and_hashes_the_rest() -> None:
    blocks = re.split(r"\n(?=[a-z])", (ROOT / "requirements" / "cpu.txt").read_text())[1:]
    names = {block.split("==")[0] for block in blocks}
    assert len(names) > 100
    assert {name for name in names if re.match(r"torch|nvidia|cuda|triton", name)} == set()
    assert [block.split("==")[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_no_file_names_a_registry_host() -> None:
    named = {}
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if found := sorted({match.group(0) for match in REGISTRY_HOSTS.finditer(text)}):
            named[str(path.relative_to(ROOT))] = found
    assert named == {}


# The commands


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_commands_in_the_readme_and_in_ci_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / ".ci" / "run").read_text()))
    if (ROOT / "README.md").exists():
        named |= set(re.findall(r"(?:`|^|\$ )make ([a-z][a-z-]*)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"install", "lint", "test"} <= named
    assert named <= make_targets()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["quickstart"], "yoke train +experiment=quickstart"),
        (["quickstart", "FRESH=1"], "yoke train +experiment=quickstart fresh=true"),
        (
            ["test", "ARGS=-k word"],
            '-m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder --durations 15 -k word',
        ),
    ],
)
def test_make_runs(arguments: list[str], command: str) -> None:
    """What a make that runs these tests sets for its children must not change the plan."""
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "VENV", "ARGS", "FRESH", "HARNESSES")
    environ = {name: value for name, value in os.environ.items() if name not in inherited}
    command_line = ["make", "-n", *arguments]
    plan = subprocess.run(command_line, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    assert plan.rstrip().endswith(command)
    assert plan.index("tools/install.py") < plan.index("pipeline.harness.install") < plan.index(command)


# The installer


def test_installer_finishes_at_once_when_nothing_changed(
    installer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = link_environment(tmp_path)
    installer.write_stamp(venv, {"state": "done", "at": str(venv), "inputs": installer.fingerprint()})
    monkeypatch.setattr(installer, "install_torch", lambda *_: pytest.fail("installed again"))
    installer.install(venv, "auto")
    assert "is up to date" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["inputs", "at", "state", "command"])
def test_installer_sees_what_makes_an_environment_stale(installer: ModuleType, tmp_path: Path, change: str) -> None:
    venv = link_environment(tmp_path)
    stamp = {"state": "done", "at": str(venv), "inputs": installer.fingerprint()}
    installer.write_stamp(venv, stamp)
    assert installer.up_to_date(venv)
    if change == "command":
        (venv / "bin" / "yoke").unlink()
    else:
        installer.write_stamp(venv, {**stamp, change: "another"})
    assert not installer.up_to_date(venv)


def test_installer_removes_what_broke_off_and_keeps_what_is_not_its_own(installer: ModuleType, tmp_path: Path) -> None:
    broken = link_environment(tmp_path / "a")
    installer.write_stamp(broken, {"state": "make"})
    assert installer.prepare(broken) == "make"
    assert [path.name for path in broken.iterdir()] == [installer.STAMP]

    by_hand = link_environment(tmp_path / "b")
    assert installer.prepare(by_hand) == "adopt"
    assert (by_hand / "bin" / "yoke").exists()

    updating = link_environment(tmp_path / "c")
    installer.write_stamp(updating, {"state": "done", "at": str(updating), "inputs": "of last week"})
    assert [installer.prepare(updating), installer.prepare(updating)] == ["update", "repair"]

    documents = tmp_path / "d"
    documents.mkdir()
    (documents / "letter").touch()
    with pytest.raises(installer.InstallError, match="set VENV="):
        installer.prepare(documents)
    assert (documents / "letter").exists()


def test_installer_tells_the_ways_to_torch_in_order(
    installer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub in uv's place: the CPU index hangs, so that way is given up in time and the default build is taken."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    done = venv / "torch"
    write_program(venv / "bin" / "python", f'test -e {done} && echo "2.13.0" || exit 1')
    write_program(
        venv / "bin" / "uv",
        f'case "$*" in *--no-index*) exit 1;; *--torch-backend*) exec sleep 60;; *) touch {done};; esac',
    )
    monkeypatch.setattr(installer, "PROBE_S", 0.3)
    installer.install_torch(venv, {**os.environ, "UV_FIND_LINKS": "/wheels"}, installer.WAYS)
    lines = [line for line in capsys.readouterr().out.splitlines() if "way" in line]
    assert [re.search(r"way (\d) of 3", line).group(1) for line in lines] == ["1", "2", "3"]  # type: ignore[union-attr]
    assert "no build for this Python in /wheels" in lines[0]
    assert "does not answer" in lines[1]
    assert "the default build" in lines[2]


def test_installer_without_a_usable_python_says_so_in_one_line(tmp_path: Path) -> None:
    write_program(tmp_path / "python3.11", "exit 127")
    command = [sys.executable, str(ROOT / "tools" / "install.py"), "--venv", str(tmp_path / "venv")]
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "needs Python 3.11 or 3.12" in done.stderr


def test_installer_without_a_way_to_make_environments_names_the_package(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's bare python3: no ensurepip, no pip, no uv."""
    write_program(tmp_path / "python3.12", 'case "$*" in *version_info*) echo 3 12;; *) exit 1;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("PYTHON", "python3.12")
    monkeypatch.setattr(installer.shutil, "which", lambda name: str(tmp_path / name) if name == "python3.12" else None)
    with pytest.raises(installer.InstallError, match=r"python3\.12-venv"):
        installer.create(tmp_path / "venv")


def test_installer_passes_pips_settings_to_uv(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nfind-links = /a /b\nindex-url = file:///mirror\ncert = /ca.pem\n")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_CERT", "UV_FIND_LINKS", "UV_INDEX_URL", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    venv = Path(sys.prefix)
    environ = installer.uv_environ(venv)
    assert environ["UV_FIND_LINKS"] == "/a,/b"
    assert environ["UV_DEFAULT_INDEX"] == "file:///mirror"
    assert environ["SSL_CERT_FILE"] == "/ca.pem"
    monkeypatch.setenv("PIP_FIND_LINKS", "/c")
    monkeypatch.setenv("UV_INDEX_URL", "file:///own")
    environ = installer.uv_environ(venv)
    assert environ["UV_FIND_LINKS"] == "/c"
    assert "UV_DEFAULT_INDEX" not in environ


def link_environment(folder: Path) -> Path:
    """A folder that looks like a finished environment of this interpreter."""
    bin_folder = folder / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    write_program(bin_folder / "yoke", "true")
    return bin_folder.parent


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
