"""A root file system of a few megabytes, from programs of this machine: a base for images without any registry."""

from __future__ import annotations

import _ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FEW = ("bash", "env", "ls", "true")
MORE = (*FEW, "cat", "chmod", "cp", "ln", "mkdir", "rm", "stat", "touch")


def small_system(root: Path, names: Sequence[str] = FEW) -> None:
    """A shell, programs, their libraries and those of this Python."""
    programs = [f"/usr/bin/{name}" for name in names]
    for program in [*programs, sys.executable, _ctypes.__file__]:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [
            *(programs if program in programs else ()),
            *re.findall(r"(?<= )/(?:usr/)?lib\S+", listed.replace("\t", " ")),
        ]:
            place = root / "usr" / path.removeprefix("/usr/").removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "etc", "proc", "tmp", ".singularity.d/env"):
        (root / name).mkdir(parents=True)
    (root / "of-the-image").touch()
    (root / ".singularity.d/env/10-docker2singularity.sh").write_text("export PATH=/usr/bin:/image/bin LEFT_OUT=1\n")
