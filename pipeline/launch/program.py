"""The one program of a run, the same on this machine and on Slurm: local rank 0 trains, local rank 1 serves and
rolls out.

Signals: USR2 warns of the end of the job's time (submitit then asks for `checkpoint` on global rank 0 and requeues);
USR1 is `yoke stop`; SIGTERM ends the job after a checkpoint, if there is time.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
from omegaconf import OmegaConf

from pipeline.config import Config
from pipeline.harness.base import register
from pipeline.launch.gates import pass_gates
from pipeline.launch.logs import log_in_background, quieten_others
from pipeline.launch.rendezvous import agree_on_attempt, restart_count
from pipeline.launch.run_directory import Attempt, FencedOff, RunDirectory

if TYPE_CHECKING:
    from pipeline.launch.trainer_rank import EndRequest

log = logging.getLogger("yoke.program")

POLL_S = 0.5
REQUEUE_S = 20.0  # of the warning time, kept for the requeue itself


class YokeProgram:
    """What submitit starts on every rank.

    Holds plain data only; where to go on is read from the run directory at start. ``attempt``: the one that was claimed
    at submission; None on Slurm, where each start of the job claims its own.
    """

    _end: EndRequest | None = None  # on global rank 0, once it trains
    _place: Attempt | None = None

    def __init__(self, config: dict[str, Any], run_dir: str, attempt: int | None = None) -> None:
        self.config, self.run_dir, self.attempt = config, run_dir, attempt

    def __call__(self) -> None:
        environment = submitit.JobEnvironment()
        config, run = to_config(self.config), RunDirectory(Path(self.run_dir))
        attempt = self._place = run.attempt(self.attempt) if self.attempt else agree_on_attempt(run, environment)
        rank = "trainer" if environment.local_rank == 0 else "engine"
        _write_to(attempt.log(rank, environment.node))
        try:
            try:
                self._run(rank, config, attempt, environment.node)
            finally:
                attempt.check_fence()  # however a ghost ends, it leaves no result
        except FencedOff as error:
            log.warning("%s", error)
            raise SystemExit(1) from None
        except Exception as error:
            attempt.fail(rank, error)
            raise

    def _run(self, rank: str, config: Config, attempt: Attempt, node: int) -> None:
        register(config.harness.recipes)  # the command line did so in another process
        if (rank, node) != ("trainer", 0):
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # for rank 0 only; children inherit this
            pass_gates(config, attempt, first=False)
        if rank == "trainer":
            self._train(config, attempt, node)
        else:
            from pipeline.launch.engine_rank import run_engine

            run_engine(config, attempt, node)

    def _train(self, config: Config, attempt: Attempt, node: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(config.training.threads)
        from pipeline.launch.trainer_rank import EndRequest, Interrupted, run_trainer

        if node != 0:
            return run_trainer(config, attempt, node)
        self._end = end = EndRequest()
        _ask_on_signals(end)
        try:
            _in_thread(lambda: pass_gates(config, attempt, first=True))
            _in_thread(lambda: run_trainer(config, attempt, node, end))
        except Interrupted as interrupted:
            if interrupted.reason == "terminated":
                attempt.publish("terminated", {"checkpoint": end.saved})
            if interrupted.reason != "stop":
                raise
            return attempt.publish("stopped", {"checkpoint": end.saved})
        if self.attempt is None:  # no launcher waits for the end
            _report(config, attempt.run)

    def checkpoint(self, *_: Any) -> submitit.helpers.DelayedSubmission | None:
        """Called by submitit on global rank 0 at the warning, in the main thread: the trainers save, then it requeues.

        Returns None, which means no requeue, when the job was requeued ``cluster.max_requeues`` times.
        """
        cluster = to_config(self.config).cluster
        saved = self._end is not None and self._end.wait("warning", max(REQUEUE_S, cluster.signal_s - REQUEUE_S))
        log.warning("warned of the end: %s", "a checkpoint is written" if saved else "no time for a checkpoint")
        if restart_count() >= cluster.max_requeues:
            log.error("not requeued: cluster.max_requeues=%d are used up", cluster.max_requeues)
            return None
        if self._place is not None:
            self._place.publish("requeued", {"checkpoint": saved})
        return submitit.helpers.DelayedSubmission(YokeProgram(self.config, self.run_dir, self.attempt))


def _write_to(path: Path) -> None:
    """From here on this process's output, and that of its children, goes to ``path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    log_in_background(sys.stderr)
    quieten_others()


def _ask_on_signals(end: EndRequest) -> None:
    """SIGTERM and SIGUSR1 become a request that the trainer's thread sees at its next safe point."""
    for number, reason in ((signal.SIGTERM, "terminated"), (signal.SIGUSR1, "stop")):
        signal.signal(number, lambda *_, reason=reason: end.ask(reason))


def _report(config: Config, run: RunDirectory) -> None:
    from pipeline.launch.reporting import report_run

    try:
        report_run(config, run)
    except Exception as error:  # the run is done all the same
        log.error("no report: %s; `yoke report run_dir=%s` makes it again", error, run.root)


def _in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread, so that this one, the main thread, answers signals at once. Raises what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    thread = threading.Thread(target=run, name="trainer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
    if failures:
        raise failures[0]


def to_config(data: dict[str, Any]) -> Config:
    """The typed configuration behind its plain form."""
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(data)))
    assert isinstance(config, Config)
    return config
