"""Apptainer: the isolation of bubblewrap on clusters that forbid user namespaces to all but this program, or with an
image of the user's own.

A supervisor outside ends everything that `apptainer` starts; process 1 inside (``first.py``) hands out the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config import SandboxConfig, UserError
from pipeline.records import Inside
from pipeline.sandbox import seccomp
from pipeline.sandbox.base import HOME, PATH, TASK, WORKSPACE, SandboxError, SandboxSpec
from pipeline.sandbox.bubblewrap import ETC, HIDDEN, HOST_ETC, START_S, counts_by_namespace
from pipeline.sandbox.builds import build_missing, complaint, find_build
from pipeline.sandbox.disk import DiskWatch, writable_places
from pipeline.sandbox.images import Image, find, host_system, kept_as
from pipeline.sandbox.layer import LAYER, ROOT_LAYER, ROOT_PARTS
from pipeline.sandbox.process import supervised
from pipeline.sandbox.running import Ends, Log, RunningSandbox, memory_file, readable
from pipeline.sandbox.watch import TreeWatch, listed

logger = logging.getLogger(__name__)

OLDEST = (1, 1)  # the first that needs no root to set it up
MODES = (("--userns",), ())  # with user namespaces; else as an administrator has set it up, set-user-id
FIRST = Path(__file__).with_name("first.py")
FIRST_INSIDE = "/opt/first.py"
OWN_ETC = tuple(sorted(file.name for file in ETC.iterdir() if file.name not in ("passwd", "group")))
FROZEN = ("sys", "sysrq-trigger", "irq", "bus", "fs")  # of /proc: they take writes of root's
MEMORY = ("dev", "dev/shm")  # Apptainer's own memory file systems
CREDENTIALS = struct.Struct("3i")

ISOLATION = (
    *("--containall", "--no-privs", "--net", "--network", "none", "--hostname", "sandbox"),
    *("--no-home", "--no-mount", "home,tmp,cwd,hostfs,sys,bind-paths"),  # of the site's settings: none
    *("--no-init", "--no-eval", "--no-umask", "--pwd", WORKSPACE),
)


@dataclass(frozen=True)
class Mount:
    """A place of the host's, where it is to be seen."""

    host: str
    inside: str
    writable: bool = False

    def option(self) -> str:
        """The value of --mount: one line of CSV, so that any path will do."""
        words = ["type=bind", f"source={self.host}", f"destination={self.inside}", *(() if self.writable else ("ro",))]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(words)
        return line.getvalue()


@dataclass(frozen=True)
class Program:
    """Apptainer as it is installed here; ``mode`` holds the options by which it gets its namespaces."""

    path: str
    version: str = ""
    mode: tuple[str, ...] = MODES[0]
    frozen: tuple[str, ...] = field(default_factory=lambda: tuple(filter(os.path.exists, _proc(FROZEN))))
    hidden: tuple[str, ...] = field(default_factory=lambda: tuple(filter(os.path.exists, HIDDEN)))

    def command_line(
        self, image: Image, spec: SandboxSpec, scratch: Path, descriptors: tuple[int, int, int]
    ) -> list[str]:
        """Run process 1 in ``image``. ``scratch`` is laid out by ``furnish``; ``descriptors`` are for first.py."""
        mounts = [
            *(Mount(host, inside) for host, inside in image.binds),
            *(Mount(path, path) for path in self.frozen),
            *(Mount("/dev/null", path) for path in self.hidden),
            *(Mount(str(ETC / name), f"/etc/{name}") for name in OWN_ETC),
            *(Mount(str(scratch / name), f"/{name}") for name in ("etc/passwd", "etc/group")),
            *(Mount(str(place), inside, writable=True) for inside, place in _written(scratch, spec).items()),
            Mount(str(FIRST), FIRST_INSIDE),
            *(Mount(str(path), str(path)) for path in spec.read_only),
            *(Mount(str(host), inside, writable) for host, inside, writable in spec.mounts),
        ]
        if not image.own_workspace:
            mounts.append(Mount(str(spec.workspace or scratch / "workspace"), WORKSPACE, writable=True))
        options = [word for mount in mounts for word in ("--mount", mount.option())]
        options += [word for layer in image.layers for word in ("--overlay", f"{layer}:ro")]
        if image.writable:
            options += ["--overlay", str(_changes(scratch, spec))]
        inner = [image.python, "-I", "-S", FIRST_INSIDE, *map(str, descriptors)]
        return [self.path, "--silent", "exec", *self.mode, *ISOLATION, *options, str(image.path), *inner]


def _python() -> tuple[str, str]:
    """This interpreter, and its installation."""
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)


def _proc(names: tuple[str, ...]) -> list[str]:
    return [f"/proc/{name}" for name in names]


def find_apptainer() -> Program:
    """The one in PATH. Raises UserError when there is none, or when it is too old."""
    path = shutil.which("apptainer")
    if path is None:
        raise UserError("no apptainer in PATH (on many clusters: module load apptainer)")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path} --version: {error}") from None
    numbers = re.search(r"(\d+)\.(\d+)\S*", done.stdout)
    if numbers is None:
        raise UserError(f"{path} --version says no version: {(done.stdout or done.stderr).strip()[:200]}")
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise UserError(f"{path} is apptainer {numbers[0]}: {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return Program(path, numbers[0])


class ApptainerSandbox:
    """Sandboxes by Apptainer, with the limits of ``config``. Raises UserError when it or the image is missing."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._program = find_apptainer()
        named = "" if config.image == TASK else config.image
        self._images: dict[str, Image] = {}  # those that have been tried, by the name that a spec gives
        self._default = self._variants(named)
        self._filter = seccomp.program(nesting=False)

    @property
    def of_tasks(self) -> bool:
        """Whether each task has its own image."""
        return self._config.image == TASK

    @property
    def version(self) -> str:
        """Of the program."""
        return self._program.version

    def _variants(self, name: str) -> list[Image]:
        """The file system of that name, with each Python that process 1 could run on: this one, and an image's own."""
        if name:
            return self._pythons(find(name, self._program.path, self._config.pull_timeout_s))
        python, base = _python()
        image = host_system(python, HOST_ETC)
        in_system = Path(base).is_relative_to("/usr")
        return [image if in_system else replace(image, binds=(*image.binds, (base, base)))]

    def _pythons(self, image: Image) -> list[Image]:
        python, base = _python()
        if Path(base).is_relative_to("/usr"):
            return [image]
        return [replace(image, binds=((base, base),), python=python), image]

    def probe(self) -> str | None:
        """Build one sandbox around `true`, by the first way that works. Returns why none did, or None."""
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop already
            return thread.submit(asyncio.run, self._probe("", self._default)).result()

    async def _probe(self, name: str, images: list[Image]) -> str | None:
        complaints: dict[str, list[str]] = {}
        for image, program in itertools.product(images, [replace(self._program, mode=mode) for mode in MODES]):
            try:
                running = await self._launch(SandboxSpec(("true",), timeout_s=START_S), program, image)
                ended = await running.wait()
                if ended.returncode == 0:
                    self._program, self._images[name] = program, image
                    return None
                complaint = f"`true` ended with {ended.returncode}"
            except SandboxError as error:
                complaint = str(error)
            complaints.setdefault(complaint, []).append(" ".join(program.mode) or "set-user-id")
        return "; ".join(f"{' and '.join(dict.fromkeys(ways))}: {text}" for text, ways in complaints.items())

    async def _image_of(self, spec: SandboxSpec) -> Image:
        """Raises SandboxError when the task's own image is not at hand, or nothing runs in it."""
        name = spec.image if self.of_tasks else ""
        if name not in self._images:
            images = await asyncio.to_thread(self._of_task, name) if name else self._default
            if trouble := await self._probe(name, images):
                raise SandboxError(f"{name}: {trouble}")
            if images[0].writable and not self._images[name].writable:
                logger.warning("%s: no overlay can be mounted here, so agents cannot write to it", name)
        return self._images[name]

    def _of_task(self, name: str) -> list[Image]:
        """A task's own image, in each way that could work. Raises SandboxError when it is not at hand."""
        build = find_build(name)
        if build is not None:
            if wrong := complaint(build):
                raise SandboxError(wrong)
            lowest, *above = build.stack
            own = Image(
                lowest.path,
                own=True,
                layers=tuple(part.path for part in above),
                env=tuple(build.env.items()),
                workdir=build.workdir,
                own_workspace=build.own_workspace,
            )
            return [replace(image, writable=writable) for writable in (True, False) for image in self._pythons(own)]
        if "://" not in name:
            raise SandboxError(build_missing(name))
        if not kept_as(name).exists():
            raise SandboxError(f"{name} is not at hand: run yoke check sandbox.image={TASK} where a network is")
        return self._variants(name)

    async def launch(self, spec: SandboxSpec) -> RunningSandbox:
        """See Sandbox.launch."""
        return await self._launch(spec, self._program, await self._image_of(spec))

    async def _launch(self, spec: SandboxSpec, program: Program, image: Image) -> RunningSandbox:
        held = ExitStack()
        try:
            scratch = Path(tempfile.mkdtemp(prefix="yoke-"))
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
            furnish(scratch, spec)
            disk = DiskWatch([scratch, *writable_places(spec)], self._config)
            log, words = Log(spec.stdout), Log(None)
            held.callback(log.close)
            held.callback(words.close)
            with ExitStack() as given:
                ends = _Ends(held, given)
                popen = self._start(spec, program, image, scratch, ends, given, log, words)
            held.callback(_end, popen)
            met = await _meet(ends.control, popen, words, held)
            if spec.listen_port is None:
                with contextlib.suppress(ConnectionError):  # its death is wait()'s to tell
                    ends.control.send(b"g")
            return RunningSandbox(
                popen,
                met.leader,
                self._watch(met),
                disk,
                stop=signal.SIGKILL,
                timeout_s=spec.timeout_s,
                held=held,
                control=ends.control if met.listener else None,
                listener=met.listener,
                inside=met.inside if met.listener else None,
                complaint=lambda: _complaint(ends.status, words),
            )
        except BaseException:
            held.close()
            raise

    def _watch(self, met: _Met) -> TreeWatch:
        proc = met.inside.proc
        return TreeWatch(lambda: os.dup(proc), listed, met.stat, self._config, MEMORY, self._config.tmp_mb << 20)

    def _start(
        self,
        spec: SandboxSpec,
        program: Program,
        image: Image,
        scratch: Path,
        ends: _Ends,
        given: ExitStack,
        log: Log,
        words: Log,
    ) -> subprocess.Popen[bytes]:
        output = [os.open(os.devnull, os.O_WRONLY) if log.stdout == subprocess.DEVNULL else os.dup(log.stdout)]
        output.append(os.dup(log.stderr))
        for descriptor in output:
            given.callback(os.close, descriptor)
        order = memory_file(given, json.dumps(self._order(spec, program, image, output)).encode())
        descriptors = (ends.theirs.fileno(), ends.status_end, order)
        command = program.command_line(image, spec, scratch, descriptors)
        return subprocess.Popen(
            supervised(ends.started.fileno(), "CORE=0", scratch, command),
            env={"PATH": os.environ.get("PATH", PATH)},  # readable inside at /proc/1/environ: nothing of ours
            cwd="/",
            pass_fds=[*descriptors, *output, ends.started.fileno()],
            stdin=subprocess.DEVNULL if spec.stdin is None else memory_file(given, spec.stdin.encode()),
            stdout=words.stderr,
            stderr=words.stderr,
            start_new_session=True,
        )

    def _order(self, spec: SandboxSpec, program: Program, image: Image, output: list[int]) -> dict[str, object]:
        config = self._config
        limits = {"NOFILE": config.open_files, "FSIZE": config.file_mb << 20, "CORE": 0}
        if program.mode and counts_by_namespace():
            limits["NPROC"] = config.processes
        path = {"PATH": PATH} if image.host else dict(image.env)  # an image has its own
        return {
            "argv": spec.argv,
            "env": {"LANG": "C.UTF-8", **path, "HOME": HOME, "TMPDIR": "/tmp", **spec.env},
            "directory": (spec.directory or image.workdir or WORKSPACE) if image.own else WORKSPACE,
            "port": spec.listen_port,
            "limits": limits,
            "output": output,
            "filter": (self._filter or b"").hex(),
        }


def furnish(scratch: Path, spec: SandboxSpec) -> None:
    """Make what a sandbox may write to in ``scratch``, and the names of its only user."""
    written = _written(scratch, spec)
    for name in ROOT_PARTS:
        (_changes(scratch, spec) / name).mkdir(parents=True, exist_ok=True)
    for place in (scratch / "etc", scratch / "workspace", *written.values()):
        place.mkdir(parents=True, exist_ok=True)
    written["/tmp"].chmod(0o1777)
    (scratch / "etc/passwd").write_text(f"agent:x:{os.getuid()}:{os.getgid()}:agent:{HOME}:/bin/bash\n")
    (scratch / "etc/group").write_text(f"agent:x:{os.getgid()}:\n")
    for name, text in spec.home_files.items():
        path = written[HOME] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)


def _changes(scratch: Path, spec: SandboxSpec) -> Path:
    """Where what an image has been changed in lies."""
    return (spec.layer or spec.leave or scratch) / ROOT_LAYER


def _written(scratch: Path, spec: SandboxSpec) -> dict[str, Path]:
    """Place inside → directory on the host."""
    layer = spec.layer or spec.leave
    kept = {} if layer is None else {inside: layer / name for inside, name in LAYER.items()}
    return {place: scratch / place[1:] for place in ("/tmp", "/run", HOME)} | kept


class _Ends(Ends):
    """The channels to process 1, and one to the supervisor."""

    def __init__(self, held: ExitStack, given: ExitStack) -> None:
        super().__init__(held, given)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # whoever greets, the kernel says its pid
        at_once, self.started = socket.socketpair()
        given.enter_context(self.started)
        with at_once:
            at_once.send(b"g")


@dataclass(frozen=True)
class _Met:
    """What process 1 has handed out, and holds on it; all closed with the sandbox, but ``stat``."""

    leader: int
    stat: int
    inside: Inside
    listener: socket.socket | None


async def _meet(control: socket.socket, popen: subprocess.Popen[bytes], words: Log, held: ExitStack) -> _Met:
    """Wait for the greeting of process 1. Raises SandboxError, in Apptainer's words, when none comes."""
    own = os.pidfd_open(popen.pid)
    try:
        in_time = await _any_readable((control.fileno(), own), START_S)
    finally:
        os.close(own)
    if not in_time:
        raise SandboxError(f"no word from the sandbox within {START_S:.0f} s: {words.tail()}")
    try:
        _, messages, _, _ = control.recvmsg(1, 4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        messages = []
    pid, descriptors = 0, list[int]()
    for _, kind, data in messages:
        if kind == socket.SCM_CREDENTIALS:
            pid = CREDENTIALS.unpack(data)[0]
        elif kind == socket.SCM_RIGHTS:
            descriptors = list(memoryview(data).cast("i"))
    for descriptor in descriptors:
        held.callback(os.close, descriptor)
    if not pid or len(descriptors) < 2:
        raise SandboxError(f"apptainer could not build the sandbox: {words.tail()}")
    return _holding(pid, descriptors, words, held)


def _holding(pid: int, descriptors: list[int], words: Log, held: ExitStack) -> _Met:
    try:
        leader = os.pidfd_open(pid)
        held.callback(os.close, leader)
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except (ProcessLookupError, FileNotFoundError):
        raise SandboxError(f"the sandbox ended at once: {words.tail()}") from None
    listener = None
    if len(descriptors) > 2:
        listener = held.enter_context(socket.socket(fileno=os.dup(descriptors[2])))
        listener.setblocking(False)
    return _Met(leader, stat, Inside(descriptors[0], descriptors[1]), listener)


async def _any_readable(descriptors: tuple[int, ...], timeout_s: float) -> bool:
    waiting = [asyncio.create_task(readable(descriptor, timeout_s)) for descriptor in descriptors]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return any(task.result() for task in done)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _complaint(status: int, words: Log) -> str | None:
    """Why there is no exit code of the command's."""
    with contextlib.suppress(BlockingIOError):
        if b"exit-code" in os.read(status, 4096):
            return None
    return f"the sandbox was killed from outside: {words.tail()}"


def _end(popen: subprocess.Popen[bytes]) -> None:
    """End what is left of a launch: the supervisor takes all with it."""
    if popen.poll() is None:
        popen.terminate()
        popen.wait(START_S)
