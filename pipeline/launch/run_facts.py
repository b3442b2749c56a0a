"""What the files of a run directory tell of it.

Read so that a file which is missing, torn or another user's counts as not there. A file system that fails raises
OSError. Nothing here is slow to import, and no file is read whole that grows with the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from pipeline.launch.processes import is_alive
from pipeline.launch.run_directory import Attempt, RunDirectory

ATTEMPTS_SHOWN = 8
TAIL_BYTES = 256 * 1024
LOG_BYTES = 4096
LOGS_SHOWN = 4
LINE = 300  # characters of a log line that are shown
PACE = 8  # updates that the time left is judged by
NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
SETTINGS = {
    "planned": "training.updates",
    "checkpoint_every": "training.checkpoint_every",
    "max_requeues": "cluster.max_requeues",
    "signal_s": "cluster.signal_s",
    "shards": "engine.shards",
}
# What an attempt leaves when it ends, in the order in which it counts, and the word for it.
ENDINGS = {
    "done": "done",
    "stopped": "stopped",
    "requeued": "requeued",
    "terminated": "terminated",
    "failed": "failed",
    "stage_done": "stage done",
}
SAID = {
    "done": "the run is done",
    "stopped": "stopped as asked, after a checkpoint",
    "requeued": "warned of the end of its time, put back into the queue",
    "terminated": "told to end (SIGTERM), after a checkpoint",
    "stage_done": "a stage that was run by itself has ended",
}


def read_facts(root: Path) -> dict[str, Any]:
    """Everything at once: plain data, whose times are seconds since 1970."""
    run = RunDirectory(root)
    numbers = run.attempt_numbers()
    attempts = [_attempt(run.attempt(number)) for number in numbers[-ATTEMPTS_SHOWN:]]
    requeues = tail_jsonl(root / "jobs" / "requeues.jsonl")
    for attempt in attempts:
        _add_requeue(attempt, requeues)
    newest = run.attempt(numbers[-1]) if numbers else None
    return {
        "settings": read_settings(run.config),
        "submission": read_json(root / "submission.json"),
        "attempts": attempts,
        "attempts_total": len(numbers),
        "address": read_json(newest.root / "coordinator.json") if newest else None,
        "snapshot": _snapshot(run, numbers[-1] if numbers else 0),
        "metrics": read_metrics_tail(run.metrics),
        "checkpoint": newest_checkpoint(run.checkpoints),
        "disk": read_json(run.size),
        "alarms": _alarms(newest) if newest else [],
        "last_words": _last_words(newest, attempts[-1]) if newest else [],
    }


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``, None when there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text())
    except (*NOT_THERE, ValueError):
        return None
    return value if isinstance(value, dict) else None


def tail_jsonl(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The JSON objects in the last ``size`` bytes of a ledger; torn lines are passed over."""
    return [entry for line in _tail(path, size) if isinstance(entry := _parse(line), dict)]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _tail(path: Path, size: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").splitlines()
    except NOT_THERE:
        return []


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except NOT_THERE:
        return None


def read_settings(path: Path) -> dict[str, Any]:
    """The few settings that matter here, None where the run has none of that name."""
    try:
        saved = OmegaConf.load(path)
    except (*NOT_THERE, ValueError, YAMLError):
        saved = OmegaConf.create({})
    return {
        name: OmegaConf.select(saved, key) if isinstance(saved, DictConfig) else None for name, key in SETTINGS.items()
    }


# --- attempts


def _attempt(attempt: Attempt) -> dict[str, Any]:
    ending = next((name for name in ENDINGS if (attempt.root / f"{name}.json").exists()), None)
    job = read_json(attempt.root / "job.json") or {}
    return {
        "number": attempt.number,
        "started": _modified(attempt.root / "job.json") or _modified(attempt.root),
        "ended": _modified(attempt.root / f"{ending}.json") if ending else None,
        "ending": ENDINGS[ending] if ending else None,
        "why": _why(attempt, ending),
        "job": {"alive": is_alive(job), **job} if "pid" in job else job,
    }


def _why(attempt: Attempt, ending: str | None) -> str | None:
    if ending == "requeued":
        saved = (read_json(attempt.root / "requeued.json") or {}).get("checkpoint")
        return f"{SAID[ending]}{' after a checkpoint' if saved else '; there was no time for a checkpoint'}"
    if ending != "failed":
        return SAID.get(ending or "")
    failed = read_json(attempt.root / "failed.json") or {}
    return f"{failed.get('rank', 'a')} rank: {failed.get('text', 'no reason can be read')}"


def _add_requeue(attempt: dict[str, Any], requeues: Sequence[Mapping[str, Any]]) -> None:
    """What the batch script of a Slurm job said after its ranks had ended."""
    start = (str(attempt["job"].get("slurm")), attempt["job"].get("restart"))
    for entry in requeues:
        if (str(entry.get("job")), entry.get("restart")) == start:
            attempt["ended"] = attempt["ended"] or entry.get("time")
            attempt["ending"] = attempt["ending"] or "failed"
            attempt["why"] = "; ".join(filter(None, (attempt["why"], entry.get("why"))))


def _alarms(attempt: Attempt) -> list[dict[str, Any]]:
    entries = [entry for entry in tail_jsonl(attempt.ledger) if "harness" in entry]
    return [{"time": e.get("t"), "text": f"{e['harness']} {e.get('what')}: {e.get('reason')}"} for e in entries]


def _last_words(attempt: Attempt, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last line of the logs that were written to last, of an attempt that failed or left no word."""
    if facts["ending"] not in (None, "failed") or not attempt.logs.is_dir():
        return []
    times = {path: _modified(path) or 0.0 for path in attempt.logs.iterdir() if path.suffix in (".log", ".out")}
    newest = sorted(times, key=lambda path: times[path])[-LOGS_SHOWN:]
    words = ((times[path], path.name, next(_filled(_tail(path, LOG_BYTES)), "")) for path in newest)
    return [{"time": time, "text": f"{name}: {line[:LINE]}"} for time, name, line in words if line]


def _filled(lines: Sequence[str]) -> Iterator[str]:
    return (line.strip() for line in reversed(lines) if line.strip())


# --- what the run has made


def _snapshot(run: RunDirectory, attempt: int) -> dict[str, Any] | None:
    """status.json, unless an older attempt wrote it."""
    snapshot = read_json(run.status)
    return snapshot if snapshot and snapshot.get("attempt") == attempt else None


def newest_checkpoint(root: Path) -> dict[str, Any] | None:
    """Name, update and time of the newest complete checkpoint (training.checkpoint, which tells more, needs torch)."""
    whole = max(root.glob("[0-9]*-update-*/manifest.json"), default=None)
    if whole is None:
        return None
    name = whole.parent.name
    return {"name": name, "update": int(name.rpartition("-")[2]), "time": _modified(whole)}


def read_metrics_tail(path: Path) -> dict[str, Any]:
    """``last``: the newest update's metrics; ``steps``: [update, seconds] of the latest updates; ``evaluations``.

    Newest means last written: a run that went back to a checkpoint counts its updates again from there.
    """
    entries = [entry for entry in tail_jsonl(path) if "update" in entry]
    updates = [entry for entry in entries if "perf/step_s" in entry]
    return {
        "last": updates[-1] if updates else None,
        "steps": [[entry["update"], entry["perf/step_s"]] for entry in updates[-PACE:]],
        "evaluations": [
            {"update": entry["update"], "pass@1": entry["eval/pass@1"], "coverage": entry.get("eval/coverage")}
            for entry in entries
            if "eval/pass@1" in entry
        ],
    }
