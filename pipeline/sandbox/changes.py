"""Which of an agent's changes to an image its verifier sees: all, but those that would change what the tests run on.

The tests of a task run in the image that the agent has had. What they start by name (a shell, python, pytest) must be
the image's own, so what the image has among its programs stays; new files are seen, unless they would stand before one
of the image's or run without being asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
MOUNTED = ("proc", "dev", "sys", "run", "tmp", "tests", "logs", "solution", "home/agent")  # never the image's
UNASKED = re.compile(
    r"(^|/)(site|user)customize(\.|/|$)"  # Python runs them at every start
    r"|(^|/)__pycache__(/|$)"  # compiled code that could belong to other sources
    r"|^etc/ld\.so"  # libraries for every program
    r"|^\.singularity\.d(/|$)"  # Apptainer's own way in
)
STANDARD_LIBRARY = re.compile(r"(^|/)lib/python[\d.]+/(?!(site|dist)-packages(/|$))")
PACKAGES = re.compile(r"^(?P<place>.*/(?:site|dist)-packages)/(?P<stem>[^/.-]+)")


class Changes:
    """The rule, for paths relative to the root.

    ``has`` tells whether a path (without the first slash) is in the image; ``path`` holds the directories of its PATH.
    """

    def __init__(self, has: Callable[[str], bool], path: Sequence[str]) -> None:
        self._has = has
        self._path = [directory.strip("/") for directory in path]
        self._own = [PurePosixPath(place) for place in {*PROGRAMS, *self._path} if place]
        self._mounted = [PurePosixPath(place) for place in MOUNTED]

    def seen(self, changed: PurePosixPath, is_directory: bool) -> bool:
        """Whether a verifier sees what is now at this path, or that it is gone."""
        text = str(changed)
        if any(changed.is_relative_to(place) for place in self._mounted) or UNASKED.search(text):
            return False
        if not self.is_programs(changed):
            return is_directory or len(changed.parts) > 1 or not self._has(f"{text}/.")
        if self._has(text):  # a directory of the image's is kept for what is new in it
            return is_directory and self._has(f"{text}/.")
        return not self._stands_before(changed)

    def is_programs(self, changed: PurePosixPath) -> bool:
        """Whether it lies where the image has its programs: there nothing of the image's can be taken away."""
        return any(changed.is_relative_to(place) for place in self._own)

    def _stands_before(self, changed: PurePosixPath) -> bool:
        """Whether something new hides a program or a module of the image's, or belongs to one."""
        text, parent = str(changed), str(changed.parent)
        if parent in self._path:
            later = self._path[self._path.index(parent) + 1 :]
            return any(self._has(f"{directory}/{changed.name}") for directory in later)
        if STANDARD_LIBRARY.search(text):
            return True
        if found := PACKAGES.match(text):
            module = f"{found['place']}/{found['stem']}"
            return self._has(module) or self._has(f"{module}.py")
        return False


def without_startup_code(root: Path) -> None:
    """Take the lines that Python would run at every start out of the .pth files below ``root``."""
    for file in root.rglob("*.pth"):
        if file.is_file() and not file.is_symlink():
            lines = file.read_text(errors="replace").splitlines(keepends=True)
            file.write_text("".join(line for line in lines if not line.startswith(("import ", "import\t"))))
