"""What a task's environment is made of, and its name: equal environments have one name, so they are built once.

Building is left to builders.py, running in what was built to pipeline.sandbox.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUILD = "build:"  # before the hash of a Dockerfile and its context; other names are addresses, docker://…
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", "singularity-compose.yaml")
TAKES_FILES = re.compile(r"^\s*(COPY|ADD|ONBUILD)\b|--mount=", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """One environment: an ``image`` of a registry, or a directory ``context`` with a Dockerfile."""

    name: str
    image: str = ""
    context: Path | None = None

    @property
    def key(self) -> str:
        """16 hexadecimal digits, for names of files."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def environment_name(root: Path, docker_image: str | None) -> str:
    """The name of a task's environment, "" where the task brings none. A ready image goes before a Dockerfile."""
    if docker_image:
        return f"docker://{docker_image}"
    dockerfile = root / "environment" / "Dockerfile"
    return f"{BUILD}{_digest(dockerfile)}" if dockerfile.is_file() else ""


def environment_of(root: Path, name: str) -> Environment:
    """The environment that ``environment_name`` has named."""
    if name.startswith(BUILD):
        return Environment(name, context=root / "environment")
    return Environment(name, image=name.removeprefix("docker://"))


def several_containers(root: Path) -> str | None:
    """The file that asks for more than one container, which nothing here can run."""
    return next((name for name in COMPOSE if (root / "environment" / name).is_file()), None)


def _digest(dockerfile: Path) -> str:
    """Of the Dockerfile and, if it takes files, of all that lies beside it: paths, contents, permission to execute."""
    text = dockerfile.read_bytes()
    digest = hashlib.sha256(text)
    if TAKES_FILES.search(text.decode(errors="replace")):
        for name, path in _files(dockerfile.parent):
            kind, data = (
                (b"link", os.fsencode(os.readlink(path))) if path.is_symlink() else (b"file", path.read_bytes())
            )
            head = b"%d %d %s %d " % (len(name), len(data), kind, os.access(path, os.X_OK))
            digest.update(head + os.fsencode(name) + data)
    return digest.hexdigest()


def _files(top: Path) -> Iterator[tuple[str, Path]]:
    found = []
    for at, folders, files in os.walk(top):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        found += [Path(at, name) for name in [*files, *links]]
    yield from sorted((str(path.relative_to(top)), path) for path in found)
