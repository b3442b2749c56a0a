"""Environments that `yoke tasks build` has made: how they lie on disk, and that they are as they were built.

``$YOKE_HOME/images/env-KEY/`` holds ``root/`` or ``image.sif``, the names of its programs, and ``manifest.json``; or
``layer/`` instead, with what a task's preparation has changed in another one, its base. It appears whole, by a rename.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.config import UserError
from pipeline.sandbox.changes import PROGRAMS
from pipeline.sandbox.images import folder

MANIFEST = "manifest.json"
ROOT, SIF = "root", "image.sif"
LAYER, UPPER = "layer", "upper"  # as Apptainer wants them
FILES = "files.gz"
KEPT = ("name", "form", "digest", "builder", "env", "workdir", "own_workspace", "base", "base_digest")
LINKS = 40  # as many as the kernel follows


@dataclass(frozen=True)
class Build:
    """One built environment. ``digest`` is of its files, or of the .sif file."""

    name: str
    place: Path
    form: str  # ROOT, SIF or LAYER
    digest: str
    builder: str
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    own_workspace: bool = False  # files at /workspace
    base: str = ""  # of a LAYER: the name of what it lies above, and its digest
    base_digest: str = ""

    @property
    def path(self) -> Path:
        """The root directory, the .sif file, or the layer."""
        return self.place / self.form

    @property
    def below(self) -> Build | None:
        """What a layer lies above. Raises UserError when that is gone, or was built anew and is not the same."""
        if not self.base:
            return None
        found = find_build(self.base)
        if found is None or found.digest != self.base_digest:
            raise UserError(f"{self.place} was made above another {place_of(self.base)}: {again(self.place)}")
        return found

    @property
    def stack(self) -> list[Build]:
        """The file system at the bottom, then the layers above it, this one last."""
        below = self.below
        return [self] if below is None else [*below.stack, self]

    @property
    def search_path(self) -> list[str]:
        """The directories of its PATH."""
        return [word for word in self.env.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":") if word]

    def has(self) -> Callable[[str], bool]:
        """Tells whether a path, relative to the root, is in the image: of a .sif only what lies among programs."""
        if below := self.below:
            under = below.has()
            return lambda name: _inside(self.path / UPPER, name) or under(name)
        if self.form == ROOT:
            return lambda name: _inside(self.path, name)
        with gzip.open(self.place / FILES, "rt", errors="surrogateescape") as file:
            known = set(file.read().split("\0"))
        return known.__contains__


def place_of(name: str) -> Path:
    """Where the environment of that name is kept, or would be."""
    return folder() / f"env-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def find_build(name: str) -> Build | None:
    """The environment as it was built, or None, also when its base is another by now. Raises UserError for a manifest
    that cannot be read.
    """
    if not name:
        return None
    place = place_of(name)
    try:
        told = json.loads((place / MANIFEST).read_text())
        found = Build(place=place, **{key: told[key] for key in KEPT})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{place / MANIFEST} cannot be read ({error}): {again(place)}") from None
    if found.base:
        base = find_build(found.base)
        return found if base is not None and base.digest == found.base_digest else None
    return found


def build_missing(name: str, task: str = "") -> str:
    """One line: what is missing, and the command that makes it."""
    of_task = f" of task {task}" if task else ""
    where = "where a builder and a network are"
    return f"the environment{of_task} ({name}) is not built: run yoke tasks build tasks=… {where}"


def again(place: Path) -> str:
    """What to do about a build that is not as it should be."""
    return f"remove {place} and run `yoke tasks build` again"


_checked: dict[Path, str | None] = {}
_checking = threading.Lock()


def complaint(build: Build) -> str | None:
    """Why it is not what was built, or None. Looked at once a process: it reads all of it."""
    with _checking:
        for part in build.stack:
            if part.place not in _checked:
                same = content_digest(part.path) == part.digest
                words = (
                    f"{part.path} is not as it was built (its digest differs from {MANIFEST}'s): {again(part.place)}"
                )
                _checked[part.place] = None if same else words
            if wrong := _checked[part.place]:
                return wrong
        return None


def publish(
    name: str,
    source: Path,
    builder: str,
    env: dict[str, str],
    workdir: str = "",
    own_workspace: bool = False,
    base: Build | None = None,
) -> Build:
    """Put ``source``, a root directory, .sif file or layer above ``base``, in a folder of its own, into its place. The
    first one stays, but for a layer above what is another by now.
    """
    form = LAYER if base else ROOT if source.is_dir() else SIF
    if source.name != form:
        source = source.rename(source.with_name(form))
    above = (base.name, base.digest) if base else ("", "")
    build = Build(name, place_of(name), form, content_digest(source), builder, env, workdir, own_workspace, *above)
    if base and build.place.exists() and find_build(name) is None:
        shutil.rmtree(build.place)
    told = {key: value for key, value in asdict(build).items() if key != "place"}
    draft = source.parent
    (draft / MANIFEST).write_text(json.dumps(told, indent=1) + "\n")
    try:
        draft.rename(build.place)
    except OSError:  # another one was faster
        if not build.place.is_dir():
            raise
        shutil.rmtree(draft, ignore_errors=True)
    return build


def write_names(root: Path, target: Path, path: list[str]) -> None:
    """Write down what lies among the programs of ``root``, for when it is packed: names, of directories with /. too."""
    names = [name for entry in os.scandir(root) for name in (entry.name, f"{entry.name}/.") if entry.is_dir()]
    for top in {*PROGRAMS, *(directory.strip("/") for directory in path)}:
        for name, status in _tree(root, top):
            names.append(name)
            if stat.S_ISDIR(status.st_mode):
                names.append(f"{name}/.")
    with gzip.open(target, "wt", errors="surrogateescape") as file:
        file.write("\0".join(names))


def content_digest(path: Path) -> str:
    """SHA-256 of a file, or of a tree: names, kinds, permissions, links and contents."""
    if path.is_file():
        return _file_digest(path)
    whole = hashlib.sha256()
    for name, status in _tree(path, ""):
        whole.update(os.fsencode(f"{name}\0{stat.S_IFMT(status.st_mode):o} {stat.S_IMODE(status.st_mode):o}\0"))
        if stat.S_ISLNK(status.st_mode):
            whole.update(os.fsencode(os.readlink(path / name)) + b"\0")
        elif stat.S_ISREG(status.st_mode):
            whole.update(_file_digest(path / name).encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tree(root: Path, top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below ``top`` in ``root``, itself too, by name; links are not followed."""
    waiting = [top]
    while waiting:
        name = waiting.pop()
        path = f"{root}/{name}"
        if not os.path.lexists(path):
            continue
        status = os.lstat(path)
        yield name, status
        if stat.S_ISDIR(status.st_mode):
            waiting += sorted((f"{name}/{entry}" if name else entry for entry in os.listdir(path)), reverse=True)


def _inside(root: Path, name: str) -> bool:
    """Whether a path is in the file system at ``root``, whose links never lead to this machine's own."""
    parts, at = name.split("/"), list[str]()
    links = 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            if part == "." and not os.path.isdir(root.joinpath(*at)):
                return False
            continue
        if part == "..":
            at = at[:-1]
            continue
        path = root.joinpath(*at, part)
        if parts and path.is_symlink():
            links += 1
            target = os.readlink(path)
            at = [] if target.startswith("/") else at
            parts = target.split("/") + parts
            if links > LINKS:
                return False
            continue
        if not os.path.lexists(path):
            return False
        at.append(part)
    return True
