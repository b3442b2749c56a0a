"""What is measured from outside: CPU, memory and files of a process tree, and how fast a health check answers."""

from __future__ import annotations

import http.client
import os
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PROBE_EVERY_S = 0.25
PROBE_TIMEOUT_S = 60


class RunFailed(Exception):
    """A run that gave no figures; the message says why."""


class Usage(NamedTuple):
    """Of a process and all it started."""

    cpu_s: float
    rss_mb: float
    files: int


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *[descendant for child in children for descendant in tree(int(child))]]


def shard_pids(pid: int) -> list[int]:
    """The shard processes under a supervisor."""
    found = []
    for child in tree(pid)[1:]:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"pipeline.capture.shard" in command:
            found.append(child)
    return found


class UsageMeter:
    """Adds up a tree whose members may die: their CPU time is kept."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s: dict[int, float] = {}

    def read(self) -> Usage:
        """The usage now."""
        rss_mb, files = 0.0, 0
        for pid in tree(self._pid):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                files += len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            self._cpu_s[pid] = (int(stat[11]) + int(stat[12])) / TICKS
            rss_mb += int(stat[21]) * PAGE / 2**20
        return Usage(sum(self._cpu_s.values()), rss_mb, files)


@dataclass
class Watch:
    """Probes a target's health and samples its usage in the background, until stopped."""

    url: str
    meter: UsageMeter
    health_s: list[float] = field(default_factory=list)
    health_failures: int = 0
    peak_rss_mb: float = 0.0
    peak_files: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._probe, self._sample)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _probe(self) -> None:
        place = urlsplit(self.url)
        while not self._stop.wait(PROBE_EVERY_S):
            started = time.perf_counter()
            connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=PROBE_TIMEOUT_S)
            try:
                connection.request("GET", place.path)
                ok = connection.getresponse().status == 200
            except OSError:
                ok = False
            finally:
                connection.close()
            if ok:
                self.health_s.append(time.perf_counter() - started)
            else:
                self.health_failures += 1

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            usage = self.meter.read()
            self.peak_rss_mb = max(self.peak_rss_mb, usage.rss_mb)
            self.peak_files = max(self.peak_files, usage.files)


def fetch(url: str, timeout_s: float = 5.0) -> bytes:
    """The body at a URL. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as reply:
        return bytes(reply.read())


def await_http(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> float:
    """Seconds until a process answers 200 at a URL. Raises RunFailed when it ends first, or on time-out."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if process.poll() is not None:
            raise RunFailed(f"what should serve {url} ended with {process.returncode}")
        try:
            fetch(url)
            return time.monotonic() - started
        except OSError:
            time.sleep(0.05)
    raise RunFailed(f"nothing served {url} within {timeout_s:.0f} s")
