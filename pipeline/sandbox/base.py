"""What to run and how it ended, the two protocols of every kind of sandbox, and the choice among the kinds."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.config import SandboxConfig, UserError
from pipeline.records import Inside

WORKSPACE = "/workspace"
HOME = "/home/agent"
PATH = "/usr/local/bin:/usr/bin:/bin"
TASK = "task"  # sandbox.image: each task's own, as its task.toml says

logger = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The sandbox itself failed (not what ran inside): an infrastructure failure of one rollout."""


@dataclass(frozen=True)
class SandboxSpec:
    """One command and everything it may see.

    ``workspace`` is writable at /workspace, the working directory (None: an empty one that is lost at the end).
    ``home_files`` (path below HOME → text) are written to a fresh HOME. ``read_only`` is bound at the same path,
    ``mounts`` (host path, path inside, writable) elsewhere. With ``listen_port`` a socket listens inside at
    127.0.0.1:port and is handed to the caller, and the command waits for ``go()``. ``stdin`` is the text it reads
    (None: nothing). stdout and stderr are appended to ``stdout``. ``timeout_s`` counts from ``go()``.
    ``image`` is the name of the task's own, which only sandbox.image=task asks for, and ``directory`` where the command
    starts in an image (else where the image says, else /workspace).

    What the command writes outside of ``workspace`` and ``mounts`` is lost, but for ``leave``: a directory that gets it
    when all inside is dead, HOME as ``home``, /tmp as ``tmp`` and the changes to an image as ``root/upper``. ``layer``
    is such a directory to begin with; what is there may be changed.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    workspace: Path | None = None
    home_files: Mapping[str, str] = field(default_factory=dict)
    read_only: tuple[Path, ...] = ()
    mounts: tuple[tuple[Path, str, bool], ...] = ()
    listen_port: int | None = None
    stdin: str | None = None
    stdout: Path | None = None
    timeout_s: float = 60.0
    image: str = ""
    directory: str = ""
    leave: Path | None = None
    layer: Path | None = None


@dataclass(frozen=True)
class SandboxExit:
    """How the command ended. ``returncode`` is None when it was stopped: by its time limit (``timed_out``), or by
    ``killed`` = "memory" | "processes" | "disk" (its limits) | "asked" (``kill()``). Memory is sampled (PSS).

    ``cpu_s``: user and system time of everything that ran inside, in steps of 10 ms. It is the kernel's own sum where
    the sandbox was stopped or is a plain process. Where a command in bubblewrap ended by itself, processes that it had
    not waited for count up to the last sample, 0.1 s before their end; so does all of it, should the machine's init
    have forgotten the sandbox before it was asked.
    """

    returncode: int | None
    timed_out: bool
    killed: str | None
    wall_s: float
    peak_memory_mb: float
    peak_processes: int
    cpu_s: float = 0.0


class SandboxProcess(Protocol):
    """A launched command. ``wait()`` must be awaited in the end, whatever happens: it leaves nothing alive."""

    listener: socket.socket | None
    inside: Inside | None  # with a listener, where the kind of sandbox has a network of its own; closed by wait()

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:port`` as the command must see it. Raises ValueError without a ``listen_port``."""
        ...

    def go(self) -> None:
        """Let the command start; its time limit starts too. Needed only with a ``listen_port``."""
        ...

    def kill(self) -> None:
        """Stop everything inside, at once and without waiting."""
        ...

    async def wait(self) -> SandboxExit:
        """Wait for the end of the command or its time limit. Everything inside is dead when this returns or raises.

        Raises SandboxError when something inside outlives SIGKILL.
        """
        ...


class Sandbox(Protocol):
    """One kind of isolation with one set of limits."""

    async def launch(self, spec: SandboxSpec) -> SandboxProcess:
        """Build the sandbox and, unless it has a ``listen_port``, start the command.

        Call it from the thread that lives as long as the program: the sandbox dies with that thread.
        Raises SandboxError (with the sandbox program's own words) when it cannot be built.
        """
        ...


KINDS = ("bubblewrap", "apptainer", "process")  # auto: the first of the first two that works
NAMESPACES = (
    "Bubblewrap needs unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns)"
)
UNSAFE = "To run agents WITHOUT isolation, with your rights and your network, ask for it by name: sandbox=process"


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox that ``config`` asks for. Raises UserError with what to do."""
    sandbox, why = choose_sandbox(config)
    logger.log(logging.WARNING if config.kind == "process" else logging.INFO, "sandbox: %s", why)
    return sandbox


def choose_sandbox(config: SandboxConfig) -> tuple[Sandbox, str]:
    """The sandbox that ``config`` asks for, tried once, and in one line which it is and why. Raises UserError."""
    if config.kind == "process":
        from pipeline.sandbox.process import ProcessSandbox

        return ProcessSandbox(config), "process: agents run WITHOUT isolation, with your rights, files and network"
    if config.kind not in ("auto", *KINDS):
        raise UserError(f"sandbox.kind={config.kind} is unknown; choose one of: auto, {', '.join(KINDS)}")
    wanted = KINDS[:2] if config.kind == "auto" else (config.kind,)
    if config.kind == "auto" and config.image == TASK and shutil.which("apptainer"):
        wanted = wanted[::-1]  # it runs what was built, and what was only fetched
    complaints = []
    for kind in wanted:
        try:
            sandbox, what = _try(kind, config)
        except UserError as error:
            complaints.append(f"{kind}: {error}")
        else:
            why = "; ".join(complaints) or ("it works here" if config.kind == "auto" else "as set")
            return sandbox, f"{what} ({why})"
    if config.image or wanted == ("apptainer",):
        raise UserError(complaints[-1])
    raise UserError(f"no sandbox can be built here. {'; '.join(complaints)}. {NAMESPACES}. {UNSAFE}")


def _try(kind: str, config: SandboxConfig) -> tuple[Sandbox, str]:
    """A sandbox of this kind that has been tried, and its name. Raises UserError with what is missing."""
    from pipeline.sandbox.apptainer import ApptainerSandbox
    from pipeline.sandbox.bubblewrap import BubblewrapSandbox

    if kind == "bubblewrap":
        if config.image not in ("", TASK):
            raise UserError(f"it has no images but those of tasks, and sandbox.image={config.image}")
        bubblewrap = BubblewrapSandbox(config)
        if complaint := bubblewrap.probe():
            raise UserError(f"it cannot build a sandbox here: {complaint}")
        return bubblewrap, f"{kind}, in the tasks' own environments" if config.image else kind
    apptainer = ApptainerSandbox(config)
    if complaint := apptainer.probe():
        raise UserError(f"it cannot build a sandbox here: {complaint}")
    return apptainer, f"{kind} {apptainer.version}, {config.image or 'on the system of this machine'}"
