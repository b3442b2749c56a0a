"""Gives memory that the allocator holds but nobody uses back to the system.

Requests of hundreds of kilobytes come and go between the ids that stay, so glibc's heap keeps free pages in its middle.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time

TRIM_EVERY_S = 5.0
GROWTH = 1.15  # a process that has not grown since the last time has little to give back
SLACK_BYTES = 16 * 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")

log = logging.getLogger(__name__)


def resident() -> int:
    """This process's resident memory in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


class Trimmer:
    """Trims the heap now and then; each time takes a few milliseconds."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        self._after, self._next = resident(), 0.0

    def run(self) -> None:
        """Trim when it is time and worth it."""
        now = time.monotonic()
        if self._trim is None or now < self._next:
            return
        self._next = now + TRIM_EVERY_S
        if resident() > self._after * GROWTH + SLACK_BYTES:
            self._trim(0)
            self._after = resident()
            log.info("the heap was trimmed in %.0f ms to %d MiB", (time.monotonic() - now) * 1000, self._after >> 20)
