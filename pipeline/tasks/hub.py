"""Task sets of the Hugging Face hub: fetched once, at a pinned revision, into $YOKE_HOME/tasks."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import track

from pipeline.config import UserError, yoke_home

PINNED = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")  # name@commit
WORKERS = 16
ANSWER_S = 20.0


def fetch_dataset(key: str, given: str, names: Sequence[str] | None = None) -> Path:
    """The directory of the data set ``given`` (name@commit), fetched if it is not there; ``names``: only these tasks.

    The directory appears whole, by one rename; a fetch that broke off goes on where it was. ``key`` is the setting
    that messages name. Raises UserError when the hub cannot be reached or does not have it.
    """
    pinned = PINNED.fullmatch(given)
    if pinned is None:
        raise UserError(
            f"{key}={given} is neither a directory nor a data set of the hub: OWNER/NAME@COMMIT (40 digits)"
        )
    name, revision = pinned.groups()
    target = yoke_home() / "tasks" / "--".join([name.replace("/", "--"), revision[:12], *_part(names)])
    if target.is_dir():
        return target
    scratch = target.with_name(f".{target.name}.part")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        _download(name, revision, names, scratch)
        shutil.rmtree(scratch / ".cache", ignore_errors=True)
        scratch.rename(target)
    except Exception as error:  # the hub's own, its transport's, which changes with its version, and the disk's
        if target.is_dir():  # another process fetched it first
            return target
        raise UserError(_no_way(key, name, revision, error)) from error
    return target


def is_pinned(given: str | None) -> bool:
    """Whether it names a data set of the hub, not a directory."""
    return bool(given and PINNED.fullmatch(given))


def _part(names: Sequence[str] | None) -> list[str]:
    return [] if names is None else [hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]]


def _download(name: str, revision: str, names: Sequence[str] | None, place: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # one of each file; there is one of them all below
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    listed = api.dataset_info(name, revision=revision, timeout=ANSWER_S).siblings or []
    files = wanted([file.rfilename for file in listed], names)
    if not files:
        raise FileNotFoundError("no Harbor tasks in it, or none of those that were named")

    def fetch(file: str) -> None:
        api.hf_hub_download(name, file, repo_type="dataset", revision=revision, local_dir=place, etag_timeout=ANSWER_S)

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for _ in track(pool.map(fetch, files), f"fetching {name}", len(files), console=Console(stderr=True)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def wanted(files: Iterable[str], names: Sequence[str] | None) -> list[str]:
    """Those of a data set's files that make up its tasks, or the tasks with one of ``names``."""
    paths = [PurePosixPath(file) for file in files]
    roots = {path.parent for path in paths if path.name == "task.toml"}
    if names is not None:
        known = set(names)
        roots = {root for root in roots if root.name in known}
    return [str(path) for path in paths if not roots.isdisjoint(path.parents)]


def _no_way(key: str, name: str, revision: str, error: Exception) -> str:
    why = " ".join(str(error).split())[:200]
    return (
        f"{key}: {name} cannot be had from the hub ({type(error).__name__}: {why}). Where there is a network: "
        f"hf download {name} --repo-type dataset --revision {revision} --local-dir DIR; then {key}=DIR"
    )
