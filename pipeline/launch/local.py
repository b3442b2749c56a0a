"""Start a run on this machine through submitit, or join one that is still going, and show it until it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import submitit

from pipeline.config import Config, UserError
from pipeline.launch.processes import is_alive, job_of, start_time
from pipeline.launch.program import YokeProgram
from pipeline.launch.rpc import RpcClient, RpcError
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.report.progress import Progress

POLL_S = 0.5
INTERRUPT_S = 60.0
RANKS = ("trainer", "engine")


class RunFailed(RuntimeError):
    """Every attempt of the run ended before the run was done."""


class RunStopped(RuntimeError):
    """Somebody stopped the run (`yoke stop`); it wrote a checkpoint first."""


def follow(config: Config, run: RunDirectory) -> Attempt:
    """Bring the run to its end: join a living attempt, else start one, and start again after a crash.

    Returns the attempt that finished the run. Raises RunStopped when somebody stopped it, RunFailed after
    ``cluster.max_attempts`` starts by this command, and UserError as soon as an attempt ended because of a wrong
    setting.
    """
    with Progress(config.training.updates, config.logging.progress) as progress:
        for _ in range(config.cluster.max_attempts):
            attempt, pid = living(run) or _submit(config, run)
            progress.event({"kind": "message", "text": f"attempt {attempt.number}; logs in {attempt.logs}"})
            _watch(attempt, pid, progress)
            if attempt.read("done") is not None:
                return attempt
            if attempt.read("stopped") is not None:
                raise RunStopped(f"{run.root} was stopped; the same command goes on from its last checkpoint")
            failed = attempt.read("failed") or {"text": _last_words(attempt), "user_error": False}
            if failed["user_error"]:
                raise UserError(failed["text"])
            progress.event({"kind": "error", "text": f"attempt {attempt.number} ended early: {failed['text']}"})
        raise RunFailed(f"{run.root} is not done after {config.cluster.max_attempts} attempts; logs: {attempt.logs}")


def _submit(config: Config, run: RunDirectory) -> tuple[Attempt, int]:
    attempt = run.new_attempt()
    run.sweep_scratch(attempt.number)
    executor = submitit.LocalExecutor(folder=attempt.logs)
    executor.update_parameters(
        tasks_per_node=len(RANKS),
        timeout_min=config.cluster.timeout_min,
        gpus_per_node=config.cluster.gpus_per_node,
        stderr_to_stdout=True,
    )
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this command, which passes it on
    try:
        job = executor.submit(YokeProgram(asdict(config), str(run.root), attempt.number))
    finally:
        signal.signal(signal.SIGINT, handler)
    job._cancel_at_deletion = False
    claim(attempt, int(job.job_id))
    return attempt, int(job.job_id)


def claim(attempt: Attempt, pid: int) -> None:
    """Leave word of which process an attempt lives and dies with."""
    attempt.publish("job", job_of(pid))


def living(run: RunDirectory) -> tuple[Attempt, int] | None:
    """The newest attempt and its process, if that still runs (its launcher may have been killed)."""
    for number in reversed(run.attempt_numbers()[-1:]):
        attempt = run.attempt(number)
        job = attempt.read("job")
        if job and "pid" in job and is_alive(job):
            return attempt, job["pid"]
    return None


def _watch(attempt: Attempt, pid: int, progress: Progress) -> None:
    """Show the attempt until its processes are gone. Ctrl-C ends them after a checkpoint."""
    started = start_time(pid)
    client: RpcClient | None = None
    seen = 0
    try:
        while started is not None and start_time(pid) == started:
            time.sleep(POLL_S)
            client = client or _client(attempt)
            if client is not None:
                seen = _relay(client, seen, progress)
    except KeyboardInterrupt:
        _interrupt(client, pid, started)
        raise


def _interrupt(client: RpcClient | None, pid: int, started: int | None) -> None:
    """Ask for a checkpoint and the end; what has not ended after INTERRUPT_S is killed (its last checkpoint stays)."""
    print("\nstopping after a checkpoint …", file=sys.stderr)
    if client is not None:
        with suppress(RpcError):
            client.call("interrupt", 10.0)
        deadline = time.monotonic() + INTERRUPT_S
        while start_time(pid) == started and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if start_time(pid) == started:
        os.kill(pid, signal.SIGINT)  # submitit's controller kills both ranks


def _client(attempt: Attempt) -> RpcClient | None:
    record = attempt.read("coordinator")
    return RpcClient(record["url"], record["token"]) if record else None


def _relay(client: RpcClient, seen: int, progress: Progress) -> int:
    """Pass news on to the live view. Returns the number of the last event."""
    try:
        status = client.call("status", 5.0, after=seen)
    except RpcError:
        return seen
    for event in status["events"]:
        progress.event(event)
        seen = max(seen, event["number"])
    for event in status["now"]:
        progress.event(event)
    return seen


def _last_words(attempt: Attempt) -> str:
    """The last line of each rank's log, for the message after a crash."""
    words = []
    for path in sorted(path for kind in ("trainer-*", "engine-*", "*_log.out") for path in attempt.logs.glob(kind)):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            words.append(f"{path.name}: {lines[-1][:200]}")
    return "; ".join(words) or f"no log in {attempt.logs}"


def start_over(run: RunDirectory) -> None:
    """Delete the run directory. Raises UserError while the run is going, or when the directory is not a run's."""
    if not run.root.exists():
        return
    if living(run):
        raise UserError(f"{run.root} is in use by a running job: stop it before starting over")
    if any(run.root.iterdir()) and not run.is_ours():
        raise UserError(f"{run.root} holds other things than a run: delete it yourself or give another run_dir=…")
    shutil.rmtree(run.root)
