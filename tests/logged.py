"""What our own code logged: other libraries also tell of what an earlier test left to the garbage collector."""

from __future__ import annotations

import logging

import pytest


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of the package's loggers."""
    return [record for record in caplog.records if record.name.partition(".")[0] in {"pipeline", "yoke"}]
