"""What of a run stays on disk: tokens of old rollouts, exports and checkpoints go when `storage` says so.

Only rank 0 of the newest attempt does this, right after a checkpoint. A kill at any moment leaves each thing whole or
gone. Groups that any kept checkpoint may still need are not touched, and the figures of no rollout are ever lost.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.launch.run_directory import RunDirectory, discard, sweep_discarded
from pipeline.launch.storage import Storage
from pipeline.report.store import read_figures, write_group, write_json
from pipeline.stages.flow import Ending, FlowState

WARNING = 0.8  # of the quota
LEAST_CHECKPOINTS = 2
GB = 1e9
UPDATE = re.compile(r"update (\d+)")

Note = Callable[[str, str], object]  # (kind of event: "error" or "message", text)

log = logging.getLogger("yoke.storage")


class QuotaReached(UserError):
    """The run directory is over its quota, and nothing is left that may go."""


# --- how large


def sizes(run: RunDirectory) -> dict[str, int]:
    """Bytes of each part of a run directory. What vanishes meanwhile counts as it is found."""
    parts = {"checkpoints": 0, "models": 0, "rollouts": 0, "evaluation": 0, "other": 0}
    for place, size in _files(run.root):
        parts[_part(place.relative_to(run.root).parts)] += size
    return parts


def _part(names: tuple[str, ...]) -> str:
    if names[0] == "attempts" and len(names) > 2 and names[2] in ("groups", "figures", "rollouts"):
        return "rollouts"
    if names[0] == "attempts" and len(names) > 2 and names[2] == "model":
        return "models"
    return names[0] if names[0] in ("checkpoints", "models", "evaluation") else "other"


def size_of(place: Path) -> int:
    """Bytes of all files below a directory; 0 where there is none."""
    return sum(size for _, size in _files(place))


def _files(root: Path) -> Iterator[tuple[Path, int]]:
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names):
            with suppress(OSError):
                yield path, path.lstat().st_size


# --- what may go


def old_groups(flow: FlowState, keep: int) -> set[str]:
    """Groups that ended, and not within the last ``keep`` updates of ``flow``.

    ``ended`` is in the order of the ends: a skipped group counts for the update after the last one trained before it.
    """
    old: set[str] = set()
    update = 0
    for group_id, (ending, reason) in flow.ended.items():
        if ending == Ending.TRAINED and (found := UPDATE.fullmatch(reason)):
            update = int(found[1])
        if update < flow.update - keep:
            old.add(group_id)
    return old


def group_files(run: RunDirectory) -> Iterator[tuple[str, Path]]:
    """(group, file) of every closed group whose tokens are there, oldest attempt first, in the schedule's order."""
    for number in run.attempt_numbers():
        for path in sorted(run.attempt(number).groups.glob("[!.]*.parquet")):
            yield path.stem, path


def thin(path: Path) -> None:
    """Keep the figures of a closed group, without its tokens: written beside, then the whole one goes."""
    figures = path.parent.parent / "figures" / path.name
    write_group(figures, [replace(record, rows=()) for record in read_figures(path)])
    path.unlink()


class Retention:
    """On global rank 0, for the trainer's thread."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        storage: Storage,
        note: Note,
        rest: Callable[[], object] = lambda: None,
        needed_exports: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        """``rest``: called between two steps; ``needed_exports``: those that evaluation jobs still read."""
        self.config, self.run, self.storage = config, run, storage
        self._note, self._rest, self._needed_exports = note, rest, needed_exports
        self._warned = False

    def look(self) -> None:
        """To be called after a checkpoint. Raises QuotaReached when the run has to stop, FencedOff when it is a ghost.

        What the file system refuses is said and left for the next time.
        """
        self.storage.attempt.check_fence()
        try:
            sweep_discarded(self.run.models)
            if self.config.storage.rollouts is not None:
                self._thin_old(self.config.storage.rollouts)
            self._keep_quota()
        except OSError as error:
            log.warning("nothing more is removed from %s for now: %s", self.run.root, error)
            self._note("error", f"ALARM: old files of the run could not be removed: {error}")

    def _thin_old(self, keep: int) -> None:
        for _ in self._thinning(keep):
            pass

    def _thinning(self, keep: int) -> Iterator[int]:
        """Thin one old group after the other; yields the bytes that each gave."""
        flow = self._oldest_flow()
        old = old_groups(flow, keep) if flow else set()
        for path in self._left_over(old):
            yield self._removed(path, path.unlink)
        for group_id, path in group_files(self.run):
            if group_id in old:
                yield self._removed(path, lambda path=path: thin(path))  # type: ignore[misc]

    def _removed(self, path: Path, remove: Callable[[], object]) -> int:
        """Remove something, unless this is a ghost. Returns the bytes that it had."""
        self.storage.attempt.check_fence()
        self._rest()
        size = size_of(path) if path.is_dir() else path.lstat().st_size
        remove()
        return size

    def _left_over(self, old: Collection[str]) -> list[Path]:
        """Single rollouts of earlier attempts whose groups have ended since."""
        earlier = [number for number in self.run.attempt_numbers() if number < self.storage.attempt.number]
        found = (path for number in earlier for path in self.run.attempt(number).rollouts.glob("[!.]*.parquet"))
        return sorted(path for path in found if path.stem.rpartition("-")[0] in old)

    def _oldest_flow(self) -> FlowState | None:
        """As the oldest checkpoint has it from which the run could go on."""
        from pipeline.training.checkpoint import STATE_FILE, checkpoints, read_json

        kept = checkpoints(self.run.checkpoints)
        return FlowState.from_json(read_json(kept[0] / STATE_FILE)["state"]["flow"]) if kept else None

    # --- the quota

    def _keep_quota(self) -> None:
        parts, quota = sizes(self.run), self.config.storage.quota_gb
        if quota is not None and sum(parts.values()) > quota * GB:
            parts = self._make_room(parts, quota * GB)
        total = sum(parts.values())
        record = {"time": time.time(), "bytes": total, "parts": parts, "quota_gb": quota}
        self.storage.publish("write size.json", lambda: write_json(self.run.size, record))
        if quota is None:
            return
        if total > quota * GB:
            raise QuotaReached(self._stopped_text(parts, quota))
        if total > WARNING * quota * GB and not self._warned:
            self._note("error", f"ALARM: {shown(parts)}: {total / GB / quota:.0%} of storage.quota_gb={quota:g}")
        self._warned = total > WARNING * quota * GB

    def _make_room(self, before: Mapping[str, int], quota: float) -> dict[str, int]:
        """In this order: exports, rollouts, checkpoints. Each as far as is needed. Returns the sizes after that."""
        over = sum(before.values()) - quota
        for step in (self._exports, lambda: self._thinning(0), self._checkpoints):
            for freed in step():
                over -= freed
                if over <= 0:
                    break
            if over <= 0:
                break
        after = sizes(self.run)
        gone = (sum(before.values()) - sum(after.values())) / GB
        if gone > 0:
            self._note("message", f"{gone:.3g} GB of old files went, which were over storage.quota_gb ({shown(after)})")
        return after

    def _exports(self) -> Iterator[int]:
        """All but the newest, those that jobs read, and those of training.keep_every; oldest first."""
        from pipeline.stages.weights import exported

        for name in set_apart(exported(self.run.models)[:-1], self._needed_exports(), self.config.training.keep_every):
            place = self.run.models / name
            yield self._removed(place, lambda place=place: discard(place))  # type: ignore[misc]

    def _checkpoints(self) -> Iterator[int]:
        from pipeline.training.checkpoint import prune

        before = size_of(self.run.checkpoints)
        self.storage.attempt.check_fence()
        prune(self.run.checkpoints, LEAST_CHECKPOINTS, self.storage.attempt.number)
        yield before - size_of(self.run.checkpoints)

    def _stopped_text(self, parts: Mapping[str, int], quota: float) -> str:
        return (
            f"{self.run.root} is over storage.quota_gb={quota:g} ({shown(parts)}), and nothing is left that may go. "
            "A checkpoint is written: give a larger quota, or make room, and the same command goes on from it"
        )


def set_apart(names: Collection[str], needed: Collection[str], keep_every: int) -> list[str]:
    """Of the exports ``names`` those that may go: no job reads them, and ``training.keep_every`` does not hold them."""
    from pipeline.stages.weights import update_of

    held = {name for name in names if keep_every and (update_of(name) or 0) % keep_every == 0}
    return [name for name in names if name not in held and name not in needed]


def shown(parts: Mapping[str, Any]) -> str:
    """Sizes in words, the largest first."""
    named = [f"{name} {size / GB:.3g}" for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size]
    return f"{sum(parts.values()) / GB:.3g} GB: {', '.join(named)}"
