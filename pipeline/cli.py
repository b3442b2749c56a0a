"""`yoke JOB [key=value …]`: composes the configuration with Hydra and runs one job.

A wrong setting ends here: one line, exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import pipeline
from pipeline.config import Config, UserError
from pipeline.harness.base import register
from pipeline.launch.run_directory import RunDirectory

CONFIG_DIR = Path(pipeline.__file__).parents[1] / "conf"
JOBS_MODULE = "pipeline.launch.jobs"
ASSETS = Path(pipeline.__file__).parent / "assets"
OF_THE_COMMAND = ("run_dir", "fresh", "dry_run", "stage")  # never those that a run was made with
MOVED = {  # keys that have another name now
    "algorithm.updates": "training.updates",
    "collect.rollouts": "collect.tasks",
    "collect.upstream_url": "collect.teacher_url",
    "collect.upstream_model": "collect.teacher_model",
}
SWEEP_FLAGS = ("-m", "--multirun")  # Hydra's


@dataclass(frozen=True)
class Job:
    """One word after `yoke`: what it does, and the function, imported only when it is asked for."""

    summary: str
    function: str  # takes a Config and returns an exit code; of JOBS_MODULE unless it is module:function
    group: str = ""  # the configuration group that `--some-key value` means
    words: str = ""  # what it takes before its settings, for the usage; its function gets them as a second argument
    sweep: str = ""  # module:function that -m calls instead, with the parsed overrides and compose_config
    over_saved: bool = False  # its settings lie over those that the run directory was made with
    own: tuple[str, ...] = ()  # words key=value that are its own, and no settings


JOBS: dict[str, Job] = {
    "train": Job(
        "the whole loop: rollout, verification, advantage and update, with evaluations around it; -m sweeps",
        "train",
        sweep="pipeline.launch.sweep:run",
    ),
    "rollout": Job("stage 1: roll out the next groups of the schedule with the newest checkpoint", "rollout"),
    "verify": Job("stage 2: score the kept workspaces of `yoke rollout` again", "verify"),
    "advantage": Job("stage 3: rewards and advantages of closed groups, with reward.fn=… at will", "advantage"),
    "update": Job("stage 4: one update from the groups of `yoke advantage`; writes a checkpoint", "update"),
    "evaluate": Job("stage 5: held-out tasks × harnesses with checkpoints of a run", "evaluate", over_saved=True),
    "collect": Job("record a teacher's solved rollouts through the real harnesses (docs/sft.md)", "collect"),
    "sft": Job("supervised learning on what `yoke collect` recorded; RL starts from its model (docs/sft.md)", "sft"),
    "warm_start": Job("make the quick start's model again, from nothing", "warm_start"),
    "import": Job(
        "take over a published checkpoint, or a teacher's traces (docs/import.md)",
        "pipeline.launch.imports:run",
        words="model=… label=NAME | traces=… [label=NAME]",
        over_saved=True,
        own=("model", "traces", "label"),
    ),
    "report": Job(
        "write the results, the table, the picture and the page of a run again; of several, side by side; of a sweep",
        "report",
        words="RUN… [--json | --md]",
    ),
    "wandb": Job(
        "make a run's W&B run again from its directory; make the W&B workspace (docs/wandb.md)",
        "pipeline.launch.wandb_job:run",
        words="again RUN… | workspace ENTITY/PROJECT | workspace --json",
    ),
    "status": Job(
        "how a run stands: its job, updates, reward, nodes and errors, on one screen (docs/status.md)",
        "pipeline.launch.status:run",
        words="RUN [--watch] [--json]",
    ),
    "stop": Job(
        "ask a run for a checkpoint and the end, and wait for it",
        "pipeline.launch.stop:run",
        words="RUN [--timeout SECONDS]",
    ),
    "proxy": Job(
        "the capture proxy by itself: --llm-url http://host:8000 (docs/capture.md)",
        "pipeline.capture.proxy:run",
        "proxy",
    ),
    "harness": Job(
        "list, install, check or lock coding agents (docs/harnesses.md)",
        "pipeline.launch.harnesses:run",
        words="list | install NAME… | check NAME… | table NAME… | lock NAME… (--all: every harness)",
    ),
    "simulate": Job(
        "what a job of these settings would do on 1 to 128 nodes, on a virtual clock (docs/scale.md)",
        "pipeline.launch.simulate:run",
    ),
    "preflight": Job(
        "every check that training makes before its first rollout, engine and trainer included (docs/preflight.md)",
        "pipeline.launch.preflight_job:run",
        words="[--json]",
    ),
    "tasks": Job(
        "the task sets of tasks=…: how many, of what level; do they give an answer away (docs/tasks.md); build them",
        "pipeline.launch.tasks:run",
        words="list | check | build [--list]",
    ),
    "check": Job("look at every setting and every task without starting anything", "check"),
}


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What Hydra and OmegaConf find wrong as a UserError."""
    try:
        yield
    except YAMLError as error:
        raise UserError(f"a file in {CONFIG_DIR} is no YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_lines(error)) from error


def compose_config(overrides: Sequence[str]) -> Config:
    """The typed configuration behind ``overrides``.

    Raises UserError for an unknown key, a wrong type or a missing value.
    """
    with _in_one_line():
        return _typed(_compose(overrides))


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """The words after `-m` as Hydra reads them; globs look into conf/. Raises UserError for a word it cannot read."""
    ConfigStore.instance().store(name="schema", node=Config)
    with _in_one_line(), initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(words))


def compose_over_saved(overrides: Sequence[str]) -> Config:
    """The settings that the run in run_dir was made with, with those of ``overrides`` in their place.

    Without such a run, or with a +experiment, it is what ``overrides`` compose. Raises UserError as compose_config,
    and when there is no run, and nothing says what it would be of.
    """
    with _in_one_line():
        composed = _compose(overrides)
        run = RunDirectory(Path(str(composed.run_dir)).absolute())
        keys = [
            word.key_or_group.replace("/", ".") for word in OverridesParser.create().parse_overrides(list(overrides))
        ]
        if not run.is_ours() and all(key.split(".")[0] in (*OF_THE_COMMAND, "cluster") for key in keys):
            raise UserError(f"there is no run in {run.root}; to make one there, give its settings (+experiment=…)")
        if "experiment" in keys or not run.is_ours():
            return _typed(composed)
        return _typed(_laid_over(run, composed, keys))


def _laid_over(run: RunDirectory, composed: DictConfig, keys: Sequence[str]) -> DictConfig:
    saved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run.config))
    assert isinstance(saved, DictConfig)
    for key in (*keys, *OF_THE_COMMAND):
        OmegaConf.update(saved, key, OmegaConf.select(composed, key), merge=False, force_add=True)
    return saved


def _compose(overrides: Sequence[str]) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("asset", lambda name: str(ASSETS / name), replace=True)
    primary = _primary()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        composed = compose(primary, [_with_new_keys(word) for word in overrides])
    for old in MOVED:
        if OmegaConf.select(composed, old) is not None:  # by +key=value
            raise UserError(_moved(old))
    return composed


def _primary() -> str:
    """Your site's settings, which lie on top of config.yaml, or else config.yaml itself."""
    path = CONFIG_DIR / "local.yaml"
    if not path.exists():
        return "config"
    site = OmegaConf.load(path)
    if not isinstance(site, DictConfig) or "config" not in site.get("defaults", []):
        raise UserError(f"{path} must begin as conf/local.example.yaml does: defaults: [config, _self_]")
    return "local"


def _with_new_keys(word: str) -> str:
    """``key={name: value}`` as Hydra takes it where the name has no default: an option of sbatch, a weight."""
    return f"++{word}" if re.match(r"[\w.]+=\{", word) else word


def _moved(old: str) -> str:
    return f"{old} is now called {MOVED[old]}"


def _typed(composed: DictConfig) -> Config:
    if strangers := list(_strangers(composed)):  # Hydra lets them in behind a +
        raise UserError(_unknown(strangers[0]))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    if not config.run_dir.strip():
        raise UserError("run_dir= is empty: name the run's directory, run_dir=runs/mine")
    return config


def _first_lines(error: Exception) -> str:
    if old := next((old for old in MOVED if old in str(error)), None):
        return _moved(old)
    if several := re.match(r"Ambiguous value for argument '(.*?)=(.*)'\n", str(error)):
        key, values = several.groups()
        return (
            f"{key}={values} are several values: `yoke train -m` sweeps over them, "
            f"{key}=[{values}] is one list, {key}='\"{values}\"' one text"
        )
    if unknown := re.match(r"Could not override '([\w.]+)'\.(?! No match)", str(error)):
        return _unknown(unknown[1])
    if options := re.match(
        r"In '.*?': Could not find '(.*)'\s+Available options in '.*':\s+((?:\t.*\n?)+)", str(error)
    ):
        return f"there is no {options[1]}; one of: {', '.join(options[2].split())}"
    if "no viable alternative" in str(error) or "mismatched input" in str(error):
        return f"{error.args[0].splitlines()[0]}: quote words with signs in them, as in 'cluster.srun=[\"--mpi=none\"]'"
    causes = [error, *([error.__cause__] if str(error).startswith("Error merging override") else [])]
    lines = [line.strip() for cause in causes for line in str(cause).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))]
    return " ".join(lines[:3])


def _unknown(key: str) -> str:
    """With the setting that was perhaps meant: one spelt almost so, or of the same name in another group."""
    known = list(_dotted(OmegaConf.to_container(OmegaConf.structured(Config))))
    name = key.rpartition(".")[2]
    found = difflib.get_close_matches(key, known, 1, 0.8) or [other for other in known if other.endswith(f".{name}")]
    return f"there is no setting {key}{f'; perhaps {found[0]}' if found else ''} (`yoke train --cfg` shows all)"


def _strangers(composed: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys that the typed configuration does not have."""
    kind = OmegaConf.get_type(composed)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else None
    for key, value in ((str(key), value) for key, value in composed.items_ex(resolve=False)):
        if known is not None and key not in known:
            yield f"{prefix}{key}"
        elif isinstance(value, DictConfig):
            yield from _strangers(value, f"{prefix}{key}.")


def _dotted(keys: Any, prefix: str = "") -> Iterator[str]:
    for key, value in keys.items():
        if not isinstance(value, dict) or not value:
            yield f"{prefix}{key}"
        else:
            yield from _dotted(value, f"{prefix}{key}.")


def usage() -> str:
    """What `yoke --help` prints."""
    width = max(map(len, JOBS))
    rows = "\n".join(f"  {name:<{width}}  {job.summary}" for name, job in JOBS.items())
    return (
        f"usage: yoke JOB [key=value …]\n\n{rows}\n\n"
        f"All settings: {CONFIG_DIR}, or `yoke JOB --cfg`. Example: yoke train +experiment=quickstart seed=1"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 0: done; 1: failed; 2: a wrong setting; 3: an evaluation is incomplete; 130: interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        print(f"yoke: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, TimeoutError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(141)  # as a shell shows a program that SIGPIPE ended
        if os.environ.get("YOKE_TRACEBACK"):
            raise
        print(f"yoke: {type(error).__name__}: {error} (YOKE_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("yoke: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def _nobody_reads() -> bool:
    """Whether what reads our output has ended (`| head`); then no more is written, at exit neither."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if given[0] == "--version":
        print(pipeline.__version__)
        return 0
    job = JOBS.get(given[0])
    if job is None:
        raise UserError(f"unknown job {given[0]!r}; one of: {', '.join(JOBS)}")
    if "--help" in given or "-h" in given:
        print(f"yoke {given[0]} {job.words}: {job.summary}\n\n{usage()}")
        return 0
    words = [word for word in given[1:] if word != "--cfg"]
    overrides = flags_as_overrides(words, job.group) if job.group else words
    if job.words:
        overrides = [word for word in words if _is_setting(word, job)]
    if any(flag in given for flag in SWEEP_FLAGS):
        return _sweep(given, job)
    if "--cfg" in given:
        print(OmegaConf.to_yaml(_compose_or_complain(overrides)), end="")
        return 0
    config = compose_over_saved(overrides) if job.over_saved else compose_config(overrides)
    register(config.harness.recipes)
    own = [[word for word in words if not _is_setting(word, job)]] if job.words else []
    return _function(job.function)(config, *own)


def _is_setting(word: str, job: Job) -> bool:
    """Whether a word of a job that takes others too is a setting: not a flag, nor a directory with an = in its name."""
    is_own = word.startswith("-") or word.partition("=")[0] in job.own
    return "=" in word and not is_own and not Path(word).exists()


def _sweep(given: list[str], job: Job) -> int:
    if not job.sweep:
        sweeping = ", ".join(name for name, other in JOBS.items() if other.sweep)
        raise UserError(f"yoke {given[0]} does not sweep; -m is for: {sweeping}")
    if "--cfg" in given:
        raise UserError("--cfg shows one configuration: leave -m out, and give one value a key")
    overrides = parse_overrides([word for word in given[1:] if word not in SWEEP_FLAGS])
    return _function(job.sweep)(overrides, compose_config)


def flags_as_overrides(words: Sequence[str], group: str) -> list[str]:
    """``--some-key value`` and ``--some-key=value`` as ``group.some_key=value``; other words as they are.

    Raises UserError for a flag without a value.
    """
    overrides = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and (value := next(rest, "--")).startswith("--"):
                raise UserError(f"{word} needs a value")
            word = f"{group}.{name.replace('-', '_')}={_quoted(value)}"
        overrides.append(word)
    return overrides


def _quoted(value: str) -> str:
    """A value that Hydra takes literally, whatever characters it has."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return value if value in ("null", "true", "false") else f"'{escaped}'"


def _compose_or_complain(overrides: Sequence[str]) -> DictConfig:
    with _in_one_line():
        return _compose(overrides)


def _function(place: str) -> Callable[..., int]:
    module, _, name = place.rpartition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module or JOBS_MODULE), name)
    return function
