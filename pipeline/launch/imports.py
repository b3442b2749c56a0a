"""`yoke import model=… label=NAME` and `yoke import traces=…`: others' checkpoints and traces for a run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.hub import fetch
from pipeline.launch.import_model import import_model
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import with_absolute_paths
from pipeline.stages.credentials import CredentialFilter
from pipeline.stages.import_traces import import_traces

USAGE = "yoke import model=DIR|ORG/NAME@REVISION label=NAME, or yoke import traces=FILE|DIR|ORG/NAME@REVISION"
TRACE_FILES = ("*.parquet", "*.jsonl")
HUB_LABEL = "@"  # what may not stand in a name, and begins a revision


def run(config: Config, words: Sequence[str]) -> int:
    """The job. Raises UserError for a source that cannot be had, or does not fit."""
    given = _words(words)
    config = with_absolute_paths(config)
    place = RunDirectory(Path(config.run_dir))
    place.save_config(config)
    if "model" in given:
        print(import_model(config, place, given["model"], given["label"]), flush=True)
    else:
        source = local_traces(given["traces"])
        label = given.get("label") or Path(given["traces"].partition(HUB_LABEL)[0]).stem
        credentials = CredentialFilter(os.environ)
        print(import_traces(config, source, given["traces"], label, credentials), flush=True)
    return 0


def _words(words: Sequence[str]) -> dict[str, str]:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    strange = [word for word in words if "=" not in word] or [key for key, value in given.items() if not value]
    if strange or ("model" in given) == ("traces" in given):
        raise UserError(f"{f'what is {strange[0]}? ' if strange else ''}{USAGE}")
    if "model" in given and "label" not in given:
        raise UserError(f"label=NAME is missing: what yoke evaluate shall call the checkpoint ({USAGE})")
    return given


def local_traces(source: str) -> Path:
    """Where the traces lie: here, or in the hub's cache, downloaded just now if need be. Raises UserError."""
    place = Path(source).expanduser()
    if place.exists():
        return place
    if HUB_LABEL not in source:
        raise UserError(f"traces={source}: there is no such file or directory; of the hub it is ORG/NAME@REVISION")
    return fetch(source, f"traces={source}", data_set=True, patterns=TRACE_FILES)
