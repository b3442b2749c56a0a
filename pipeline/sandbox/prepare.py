"""Runs a task's preparation in the environment that was built for it, with a network, and keeps what it changes.

This is a step of a build, like a Dockerfile's RUN: it is trusted as those are, and no agent has run yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.sandbox.apptainer import find_apptainer
from pipeline.sandbox.bubblewrap import find_bwrap, lower
from pipeline.sandbox.builds import ROOT, Build
from pipeline.sandbox.layer import ROOT_PARTS

NAMES = ("/etc/resolv.conf", "/etc/hosts")  # the host's, to find others by
HOME = "/root"


def preparation(
    base: Build, command: str, variables: Mapping[str, str], layer: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line that runs a shell ``command`` above ``base``, and the environment to start it with. Changes go
    to ``layer``. Values are in no command line: some are keys. Raises UserError without the program for it.
    """
    for part in ROOT_PARTS:
        (layer / part).mkdir(parents=True, exist_ok=True)
    told = {"HOME": HOME, **base.env, **variables}
    if base.form == ROOT:
        return [*_by_bubblewrap(base, layer), "sh", "-c", command], told
    program = find_apptainer().path
    options = (
        "--containall",
        "--cleanenv",
        "--no-home",
        "--userns",
        "--overlay",
        str(layer),
        "--pwd",
        base.workdir or "/",
    )
    inherited = {"PATH": os.environ.get("PATH", os.defpath)}
    return (
        [program, "--silent", "exec", *options, str(base.path), "sh", "-c", command],
        inherited | {f"APPTAINERENV_{name}": value for name, value in told.items()},
    )


def _by_bubblewrap(base: Build, layer: Path) -> list[str]:
    """As the root of its own user namespace, so that it may write anywhere."""
    return [
        find_bwrap(),
        *("--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
        *("--die-with-parent", "--new-session"),
        *(*lower(base), "--overlay", *(str(layer / part) for part in ROOT_PARTS), "/"),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"),
        *(word for name in NAMES if os.path.exists(name) for word in ("--ro-bind", os.path.realpath(name), name)),
        *("--chdir", base.workdir or "/", "--"),
    ]
