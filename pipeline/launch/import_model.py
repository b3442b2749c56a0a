"""A checkpoint of others as an export of a run: compared with the base model, linked or copied, with the hash of each
file.

It appears under its label by one rename; whatever a killed import left is cleared by the next one of that label.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.hub import fetch, model_file, split, weight_shapes
from pipeline.launch.cohort import RESERVED
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.bar import Bar

SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")  # of what an engine reads
# Whatever of these two configurations both say must be the same, or the weights are those of another model.
SHAPE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "layer_types", "tie_word_embeddings"),
)
TIED = ("lm_head.weight", "model.embed_tokens.weight")  # one of them may be left out where they are the same
HASH_BYTES = 1 << 22
CROSS_DEVICE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from. ``revision``: the commit, of one of the hub."""

    given: str
    place: Path
    revision: str | None


def import_model(config: Config, run: RunDirectory, given: str, label: str) -> str:
    """Put the checkpoint ``given`` under ``label``; returns what was done, for the person at the terminal.

    Raises UserError for a label that means something else, a source that is none, or a model that does not fit.
    """
    from pipeline.stages.weights import IMPORTED
    from pipeline.training import checkpoint
    from pipeline.training.export import settle

    check_label(label)
    source, place = find(given), run.models / label
    refuse_other_model(source, config.model.path)
    again = f"yoke evaluate run_dir={run.root} stage.checkpoint={label}"
    if checkpoint.is_complete(place):
        return _same_or_refuse(source, place, label, again)
    run.models.mkdir(parents=True, exist_ok=True)
    for left in run.models.iterdir():
        if re.fullmatch(rf"({re.escape(checkpoint.PARTIAL)})+{re.escape(label)}(-[0-9a-f]{{8}})+", left.name):
            shutil.rmtree(left, ignore_errors=True)
    draft = checkpoint.partial_path(place)

    def fill(folder: Path) -> None:
        record = {"label": label, "source": str(given), "revision": source.revision, "base": config.model.path}
        files = _take_over(source, config, folder)
        text = json.dumps(record | {"time": time.time(), "files": files}, indent=2)
        (folder / IMPORTED).write_text(text + "\n")

    checkpoint.write_atomically(draft, fill)
    settle(draft, place)
    return f"{label} is in {place}; evaluate it: {again}"


def check_label(label: str) -> None:
    """Raises UserError for a label that is no plain name, or that means other weights."""
    from pipeline.stages.weights import ALL, BASE, NEWEST, update_of

    taken = (*RESERVED, ALL, BASE, NEWEST)
    plain = Path(label).name == label and not label.startswith(".") and "," not in label
    if not plain or label in taken or label.isdigit() or update_of(label) is not None:
        raise UserError(f"label={label}: give it a plain name that is no number and none of {', '.join(taken)}")


def find(given: str) -> Source:
    """The directory of a checkpoint. Raises UserError when there is none, or no revision is named."""
    place = Path(given).expanduser().absolute()
    if not place.is_dir():
        if split(given)[1] is None:
            raise UserError(
                f"model={given} is no directory here; of the hub it is ORG/NAME@REVISION (@main: the newest)"
            )
        snapshot = fetch(given, f"model={given}")
        return Source(given, snapshot, snapshot.name)
    return Source(given, place.resolve(), None)


def refuse_other_model(source: Source, base: str) -> None:
    """Raises UserError with the first thing in which a checkpoint is not one of the base model."""
    if not (source.place / "config.json").is_file() or not list(source.place.glob("*.safetensors")):
        raise UserError(f"model={source.given}: no whole model (config.json and *.safetensors) in {source.place}")
    if model_file(base, "config.json") is None:
        raise UserError(f"model.path={base} is not here, so nothing can be compared with it: yoke preflight says more")
    differs = next(_differences(source.place, base), None)
    if differs:
        raise UserError(f"model={source.given} is not of model.path={base}: {differs}")


def _differences(place: Path, base: str) -> Iterator[str]:
    theirs, ours = _shape(str(place)), _shape(base)
    for key in SHAPE:
        if key in theirs and key in ours and theirs[key] != ours[key]:
            yield f"{key} is {_short(theirs[key])}, not {_short(ours[key])}"
    missing = [name for name in _shards(place) if not (place / name).exists()]
    if missing:
        yield f"{missing[0]} is missing, which its index names"
    theirs, ours = weight_shapes(str(place)), weight_shapes(base)
    for name in sorted(theirs.keys() & ours.keys()):
        if theirs[name] != ours[name]:
            yield f"{name} has the shape {theirs[name]}, not {ours[name]}"
    if len(theirs.keys() & ours.keys()) > len(ours) / 2:  # else the base is wrapped: a text model beside a vision tower
        for name in sorted((theirs.keys() ^ ours.keys()) - set(TIED)):
            yield f"{name} is only in {'it' if name in theirs else 'the base model'}"
    elif ours and not theirs:
        yield "it has no tensors"


def _shape(model_path: str) -> dict[str, Any]:
    """A configuration, with what it says of its text model on top."""
    place = model_file(model_path, "config.json")
    assert place is not None
    known: dict[str, Any] = json.loads(place.read_text())
    return known | known.get("text_config", {})


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _shards(place: Path) -> list[str]:
    index = place / "model.safetensors.index.json"
    return sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []


def _same_or_refuse(source: Source, place: Path, label: str, again: str) -> str:
    from pipeline.stages.weights import IMPORTED

    record = json.loads((place / IMPORTED).read_text()) if (place / IMPORTED).exists() else {}
    if record.get("revision") != source.revision or not _has_same_files(source, record.get("files", {})):
        raise UserError(f"{place} is of {record.get('source', 'the run itself')} already: choose another label")
    return f"{label} is in {place} already; evaluate it: {again}"


def _has_same_files(source: Source, files: Mapping[str, Any]) -> bool:
    """By size, of the weights: a hash of them takes minutes."""
    wanted = {path.name: path.stat().st_size for path in source.place.glob("*.safetensors")}
    return wanted == {name: entry["bytes"] for name, entry in files.items() if name.endswith(".safetensors")}


def _take_over(source: Source, config: Config, folder: Path) -> dict[str, dict[str, Any]]:
    """Fill ``folder``: the checkpoint's own files, and of the base model's what it lacks (tokenizer, template)."""
    from pipeline.stages.weights import IMPORTED
    from pipeline.training.checkpoint import MANIFEST
    from pipeline.training.export import WEIGHT_SUFFIXES

    own = {path.name: path for path in source.place.iterdir() if path.name.endswith(SUFFIXES) and path.is_file()}
    base_config = model_file(config.model.path, "config.json")
    assert base_config is not None
    lacking = {
        path.name: path
        for path in base_config.parent.iterdir()
        if path.name.endswith(SUFFIXES) and path.name not in own and not path.name.endswith(WEIGHT_SUFFIXES)
    }
    chosen = [(path, "checkpoint") for path in own.values()] + [(path, "base model") for path in lacking.values()]
    files = {}
    with Bar("import", len(chosen), config.logging.progress) as bar:
        for path, origin in sorted(chosen):
            if path.name in (MANIFEST, IMPORTED):
                continue
            put = folder / path.name
            _link(path.resolve(), put)
            files[path.name] = {"sha256": sha256(put), "bytes": put.stat().st_size, "of": origin}
            bar.advance(1, path.name)
    return files


def _link(source: Path, place: Path) -> None:
    """Another name for the same file where that can be, else a copy. Of weights only: small files may be edited."""
    try:
        if place.suffix != ".safetensors":
            shutil.copyfile(source, place)
        else:
            os.link(source, place)
    except OSError as error:
        if error.errno not in CROSS_DEVICE:
            raise
        shutil.copyfile(source, place)


def sha256(place: Path) -> str:
    """Of a file's content."""
    digest = hashlib.sha256()
    with place.open("rb") as file:
        while part := file.read(HASH_BYTES):
            digest.update(part)
    return digest.hexdigest()
