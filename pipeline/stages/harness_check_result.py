"""What `yoke harness check` found out: one entry a harness in one JSON file, and docs/harness-table.md made from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pipeline.config import UserError
from pipeline.harness.base import HarnessRecipe, harness_root
from pipeline.report.store import write_json

FILE = "harness-check.json"


@dataclass(frozen=True)
class Result:
    """How one scene went. ``failures``: a line each, what was expected and seen. ``facts`` go through JSON."""

    scene: str
    failures: tuple[str, ...]
    facts: dict[str, Any]


Tell = Callable[[str, str, Result | None], None]  # (harness, scene, None) when it begins, with a result when done
Entry = dict[str, Any]


def results_place() -> Path:
    """Where the results lie: $YOKE_HOME, else ~/.cache/yoke."""
    return harness_root().parent / FILE


def entry_of(recipe: HarnessRecipe, results: Sequence[Result]) -> Entry:
    """The results of one harness as they are kept."""
    return {
        "version": recipe.version,
        "dialect": recipe.dialect,
        "checked": date.today().isoformat(),
        "failures": [f"{result.scene}: {line}" for result in results for line in result.failures],
        "scenes": {result.scene: result.facts for result in results},
    }


def keep(entries: Mapping[str, Entry], place: Path) -> None:
    """Put entries in place of older ones of the same harnesses."""
    write_json(place, dict(sorted((read(place) | dict(entries)).items())))


def read(place: Path) -> dict[str, Entry]:
    """The entries of a results file by harness; none where there is no such file. Raises UserError for another file."""
    if not place.exists():
        return {}
    try:
        entries = json.loads(place.read_text())
    except ValueError as error:
        raise UserError(f"{place} is not a file of results: {error}; delete it and check again") from None
    assert isinstance(entries, dict)
    return entries
