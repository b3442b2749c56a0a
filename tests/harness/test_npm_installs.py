"""npm harnesses: what locks hold, and the installer's promises on a harness of one file, from a registry made here."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.config import Config, UserError
from pipeline.harness import get_harness, node
from pipeline.harness.base import BUILT_IN, locks_of, register
from pipeline.harness.install import install, installed
from pipeline.harness.packages import Npm
from pipeline.launch import harnesses

VERSION = "1.2.3"
NPM = [name for name in BUILT_IN if isinstance(get_harness(name).packaging, Npm)]
RECIPE = f"""
from pipeline.harness.base import HarnessRecipe
from pipeline.harness.packages import Npm

RECIPE = HarnessRecipe(
    name="small", version="{VERSION}", dialect="chat", packaging=Npm("small-harness"), argv=("$node",), env={{}}
)
"""
MANIFEST = {
    "name": "small-harness",
    "version": VERSION,
    "bin": {"small": "small.js"},
    "optionalDependencies": {"small-other-system": VERSION},  # which the registry lacks
}


def tarball() -> bytes:
    files = {"package/package.json": json.dumps(MANIFEST), "package/small.js": "console.log('small')\n"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Registry(ThreadingHTTPServer):
    """Holds one package. ``hangs``: it answers no request for the package itself; ``asked``: there was one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.tarball = tarball()
        self.hangs = threading.Event()
        self.asked = threading.Event()
        self.paths: list[str] = []

    def packument(self) -> bytes:
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(self.tarball).digest()).decode()
        dist = {"tarball": f"{self.url}small-harness/-/small-harness-{VERSION}.tgz", "integrity": integrity}
        versions = {VERSION: {**MANIFEST, "dist": dist}}
        return json.dumps({"name": "small-harness", "dist-tags": {"latest": VERSION}, "versions": versions}).encode()


class Answers(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        answers = {"/small-harness": self.server.packument}
        body = self.server.tarball if self.path.endswith(".tgz") else answers.get(self.path, bytes)()
        if self.path.endswith(".tgz"):
            self.server.asked.set()
            while self.server.hangs.is_set():
                time.sleep(0.05)
        self.send_response(200 if body else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry that npm is set up for, with an empty cache."""
    with Registry() as registry:
        threading.Thread(target=registry.serve_forever, daemon=True).start()
        for name, value in (("registry", registry.url), ("cache", tmp_path / "cache"), ("fetch_retries", 0)):
            monkeypatch.setenv(f"npm_config_{name}", str(value))
        yield registry
        registry.hangs.clear()
        registry.shutdown()


@pytest.fixture
def small(registry: Registry, tmp_path: Path) -> Path:
    """The recipe of a harness with a lock."""
    recipe = tmp_path / "small.py"
    recipe.write_text(RECIPE)
    register([str(recipe)])
    harnesses.run(Config(), ["lock", "small"])
    return recipe


def install_small(recipe: Path, root: Path) -> dict[str, str]:
    register([str(recipe)])
    return install(["small"], root)


def test_lock_holds_hashes_and_no_url_and_wishes_for_nothing_that_is_not_there(small: Path, tmp_path: Path) -> None:
    lock = locks_of("small")
    assert lock is not None
    assert "://" not in (lock / "package-lock.json").read_text()
    assert "integrity" in json.loads((lock / "package-lock.json").read_text())["packages"]["node_modules/small-harness"]
    assert install_small(small, tmp_path / "root") == {}  # npm takes it


@pytest.mark.parametrize("name", NPM)
def test_lock_pins_every_package_by_hash(name: str) -> None:
    recipe, place = get_harness(name), locks_of(name)
    assert place is not None
    text = (place / "package-lock.json").read_text()
    lock = json.loads(text)
    assert lock["packages"][f"node_modules/{recipe.packaging.package}"]["version"] == recipe.version
    packages = [package for place, package in lock["packages"].items() if place]
    assert all("integrity" in package for package in packages if not package.get("inBundle"))
    assert not any("resolved" in package for package in packages)


def test_install_needs_no_network_for_what_the_cache_has(small: Path, registry: Registry, tmp_path: Path) -> None:
    assert install_small(small, tmp_path / "a") == {}
    registry.paths.clear()
    assert install_small(small, tmp_path / "b") == {}
    assert installed("small", tmp_path / "b")
    assert registry.paths == []


def test_wrong_hash_is_refused_in_npms_words(small: Path, registry: Registry, tmp_path: Path) -> None:
    registry.tarball += b"\0"
    failures = install_small(small, tmp_path / "root")
    assert "npm failed" in failures["small"]
    assert "EINTEGRITY" in failures["small"]
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.slow
def test_two_installs_at_once_and_one_over_an_older(small: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "small").mkdir(parents=True)
    (root / "small" / "left-over").touch()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(install_small, [(small, root)] * 2) == [{}, {}]
    assert installed("small", root)
    assert [path.name for path in root.iterdir()] == ["small"]
    assert not (root / "small" / "left-over").exists()


@pytest.mark.slow
def test_killed_install_leaves_nothing_that_counts(small: Path, registry: Registry, tmp_path: Path) -> None:
    root = tmp_path / "root"
    registry.hangs.set()
    registry.asked.clear()
    code = "import sys; from pathlib import Path; from pipeline.harness import base, install\n"
    code += "base.register(sys.argv[1:2]); install.install(['small'], Path(sys.argv[2]))"
    child = subprocess.Popen([sys.executable, "-c", code, str(small), str(root)], start_new_session=True)
    assert registry.asked.wait(120)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(30)
    assert not installed("small", root)
    assert not (root / "small").exists()
    registry.hangs.clear()
    assert install_small(small, root) == {}
    assert installed("small", root)


def test_other_version_is_told_and_replaced(small: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert install_small(small, root) == {}
    manifest = root / "small" / "node_modules" / "small-harness" / "package.json"
    manifest.write_text(manifest.read_text().replace(VERSION, "1.0.0"))
    with pytest.raises(UserError, match=r"^small 1\.2\.3 is needed, but 1\.0\.0 is installed, in .*: yoke harness in"):
        get_harness("small").check_installed(root)
    assert install_small(small, root) == {}
    get_harness("small").check_installed(root)


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without Node."""
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(node.shutil, "which", lambda name: None)
    node.find_node.cache_clear()
    yield
    node.find_node.cache_clear()


def test_missing_node_is_told_in_one_line(no_node: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    config.harness.home = str(tmp_path)
    assert harnesses.run(config, ["install", "pi", "codex"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[0] for line in lines] == ["pi 1.6.0", "codex 0.171.0"]
    assert all("NOT installed: harnesses need Node 22.19 or newer" in line for line in lines)


def test_list_and_install_say_what_is_there(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    config.harness.home = str(tmp_path / "root")
    states = []
    for words in (["list", "small"], ["install", "small"], ["install", "small"], ["list", "small"]):
        capsys.readouterr()
        assert harnesses.run(config, words) == 0
        states.append(capsys.readouterr().out.splitlines()[-1].split())
    before, first, second, after = states
    assert before == ["small", VERSION, "chat", "not", "installed"]
    assert first == ["small", f"{VERSION}:", "installed", "in", str(tmp_path / "root" / "small")]
    assert second == ["small", f"{VERSION}:", "is", "installed", "in", str(tmp_path / "root" / "small")]
    assert after == ["small", VERSION, "chat", "installed"]


@pytest.mark.slow
def test_an_installation_is_made_anew_when_the_recipe_starts_node_otherwise(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compile cache would be refused: it belongs to the flags that filled it."""
    monkeypatch.setattr("pipeline.harness.install.warm_up", lambda recipe, root: True)
    for flags in ("", ', "--liftoff-only"'):
        small.write_text(RECIPE.replace('argv=("$node",)', f'argv=("$node"{flags},), warm_up=True'))
        register([str(small)])
        assert not installed("small", tmp_path / "root")
        assert install_small(small, tmp_path / "root") == {}
        assert installed("small", tmp_path / "root")
