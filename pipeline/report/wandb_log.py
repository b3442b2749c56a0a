"""W&B as a mirror of a run's metrics: one W&B run over all attempts, in a thread, so that it may fail or hang.

metrics.jsonl is what counts. An attempt begins its W&B run with the history that it resumed from, so the newest offline
directory holds the whole run, each update once; earlier ones are put aside. Where W&B has the history already, the
attempt goes on behind it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import LoggingConfig, UserError
from pipeline.records import RolloutRecord
from pipeline.report.sample import spread
from pipeline.report.store import publish_new, write_json

MODES = ("offline", "online", "disabled")
ACCOUNT = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")  # variables that name it
ID_FILE = "wandb_id"
FOLDER, ASIDE, TABLES = "wandb", "superseded", "tables"
STEP = "update"  # the x axis of every metric
INIT_S = 60
FINISH_S = 20  # that W&B may take for the last uploads; what is left lies on disk for `wandb sync`
CLOSE_S = 30.0  # after which a W&B that still hangs is ended
SERVICE = "wandb-core"
TABLE_ROWS = 64
COLUMNS = ("harness", "task", "outcome", "pass", "reward", "tool_calls", "calls", "malformed", "seconds", "trace")
SECRET = ("_key", "token", "password")  # ends of settings' names that are not for W&B's eyes

log = logging.getLogger(__name__)

Action = Callable[[Any], object]  # takes wandb's Run
Entry = Mapping[str, Any]  # a line of metrics.jsonl


def check_wandb(config: LoggingConfig, run_dir: Path) -> None:
    """Raises UserError for a setting of W&B that cannot work in ``run_dir``. Asks no network."""
    if config.wandb not in MODES:
        raise UserError(f"logging.wandb={config.wandb} is unknown; one of: {', '.join(MODES)}")
    place = run_dir / FOLDER
    if config.wandb != "disabled" and place.exists() and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise UserError(
            f"logging.wandb={config.wandb}: {place} is not a directory that you may write to; "
            "remove it, or set logging.wandb=disabled"
        )
    if config.wandb == "online" and not _has_account():
        raise UserError(
            "logging.wandb=online needs an account: set WANDB_API_KEY or run `wandb login`; "
            "logging.wandb=offline needs none"
        )


def _has_account() -> bool:
    """Whether W&B would find a key without asking for one."""
    if any(os.environ.get(name) for name in ACCOUNT):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


class WandbLog:
    """Takes what a run logs, at once, and gives it to W&B when W&B is ready. Only `close` waits, at most CLOSE_S."""

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        settings: Mapping[str, Any],
        history: Callable[[], Sequence[Entry]] = tuple,
        job: str = "train",
        identity: str = "",
    ) -> None:
        """``settings``: the composed configuration; ``history`` reads what was logged before this attempt; ``job``:
        what kind of run it is, W&B's job type; ``identity`` of a W&B run beside the one of all attempts.
        """
        self._tables = run_dir / FOLDER / TABLES
        self._actions: SimpleQueue[Action | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            import wandb  # noqa: F401  (half a second, and not in a thread beside other imports)

            known = history()
        except Exception as error:  # whatever it is, it costs only the mirror
            return _warn("start", error)
        arguments = (lambda: _open(run_dir, config, settings, known, job, identity or wandb_id(run_dir)),)
        self._thread = threading.Thread(target=self._work, args=arguments, name="wandb", daemon=True)
        self._thread.start()

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an update, this one or an earlier one."""
        self._actions.put(lambda run: run.log({STEP: update, **metrics}))

    def rollouts(self, update: int, label: str, read: Callable[[], Iterable[RolloutRecord]]) -> None:
        """A table of some rollouts of the evaluation ``label``; ``read`` is called in W&B's thread."""
        self._actions.put(lambda run: self._log_table(run, update, label, read()))

    def summary(self, values: Mapping[str, Any]) -> None:
        """The closing figures, for W&B's run page."""
        self._actions.put(lambda run: run.summary.update(dict(values)))

    def close(self, within_s: float | None = None) -> None:
        """Let W&B finish, by default within CLOSE_S. What hangs then is ended, so that the process can end too."""
        if self._thread is None:
            return
        limit = CLOSE_S if within_s is None else within_s
        self._actions.put(None)
        self._thread.join(limit)
        if self._thread.is_alive():
            _warn("finish", TimeoutError(f"not within {limit:g} s"))
            _end_service()

    def _work(self, start: Callable[[], Any]) -> None:
        doing = "start"
        try:
            run = start()
            doing = "take metrics"
            while (action := self._actions.get()) is not None:
                action(run)
            doing = "finish"
            run.finish()
        except Exception as error:  # whatever it is, it costs only the mirror
            _warn(doing, error)

    def _log_table(self, run: Any, update: int, label: str, records: Iterable[RolloutRecord]) -> None:
        table = {STEP: update, "label": label, "rows": table_rows(list(records), label)}
        write_json(self._tables / f"{label}.json", table)
        _send_table(run, table)


def table_rows(records: Sequence[RolloutRecord], label: str, size: int = TABLE_ROWS) -> list[list[Any]]:
    """A sample of an evaluation's rollouts as COLUMNS, of every harness and outcome in turn."""
    chosen = spread(records, lambda record: (record.harness, record.outcome.value), size)
    return [_row(record, label) for record in sorted(chosen, key=lambda one: (one.harness, one.task_id, one.index))]


def _row(record: RolloutRecord, label: str) -> list[Any]:
    verdict = record.verdict
    passed = None if verdict.correctness is None else verdict.correctness >= 1.0
    figures = [verdict.reward, verdict.tool_calls, record.calls, record.malformed, round(record.wall_s, 1)]
    trace = f"evaluation/{label}/{record.group_id}.parquet#{record.index}"
    return [record.harness, record.task_id, record.outcome.value, passed, *figures, trace]


def _send_table(run: Any, table: Mapping[str, Any]) -> None:
    import wandb

    shown = wandb.Table(columns=list(COLUMNS), data=table["rows"], allow_mixed_types=True)
    run.log({STEP: table[STEP], f"rollouts/{table['label']}": shown})


# --- the W&B run


def _open(
    run_dir: Path,
    config: LoggingConfig,
    settings: Mapping[str, Any],
    history: Sequence[Entry],
    job: str,
    identity: str,
) -> Any:
    earlier = offline_runs(run_dir, identity)
    run = _start(run_dir, identity, config, settings, job)
    run.define_metric("*", step_metric=STEP)
    if not _has_history(run, earlier):
        _replay(run, history, run_dir / FOLDER / TABLES)
        _put_aside([path for path in earlier if path != Path(run.dir).parent], run_dir / FOLDER / ASIDE)
    return run


def _start(run_dir: Path, identity: str, config: LoggingConfig, settings: Mapping[str, Any], job: str) -> Any:
    import wandb

    options: dict[str, Any] = {"mode": config.wandb, "project": config.project, "group": config.group}
    return wandb.init(
        **options,
        id=identity,
        resume="allow",
        job_type=job,
        tags=list(config.tags),
        name=run_dir.name if job == "train" else f"{run_dir.parent.name}-{job}",
        dir=str(run_dir),
        config=without_secrets(settings),
        allow_val_change=True,  # an attempt may have other settings of the cluster
        settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_S, finish_timeout=FINISH_S),
    )


def _has_history(run: Any, earlier: Sequence[Path]) -> bool:
    """Whether W&B's server has what earlier attempts logged, so that this one goes on behind it."""
    synced = any(any(path.glob("*.wandb.synced")) for path in earlier)
    return bool(synced if run.offline else run.resumed)


def _replay(run: Any, history: Sequence[Entry], tables: Path) -> None:
    evaluated = set()
    for entry in history:
        run.log({"_timestamp" if name == "time" else name: value for name, value in entry.items()})
        if "eval/pass@1" in entry:
            evaluated.add(entry[STEP])
    for path in sorted(tables.glob("*.json")):
        table = json.loads(path.read_text())
        if table[STEP] in evaluated:
            _send_table(run, table)


def _put_aside(directories: Sequence[Path], place: Path) -> None:
    """Where `wandb sync` does not look."""
    for path in directories:
        place.mkdir(exist_ok=True)
        path.rename(place / path.name)


def offline_runs(run_dir: Path, identity: str) -> list[Path]:
    """A W&B run's directories for `wandb sync`, oldest first."""
    return sorted((run_dir / FOLDER).glob(f"offline-run-*-{identity}"))


def wandb_id(run_dir: Path) -> str:
    """The id that every attempt of this run shares."""
    path = run_dir / ID_FILE
    if not path.exists():
        publish_new(path, lambda draft: draft.write_text(new_id() + "\n"))
    return path.read_text().strip()


def new_id() -> str:
    """An id that no other W&B run has."""
    return uuid.uuid4().hex[:12]


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the values that open something."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if not name.endswith(SECRET)
    }


def _end_service() -> None:
    """Kill the W&B service that this process has started: wandb would wait for it at exit, without end."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
            name, fields = rest.rsplit(") ", 1)
            if name == SERVICE and int(fields.split()[1]) == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
        except (OSError, ValueError):
            continue  # it has ended meanwhile


def _warn(what: str, error: Exception) -> None:
    kind = type(error).__name__
    log.warning("W&B failed to %s (%s: %s); metrics.jsonl has everything", what, kind, error)
