"""What a run does while its directory cannot be read or written: it says so, tries again, and goes on where it was.

A full disk, a quota, a file server that is away, slow or hangs cost time, up to ``cluster.storage_wait_s``; only then
does the run end, with a message for the person who has to mend it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import UserError
from pipeline.launch.run_directory import Attempt, FencedOff
from pipeline.records import RolloutRecord
from pipeline.report.store import append_lines, read_group

T = TypeVar("T")
Tell = Callable[[str, str], object]  # (kind of event: "error" or "message", text)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
ALARM_S = 15.0  # trouble that is over sooner is only logged
FENCE_S = 5.0  # a look at the fence in a wait is at most this old
LINES_KEPT = 100_000  # that wait for the disk; later ones are counted and left out
TROUBLE = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EREMOTEIO", "EROFS", "ENOENT", "ESTALE", "ENODEV", "ENXIO", "ENOTCONN"),
        *("ESHUTDOWN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH", "EAGAIN"),
        *("EBUSY", "EINTR", "ENOLCK", "ENOMEM", "EPROTO", "ECOMM"),
    )
)

log = logging.getLogger("yoke.storage")


class StorageLost(UserError):
    """The run directory could not be used for ``cluster.storage_wait_s``: a person has to mend this."""


class Storage:
    """The run directory of one attempt, as one rank sees it. Thread-safe; its calls block: not for event loops.

    ``tell`` passes alarms on to the live view.
    """

    def __init__(self, attempt: Attempt, wait_s: float, tell: Tell = lambda kind, text: None) -> None:
        self.attempt, self.wait_s = attempt, wait_s
        self.lost: StorageLost | None = None
        self._tell = tell
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._trouble_since: float | None = None
        self._alarmed = False
        self._looked = 0.0
        self._last_trouble = 0.0

    def insist(self, what: str, action: Callable[[], T]) -> T:
        """``action``'s result, as soon as the directory lets it succeed. It must be safe to repeat.

        Raises StorageLost after ``wait_s`` of trouble, and at once whatever is no trouble of the directory's.
        """
        since, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                with self._watched(what):
                    result = action()
            except Exception as error:
                if not self._is_trouble(error):
                    raise
                self._say(what, str(error), since)
                if time.monotonic() - since > self.wait_s:
                    self.lost = StorageLost(self._lost_text(what, str(error)))
                    raise self.lost from error
            else:
                self._over()
                return result
            if self._closed.wait(pause):
                raise StorageLost(f"{what}: given up, the attempt ends")
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def write(self, what: str, action: Callable[[], T]) -> T:
        """`insist`, and nothing is made where the attempt's directory is gone: the file system is not mounted there."""

        def there() -> T:
            os.stat(self.attempt.root)
            return action()

        return self.insist(what, there)

    def publish(self, what: str, write: Callable[[], T]) -> T:
        """`insist`, with a look at the fence before each try."""

        def fenced() -> T:
            self.attempt.check_fence()
            return write()

        return self.insist(what, fenced)

    def glance(self) -> None:
        """For waits: raises FencedOff like `Attempt.check_fence`, from a look that may be FENCE_S old.

        A directory that cannot be read is no reason to end.
        """
        now = time.monotonic()
        if now - self._looked < FENCE_S:
            return
        self._looked = now
        try:
            with self._watched("look for a newer attempt"):
                self.attempt.check_fence()
        except OSError as error:
            self._say("look for a newer attempt", str(error), now)

    def read_rollouts(self, path: Path) -> tuple[RolloutRecord, ...]:
        """A file that another node has just published."""
        return self.insist(f"read {path.name}", lambda: _read_rollouts(path))

    def was_away(self, since: float, places: Sequence[Path]) -> bool:
        """Whether there was trouble after ``since`` (monotonic clock); waits until ``places`` are there."""
        for place in places:
            self.insist(f"look at {place}", partial(os.stat, place))
        return self._last_trouble > since

    def close(self) -> None:
        """Nobody tries again any more."""
        self._closed.set()

    def _is_trouble(self, error: BaseException) -> bool:
        if isinstance(error, FencedOff):
            return False
        cause = os_error(error)
        return cause is not None and (cause.errno in TROUBLE or not self._is_there())

    def _is_there(self) -> bool:
        """Under a file system that is not mounted any more lies an empty directory, often another user's."""
        try:
            return self.attempt.root.is_dir()
        except OSError:
            return False

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """A call that hangs raises nothing: a timer tells of it."""
        since = time.monotonic()
        timer = threading.Timer(ALARM_S, lambda: self._say(what, "no answer", since))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _say(self, what: str, why: str, since: float) -> None:
        with self._lock:
            first, self._trouble_since = self._trouble_since is None, self._trouble_since or since
            alarm = not self._alarmed and time.monotonic() - since >= ALARM_S
            self._alarmed = self._alarmed or alarm
            self._last_trouble = time.monotonic()
        if first:
            log.warning("%s: %s; trying again for %.0f s", what, why, self.wait_s)
        if alarm:
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.wait_s - (time.monotonic() - since)))
            self._tell("error", f"ALARM: {self._place} cannot be used ({what}: {why}); trying again until {until}")

    def _over(self) -> None:
        with self._lock:
            since, self._trouble_since = self._trouble_since, None
            alarmed, self._alarmed = self._alarmed, False
        if since is not None:
            text = f"{self._place} can be used again after {time.monotonic() - since:.0f} s"
            log.warning("%s", text)
            if alarmed:
                self._tell("message", text)

    def _lost_text(self, what: str, why: str) -> str:
        return (
            f"{self._place} could not be used for {self.wait_s:.0f} s (cluster.storage_wait_s): {what}: {why}. "
            "Make room or mend the file system, then start the run again: it resumes from its last checkpoint"
        )

    @property
    def _place(self) -> str:
        return f"the run directory {self.attempt.run.root}"


def os_error(error: BaseException | None) -> OSError | None:
    """The file system's part in ``error``, which may be wrapped; None when it has none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def _read_rollouts(path: Path) -> tuple[RolloutRecord, ...]:
    try:
        return read_group(path)
    except UserError:
        os.listdir(path.parent)  # NFS remembers for a while that a name was not there, unless it lists anew
        raise


class Lines:
    """Ledgers, written by a thread of its own: whoever adds a line never waits for the disk. Order is kept.

    A crash may lose the lines of its last moment, which nobody resumes from.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._waiting: deque[tuple[Path, dict[str, Any]]] = deque()
        self._sizes: dict[Path, int] = {}  # after the last good write
        self._left_out = 0
        self._changed = threading.Condition()
        self._busy = False
        threading.Thread(target=self._keep, name="lines", daemon=True).start()

    def add(self, path: Path, entry: dict[str, Any]) -> None:
        with self._changed:
            if len(self._waiting) < LINES_KEPT:
                self._waiting.append((path, entry))
            else:
                self._left_out += 1
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Whether all lines are on disk, waiting at most ``deadline_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, deadline_s)

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                batch, self._busy = list(self._waiting), True
                self._waiting.clear()
                left_out, self._left_out = self._left_out, 0
            try:
                for path in dict.fromkeys(path for path, _ in batch):
                    self._write(path, [entry for place, entry in batch if place == path])
            except Exception as error:  # kept in storage.lost where it is the disk's fault
                log.error("%d lines are lost: %s", len(batch), error)
            if left_out:
                log.error("%d lines were left out while the disk was away", left_out)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _write(self, path: Path, entries: list[dict[str, Any]]) -> None:
        append = partial(append_lines, path, entries, self._sizes.get(path))
        self._sizes[path] = self._storage.write(f"write {path.name}", append)


class Saving:
    """When a checkpoint that could not be written is tried again, and when the run gives up."""

    def __init__(self, wait_s: float, tell: Tell) -> None:
        self._wait_s, self._tell = wait_s, tell
        self._failing_since: float | None = None
        self._again_at = 0.0
        self._pause = FIRST_PAUSE_S

    @property
    def due(self) -> bool:
        """An earlier one failed, and it is time for another try."""
        return self._failing_since is not None and time.monotonic() >= self._again_at

    @property
    def failing(self) -> bool:
        return self._failing_since is not None

    def failed(self, error: UserError) -> None:
        """Raises StorageLost when it has been failing for ``wait_s``."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since, self._pause = now, FIRST_PAUSE_S
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._wait_s))
            self._tell("error", f"ALARM: {error} Training goes on, trying again until {until}")
        log.warning("%s", error)
        if now - self._failing_since > self._wait_s:
            raise StorageLost(f"no checkpoint for {self._wait_s:.0f} s (cluster.storage_wait_s): {error}") from error
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._again_at = now + self._pause

    def worked(self) -> None:
        if self._failing_since is not None:
            self._tell("message", f"checkpoints are written again after {time.monotonic() - self._failing_since:.0f} s")
        self._failing_since = None
