"""The weights of a run that can be served: the base model, exports in models/, checkpoints that are not pruned yet, and
what `yoke import` put beside the exports.

The training room takes seconds to import, so it is imported only where it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.hub import local_model

BASE, NEWEST, ALL = "base", "newest", "all"
IMPORTED = "import.json"  # what an imported checkpoint has beside its weights
_NAME = re.compile(r"(?:\d+-)?\d+-update-(\d+)")


def update_of(name: str) -> int | None:
    """The update after which the checkpoint ``name`` was written, 0 for the base model, None for no such name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0 if name == BASE else None


def exported(models: Path) -> list[str]:
    """The whole exports under ``models``, oldest first."""
    from pipeline.training import checkpoint

    found = sorted(models.iterdir()) if models.is_dir() else []
    return [path.name for path in found if _NAME.fullmatch(path.name) and checkpoint.is_complete(path)]


def kept(checkpoints: Path, models: Path) -> list[str]:
    """Names of the exports and of the checkpoints, oldest first."""
    from pipeline.training import checkpoint

    return sorted({*exported(models), *(path.name for path in checkpoint.checkpoints(checkpoints))})


def imported(models: Path) -> list[str]:
    """The labels of imported checkpoints. They are no part of `kept`: only their own name means them."""
    from pipeline.training import checkpoint

    return sorted(path.parent.name for path in models.glob(f"[!.]*/{IMPORTED}") if checkpoint.is_complete(path.parent))


def select(wanted: str, names: list[str], labels: Collection[str] = ()) -> list[str]:
    """What ``stage.checkpoint=wanted`` means among ``names``, oldest first, and the ``labels`` of imported ones.

    Raises UserError when nothing is meant.
    """
    if wanted in labels:
        return [wanted]
    if wanted == BASE or (wanted == NEWEST and not names):
        return [BASE]
    if wanted in (NEWEST, ALL) and names:
        return names if wanted == ALL else names[-1:]
    found = [name for name in names if wanted == name or (wanted.isdigit() and int(wanted) == update_of(name))]
    if not found:
        there = [*names, *labels]
        known = f"is none of {NEWEST}, {ALL}, {BASE}; kept are: {', '.join(there)}"
        raise UserError(f"stage.checkpoint={wanted} " + (known if there else f"but no checkpoint yet, only {BASE}"))
    return found[-1:]


def model_dir(config: Config, checkpoints: Path, models: Path, name: str) -> Path:
    """Where an engine can load the weights ``name`` from, exported just now if need be. Raises CheckpointError."""
    if name == BASE:
        return local_model(config.model.path)
    from pipeline.training import checkpoint

    place = models / name
    if not checkpoint.is_complete(place):
        from pipeline.training.export import export_checkpoint

        export_checkpoint(config.model.path, checkpoints / name, place, config.model.dtype)
    return place
