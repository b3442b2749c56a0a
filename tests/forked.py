"""Processes forked from one that has imported the trainer: they start at once, and can be killed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["deepspeed", "pipeline.launch.trainer_rank"])
DEADLINE_S = 400.0


def fork(log: Path, program: Callable[..., Any], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Run ``program``, a function of an importable module, with its output in ``log``."""
    process = CONTEXT.Process(target=_logged, args=(log, program, arguments), daemon=True)
    process.start()
    return process


def _logged(log: Path, program: Callable[..., Any], arguments: Sequence[Any]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        program(*arguments)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)  # no thread is waited for


def run_ranks(place: Path, ranks: int, program: Callable[..., Any], *arguments: Any) -> None:
    """``program`` on ``ranks`` processes that find each other over gloo; fails with what they said if one fails."""
    place.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [place / f"rank-{rank}.log" for rank in range(ranks)]
    processes = [fork(log, _as_rank, rank, ranks, port, program, arguments) for rank, log in enumerate(logs)]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.join(deadline - time.monotonic())
    finally:
        for process in processes:
            process.kill()
    said = "\n".join(log.read_text()[-2000:] for log in logs if log.exists())
    assert [process.exitcode for process in processes] == [0] * ranks, said


def _as_rank(rank: int, ranks: int, port: int, program: Callable[..., Any], arguments: Sequence[Any]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}
    program(*arguments)
