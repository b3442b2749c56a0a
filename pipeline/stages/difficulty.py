"""How hard each task was for each harness: figures of the groups that ended, each counted once.

They are part of the flow's state, so a run that goes back to a checkpoint goes back to the figures of that moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from pipeline.records import PolicyVersion, RolloutRecord

Counted = dict[str, list[Any]]  # "harness/task" → the values of a Seen, as a checkpoint keeps them


@dataclass(frozen=True)
class Seen:
    """The ended groups of one (harness, task), or of several together."""

    groups: int = 0  # trained or skipped
    rollouts: int = 0  # graded ones of those
    correctness: float = 0.0  # their sum
    reward: float = 0.0  # their sum
    no_contrast: int = 0  # groups of ``groups``
    abandoned: int = 0  # groups that came back with too few graded rollouts, for the last time
    version: str = ""  # the newest weights that wrote a token of them

    def __add__(self, other: Seen) -> Seen:
        values = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "version"}
        return Seen(**values, version=max(self.version, other.version, key=_order))

    def figures(self) -> dict[str, Any]:
        """As difficulty.json shows them; a mean of nothing is null."""
        return {
            "groups": self.groups,
            "rollouts": self.rollouts,
            "pass_rate": self.correctness / self.rollouts if self.rollouts else None,
            "mean_reward": self.reward / self.rollouts if self.rollouts else None,
            "no_contrast": self.no_contrast,
            "abandoned": self.abandoned,
            "last_version": self.version or None,
        }


def _order(version: str) -> tuple[int, int]:
    """By updates: the attempts of a run count on."""
    known = PolicyVersion.parse(version) if version else PolicyVersion(-1, -1)
    return known.n, known.attempt


def seen_in(records: Sequence[RolloutRecord], contrast: bool) -> Seen:
    """One group that was trained, or skipped for want of ``contrast``."""
    rewards = [(r.verdict.correctness or 0.0, r.verdict.reward) for r in records if r.verdict.reward is not None]
    newest = max((str(record.newest_version) for record in records), key=_order, default="")
    return Seen(
        groups=1,
        rollouts=len(rewards),
        correctness=sum(correctness for correctness, _ in rewards),
        reward=sum(reward for _, reward in rewards),
        no_contrast=int(not contrast),
        version=newest,
    )


def count(counted: Counted, harness: str, task_id: str, seen: Seen) -> None:
    """The values are replaced, never changed: a checkpoint may still hold them."""
    key = f"{harness}/{task_id}"
    counted[key] = list(astuple(Seen(*counted.get(key, ())) + seen))


def by_task(counted: Mapping[str, Sequence[Any]]) -> dict[str, Seen]:
    return _together((key.partition("/")[2], values) for key, values in counted.items())


def by_harness(counted: Mapping[str, Sequence[Any]]) -> dict[str, Seen]:
    return _together((key.partition("/")[0], values) for key, values in counted.items())


def report(counted: Mapping[str, Sequence[Any]], update: int) -> dict[str, Any]:
    """The contents of difficulty.json, as of ``update``."""
    cells: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, values in sorted(counted.items()):
        harness, _, task = key.partition("/")
        cells[task][harness] = Seen(*values).figures()
    tasks = by_task(counted)
    return {
        "update": update,
        "harnesses": {name: seen.figures() for name, seen in sorted(by_harness(counted).items())},
        "tasks": {name: {**tasks[name].figures(), "harnesses": own} for name, own in sorted(cells.items())},
    }


def _together(parts: Iterable[tuple[str, Sequence[Any]]]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for name, values in parts:
        found[name] = found.get(name, Seen()) + Seen(*values)
    return found
