"""A launched sandbox as the event loop sees it: exit, time limit, watch, and the proof that all inside is dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pipeline.records import Inside
from pipeline.sandbox.base import SandboxError, SandboxExit
from pipeline.sandbox.disk import DiskWatch
from pipeline.sandbox.layer import WorkspaceTooLarge
from pipeline.sandbox.watch import INTERVAL_S, TreeWatch

WALKERS = ThreadPoolExecutor(2, "disk-watch")
DEATH_S = 20.0  # from SIGKILL to the last process's end


async def readable(fd: int, timeout_s: float) -> bool:
    """Whether ``fd`` became readable (a pidfd: its process ended) within the time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def arrived() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, arrived)
    try:
        await asyncio.wait_for(ready, max(timeout_s, 0.0))
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


class Ends:
    """The channels between a launcher and its sandbox: a status pipe, and a socket pair for release and hand-over.

    ``held`` closes our ends, ``given`` those that the sandbox inherits.
    """

    def __init__(self, held: ExitStack, given: ExitStack) -> None:
        self.status, self.status_end = os.pipe()
        held.callback(os.close, self.status)
        given.callback(os.close, self.status_end)
        os.set_blocking(self.status, False)
        control, theirs = socket.socketpair()
        self.control = held.enter_context(control)
        self.theirs = given.enter_context(theirs)


class RunningSandbox:
    """One command in its sandbox.

    ``popen`` is what was started here; ``leader`` is a pidfd of the process whose end proves that all inside is dead
    (pid 1 of the namespace, or the supervisor); ``stop`` is the signal that ends it. ``held`` is closed last.
    ``control`` takes the word to start; ``complaint`` tells after the end why the command was never started, and
    ``at_end`` then keeps what was left.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        leader: int,
        watch: TreeWatch,
        disk: DiskWatch,
        *,
        stop: signal.Signals,
        timeout_s: float,
        held: contextlib.ExitStack,
        control: socket.socket | None = None,
        listener: socket.socket | None = None,
        inside: Inside | None = None,
        complaint: Callable[[], str | None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.listener = listener
        self.inside = inside
        self._popen = popen
        self._own = os.pidfd_open(popen.pid)
        held.callback(os.close, self._own)
        self._leader = leader
        self._watch = watch
        self._disk = disk
        self._stop = stop
        self._timeout_s = timeout_s
        self._control = control
        self._complaint = complaint
        self._at_end = at_end
        self._keeping: asyncio.Future[None] | None = None
        self._closed = False
        self._held = held
        self._killed: str | None = None
        self._exit: SandboxExit | SandboxError | None = None
        self._started = time.monotonic()
        self._failure: str | None = None
        self._watchers = [asyncio.create_task(self._watching()), asyncio.create_task(self._watching_disk())]

    @property
    def pid(self) -> int:
        """Host pid of the launched program."""
        return self._popen.pid

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:port`` as the command must see it."""
        if self.listener is None:
            raise ValueError("this sandbox has no listener: its spec has no listen_port")
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def go(self) -> None:
        """Release the command. Does nothing when it was killed before."""
        if self._control is not None:
            with contextlib.suppress(ConnectionError):  # its death is wait()'s to tell
                self._control.send(b"g")
            self._control.close()
            self._control = None
            self._started = time.monotonic()

    def kill(self, reason: str = "asked") -> None:
        """Signal everything inside to end; ``wait()`` sees to it that it has."""
        if self._exit is None:
            self._killed = self._killed or reason
            self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._leader, self._stop)

    async def wait(self) -> SandboxExit:
        """See SandboxProcess.wait."""
        if self._exit is None:
            if self._control is not None and self._killed is None:
                self.kill()
                raise RuntimeError("wait() before go(): the command has not been started")
            try:
                ended = await readable(self._own, self._started + self._timeout_s - time.monotonic())
            except asyncio.CancelledError:
                self.kill()
                raise
            self._watch.count_cpu()  # before pid 1 inside is gone
            self._signal()
            self._exit = await self._finish(timed_out=not ended and self._killed is None)
        if not self._closed:
            await self._keep()
            self._close()
        if isinstance(self._exit, SandboxError):
            raise self._exit
        return self._exit

    async def _finish(self, timed_out: bool) -> SandboxExit | SandboxError:
        wall = time.monotonic() - self._started
        for fd, what in ((self._leader, "the processes inside"), (self._own, "the sandbox program")):
            if not await readable(fd, DEATH_S):
                return SandboxError(f"{what} did not end within {DEATH_S:.0f} s of SIGKILL (pid {self._popen.pid})")
        self._watch.count_cpu()
        _, status, usage = os.wait4(self._popen.pid, 0)
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        stopped = timed_out or self._killed is not None
        if self._failure is not None:
            return SandboxError(self._failure)
        if not stopped and (complaint := self._complaint()):
            return SandboxError(complaint)
        return SandboxExit(
            returncode=None if stopped else self._popen.returncode,
            timed_out=timed_out,
            killed=self._killed,
            wall_s=wall,
            peak_memory_mb=self._watch.peak_memory_mb,
            peak_processes=self._watch.peak_processes,
            cpu_s=round(max(self._watch.cpu_s, usage.ru_utime + usage.ru_stime), 2),
        )

    async def _keep(self) -> None:
        """Keep what is to be left; too much of it is a broken limit. Goes on where a cancelled ``wait`` was."""
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(asyncio.to_thread(self._at_end))
        try:
            await asyncio.shield(self._keeping)
        except WorkspaceTooLarge:
            if isinstance(self._exit, SandboxExit):
                self._exit = replace(self._exit, returncode=None, killed=self._exit.killed or "disk")
        except OSError as error:
            self._exit = SandboxError(f"what the command left could not be kept: {error}")

    def _close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.cancel()
        self._watch.close()
        with contextlib.suppress(ChildProcessError):  # only where this program is the reaper of orphans
            os.waitid(os.P_PIDFD, self._leader, os.WEXITED | os.WNOHANG)
        self._held.close()

    async def _watching(self) -> None:
        while self._popen.returncode is None:
            await asyncio.sleep(INTERVAL_S)
            if reason := self._watch.sample():
                self.kill(reason)

    async def _watching_disk(self) -> None:
        loop = asyncio.get_running_loop()
        while self._popen.returncode is None:
            if failure := self._disk.full():
                self._failure = self._failure or failure
                self.kill()
            if self._disk.due() and await loop.run_in_executor(WALKERS, self._disk.broken):
                self.kill("disk")
            await asyncio.sleep(INTERVAL_S)


class Log:
    """Where a command writes: appended to ``path``; without one, stdout is dropped and stderr kept only for errors."""

    def __init__(self, path: Path | None) -> None:
        self._file = tempfile.TemporaryFile() if path is None else open(path, "ab+")  # noqa: SIM115
        self._begin = self._file.seek(0, os.SEEK_END)
        self.stderr = self._file.fileno()
        self.stdout = subprocess.DEVNULL if path is None else self.stderr

    def tail(self) -> str:
        """The last 2,000 bytes written."""
        self._file.seek(max(self._begin, self._file.seek(0, os.SEEK_END) - 2000))
        return self._file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    """A descriptor, closed with ``stack``, of a file in memory that holds ``data``."""
    fd = os.memfd_create("sandbox")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
