"""Whether the process that an attempt lives and dies with is still there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_time(pid: int) -> int | None:
    """Clock ticks at which ``pid`` started, so that a reused pid is not taken for it; None when it is gone or a
    zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def job_of(pid: int) -> dict[str, Any]:
    """What an attempt on this machine leaves of the process ``pid``."""
    return {"pid": pid, "started": start_time(pid), "host": socket.gethostname()}


def is_alive(job: Mapping[str, Any]) -> bool | None:
    """Whether that process still runs; None when it is another machine's."""
    if job.get("host", socket.gethostname()) != socket.gethostname():
        return None
    return job["started"] is not None and start_time(job["pid"]) == job["started"]
