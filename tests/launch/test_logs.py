"""Logging beside a disk that hangs."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.launch import logs

LONG_S = 60.0


class HangingStream(io.StringIO):
    """A file on a file system that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def write(self, text: str) -> int:
        assert self.answers.wait(LONG_S)
        return super().write(text)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_whoever_logs_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT", 50)
    stream = HangingStream()
    listener = logs.log_in_background(stream)
    started = time.monotonic()
    for number in range(200):
        logging.getLogger("yoke.test").warning("line %d", number)
    assert time.monotonic() - started < LONG_S / 2
    stream.answers.set()
    monkeypatch.setattr(logs, "LAST_S", LONG_S)
    logs._end(listener)
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines[:20]] == [str(number) for number in range(20)], "in order"
    assert 50 <= len(lines) < 200 and "yoke.test WARNING line 0" in lines[0]


def test_the_end_of_a_process_does_not_wait_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LAST_S", 0.2)
    stream = HangingStream()
    listener = logs.log_in_background(stream)
    logging.getLogger("yoke.test").warning("never written")
    started = time.monotonic()
    logs._end(listener)
    assert time.monotonic() - started < LONG_S / 2
    stream.answers.set()
