"""What a task's environment is made of, and its name: equal environments have one name, so they are built once.

Harbor runs a task's health check (``[environment.healthcheck]``) when its container starts, with a network, and tasks
fetch their data in it. Here it is run once, when the environment is built: nothing has a network later.

Building is left to builders.py, running in what was built to pipeline.sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUILD = "build:"  # before the hash of a Dockerfile and its context
PREPARED = "prepared:"  # before the hash of another environment's name, a command and its variables
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml", "singularity-compose.yaml")
TAKES_FILES = re.compile(r"^\s*(COPY|ADD|ONBUILD)\b|--mount=", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """One environment: an ``image`` of a registry, a directory ``context`` with a Dockerfile, or a ``base`` in which a
    shell ``command`` has run with the variables ``env``, and with ``host_env`` of the host's own.
    """

    name: str  # docker://…, build:… or prepared:…
    image: str = ""
    context: Path | None = None
    base: Environment | None = None
    command: str = ""
    env: tuple[tuple[str, str], ...] = ()
    host_env: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """16 hexadecimal digits, for names of files."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def environment_of(
    root: Path,
    docker_image: str | None,
    command: str = "",
    env: Mapping[str, str] = {},
    host_env: Sequence[str] = (),
) -> Environment | None:
    """The environment of a task directory, None where the task brings none. A ready image goes before a Dockerfile."""
    base = _bare_environment(root, docker_image)
    if base is None or not (command or env):
        return base
    variables = tuple(sorted(env.items()))
    told = json.dumps([base.name, command, variables, sorted(host_env)])
    name = f"{PREPARED}{hashlib.sha256(told.encode()).hexdigest()}"
    return Environment(name, base=base, command=command, env=variables, host_env=tuple(sorted(host_env)))


def _bare_environment(root: Path, docker_image: str | None) -> Environment | None:
    if docker_image:
        return Environment(f"docker://{docker_image}", image=docker_image)
    dockerfile = root / "environment" / "Dockerfile"
    return Environment(f"{BUILD}{_digest(dockerfile)}", context=dockerfile.parent) if dockerfile.is_file() else None


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
