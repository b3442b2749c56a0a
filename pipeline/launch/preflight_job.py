"""`yoke preflight`: every check that `yoke train` makes before its first rollout, by itself, with what was seen."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipeline.config import Config, UserError
from pipeline.hub import local_model
from pipeline.launch.evaluation_jobs import on_slurm
from pipeline.launch.preflight_check import FAILED, NEEDS, OK, SKIPPED, Check, Forward, Grounds, Result
from pipeline.launch.preflight_table import CHECKS, look, made_with
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import with_absolute_paths

AS_JSON = "--json"
REFUSED = 2  # exit code
STYLES = {OK: "green", FAILED: "bold red", SKIPPED: "yellow"}


def run(config: Config, words: Sequence[str] = ()) -> int:
    """Make every check. Exit code 0 when none failed, else 2. ``--json`` prints the results as JSON on stdout."""
    if strange := [word for word in words if word != AS_JSON]:
        raise UserError(f"yoke preflight takes settings and {AS_JSON}, not {' '.join(strange)}")
    config = with_absolute_paths(config)
    with View(AS_JSON in words) as view, ExitStack() as stack:
        results = look(config, NEEDS, _grounds(config, stack), view.tell)
    if AS_JSON in words:
        print(json.dumps({"ok": not _failed(results), "checks": [result.as_json() for result in results]}, indent=2))
    return REFUSED if _failed(results) else 0


def _failed(results: Sequence[Result]) -> bool:
    return any(result.result == FAILED for result in results)


def _grounds(config: Config, stack: ExitStack) -> Grounds:
    """Engine and trainer are of this machine; a job on Slurm looks at them on its own nodes."""
    run = RunDirectory(Path(config.run_dir))
    grounds = Grounds(config, made_with(run), not on_slurm(config), sample=config.preflight.tasks, stack=stack)
    if grounds.here:
        grounds.start_engine = lambda stack: _start_engine(config, stack)
        grounds.forward = lambda prompt, sampled: _forward(config, prompt, sampled)
    return grounds


def _start_engine(config: Config, stack: ExitStack) -> str:
    """A vLLM of the base model, until the stack is closed; its URL."""
    from pipeline.engine.server import EngineServer

    scratch = Path(
        stack.enter_context(tempfile.TemporaryDirectory(prefix="yoke-preflight-", ignore_cleanup_errors=True))
    )
    server = EngineServer(config.engine, config.model, scratch / "vllm.log", scratch)
    stack.callback(server.close)
    server.start(local_model(config.model.path))
    server.wait_ready()
    server.warm_up()
    return server.url


def _forward(config: Config, prompt: Sequence[int], sampled: Sequence[int]) -> Forward:
    os.environ["OMP_NUM_THREADS"] = str(config.training.threads)
    from pipeline.launch.preflight_engine import forward_of
    from pipeline.stages.update import open_trainer

    return forward_of(open_trainer(config), prompt, sampled)


class View:
    """A line a check: in a terminal what is going on, then, there and elsewhere, how it ended."""

    def __init__(self, beside: bool) -> None:
        """``beside``: to stderr, since stdout is for something else."""
        self._console = Console(file=sys.stderr if beside else sys.stdout, highlight=False)
        self._status = self._console.status("")
        self._width = max(len(check.name) for check in CHECKS)

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def tell(self, check: Check, result: Result | None) -> None:
        if result is None:
            return self._status.update(f"{check.name}: {check.looks_at}")
        name = Text(f"{result.name:<{self._width}}  ")
        self._say(name + Text(f"{result.result:<7}", STYLES[result.result]) + Text(f"  {result.said}"))
        if result.cure:
            self._say(Text(f"{'':<{self._width + 11}}→ {result.cure}"))

    def _say(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
