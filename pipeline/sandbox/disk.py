"""How much a sandbox may leave on the host's disk: bytes and files below its writable directories, sampled.

A walk over a tree costs as much as the tree is large, so it waits until the file system has lost space or files that
could matter, or some seconds have passed. A file's own limit (RLIMIT_FSIZE) holds without any watch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from pipeline.config import SandboxConfig
from pipeline.sandbox.base import SandboxSpec

SLICES = 8  # of a limit, that the file system must have lost to make us look
LOOK_S = 10.0  # and look after so long anyway
SHARE = 10  # a walk of a second is followed by so many seconds without one
BLOCK = 512  # bytes, the unit of st_blocks whatever the file system's is


class DiskWatch:
    """Watches the host's directories ``places``. ``due`` and ``full`` are cheap, ``broken`` is for a thread."""

    def __init__(self, places: Iterable[Path], config: SandboxConfig) -> None:
        self._size, self._files = config.workspace_mb << 20, config.workspace_files
        self._must_stay = config.disk_free_mb << 20
        self._places = tuple(places)
        self._devices = {place.stat().st_dev: place for place in self._places if place.exists()}
        self._left = self._measure()
        self._earliest = 0.0
        self._latest = time.monotonic() + LOOK_S

    def full(self) -> str | None:
        """The file system, and what is left on it, when that is less than must stay."""
        for place, (free, _) in self._measure().items():
            if free < self._must_stay:
                return f"only {free >> 20} MB are left on the file system of {place}"
        return None

    def due(self) -> bool:
        """Whether to look again."""
        now = time.monotonic()
        if now < self._earliest:
            return False
        return now > self._latest or any(self._lost(place, *left) for place, left in self._measure().items())

    def broken(self) -> bool:
        """Walk over everything. Whether a limit is broken."""
        began = time.monotonic()
        self._left = self._measure()
        within = fits(self._places, self._size, self._files)
        now = time.monotonic()
        self._earliest = now + SHARE * (now - began)
        self._latest = max(now + LOOK_S, self._earliest)
        return not within

    def _lost(self, place: Path, free: int, free_files: int) -> bool:
        before, files_before = self._left.get(place, (free, free_files))
        lost_files = files_before - free_files
        return before - free > self._size // SLICES or lost_files > self._files // SLICES

    def _measure(self) -> dict[Path, tuple[int, int]]:
        """Free bytes and files of each file system, by one of its directories."""
        left = {}
        for place in self._devices.values():
            with contextlib.suppress(OSError):  # removed: the sandbox has ended
                status = os.statvfs(place)
                left[place] = status.f_bavail * status.f_frsize, status.f_favail
        return left


def writable_places(spec: SandboxSpec) -> list[Path]:
    """The host's directories that a command may write to."""
    mounts = [host for host, _, is_writable in spec.mounts if is_writable]
    mounts += [place for place in (spec.layer, spec.leave) if place is not None]
    return mounts if spec.workspace is None else [spec.workspace, *mounts]


def fits(places: Iterable[Path], size: int, files: int) -> bool:
    """Whether all that lies below ``places`` stays within limits. Links are not followed, hard links count once.

    It stops where a limit is broken. Directories that cannot be read are left out.
    """
    waiting, seen = [str(place) for place in places], set()
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif status.st_nlink > 1:
                        if status.st_ino in seen:
                            continue
                        seen.add(status.st_ino)
                    size -= status.st_blocks * BLOCK
                    files -= 1
                if size < 0 or files < 0:
                    return False
    return True
