"""`yoke status RUN`: asks the run directory, the coordinator and Slurm how a run stands, and shows it.

Each of them may be silent: every question has a deadline and a thread of its own, and the last answer stays on the
screen with its age.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.launch.rpc import RpcClient, RpcError
from pipeline.launch.run_facts import read_facts, read_json
from pipeline.launch.run_status import ENDED, combine, slurm_job
from pipeline.launch.squeue import find_jobs
from pipeline.report.status_view import Screen, run_view, runs_view

POLL_S = 5.0  # between two looks of --watch
FILES_S = 10.0
RPC_S = 3.0
QUEUE_S = 10.0
MARGIN_S = 1.0  # that a question may end later than its own deadline
SWEEP = "sweep.json"
USAGE = "yoke status RUN [--watch] [--json]"


class Source:
    """Something that is asked again and again and may not answer. One question at a time."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: str | None = None
        self._answered = time.monotonic()  # or since when an answer is waited for
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], Any]) -> None:
        """Put ``question``, unless the last one is still open."""
        if self._thread is None:
            self._answered = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._answer, args=(question,), daemon=True)
            self._thread.start()

    def wait(self, until: float) -> bool:
        """Whether the last question was answered by ``until`` (monotonic clock)."""
        if self._thread is None:
            return False
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.error = "it does not answer"
        return self.error is None

    def _answer(self, question: Callable[[], Any]) -> None:
        try:
            value = question()
        except Exception as error:  # whatever it is, it is shown as this source's trouble
            self.error = str(error) or repr(error)
        else:
            self.value, self._answered, self.error = value, time.monotonic(), None

    def standing(self) -> dict[str, Any]:
        """``silent_s``: since its last answer, 0 when it has answered."""
        silent_s = 0.0 if self.error is None else round(time.monotonic() - self._answered, 1)
        return {"silent_s": silent_s, "error": self.error}


class RunWatcher:
    """One run, by its files and its coordinator."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files, self.coordinator = Source(), Source()
        self._client: tuple[str, RpcClient] | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the files told last. Raises UserError when they never told anything."""
        if self.files.value is None:
            raise UserError(f"{self.root} cannot be read: {self.files.error}")
        facts: Mapping[str, Any] = self.files.value
        return facts

    @property
    def may_answer(self) -> bool:
        """Whether the newest attempt has a coordinator that may be there still."""
        newest = self.facts["attempts"][-1] if self.facts["attempts"] else None
        ended = newest is None or newest["ending"] is not None or newest["job"].get("alive") is False
        return not ended and self.facts["address"] is not None

    def call(self, method: str, timeout_s: float = RPC_S) -> dict[str, Any]:
        """Ask the newest attempt's coordinator. Raises RpcError, also while it has none."""
        address = self.facts["address"]
        if not address:
            raise RpcError("the attempt has no coordinator yet")
        if self._client is None or self._client[0] != address["url"]:
            self._client = (address["url"], RpcClient(address["url"], address["token"]))
        try:
            return self._client[1].call(method, timeout_s)
        except ValueError as error:  # of a run on another machine: some other program has that port here
            raise RpcError(f"{address['url']} is not the run's coordinator") from error


class Watch:
    """Some runs, and the queue that all of them are in."""

    def __init__(self, runs: Sequence[RunWatcher]) -> None:
        self.runs = runs
        self.queue = Source()

    def look(self) -> list[dict[str, Any]]:
        """How each run stands now, within FILES_S and QUEUE_S. Raises UserError when a run cannot be read at all."""
        until = time.monotonic() + FILES_S
        for run in self.runs:
            run.files.ask(partial(read_facts, run.root))
        for run in self.runs:
            run.files.wait(until)
        asked = [run for run in self.runs if run.may_answer]
        for run in asked:
            run.coordinator.ask(partial(run.call, "overview"))
        jobs = self._jobs()
        until = time.monotonic() + RPC_S + MARGIN_S
        answered = {run.root for run in asked if run.coordinator.wait(until)}
        return [self._status(run, run.root in answered, jobs) for run in self.runs]

    def _jobs(self) -> dict[str, Any] | None:
        ids = sorted({job for run in self.runs if (job := slurm_job(run.facts))})
        if not ids:
            return None
        self.queue.ask(lambda: find_jobs(ids, QUEUE_S))
        answered = self.queue.wait(time.monotonic() + QUEUE_S + MARGIN_S)
        return self.queue.value if answered else None

    def _status(self, run: RunWatcher, answered: bool, jobs: dict[str, Any] | None) -> dict[str, Any]:
        live = run.coordinator.value if answered else None
        sources = {"files": run.files, "coordinator": run.coordinator, "squeue": self.queue}
        standing = {"sources": {name: source.standing() for name, source in sources.items()}}
        return combine(str(run.root), run.facts, live, jobs, time.time()) | standing


def run(config: Config, words: Sequence[str]) -> int:
    """The job. Exit code 0 whatever the state; UserError when no run was ever started there."""
    flags = [word for word in words if word.startswith("--")]
    if unknown := [flag for flag in flags if flag not in ("--watch", "--json")]:
        raise UserError(f"{unknown[0]} is unknown: {USAGE}")
    watch = Watch(find_runs(run_root(config, [word for word in words if word not in flags])))
    as_json, watched = "--json" in flags, "--watch" in flags
    with Screen(live=watched and not as_json) as screen, suppress(KeyboardInterrupt):
        show = _print_json if as_json else lambda found: screen.show(_view(found))
        states: list[set[str]] = []
        while True:
            found = watch.look()
            show(found)
            states.append({status["state"] for status in found})
            if not watched or _over(states):
                return 0
            time.sleep(POLL_S)
    return 0


def _over(states: Sequence[set[str]]) -> bool:
    """Whether the runs have ended. One that fails under one's eyes may be started again in a moment."""
    settled = len(states) == 1 or "failed" not in states[-1] or states[-2] <= set(ENDED)
    return states[-1] <= set(ENDED) and settled


def _view(found: Sequence[Mapping[str, Any]]) -> Any:
    return run_view(found[0]) if len(found) == 1 else runs_view(found)


def _print_json(found: Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps(found[0] if len(found) == 1 else {"runs": found}), flush=True)


def run_root(config: Config, words: Sequence[str]) -> Path:
    """The directory that RUN, or else run_dir=…, means. Raises UserError for several."""
    if len(words) > 1:
        raise UserError(f"one RUN at a time: {' '.join(words)}")
    return Path(words[0] if words else config.run_dir).absolute()


def find_runs(root: Path) -> list[RunWatcher]:
    """The run in ``root``, or those of the sweep in it. Raises UserError when nothing was ever started there."""
    if sweep := read_json(root / SWEEP):
        return [RunWatcher(root / point["name"]) for point in sweep["points"]]
    if not root.is_dir():
        what = "is a file, not the directory of a run" if root.exists() else "does not exist: no run was started there"
        raise UserError(f"{root} {what}")
    if not (root / "submission.json").exists() and not any((root / "attempts").glob("[0-9]*")):
        raise UserError(f"no run was started in {root}")
    return [RunWatcher(root)]
