"""The programs that can turn an environment into a root file system: Podman, Docker, Buildah, Apptainer.

Each gives the same: a directory with all files, and what the image says about its environment variables and working
directory. A build step may use the network; nothing after the build can.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.config import UserError
from pipeline.tasks.dockerfile import Unsupported, copy_context, read_dockerfile
from pipeline.tasks.environments import Environment

WORKS_S = 30.0
TAIL = 300
NOT_THE_IMAGES = ("HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TERM", "_", "PROMPT_COMMAND", "PS1", "LD_LIBRARY_PATH",
                  "USER_PATH", "LANG", "LC_ALL")  # fmt: skip


class BuildError(Exception):
    """Why an environment could not be built, in one line."""


@dataclass
class Built:
    """A finished root file system."""

    root: Path
    builder: str
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""


@dataclass(frozen=True)
class Job:
    """One build: where to work, its log and its end. ``local_base`` gives the file system of an image's name that is
    on this machine already, or None.
    """

    work: Path
    deadline: float  # time.monotonic()
    local_base: Callable[[str], Path | None] = lambda image: None

    @property
    def log(self) -> Path:
        return self.work.with_name(f"{self.work.name}.log")

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """What the command prints. Raises BuildError with its last line; nothing of it is left alive."""
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                     start_new_session=True, env=env)  # fmt: skip
            try:
                output, _ = popen.communicate(timeout=max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BuildError(f"not done within its time limit: {shlex.join(command)[:TAIL]}") from None
            finally:
                if popen.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(popen.pid, signal.SIGKILL)
                    popen.communicate()
            log.write(output)
        if popen.returncode:
            raise BuildError(f"{Path(command[0]).name} {command[1]}: {_last_line(self.log)} (all of it: {self.log})")
        return output.decode(errors="replace")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return [*lines, *errors][-1][-TAIL:].strip()


class Builder(Protocol):
    """One program."""

    name: str

    def build(self, environment: Environment, job: Job) -> Built:
        """Raises BuildError."""
        ...


class ContainerBuilder:
    """Podman or Docker."""

    def __init__(self, program: str) -> None:
        self.name = Path(program).name
        self._program = program

    def build(self, environment: Environment, job: Job) -> Built:
        """Raises BuildError."""
        tag = environment.image or f"yoke-env:{environment.key}"
        if environment.context is None:
            job.run(self._program, "pull", tag)
        else:
            job.run(self._program, "build", "--tag", tag, str(environment.context))
        config = json.loads(job.run(self._program, "image", "inspect", tag))[0]["Config"]
        container = job.run(self._program, "create", tag, "true").strip()
        archive = job.work / "root.tar"
        try:
            job.run(self._program, "export", "--output", str(archive), container)
        finally:
            job.run(self._program, "rm", "--force", container)
        return _unpacked(archive, job, self.name, config)


class BuildahBuilder:
    """Buildah, which needs neither a daemon nor a runtime of containers."""

    name = "buildah"

    def __init__(self, program: str) -> None:
        self._program = program

    def build(self, environment: Environment, job: Job) -> Built:
        """Raises BuildError."""
        tag = environment.image or f"localhost/yoke-env:{environment.key}"
        if environment.context is not None:
            job.run(self._program, "build", "--isolation", "chroot", "--tag", tag, str(environment.context))
        container = job.run(self._program, "from", tag).strip()
        archive = job.work / "root.tar"
        try:
            config = json.loads(job.run(self._program, "inspect", container))["OCIv1"]["config"]
            script = 'tar -C "$("$1" mount "$2")" -cf "$3" .'
            own_namespace = () if os.getuid() == 0 else (self._program, "unshare")
            job.run(*own_namespace, "sh", "-c", script, "sh", self._program, container, str(archive))
        finally:
            job.run(self._program, "rm", container)
        return _unpacked(archive, job, self.name, config)


class ApptainerBuilder:
    """Apptainer by itself, with Yoke's own reading of Dockerfiles."""

    def __init__(self, program: str) -> None:
        self.name = "apptainer"
        self._program = program

    def build(self, environment: Environment, job: Job) -> Built:
        """Raises BuildError."""
        root = job.work / "root"
        if environment.context is None:
            base = job.local_base(environment.image)
            job.run(self._program, "build", "--sandbox", str(root), str(base or f"docker://{environment.image}"))
            return Built(root, self.name, self._variables(root, job))
        try:
            copy_context(environment.context, job.work / "context")
            definition = read_dockerfile(job.work / "context")
        except Unsupported as error:
            raise BuildError(f"apptainer alone cannot build this Dockerfile: {error}") from None
        file = job.work / "definition"
        file.write_text(definition.text(bootstrap(definition.base, job.local_base(definition.base))))
        job.run(self._program, "build", "--sandbox", str(root), str(file))
        return Built(root, self.name, self._variables(root, job), definition.workdir)

    def _variables(self, root: Path, job: Job) -> dict[str, str]:
        """What its programs are to find in their environment."""
        options = ("--containall", "--cleanenv", "--no-home", "--userns")
        text = job.run(self._program, "--silent", "exec", *options, str(root), "env", "-0")
        pairs = (line.partition("=")[::2] for line in text.split("\0") if "=" in line)
        return {key: value for key, value in pairs if _is_the_images(key)}


def _is_the_images(name: str) -> bool:
    return name not in NOT_THE_IMAGES and not name.startswith(("APPTAINER", "SINGULARITY", "BASH_FUNC"))


def bootstrap(base: str, local: Path | None) -> str:
    """The first lines of a definition file."""
    if local is not None:
        return f"Bootstrap: localimage\nFrom: {local}"
    return "Bootstrap: scratch" if base == "scratch" else f"Bootstrap: docker\nFrom: {base}"


def _unpacked(archive: Path, job: Job, builder: str, config: dict[str, object]) -> Built:
    root = job.work / "root"
    root.mkdir()
    job.run("tar", "-xf", str(archive), "-C", str(root), "--no-same-owner", "--exclude=./dev/*", "--exclude=dev/*")
    archive.unlink()
    listed = config.get("Env") or []
    assert isinstance(listed, list)
    env = dict(line.partition("=")[::2] for line in listed)
    return Built(root, builder, env, str(config.get("WorkingDir") or ""))


def make_own(root: Path) -> None:
    """Let the builder read, copy and change all of it: agents are one user, and sandboxes know no other group.

    Devices, sockets and set-user-id bits are taken out; an overlay's marks of what was removed (devices 0/0) stay.
    """
    group = os.getegid()
    for at, folders, files in os.walk(root):
        for path in [at, *(os.path.join(at, name) for name in files), *(os.path.join(at, name) for name in folders)]:
            status = os.lstat(path)
            if status.st_gid != group:
                os.lchown(path, -1, group)
            if stat.S_ISLNK(status.st_mode):
                continue
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                continue
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                os.unlink(path)
                continue
            wanted = status.st_mode & 0o777 | (0o700 if stat.S_ISDIR(status.st_mode) else 0o600)
            if wanted != stat.S_IMODE(status.st_mode):
                os.chmod(path, wanted)


KINDS: dict[str, Callable[[str], Builder]] = {
    "podman": ContainerBuilder,
    "docker": ContainerBuilder,
    "buildah": BuildahBuilder,
    "apptainer": ApptainerBuilder,
}
ANSWERS: dict[str, Sequence[str]] = {  # commands that succeed only where the program can work
    "podman": ("info",),
    "docker": ("info",),
    "buildah": ("info",),
    "apptainer": ("--version",),
}


def choose_builder(wanted: str) -> tuple[Builder, str]:
    """The builder of that name, or for "auto" the first that answers; and why it is this one. Raises UserError."""
    if wanted not in ("auto", *KINDS):
        raise UserError(f"tasks.builder={wanted} is unknown; choose one of: auto, {', '.join(KINDS)}")
    complaints: list[str] = []
    for name in KINDS if wanted == "auto" else (wanted,):
        program = shutil.which(name)
        complaint = "not in PATH" if program is None else _silent(program, ANSWERS[name])
        if program is not None and complaint is None:
            return KINDS[name](program), "; ".join(complaints) or "as set"
        complaints.append(f"{name}: {complaint}")
    raise UserError(
        f"no program here can build environments ({'; '.join(complaints)}). Run `yoke tasks build` where there is one, "
        "with the same $YOKE_HOME, or copy its images folder here"
    )


def _silent(program: str, words: Sequence[str]) -> str | None:
    """Why a program does not answer, or None."""
    try:
        done = subprocess.run([program, *words], capture_output=True, timeout=WORKS_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:TAIL]
    lines = (done.stderr or done.stdout).strip().splitlines()
    return (lines[-1][:TAIL] if lines else f"exit {done.returncode}") if done.returncode else None


@contextmanager
def working_directory(folder: Path, key: str) -> Iterator[Path]:
    """A directory for one build, gone afterwards; beside the images, so that its result can be renamed."""
    work = folder / f".build-{key}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
