"""Free pages in the middle of the heap go back to the system."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from pipeline.capture.heap import Heap, resident
heap = Heap()
small = resident()
kept = []
for index in range(4000):
    large = bytes(60_000)
    kept.append((large, bytes(700)))
kept = [little for _, little in kept]
del large
held = resident()
heap.relieve(busy=False)
print(small, held, resident())
"""


def test_freed_buffers_between_kept_ones_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    small, held, trimmed = map(int, done.stdout.split())
    assert held > small + 100 * 2**20, "the heap holds what was freed"
    assert trimmed < small + 30 * 2**20
