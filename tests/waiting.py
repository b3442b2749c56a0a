"""Waiting in tests for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONG_S = 60.0


def wait_for(condition: Callable[[], Any]) -> None:
    """Until ``condition`` is true; fails after LONG_S."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
