"""Models and data sets of the Hugging Face hub: ORG/NAME, or ORG/NAME@REVISION for one commit of it.

Nothing is downloaded but by `fetch`; huggingface_hub itself goes on with a download that was cut off.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HINT = "download it where a network is (hf download {name}{revision}), or give a local directory"


def split(name: str) -> tuple[str, str | None]:
    """(ORG/NAME, revision) of ORG/NAME@REVISION; without an @ the revision is None, the newest."""
    plain, _, revision = name.partition("@")
    return plain, revision or None


def cached_file(name: str, file: str) -> Path | None:
    """A file of a model that lies in the local hub cache, of the revision that ``name`` asks for."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    plain, revision = split(name)
    try:
        found = try_to_load_from_cache(plain, file, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def fetch(name: str, what: str, data_set: bool = False, patterns: Sequence[str] | None = None) -> Path:
    """The local directory of a snapshot, downloaded if need be. Its name is the commit.

    Raises UserError, which begins with ``what``, when the hub does not give it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    plain, revision = split(name)
    kind = "dataset" if data_set else "model"
    try:
        return Path(
            snapshot_download(
                plain, repo_type=kind, revision=revision, allow_patterns=list(patterns) if patterns else None
            )
        )
    except HFValidationError as error:
        raise UserError(f"{what} is neither a directory here nor a name of the hub (ORG/NAME@REVISION)") from error
    except Exception as error:  # the hub's own, its transport's, which changes with its version, and the disk's
        wanted = f" --revision {revision}" if revision else ""
        hint = HINT.format(name=plain, revision=f"{wanted} --repo-type dataset" if data_set else wanted)
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"{what} is no directory here, and the hub did not give it ({why}): {hint}") from error


def local_model(name: str | Path) -> Path:
    """The directory of a checkpoint, from its path or its name on the hub. Raises UserError when there is none."""
    place = Path(name).expanduser()
    return place if place.is_dir() else fetch(str(name), f"model.path={name}")


def model_file(model_path: str, name: str) -> Path | None:
    """A file of a checkpoint directory, or of a hub's model in the local cache."""
    place = Path(model_path).expanduser() / name
    return place if place.is_file() else cached_file(model_path, name)


def weight_shapes(model_path: str) -> dict[str, list[int]]:
    """Tensor → shape, from the headers of a checkpoint's safetensors; of those files that are here."""
    index = model_file(model_path, INDEX)
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index else [SINGLE]
    places = [place for name in names if (place := model_file(model_path, name))]
    return {name: shape for place in places for name, shape in _shapes_in(place).items()}


def _shapes_in(place: Path) -> dict[str, list[int]]:
    with place.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
