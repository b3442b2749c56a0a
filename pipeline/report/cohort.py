"""What an evaluation was of, as its cohort.json says, and whether two evaluations can be compared.

Tasks or graders that differ forbid a difference; versions of harnesses and limits that differ are said beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Cohort = Mapping[str, Any]  # the contents of cohort.json


@dataclass(frozen=True)
class Comparison:
    """``comparable`` None: an evaluation from before cohorts were pinned. ``differs``: a sentence each.

    ``headline``: whether a difference in pass@1 means anything at all.
    """

    comparable: bool | None = None
    differs: tuple[str, ...] = ()
    headline: bool = True


def compare_cohorts(old: Cohort | None, new: Cohort | None) -> Comparison:
    """What a comparison of two evaluations must say."""
    if old is None or new is None:
        return Comparison()
    tasks = [*_tasks(old, new, "content", "tasks differ"), *_tasks(old, new, "grader", "graders differ")]
    rest = [
        *_values(old["harnesses"], new["harnesses"], lambda name: f"{name} ran at version"),
        *_values(old["limits"], new["limits"], lambda name: f"{name} was"),
        *_values(old, new, lambda name: "rollouts a task:", ("rollouts_per_task",)),
    ]
    return Comparison(not tasks and not rest, (*tasks, *rest), not tasks)


def _tasks(old: Cohort, new: Cohort, part: str, what: str) -> list[str]:
    """Tasks that are on one side only differ in their content, and only there."""
    before, after = old["tasks"], new["tasks"]
    names = before.keys() | after.keys() if part == "content" else before.keys() & after.keys()
    found = sorted(name for name in names if _part(before, name, part) != _part(after, name, part))
    return [f"{what}: {len(found)} of {len(names)}, the first is {found[0]}"] if found else []


def _part(tasks: Mapping[str, Mapping[str, Any]], name: str, part: str) -> str | None:
    return tasks[name][part] if name in tasks else None


def _values(
    old: Mapping[str, Any], new: Mapping[str, Any], words: Callable[[str], str], names: tuple[str, ...] = ()
) -> list[str]:
    """Of what both sides have: a newer version of Yoke may know more limits."""
    shared = [name for name in old if name in new and (not names or name in names)]
    return [f"{words(name)} {old[name]}, then {new[name]}" for name in shared if old[name] != new[name]]
