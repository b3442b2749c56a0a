"""Turns a Dockerfile into an Apptainer definition, for machines that have no program of Docker's family.

FROM (one), RUN, COPY and ADD of local files, ENV, ARG, WORKDIR, SHELL and USER root are understood; what only tells how
a container is started (CMD, EXPOSE, LABEL …) changes no file and is passed over. All else is refused by name: a file
system that is not what the Dockerfile says would be worse than none.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

PASSED_OVER = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
CONTEXT = "/.yoke-context"  # where the files lie inside while the image is built
VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class Unsupported(Exception):
    """What this cannot build, with the line."""


@dataclass
class Definition:
    """What has been read so far."""

    context: Path
    base: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    environment: list[str] = field(default_factory=list)  # lines of shell
    steps: list[str] = field(default_factory=list)  # lines of shell
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    workdir: str = "/"

    def text(self, bootstrap: str) -> str:
        """The definition file; ``bootstrap`` is its first lines."""
        exports = "\n    ".join(self.environment)
        steps = "\n    ".join(self.steps)
        return f"""{bootstrap}

%files
    {self.context} {CONTEXT}

%environment
    {exports or "true"}

%post
    set -e
    for file in /.singularity.d/env/10-docker*.sh; do if [ -e "$file" ]; then . "$file"; fi; done
    {steps or "true"}
    rm -rf {CONTEXT}
"""


def read_dockerfile(context: Path) -> Definition:
    """Raises Unsupported with the instruction that is not understood."""
    definition = Definition(context)
    for name, value in _instructions((context / "Dockerfile").read_text(encoding="utf-8")):
        if name in PASSED_OVER:
            continue
        if name not in READERS:
            raise Unsupported(f"{name} {value[:60]}".strip())
        if not definition.base and name not in ("FROM", "ARG"):
            raise Unsupported(f"{name} before FROM")
        READERS[name](definition, value)
    if not definition.base:
        raise Unsupported("no FROM")
    return definition


def copy_context(context: Path, target: Path) -> None:
    """Copy what the build may see. Raises Unsupported for a .dockerignore that needs Docker's own rules."""
    ignore = context / ".dockerignore"
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    if strange := next((pattern for pattern in patterns if pattern.startswith("!") or "**" in pattern), None):
        raise Unsupported(f".dockerignore: {strange}")

    def left_out(folder: str, names: list[str]) -> list[str]:
        below = Path(folder).relative_to(context)
        return [name for name in names if any(fnmatch(str(below / name), pattern) for pattern in patterns)]

    shutil.copytree(context, target, symlinks=True, ignore=left_out)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its value, continued lines joined, comments left out."""
    if re.match(r"\s*#\s*escape\s*=", text, re.IGNORECASE):
        raise Unsupported("# escape=")
    whole = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (whole and not line.strip()):
            continue
        whole += line
        if whole.rstrip().endswith("\\"):
            whole = whole.rstrip()[:-1] + "\n"
            continue
        if whole.strip():
            name, _, value = whole.strip().partition(" ")
            if re.search(r"<<-?[\"']?\w", value) and name.upper() in ("RUN", "COPY", "ADD"):
                raise Unsupported(f"{name.upper()} with a here-document")
            yield name.upper(), value.strip()
        whole = ""
    if whole.strip():
        raise Unsupported("a last line that goes on")


def _from(definition: Definition, value: str) -> None:
    words = value.split()
    if definition.base:
        raise Unsupported(f"a second FROM ({value[:60]})")
    if words[:1] == [] or words[0].startswith("--") or len(words) not in (1, 3):
        raise Unsupported(f"FROM {value[:60]}")
    definition.base = _filled(definition, words[0])


def _argument(definition: Definition, value: str) -> None:
    for word in shlex.split(value):
        name, _, default = word.partition("=")
        definition.arguments[name] = _filled(definition, default)
        if definition.base and "=" in word:
            definition.steps.append(f"export {name}={shlex.quote(definition.arguments[name])}")


def _environment(definition: Definition, value: str) -> None:
    pairs = [word.partition("=")[::2] for word in shlex.split(value)] if "=" in value.split()[0] else []
    if not pairs:
        name, _, text = value.partition(" ")
        pairs = [(name, text.strip())]
    for name, text in pairs:
        if "$" not in (known := _for_shell(definition, text)):
            definition.arguments[name] = known
        line = f'export {name}="{_for_shell(definition, text)}"'
        definition.environment.append(line)
        definition.steps.append(line)


def _run(definition: Definition, value: str) -> None:
    if value.startswith("--"):
        raise Unsupported(f"RUN {value.split()[0]}")
    command = _as_list(value) or [*definition.shell, value.replace("\n", "")]
    definition.steps.append(f"( cd {shlex.quote(definition.workdir)} && {shlex.join(command)} )")


def _copy(definition: Definition, value: str) -> None:
    if value.startswith("--"):
        raise Unsupported(f"COPY {value.split()[0]}")
    words = _as_list(value) or value.split()
    *sources, target = (_filled(definition, word) for word in words)
    place = posixpath.join(definition.workdir, target)
    names = [name for source in sources for name in _matching(definition.context, source)]
    as_directory = target.endswith(("/", "/.")) or target in (".", "") or len(names) > 1
    for name in names:
        definition.steps += _copy_lines(definition.context / name, f"{CONTEXT}/{name}", place, as_directory)


def _copy_lines(source: Path, inside: str, place: str, as_directory: bool) -> list[str]:
    target = shlex.quote(place)
    if source.is_dir():  # its contents, as Docker does
        return [f"mkdir -p {target}", f"cp -R {shlex.quote(inside)}/. {target}/"]
    if as_directory:
        return [f"mkdir -p {target}", f"cp -R {shlex.quote(inside)} {target}/"]
    return [f"mkdir -p {shlex.quote(posixpath.dirname(place) or '/')}", f"cp -R {shlex.quote(inside)} {target}"]


def _matching(context: Path, source: str) -> list[str]:
    relative = posixpath.normpath(source.lstrip("/") or ".")
    if relative.startswith(".."):
        raise Unsupported(f"COPY {source}: it leads out of environment/")
    found = sorted(str(path.relative_to(context)) for path in context.glob(relative)) if relative != "." else ["."]
    if not found:
        raise Unsupported(f"COPY {source}: there is no such file in environment/")
    return found


def _add(definition: Definition, value: str) -> None:
    words = _as_list(value) or value.split()
    if remote := next((word for word in words if "://" in word or word.startswith("git@")), None):
        raise Unsupported(f"ADD {remote}: write RUN with a program that fetches it")
    if archive := next((word for word in words[:-1] if word.endswith(ARCHIVES)), None):
        raise Unsupported(f"ADD {archive}: write COPY, and RUN tar")
    _copy(definition, value)


def _workdir(definition: Definition, value: str) -> None:
    definition.workdir = posixpath.normpath(posixpath.join(definition.workdir, _filled(definition, value.strip('"'))))
    definition.steps.append(f"mkdir -p {shlex.quote(definition.workdir)}")


def _user(definition: Definition, value: str) -> None:
    if value.split(":")[0] not in ("root", "0"):
        raise Unsupported(f"USER {value}: everything inside belongs to one user")


def _shell(definition: Definition, value: str) -> None:
    if not (words := _as_list(value)):
        raise Unsupported(f"SHELL {value[:60]}")
    definition.shell = words


def _as_list(value: str) -> list[str]:
    """The words of an instruction in its JSON form; empty when it is not in that form."""
    if not value.startswith("["):
        return []
    try:
        words = json.loads(value)
    except ValueError:
        return []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _filled(definition: Definition, text: str) -> str:
    """With the arguments' values. Raises Unsupported for a variable whose value only the build would know."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in definition.arguments:
            raise Unsupported(f"${name}: only an ARG with a value may be named there")
        return definition.arguments[name]

    filled = VARIABLE.sub(value, text)
    if "${" in filled:
        raise Unsupported(text)
    return filled


def _for_shell(definition: Definition, text: str) -> str:
    """Between double quotes, variables left to the shell but for arguments."""
    known = VARIABLE.sub(lambda found: definition.arguments.get(found[1] or found[2], found[0]), text)
    return known.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")


READERS: dict[str, Callable[[Definition, str], None]] = {
    "FROM": _from,
    "ARG": _argument,
    "ENV": _environment,
    "RUN": _run,
    "COPY": _copy,
    "ADD": _add,
    "WORKDIR": _workdir,
    "USER": _user,
    "SHELL": _shell,
}
