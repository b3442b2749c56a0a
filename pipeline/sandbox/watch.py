"""Memory and process limits of a whole sandbox and the CPU time it used, sampled from /proc.

Proportional set sizes are read only when they can matter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import SandboxConfig

INTERVAL_S = 0.1
PSS_INTERVAL_S = 0.5
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
STAT_BYTES = 4096  # more than any file that is read here has


@dataclass(frozen=True)
class Stat:
    """Of one process: CPU time with that of the children it has waited for, threads, resident bytes."""

    cpu_s: float
    threads: int
    rss: int

    @classmethod
    def parse(cls, text: bytes) -> Stat:
        """From /proc/PID/stat (proc_pid_stat(5)): fields 14 to 17, 20 and 24, behind a name that may hold anything."""
        fields = text[text.rindex(b")") + 2 :].split()
        return cls(sum(int(ticks) for ticks in fields[11:15]) / TICKS, int(fields[17]), int(fields[21]) * PAGE)


class TreeWatch:
    """``open_proc`` gives a descriptor of a /proc directory (None: not yet), ``pids`` the processes to count in it.
    ``root`` is an open /proc/PID/stat of the process that inherits orphans of theirs; it is closed with the watch.

    ``scratch`` names the memory file systems inside, as paths without the first slash: their sizes have limits (else
    ``scratch_bytes`` is the limit of each), but each file in them takes memory of the kernel's.

    The sum of resident set sizes counts shared pages more than once, so it bounds the true use (the sum of proportional
    set sizes) from above: the dear figure is read when the cheap one is over the limit or has grown.
    """

    def __init__(
        self,
        open_proc: Callable[[], int | None],
        pids: Callable[[int], list[str]],
        root: int,
        config: SandboxConfig,
        scratch: tuple[str, ...] = (),
        scratch_bytes: int | None = None,
    ) -> None:
        self.peak_memory_mb = 0.0
        self.peak_processes = 0
        self.cpu_s = 0.0
        self._open_proc = open_proc
        self._pids = pids
        self._root = root
        self._memory = config.memory_mb << 20
        self._tasks = config.processes
        self._files = config.workspace_files
        self._scratch = scratch
        self._scratch_bytes = scratch_bytes
        self._proc: int | None = None
        self._highest_rss = 0
        self._last_pss = 0.0

    def sample(self) -> str | None:
        """Look once. Returns the limit that is broken, "memory", "processes" (threads count) or "disk", or None."""
        try:
            if self._proc is None:
                self._proc = self._open_proc()
            if self._proc is None:
                return None
            pids = self._pids(self._proc)
        except OSError:  # already ended
            return None
        self.peak_processes = max(self.peak_processes, len(pids))
        stats = {pid: self._stat(pid) for pid in pids}
        self.count_cpu(sum(stat.cpu_s for stat in stats.values()))
        if sum(stat.threads for stat in stats.values()) > self._tasks:
            return "processes"
        if any(self._full(*_used(self._proc, name)) for name in self._scratch):
            return "disk"
        return "memory" if self._memory_broken(stats) else None

    def _full(self, files: int, size: int) -> bool:
        return files > self._files or (self._scratch_bytes is not None and size > self._scratch_bytes)

    def count_cpu(self, running_s: float = 0.0) -> None:
        """Add up the time of the ended processes, which the root has inherited, and of the running ones."""
        with contextlib.suppress(OSError):  # the root has ended and is forgotten
            self.cpu_s = max(self.cpu_s, Stat.parse(os.pread(self._root, STAT_BYTES, 0)).cpu_s + running_s)

    def _memory_broken(self, stats: dict[str, Stat]) -> bool:
        rss = sum(stat.rss for stat in stats.values())
        now = time.monotonic()
        due = rss > self._highest_rss and now - self._last_pss >= PSS_INTERVAL_S
        if rss <= self._memory and not due:
            return False
        self._last_pss, self._highest_rss = now, max(rss, self._highest_rss)
        pss = self._total_pss(stats)
        if pss > self._memory:  # while processes end, their shares pass to those that are read after them
            pss = min(pss, self._total_pss(stats))
        self.peak_memory_mb = max(self.peak_memory_mb, round(pss / 2**20, 1))
        return pss > self._memory

    def close(self) -> None:
        """Let go of /proc."""
        os.close(self._root)
        if self._proc is not None:
            os.close(self._proc)
            self._proc = None

    def _read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(fd, STAT_BYTES)
        finally:
            os.close(fd)

    def _stat(self, pid: str) -> Stat:
        with contextlib.suppress(OSError):
            return Stat.parse(self._read(f"{pid}/stat"))
        return Stat(0.0, 0, 0)

    def _total_pss(self, stats: dict[str, Stat]) -> int:
        return sum(self._pss(pid, stat.rss) for pid, stat in stats.items())

    def _pss(self, pid: str, rss: int) -> int:
        try:
            return int(self._read(f"{pid}/smaps_rollup").split(b"Pss:")[1].split()[0]) << 10
        except PermissionError:  # not ours to read: the larger figure stands in
            return rss
        except (OSError, IndexError):  # ended
            return 0


def _used(proc: int, name: str) -> tuple[int, int]:
    """How many files a memory file system inside holds, and bytes."""
    try:
        fd = os.open(f"1/root/{name}", os.O_PATH, dir_fd=proc)
    except OSError:  # already ended
        return 0, 0
    try:
        status = os.statvfs(fd)
        return status.f_files - status.f_ffree, (status.f_blocks - status.f_bfree) * status.f_frsize
    finally:
        os.close(fd)


def listed(proc: int) -> list[str]:
    """Every process of a /proc that is a namespace's own, but its pid 1 (the sandbox program)."""
    return [name for name in os.listdir(proc) if name.isdigit() and name != "1"]


def descendants(proc: int, pid: int) -> list[str]:
    """Every process below ``pid``, by the kernel's lists of children."""
    found: list[str] = []
    todo = [str(pid)]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for task in _listdir(f"{parent}/task", proc):
                fd = os.open(f"{parent}/task/{task}/children", os.O_RDONLY, dir_fd=proc)
                with open(fd, "rb") as file:
                    children = file.read().decode().split()
                found += children
                todo += children
    return found


def _listdir(name: str, proc: int) -> list[str]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
