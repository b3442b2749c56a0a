"""How a node is: its GPUs, memory and load, looked at now and then by a thread of its own: nobody waits for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

EVERY_S = 10.0
GPU_DEADLINE_S = 5.0
GPU_FIELDS = {
    "index": "index",
    "utilisation": "utilization.gpu",
    "used_mib": "memory.used",
    "total_mib": "memory.total",
}
GIB_KB = 1024 * 1024


class HealthProbe:
    """Remembers the last look at this node. ``latest`` never blocks: what hangs is the thread behind it."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._seen: dict[str, Any] = {}
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def latest(self) -> dict[str, Any]:
        """What was last seen, {} before the first look ended. Starts another look when the last one is old."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self._thread = threading.Thread(target=self._look, name="health", daemon=True)
            self._thread.start()
        return self._seen

    def _look(self) -> None:
        self._seen = {**host_health(), **gpu_health()}


def host_health() -> dict[str, Any]:
    """Memory in GiB, load of the last minute, CPU cores."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kb["MemTotal"], kb["MemAvailable"]
    return {
        "memory_used_gib": round((total - free) / GIB_KB, 1),
        "memory_gib": round(total / GIB_KB, 1),
        "load": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
    }


def gpu_health(deadline_s: float = GPU_DEADLINE_S) -> dict[str, Any]:
    """``gpus``: one entry a GPU, [] on a node without; None, with ``gpu_error``, when nvidia-smi cannot tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": [], "gpu_error": None}
    query = [program, f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"gpus": None, "gpu_error": f"nvidia-smi did not answer within {deadline_s:g} s"}
    except OSError as error:
        return {"gpus": None, "gpu_error": f"nvidia-smi cannot be run: {error.strerror}"}
    if answer.returncode != 0:
        text = (answer.stderr or answer.stdout).strip().splitlines()
        return {"gpus": None, "gpu_error": f"nvidia-smi: {text[-1] if text else f'exit code {answer.returncode}'}"}
    return {"gpus": [_gpu(line) for line in answer.stdout.splitlines() if line.strip()], "gpu_error": None}


def _gpu(line: str) -> dict[str, int | None]:
    return dict(zip(GPU_FIELDS, (_number(value) for value in line.split(",")), strict=False))


def _number(text: str) -> int | None:
    """nvidia-smi writes [N/A] for what a GPU does not tell, as for one that is split into parts."""
    return int(text) if text.strip().isdigit() else None
