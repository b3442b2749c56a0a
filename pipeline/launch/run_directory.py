"""The run directory: where each thing of a run lies, who may write it, and which attempt is the current one."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import Config, UserError
from pipeline.records import checkpoint_order
from pipeline.report.store import write_text

log = logging.getLogger("yoke.run")

RESERVE, RESERVE_BYTES = ".reserve", 1 << 15  # given up when a rank has to leave its last word on a full disk
GONE = ".gone-"  # a directory that is being deleted
RENDEZVOUS_S = 300.0  # within which the ranks of an attempt must have found each other
STALL_S = 1800.0  # that a trainer waits for a batch before it gives the attempt up


class FencedOff(RuntimeError):
    """A newer attempt of this run exists: this process is a ghost and must not write."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def models(self) -> Path:
        """Exported checkpoints, which engines can load."""
        return self.root / "models"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def results(self) -> Path:
        return self.report / "results.json"

    @property
    def difficulty(self) -> Path:
        """Figures of each task and harness, as of the newest checkpoint."""
        return self.root / "difficulty.json"

    @property
    def curriculum(self) -> Path:
        """Which tasks were drawn, block by block."""
        return self.root / "curriculum"

    @property
    def status(self) -> Path:
        """The coordinator's last snapshot, for `yoke status` where the coordinator cannot be asked."""
        return self.root / "status.json"

    @property
    def size(self) -> Path:
        """How large the directory was after the newest checkpoint."""
        return self.root / "size.json"

    @property
    def done(self) -> dict[str, Any] | None:
        """What the attempt that finished the run left, or None while no attempt has."""
        for number in reversed(self.attempt_numbers()):
            if record := self.attempt(number).read("done"):
                return record if self._newest_checkpointed() <= number else None  # else it is a ghost's
        return None

    def _newest_checkpointed(self) -> int:
        """The newest attempt that has a checkpoint; 0 when none has."""
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return max((checkpoint_order(name)[0] for name in names), default=0)

    @property
    def scratch_prefix(self) -> str:
        """Node-local temporary directories of this run's attempts begin like this."""
        return f"yoke-{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}-"

    def sweep_scratch(self, before: int) -> None:
        """Remove what attempts before ``before`` left on this node. They must be dead, or fenced off."""
        for path in Path(tempfile.gettempdir()).glob(f"{self.scratch_prefix}*"):
            number = path.name.removeprefix(self.scratch_prefix).partition("-")[0]
            if number.isdigit() and int(number) < before:
                shutil.rmtree(path, ignore_errors=True)

    def evaluation(self, label: str) -> Path:
        return self.root / "evaluation" / label

    def attempt(self, number: int) -> Attempt:
        return Attempt(self, number)

    def attempt_numbers(self) -> list[int]:
        """Numbers of all attempts so far, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(path.name) for path in self.attempts.iterdir() if path.name.isdigit())

    def new_attempt(self) -> Attempt:
        """Claim the next attempt number. Two callers never get the same one: making the directory is the claim."""
        number = max(self.attempt_numbers(), default=0) + 1
        while True:
            attempt = Attempt(self, number)
            try:
                attempt.root.mkdir(parents=True)
            except FileExistsError:
                number += 1
                continue
            attempt.groups.mkdir()
            attempt.rollouts.mkdir()
            attempt.logs.mkdir()
            (attempt.root / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
            return attempt

    def is_ours(self) -> bool:
        """Whether this directory was made by a run, and not by somebody's other program."""
        if not self.config.is_file():
            return False
        keys = OmegaConf.load(self.config)
        return isinstance(keys, DictConfig) and {str(key) for key in keys} >= OURS

    def saved_config(self) -> Config:
        """The configuration that the run was made with. Raises UserError when this is no run directory, or one with
        settings that this version of Yoke does not have.
        """
        if not self.is_ours():
            raise UserError(f"{self.root} is no run directory")
        try:
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(self.config)))
        except OmegaConfBaseException as error:
            what = str(error).splitlines()[0]
            raise UserError(f"{self.config} was written by another version of Yoke: {what}") from error
        assert isinstance(config, Config)
        return config

    def save_config(self, config: Config) -> None:
        """Keep the canonical configuration; a later command on the same directory must agree with it.

        Raises UserError that names the differing keys.
        """
        if different := self.other_settings(config):
            raise UserError(
                f"{self.root} was made with other settings ({', '.join(different)}): "
                "give the same ones, another run_dir=…, or fresh=true to start over"
            )
        if not self.is_made:
            write_text(self.config, OmegaConf.to_yaml(OmegaConf.structured(config)))

    def other_settings(self, config: Config) -> list[str]:
        """The keys in which ``config`` differs from what the run was made with; [] while nothing was made."""
        if not self.is_made:
            return []
        text = OmegaConf.to_yaml(OmegaConf.structured(config))
        return differing_keys(OmegaConf.create(self.config.read_text()), OmegaConf.create(text))

    @property
    def is_made(self) -> bool:
        """Whether an attempt or an evaluation has begun to make something with the saved settings."""
        begun = self.attempt_numbers() or any((self.root / "evaluation").glob("[!.]*"))
        return self.config.exists() and bool(begun)


def discard(place: Path) -> None:
    """Delete a directory so that a kill in the middle leaves no half of it under its name."""
    gone = place.with_name(f"{GONE}{place.name}-{secrets.token_hex(4)}")
    try:
        place.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def sweep_discarded(root: Path) -> None:
    """What a killed `discard` left below ``root``."""
    for gone in root.glob(f"{GONE}*"):
        shutil.rmtree(gone, ignore_errors=True)


OURS = frozenset(("run_dir", "model", "mix", "tasks", "algorithm", "training"))  # what every saved configuration has

# May differ between two commands on one run directory without making it another experiment.
FREE = (
    "fresh",
    "dry_run",
    "logging",
    "concurrency",
    "cluster",
    "engine",
    "run_dir",
    "stage",
    "collect",
    "sft",
    "warm_start",
    "sweep",
    "simulate",
    "preflight",
    "storage",
)
_FREE_KEYS = (
    *("mix.readmit", "mix.set_aside_after", "tasks.check", "tasks.gates"),
    *("training.keep_checkpoints", "training.keep_every"),
    *(f"evaluation.{key}" for key in ("every", "replicas", "keep_exports", "max_jobs", "cluster")),
)
_FREE_PREFIXES = tuple(f"{key}." for key in _FREE_KEYS)


def differing_keys(old: Any, new: Any) -> list[str]:
    """Dotted keys in which two configurations differ, apart from those that may change between attempts.

    A key that ``old`` lacks came with a later version of Yoke: it was what is its default now.
    """
    defaults = _flatten(OmegaConf.to_container(OmegaConf.structured(Config)))
    flat_old, flat_new = (defaults | _flatten(OmegaConf.to_container(config)) for config in (old, new))
    different = sorted(key for key in flat_old.keys() | flat_new.keys() if flat_old.get(key) != flat_new.get(key))
    return [key for key in different if key.split(".")[0] not in FREE and not f"{key}.".startswith(_FREE_PREFIXES)]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


@dataclass(frozen=True)
class Attempt:
    """One start of the run. It writes only below its own directory, and stops writing once a newer attempt exists."""

    run: RunDirectory
    number: int

    @property
    def root(self) -> Path:
        return self.run.attempts / f"{self.number:04d}"

    @property
    def groups(self) -> Path:
        return self.root / "groups"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def log(self, rank: str, node: int) -> Path:
        """Where the ``trainer`` or ``engine`` rank of a node writes what it has to say."""
        return self.logs / f"{rank}-node{node}.log"

    def new_scratch(self, name: str) -> Path:
        """A fresh node-local directory of this attempt."""
        return Path(tempfile.mkdtemp(prefix=f"{self.run.scratch_prefix}{self.number}-{name}-"))

    def fail(self, rank: str, error: BaseException) -> None:
        """Leave word of why a rank ended, for the other ranks and the launcher; the first word stands."""
        record = {"rank": rank, "text": str(error) or repr(error), "user_error": isinstance(error, UserError)}
        try:
            (self.root / RESERVE).unlink(missing_ok=True)  # makes room for this word on a full disk
            if not (self.root / "failed.json").exists():
                self.publish("failed", record)
        except OSError as trouble:
            log.error("%s; no word of it could be left: %s", record["text"], trouble)

    def check_fence(self) -> None:
        """Raises FencedOff when a newer attempt has been claimed."""
        numbers = self.run.attempt_numbers()
        if self.number not in numbers:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))  # the storage is away
        if numbers[-1] > self.number:
            raise FencedOff(f"attempt {self.number} of {self.run.root} ends: attempt {numbers[-1]} has taken over")

    def publish(self, name: str, record: dict[str, Any]) -> None:
        """Write ``name``.json, readable by this user only (it may hold a token)."""
        write_text(self.root / f"{name}.json", json.dumps(record), mode=0o600)

    def read(self, name: str) -> dict[str, Any] | None:
        """What `publish` wrote, or None when it has not been written."""
        path = self.root / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None
