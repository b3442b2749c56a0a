"""The two ways in which a harness is packaged, npm and PyPI: installing it from its lock, and asking what is there.

A lock names every package at its version with its hash; it lies in ``locks/<name>/`` beside the recipe.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.config import UserError
from pipeline.harness.node import find_node
from pipeline.harness.python import NEWEST, base_prefix, find_python

NODE_INSIDE = "/opt/node/bin/node"
# Node else spends a second and a gigabyte on optimising a parser of shell commands that is used a few times.
WASM_QUICKLY = "--liftoff-only"
INSTALL_S = 900.0
Mount = tuple[Path, str, bool]


class Packaging(Protocol):
    """How a harness is packaged."""

    @property
    def package(self) -> str:
        """The package whose version is the harness's."""
        ...

    def install(self, prefix: Path, version: str, lock: Path | None) -> None:
        """Install into the empty ``prefix``, exactly what ``lock`` says, else today's newest of all but ``version``.

        Raises UserError with the installer's last lines.
        """
        ...

    def lock(self, version: str, target: Path) -> None:
        """Write a lock of ``version`` and today's newest of all that it needs into the directory ``target``."""
        ...

    def version(self, prefix: Path) -> str | None:
        """The version that lies in ``prefix``; None if there is none."""
        ...

    def missing(self) -> str | None:
        """Why it cannot be installed or run here, in one line."""
        ...

    def runtime(self, prefix: Path) -> tuple[Mount, ...]:
        """What it needs in a sandbox beside its own ``prefix``. Raises UserError when this machine lacks it."""
        ...


@dataclass(frozen=True)
class Npm:
    """A package of npm. ``native``: an executable of its own, for which no Node is mounted."""

    package: str
    native: bool = False

    def install(self, prefix: Path, version: str, lock: Path | None) -> None:
        """See Packaging.install."""
        if lock is None:
            self.lock(version, prefix)
        else:
            for file in ("package.json", "package-lock.json"):
                shutil.copy(lock / file, prefix)
        _npm(prefix, "ci", "--prefer-offline")

    def lock(self, version: str, target: Path) -> None:
        """See Packaging.lock. The lock names no registry: npm asks the one that it is set up for."""
        name = f"yoke-harness-{self.package.rpartition('/')[2]}"
        manifest = {"name": name, "version": "0.0.0", "private": True, "dependencies": {self.package: version}}
        _write_json(target / "package.json", manifest)
        _npm(target, "install", "--package-lock-only", "--omit-lockfile-registry-resolved")
        _forget_absent(target / "package-lock.json")

    def version(self, prefix: Path) -> str | None:
        """See Packaging.version."""
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads((prefix / "node_modules" / self.package / "package.json").read_text())["version"])
        return None

    def missing(self) -> str | None:
        """See Packaging.missing."""
        return _complaint(find_node)

    def runtime(self, prefix: Path) -> tuple[Mount, ...]:
        """See Packaging.runtime."""
        return () if self.native else ((find_node().binary, NODE_INSIDE, False),)


@dataclass(frozen=True)
class Pip:
    """A package of PyPI in a virtual environment of its own; ``also`` is installed beside it, as pinned there."""

    package: str
    also: tuple[str, ...] = ()
    oldest: tuple[int, int] = (3, 11)
    newest: tuple[int, int] = NEWEST

    def install(self, prefix: Path, version: str, lock: Path | None) -> None:
        """See Packaging.install. Byte code is made now and never checked: a rollout could not write it."""
        if lock is None:
            self.lock(version, prefix)
            lock = prefix
        python = find_python(self.oldest, self.newest)
        _uv(prefix, "venv", "--relocatable", "--allow-existing", "--python", str(python), ".")
        wanted = ("-r", str(lock / "requirements.txt"), "--require-hashes", "--compile-bytecode")
        target = ("--python", str(prefix / "bin" / "python"))
        try:
            _uv(prefix, "pip", "install", *target, *wanted, "--offline")
        except UserError:  # the cache lacks something
            _uv(prefix, "pip", "install", *target, *wanted)

    def lock(self, version: str, target: Path) -> None:
        """See Packaging.lock."""
        wanted = "\n".join([f"{self.package}=={version}", *self.also])
        (target / "requirements.in").write_text(wanted + "\n")
        oldest = ".".join(map(str, self.oldest))
        options = ("--universal", "--python-version", oldest, "--generate-hashes", "--no-header", "--no-annotate")
        _uv(target, "pip", "compile", *options, "requirements.in", "-o", "requirements.txt")

    def version(self, prefix: Path) -> str | None:
        """See Packaging.version."""
        if not (prefix / "bin" / "python").exists():  # a link into an installation that is gone
            return None
        name = self.package.replace("-", "_").lower()
        for info in prefix.glob("lib/python3.*/site-packages/*.dist-info"):
            found, _, version = info.name.removesuffix(".dist-info").partition("-")
            if found.lower() == name:
                return version
        return None

    def missing(self) -> str | None:
        """See Packaging.missing."""
        return _complaint(lambda: find_python(self.oldest, self.newest))

    def runtime(self, prefix: Path) -> tuple[Mount, ...]:
        """See Packaging.runtime. The environment's Python is a link into the installation that it was made of."""
        base = base_prefix(prefix / "bin" / "python")
        return () if base.is_relative_to("/usr") else ((base, str(base), False),)


def _complaint(find: Callable[[], object]) -> str | None:
    try:
        find()
    except UserError as error:
        return str(error)
    return None


def _forget_absent(lock: Path) -> None:
    """Take optional packages that the registry lacks, such as other systems' programs, out of a lock's wishes.

    `npm ci` takes a lock that wishes for what it does not hold as out of date.
    """
    content = json.loads(lock.read_text())
    held = {place.rpartition("node_modules/")[2] for place in content["packages"]}
    for package in content["packages"].values():
        wishes = package.get("optionalDependencies", {})
        for name in wishes.keys() - held:
            del wishes[name]
    _write_json(lock, content)


def _npm(folder: Path, *words: str) -> None:
    node = find_node()
    path = f"{node.binary.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    argv = [str(node.binary), str(node.npm), *words, "--no-audit", "--no-fund"]
    _run(argv, folder, {"PATH": path})


def _uv(folder: Path, *words: str) -> None:
    import uv

    environment = {
        "UV_PYTHON_DOWNLOADS": "never",
        "PYC_INVALIDATION_MODE": "UNCHECKED_HASH",  # valid wherever the files are copied to
    }
    _run([uv.find_uv_bin(), *words, "--quiet"], folder, environment)


def _run(argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run an installer in ``folder``. Raises UserError with its last lines."""
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(argv[:3])} did not end within {INSTALL_S:.0f} s for {folder.name}") from None
    if done.returncode:
        tool = "npm" if "npm" in Path(argv[1]).name else Path(argv[0]).name
        lines = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise UserError(f"{tool} failed (exit {done.returncode}) for {folder.name}; its last lines:\n{lines}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
