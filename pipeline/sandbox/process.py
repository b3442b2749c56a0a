"""A plain process, for machines without user namespaces: limits and a sure end, but NO isolation.

Paths of the sandbox (/workspace, HOME, mounts) are replaced by the host's in arguments, environment and home files; a
script that has such a path in its own text does not find it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pipeline.config import SandboxConfig
from pipeline.sandbox.base import HOME, PATH, WORKSPACE, SandboxSpec
from pipeline.sandbox.disk import DiskWatch, writable_places
from pipeline.sandbox.running import Log, RunningSandbox, memory_file
from pipeline.sandbox.watch import TreeWatch, descendants

# Parent of the command: whatever the command leaves behind becomes this one's child, however it was detached, and is
# killed when the command ends, when SIGTERM comes, or when the launcher dies. Removes HOME and the rest of the scratch.
SUPERVISOR = """
import ctypes, os, resource, signal, sys, time
fd, launcher, limits, scratch, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

class Stop(BaseException):
    pass

def stop(*_):
    raise Stop

def command():
    for number in (signal.SIGTERM, signal.SIGPIPE):  # Python ignores the latter, and what it starts would too
        signal.signal(number, signal.SIG_DFL)
    for limit in limits.split(","):
        name, value = limit.split("=")
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(value), int(value)))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\\n")
    finally:
        os._exit(127)

def below(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return children + [deeper for child in children for deeper in below(child)]

def sweep():
    while True:
        for pid in below(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)

ended = 1 << 8
try:
    signal.signal(signal.SIGTERM, stop)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == launcher and os.read(fd, 1) == b"g":
        os.close(fd)
        child = os.fork() or command()
        pid = 0
        while pid != child:
            pid, ended = os.wait()
except Stop:
    pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sweep()
import shutil
shutil.rmtree(scratch, ignore_errors=True)
code = os.waitstatus_to_exitcode(ended)
sys.exit(code if code >= 0 else 128 - code)
"""


class ProcessSandbox:
    """Commands as plain processes, with the limits of ``config`` that work without a namespace."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config

    async def launch(self, spec: SandboxSpec) -> RunningSandbox:
        """See Sandbox.launch. The listener gets a free port, and 127.0.0.1:listen_port is replaced like a path."""
        held = ExitStack()
        try:
            log = Log(spec.stdout)
            held.callback(log.close)
            scratch = Path(tempfile.mkdtemp(prefix="yoke-"))
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
            places = _places(spec, scratch)
            temporary = _of_layer(spec, "tmp") or scratch / "tmp"
            control, theirs = socket.socketpair()
            held.enter_context(control)
            listener = None
            if spec.listen_port is not None:
                listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
                listener.setblocking(False)
                places[f"127.0.0.1:{spec.listen_port}"] = f"127.0.0.1:{listener.getsockname()[1]}"
            with theirs, ExitStack() as given:
                stdin = None if spec.stdin is None else memory_file(given, _translated(spec.stdin, places).encode())
                popen = self._start(spec, places, (scratch, temporary), theirs.fileno(), stdin, log)
            leader = os.pidfd_open(popen.pid)
            held.callback(os.close, leader)
            if listener is None:
                control.send(b"g")
            return RunningSandbox(
                popen,
                leader,
                TreeWatch(_open_proc, lambda proc: descendants(proc, popen.pid), _open_stat(popen.pid), self._config),
                DiskWatch([scratch, *writable_places(spec)], self._config),
                stop=signal.SIGTERM,
                timeout_s=spec.timeout_s,
                held=held,
                control=control if listener else None,
                listener=listener,
            )
        except BaseException:
            held.close()  # the supervisor ends when its control socket closes
            raise

    def _start(
        self,
        spec: SandboxSpec,
        places: dict[str, str],
        scratch: tuple[Path, Path],
        control: int,
        stdin: int | None,
        log: Log,
    ) -> subprocess.Popen[bytes]:
        config = self._config
        limits = f"NOFILE={config.open_files},FSIZE={config.file_mb << 20},CORE=0"  # NPROC would count the whole user
        home = Path(places[HOME])
        for name, text in spec.home_files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch(mode=0o600)
            (home / name).write_text(_translated(text, places))
        environment = {"PATH": PATH, "HOME": str(home), "LANG": "C.UTF-8", "TMPDIR": str(scratch[1])}
        argv = [_translated(word, places) for word in spec.argv]
        return subprocess.Popen(
            supervised(control, limits, scratch[0], argv),
            env={**environment, **{key: _translated(value, places) for key, value in spec.env.items()}},
            cwd=places[WORKSPACE],
            pass_fds=[control],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=log.stdout,
            stderr=log.stderr,
            start_new_session=True,
        )


def supervised(control: int, limits: str, scratch: Path, argv: Sequence[str]) -> list[str]:
    """``argv`` under the supervisor, which waits for a "g" on ``control``."""
    return [sys.executable, "-I", "-S", "-c", SUPERVISOR, str(control), str(os.getpid()), limits, str(scratch), *argv]


def _places(spec: SandboxSpec, scratch: Path) -> dict[str, str]:
    """Path inside → path on the host."""
    for name in ("home", "tmp", "workspace"):
        (scratch / name).mkdir()
    for name in ("home", "tmp"):
        if kept := _of_layer(spec, name):
            kept.mkdir(parents=True, exist_ok=True)
    places = {inside: str(host.absolute()) for host, inside, _ in spec.mounts}
    workspace = (spec.workspace or scratch / "workspace").absolute()
    return places | {WORKSPACE: str(workspace), HOME: str(_of_layer(spec, "home") or scratch / "home")}


def _of_layer(spec: SandboxSpec, name: str) -> Path | None:
    place = spec.layer or spec.leave
    return None if place is None else (place / name).absolute()


def _translated(text: str, places: dict[str, str]) -> str:
    pattern = "|".join(re.escape(inside) for inside in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w.-])({pattern})(?![\w.-])", lambda match: places[match[1]], text)


def _open_proc() -> int:
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)


def _open_stat(pid: int) -> int:
    return os.open(f"/proc/{pid}/stat", os.O_RDONLY)
