"""Log lines, written by a thread of its own: whoever logs never waits for a disk that is full or hangs."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

KEPT = 10_000  # lines that wait for the disk; later ones are left out
LAST_S = 2.0  # that the end of the process waits for them
POLL_S = 0.02
FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def log_in_background(stream: TextIO) -> QueueListener:
    """Let this process's log, from INFO on, go to ``stream``."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(KEPT)
    writer = logging.StreamHandler(stream)
    writer.setFormatter(logging.Formatter(FORMAT))
    listener = QueueListener(lines, writer)
    listener.start()
    logging.basicConfig(level=logging.INFO, handlers=[_Dropping(lines)], format="%(message)s", force=True)
    atexit.register(_end, listener)
    return listener


def quieten_others() -> None:
    """Libraries that would say too much, or everything twice."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("submitit").propagate = False  # it has a handler of its own


def _end(listener: QueueListener) -> None:
    atexit.unregister(_end)
    stopping = threading.Thread(target=_stop, args=(listener,), daemon=True)
    stopping.start()
    stopping.join(LAST_S)


def _stop(listener: QueueListener) -> None:
    """Its end is a line as well, and waits for room behind the others."""
    while True:
        with suppress(queue.Full):
            return listener.stop()
        time.sleep(POLL_S)
