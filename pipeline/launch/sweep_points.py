"""The points of a sweep: the product of the swept overrides, a name for each, and everything that is wrong with any."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import Override

from pipeline.config import Config, UserError
from pipeline.harness.base import register
from pipeline.launch import preflight
from pipeline.launch.preflight_table import refuse_at_start
from pipeline.launch.run_directory import FREE, RunDirectory
from pipeline.launch.snapshot import with_absolute_paths

RECORD = "sweep.json"
TAG_LENGTH = 64  # W&B's limit
NAME_LENGTH = 100  # of a run's directory
KEYS_LENGTH = 48  # of a sweep's own name, before its digest
# Keys that no sweep may vary, and why.
FIXED = {
    "run_dir": "a sweep makes its own run directories, in sweep.root/sweep-<sweep.name>",
    "sweep": "it says where the runs of the sweep go",
    "cluster": "all points run with the same cluster settings",
    "fresh": "all points start over, or none does",
    "dry_run": "it is for the whole command",
    "logging": "it makes no other experiment",
}

Compose = Callable[[Sequence[str]], Config]


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its name in the sweep's directory, what it varies, and its whole configuration."""

    name: str
    overrides: tuple[str, ...]
    config: Config

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.config.run_dir))


@dataclass(frozen=True)
class Member:
    """A point as sweep.json keeps it."""

    name: str
    overrides: tuple[str, ...]


def is_sweep(root: Path) -> bool:
    """Whether a directory is a sweep's."""
    return (root / RECORD).is_file()


def read_members(root: Path) -> list[Member]:
    """The points of a sweep, in order. Raises UserError when this is no sweep's directory."""
    try:
        points = json.loads((root / RECORD).read_text())["points"]
        return [Member(point["name"], tuple(point["overrides"])) for point in points]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{root} is no sweep's directory: {RECORD}: {error}") from error


def plan(overrides: Sequence[Override], compose: Compose) -> tuple[Path, list[Point]]:
    """(the sweep's directory, its points in the order of the product). Writes nothing.

    Raises UserError for the first thing that is wrong with the words or with a point.
    """
    _check_keys(overrides)
    swept = [override for override in overrides if override.is_sweep_override()]
    keys = _short_keys(swept)
    configs: dict[str, tuple[tuple[str, ...], Config]] = {}
    for values in itertools.product(*(_values(override) for override in swept)):
        varied = tuple(f"{override.get_key_element()}={value}" for override, value in zip(swept, values, strict=True))
        name = _point_name(keys, values)
        if name in configs:
            first = " ".join(configs[name][0])
            raise UserError(f"{first} and {' '.join(varied)} would share the run directory {name}: they must differ")
        configs[name] = varied, _composed(_words(overrides, varied), varied, compose)
    name = _sweep_name(next(iter(configs.values()))[1], overrides, keys)
    root = Path(next(iter(configs.values()))[1].sweep.root).absolute() / f"sweep-{name}"
    points = [_point(root, *item) for item in configs.items()]
    _check_points(points)
    return root, points


def _values(override: Override) -> list[str]:
    """The values of a swept key, as Hydra would give them one at a time."""
    key = override.get_key_element()
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: a range without steps cannot be tried out; name the values of {key}")
    values = list(override.sweep_string_iterator())
    if not values:
        raise UserError(f"{override.input_line} gives no value: the sweep would have no point")
    return values


def _words(overrides: Sequence[Override], varied: Sequence[str]) -> list[str]:
    """The command line of one point."""
    values = iter(varied)
    return [next(values) if override.is_sweep_override() else str(override.input_line) for override in overrides]


def _composed(words: Sequence[str], varied: Sequence[str], compose: Compose) -> Config:
    try:
        config = compose(words)
        register(config.harness.recipes)
        return config
    except UserError as error:
        raise UserError(f"point {' '.join(varied)}: {error}") from error


def _point(root: Path, name: str, varied: tuple[tuple[str, ...], Config]) -> Point:
    overrides, config = varied
    tags = [override.lstrip("+")[:TAG_LENGTH] for override in overrides]
    logging = replace(
        config.logging,
        group=config.logging.group or root.name.removeprefix("sweep-"),
        tags=list(dict.fromkeys([*config.logging.tags, *tags])),
    )
    config = replace(config, run_dir=str(root / name), logging=logging)
    return Point(name, overrides, with_absolute_paths(config))  # as the run's own start will keep it


# --- names


def _short_keys(swept: Sequence[Override]) -> list[str]:
    """The last part of each swept key, or all of it where two end alike."""
    whole = [override.get_key_element().lstrip("+") for override in swept]
    last = [key.rpartition(".")[2] for key in whole]
    often = Counter(last)
    return [_safe(short if often[short] == 1 else key) for short, key in zip(last, whole, strict=True)]


def _point_name(keys: Sequence[str], values: Sequence[str]) -> str:
    """Like ``aggregation-token_mean+mix-four``: no character that a shell or Hydra would take for its own."""
    name = "+".join(f"{key}-{_safe(value)}" for key, value in zip(keys, values, strict=True))
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 7]}-{_digest(name)}"


def _sweep_name(config: Config, overrides: Sequence[Override], keys: Sequence[str]) -> str:
    """The given one, or one that the same experiment always gets, wherever and however it runs."""
    if (given := config.sweep.name) is not None:
        if given != _safe(given) or len(given) > NAME_LENGTH:
            raise UserError(f"sweep.name={given}: letters, digits, dots, dashes and underscores, at most {NAME_LENGTH}")
        return given
    free = {*FREE, *FIXED}
    words = sorted(str(override.input_line) for override in overrides if _top(override) not in free)
    return f"{'-'.join(keys)[:KEYS_LENGTH].strip('-.')}-{_digest(' '.join(words))}"


def _safe(text: str) -> str:
    """``text`` with a dash for everything that does not belong into a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _top(override: Override) -> str:
    return override.key_or_group.split(".")[0].split("/")[0]


# --- checks


def _check_keys(overrides: Sequence[Override]) -> None:
    """What is wrong with the words, before anything is composed."""
    swept = [override for override in overrides if override.is_sweep_override()]
    if any(_top(override) == "run_dir" for override in overrides):
        raise UserError(f"run_dir cannot be given with -m: {FIXED['run_dir']}")
    for override in swept:
        if reason := FIXED.get(_top(override)):
            raise UserError(f"{override.input_line}: {_top(override)} cannot be swept: {reason}")
    if not swept:
        raise UserError("-m needs a key with several values, like algorithm.aggregation=group_mean,token_mean")
    often = Counter(override.get_key_element().lstrip("+") for override in overrides)
    if twice := [key for override in swept if often[key := override.get_key_element().lstrip("+")] > 1]:
        raise UserError(f"{twice[0]} is given twice, once with several values: give it once")


def _check_points(points: Sequence[Point]) -> None:
    """What is wrong with any point, as the start of its run would find it, and points that are one experiment."""
    seen: dict[str, Point] = {}
    for point in points:
        try:
            _check_point(point)
        except UserError as error:
            raise UserError(f"point {' '.join(point.overrides)}: {error}") from error
        same = seen.setdefault(repr(asdict(replace(point.config, run_dir="", logging=points[0].config.logging))), point)
        if same is not point:
            both = f"{' '.join(same.overrides)} and {' '.join(point.overrides)}"
            raise UserError(f"{both} are the same settings: another word of the command decides what they vary")


def _check_point(point: Point) -> None:
    preflight.check_settings(point.config)
    refuse_at_start(point.config, point.run)
    if point.config.tasks.kind != "generated":
        preflight.check_tasks_readable(point.config, point.run)
    if not point.config.fresh and (different := point.run.other_settings(point.config)):
        raise UserError(
            f"{point.run.root} was made with other settings ({', '.join(different)}): "
            "give the same ones, another sweep.name=…, or fresh=true to start over"
        )
