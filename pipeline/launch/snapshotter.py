"""Keeps run_dir/status.json: what `yoke status` shows where the coordinator cannot be asked.

A thread of its own writes it, one file at a time, so that a file system that hangs stops this thread and nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.launch.run_directory import FencedOff
from pipeline.report.store import write_text

EVERY_S = 10.0
LOOK_S = 0.5  # how often it looks, in memory, whether something is new
LAST_S = 5.0  # that the end of a run waits for the last snapshot

log = logging.getLogger("yoke.status")


class Snapshotter:
    """Writes ``take()`` to ``path`` about every ``every_s`` seconds and whenever ``news()`` is another one.

    ``check_fence`` is called before each write; once it raises FencedOff, nothing is written any more.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[], dict[str, Any]],
        news: Callable[[], Any],
        check_fence: Callable[[], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._path, self._take, self._news = path, take, news
        self._check_fence, self._every_s = check_fence, every_s
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._keep, name="snapshotter", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float = LAST_S) -> None:
        """Write a last snapshot and end; what takes longer than ``deadline_s`` is left behind."""
        self._stopping.set()
        self._thread.join(deadline_s)

    def _keep(self) -> None:
        due, news = 0.0, None
        while True:
            last = self._stopping.is_set()
            changed = news != (news := self._news())
            if last or changed or time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                if not self._write(self._take()):
                    return
            if last:
                return
            self._stopping.wait(LOOK_S)

    def _write(self, snapshot: dict[str, Any]) -> bool:
        """False when a newer attempt has taken the file over."""
        try:
            self._check_fence()
            write_text(self._path, json.dumps(snapshot) + "\n")
        except FencedOff:
            return False
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written, it is tried again: %s", self._path, error)
            self._failing = True
        else:
            self._failing = False
        return True
