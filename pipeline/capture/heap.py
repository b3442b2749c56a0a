"""Gives freed memory back to the system: glibc keeps what request bodies used, in pieces, until it is told to trim."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 32 * 2**20  # a busy process trims when it has grown by so much
BUSY_EVERY_S = 10.0  # and not more often: a trim stops it for up to some 20 ms
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEPT = {M_TRIM_THRESHOLD: 2**30, M_TOP_PAD: 8 * 2**20, M_MMAP_THRESHOLD: 8 * 2**20}
PAGE = resource.getpagesize()


class Heap:
    """This process's heap. ``relieve`` is called now and then, and does nothing where the C library has no trim.

    Between two trims the heap keeps what was freed: by default glibc returns and fetches the pages of every large
    buffer, and fetching them costs more than filling them.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            for option, size in KEPT.items():
                library.mallopt(option, size)
        self._size = resident()
        self._trimmed = time.monotonic()

    def relieve(self, busy: bool) -> None:
        """Trim when the process has grown: at leisure at once, else after a while."""
        if self._trim is None or resident() < self._size + (GROWTH_BYTES if busy else GROWTH_BYTES // 8):
            return
        if busy and time.monotonic() - self._trimmed < BUSY_EVERY_S:
            return
        self._trim(0)
        self._size, self._trimmed = resident(), time.monotonic()


def resident() -> int:
    """Bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
