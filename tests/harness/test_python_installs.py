"""Python harnesses: which interpreter, what locks hold, and the installer's promises on a harness of one module."""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.harness import get_harness, harness_names, python
from pipeline.harness.base import locks_of, register
from pipeline.harness.install import install, installed
from pipeline.harness.packages import Pip

VERSION = "1.2"
RECIPE = f"""
from pipeline.harness.base import HarnessRecipe
from pipeline.harness.packages import Pip

TINY = dict(version="{VERSION}", dialect="chat", argv=("$prefix/bin/tiny",), env={{}})
RECIPE = HarnessRecipe(name="tiny", packaging=Pip("tiny-harness"), **TINY)
PICKY = HarnessRecipe(name="picky", packaging=Pip("tiny-harness", oldest=(3, 99), newest=(3, 99)), **TINY)
"""
PYTHON_HARNESSES = [name for name in harness_names() if isinstance(get_harness(name).packaging, Pip)]


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of a harness with a lock; its wheel lies in the one place where uv may look."""
    info = f"tiny_harness-{VERSION}.dist-info"
    files = {
        "tiny.py": "def main():\n    print('tiny', __file__)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-harness\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    }
    record = [f"{name},sha256={digest(text.encode())},{len(text)}" for name, text in files.items()]
    wheel = tmp_path / "wheels" / f"tiny_harness-{VERSION}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"]) + "\n"}.items():
            archive.writestr(name, text)
    recipe = tmp_path / "tiny.py"
    recipe.write_text(RECIPE)
    lock = tmp_path / "locks" / "tiny" / "requirements.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"tiny-harness=={VERSION} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_", python.VARIABLE))]:
        monkeypatch.delenv(name)
    for name, value in (("FIND_LINKS", wheel.parent), ("NO_INDEX", "1"), ("CACHE_DIR", tmp_path / "cache")):
        monkeypatch.setenv(f"UV_{name}", str(value))
    register([str(recipe)])
    return recipe


def install_tiny(recipe: Path, root: Path) -> dict[str, str]:
    register([str(recipe)])
    return install(["tiny"], root)


def test_install_is_whole_moved_and_compiled(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert install_tiny(tiny, root) == {}
    assert installed("tiny", root)
    assert [path.name for path in root.iterdir()] == ["tiny"]
    moved = (root / "tiny").rename(tmp_path / "elsewhere")  # as the sandbox shows it
    module = next(moved.glob("lib/python3.*/site-packages/tiny.py"))
    code = next(module.parent.glob("__pycache__/tiny.*.pyc")).read_bytes()
    assert code[4:8] == bytes([1, 0, 0, 0])  # by hash, unchecked: no time stamp can make it stale
    ran = subprocess.run([moved / "bin" / "tiny"], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == f"tiny {module}\n"


def test_install_needs_no_network_for_what_the_cache_has(tiny: Path, tmp_path: Path) -> None:
    """The index hangs: it must not even be asked."""
    assert install_tiny(tiny, tmp_path / "a") == {}
    with hanging_index() as url, pytest.MonkeyPatch.context() as patch:
        patch.delenv("UV_NO_INDEX")
        patch.setenv("UV_DEFAULT_INDEX", url)
        assert install_tiny(tiny, tmp_path / "b") == {}
    assert installed("tiny", tmp_path / "b")


def test_wrong_hash_is_refused_in_uvs_words(tiny: Path, tmp_path: Path) -> None:
    lock = tiny.parent / "locks" / "tiny" / "requirements.txt"
    lock.write_text(re.sub("[0-9a-f]{64}", "0" * 64, lock.read_text()))
    failures = install_tiny(tiny, tmp_path / "root")
    assert "uv failed" in failures["tiny"]
    assert "Hash mismatch" in failures["tiny"]
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.slow
def test_two_installs_at_once(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "left-over").touch()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(install_tiny, [(tiny, root)] * 2) == [{}, {}]
    assert installed("tiny", root)
    assert [path.name for path in root.iterdir()] == ["tiny"]
    assert not (root / "tiny" / "left-over").exists()


@pytest.mark.slow
def test_killed_install_leaves_nothing_that_counts(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    code = f"""
from pathlib import Path
from pipeline.harness.base import register
from pipeline.harness.install import install
register([{str(tiny)!r}])
install(["tiny"], Path({str(root)!r}))
"""
    with hanging_index() as url:
        environment = {**os.environ, "UV_NO_INDEX": "", "UV_FIND_LINKS": "", "UV_DEFAULT_INDEX": url}
        child = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
        drafts = await_drafts(root)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    register([str(tiny)])
    assert not installed("tiny", root)
    os.utime(drafts, (0, 0))
    assert install(["tiny"], root) == {}
    assert [path.name for path in root.iterdir()] == ["tiny"]  # the next install removes old drafts


def await_drafts(root: Path) -> Path:
    """The draft of an install that has made its environment and now waits for the index."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for python_link in root.glob(".tiny-*/tiny/bin/python"):
            return python_link.parents[2]
        time.sleep(0.02)
    raise AssertionError("no draft within 120 s")


class hanging_index:
    """A server that takes connections and never answers."""

    def __enter__(self) -> str:
        self.socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/simple"

    def __exit__(self, *error: object) -> None:
        self.socket.close()


# Locks


@pytest.mark.parametrize("name", PYTHON_HARNESSES)
def test_lock_pins_every_package_by_hash(name: str) -> None:
    recipe, lock = get_harness(name), locks_of(name)
    assert lock is not None
    text = (lock / "requirements.txt").read_text()
    entries = [entry for entry in re.split(r"\n(?=\S)", text.strip()) if not entry.startswith("#")]
    assert f"{recipe.packaging.package}=={recipe.version}" in text
    assert all(re.match(r"[a-z0-9.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry, re.DOTALL) for entry in entries)
    assert "://" not in text
    assert not re.search(r"^--", text, re.MULTILINE)


# Interpreters


def write_python(path: Path, version: str, real: str = "") -> Path:
    """Answers what an interpreter is asked, or fails as pyenv's stand-ins do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = json.dumps([[int(number) for number in version.split(".")], real or str(path)]) if version else ""
    path.write_text("#!/bin/sh\n" + (f"echo '{answer}'\n" if version else "exit 127\n"))
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with no Python but 3.11 and those that a test puts below its home."""
    monkeypatch.setattr(python, "FOLDERS", (str(tmp_path / "versions"),))
    monkeypatch.setattr(sys, "executable", str(write_python(tmp_path / "python", "3.11")))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(python.VARIABLE, raising=False)
    python.find_python.cache_clear()
    yield tmp_path
    python.find_python.cache_clear()


def test_oldest_fitting_python_is_taken_and_standins_are_not(machine: Path) -> None:
    write_python(machine / "bin" / "python3.12", "")
    write_python(machine / "versions" / "3.13.0" / "bin" / "python3.13", "3.13")
    twelve = write_python(machine / "versions" / "3.12.1" / "bin" / "python3.12", "3.12")
    assert python.find_python((3, 12)) == twelve
    assert python.find_python((3, 13)).name == "python3.13"
    assert python.find_python((3, 11)) == machine / "python"


def test_link_and_standin_lead_to_the_real_interpreter(machine: Path) -> None:
    write_python(machine / "bin" / "python3.12", "3.12", real="/real/bin/python3.12")
    assert python.find_python((3, 12)) == Path("/real/bin/python3.12")


def test_missing_python_is_told_in_one_line(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no Python 3\.12 to 3\.14, which no package brings: install one.*YOKE_PYTHON"):
        python.find_python((3, 12))
    monkeypatch.setenv(python.VARIABLE, str(machine / "python"))
    with pytest.raises(UserError, match=r"YOKE_PYTHON=.* is no Python 3\.12"):
        python.find_python((3, 12))


def test_harness_without_its_python_does_not_keep_others_from_being_installed(tiny: Path, tmp_path: Path) -> None:
    register([str(tiny), f"{tiny}:PICKY"])
    failures = install(["picky", "tiny"], tmp_path / "root")
    assert list(failures) == ["picky"]
    assert failures["picky"].startswith("no Python 3.99")
    assert installed("tiny", tmp_path / "root")


def test_installation_whose_python_is_gone_does_not_count(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    install_tiny(tiny, root)
    link = root / "tiny" / "bin" / "python"
    link.unlink()
    link.symlink_to("/gone/bin/python3.12")
    assert not installed("tiny", root)
    with pytest.raises(UserError, match=r"tiny 1\.2 is not installed"):
        get_harness("tiny").check_installed(root)
