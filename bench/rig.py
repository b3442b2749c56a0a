"""One run of the bench: engine, target and generator, each a process of its own, measured from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contract import Adapter, Place, load_adapter
from bench.measure import RunFailed, UsageMeter, Watch, await_http, fetch, shard_pids

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 15.0
SETTLE_S = 0.5
POLL_S = 0.1


@dataclass(frozen=True)
class Load:
    """One run of the generator against one target."""

    name: str
    options: dict[str, Any]
    latency_s: tuple[float, float] = (0.5, 2.0)
    shards: int = 2
    kill_every_s: float = 0.0
    pins: dict[str, str] = field(default_factory=dict)  # process ("engine", "target", "load") -> cores
    rest_s: float = 5.0  # after the load, before memory is read
    cap_s: float = 1200.0

    def command(self, adapter: str, url: str, engine_url: str) -> list[str]:
        """The generator's."""
        command = [sys.executable, "-m", "bench.load", "--adapter", adapter, "--base", url, "--engine", engine_url]
        command += ["--settle", str(self.rest_s)]
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            if value is not False:
                command += [flag] if value is True else [flag, str(value)]
        return self.pinned("load", command)

    def pinned(self, role: str, command: Sequence[str]) -> list[str]:
        """A command, on the cores that its role is to have."""
        cores = self.pins.get(role)
        return ["taskset", "-c", cores, *command] if cores else list(command)


def run_load(adapter_name: str, load: Load, logs: Path | None = None) -> dict[str, Any]:
    """The figures of one run; what its processes wrote is kept in ``logs``. Raises NotInstalled or RunFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        try:
            return _run(adapter_name, load_adapter(adapter_name), load, Path(directory))
        finally:
            if logs is not None:
                shutil.copytree(directory, logs / f"{load.name}-{adapter_name}", dirs_exist_ok=True)


def _run(name: str, adapter: Adapter, load: Load, directory: Path) -> dict[str, Any]:
    port, engine_port = free_port(), free_port()
    engine_url = f"http://127.0.0.1:{engine_port}"
    command = adapter.start_cmd(Place(port, engine_url, load.shards, directory / "target"))
    engine_command = [sys.executable, "-m", "bench.engine", str(engine_port), "--latency", *map(str, load.latency_s)]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_process(load.pinned("engine", engine_command), directory / "engine.log"))
        await_http(f"{engine_url}/v1/models", engine)
        target, url, started_s = engine, engine_url, 0.0
        if command is not None:
            url = f"http://127.0.0.1:{port}"
            target = stack.enter_context(_process(load.pinned("target", command), directory / "target.log"))
            started_s = await_http(url + adapter.HEALTH, target)
        time.sleep(SETTLE_S)
        measured = _Measured(target, engine, url, adapter.HEALTH, engine_url)
        figures = measured.load(load.command(name, url, engine_url), load, directory)
        return figures | {"start_s": round(started_s, 2)}


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class _Measured:
    """A running target, measured while the generator runs."""

    def __init__(
        self, target: subprocess.Popen[bytes], engine: subprocess.Popen[bytes], url: str, health: str, engine_url: str
    ) -> None:
        self._target, self._url, self._engine_url = target, url, engine_url
        self._meter, self._engine_meter = UsageMeter(target.pid), UsageMeter(engine.pid)
        self._watch = Watch(url + health, self._meter)

    def load(self, command: Sequence[str], load: Load, directory: Path) -> dict[str, Any]:
        """Run the generator; its figures and what was measured beside it."""
        before, engine_before = self._meter.read(), self._engine_meter.read()
        log = directory / "load.log"
        at_end: dict[str, Any] = {}
        deadline = time.monotonic() + load.cap_s
        with (
            self._watch,
            Killer(self._target.pid, load.kill_every_s) as killer,
            _process([*command, "--out", str(directory / "load.json")], log) as process,
        ):
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise RunFailed(f"the generator did not end within {load.cap_s:.0f} s")
                if not at_end and b"LOAD_DONE" in log.read_bytes():
                    killer.stop()
                    at_end = self._at_end(before, engine_before)
                    time.sleep(0.8 * load.rest_s)
                    at_end["rss_mb"] = round(self._meter.read().rss_mb, 1)
                time.sleep(POLL_S)
        if process.returncode or not at_end:
            raise RunFailed(f"the generator ended with {process.returncode}: {log.read_text()[-2000:]}")
        figures = json.loads((directory / "load.json").read_text())
        return self._joined(figures, at_end, before.rss_mb) | {"kills": killer.kills}

    def _at_end(self, before: Any, engine_before: Any) -> dict[str, Any]:
        """What the target used, and the metrics it gives of itself, at the end of the load."""
        now, engine_now = self._meter.read(), self._engine_meter.read()
        return {
            "cpu_s": now.cpu_s - before.cpu_s,
            "engine_cpu_s": engine_now.cpu_s - engine_before.cpu_s,
            "rss_loaded_mb": round(now.rss_mb, 1),
            "health": sorted(self._watch.health_s) or [0.0],
            "metrics": self._metrics(),
        }

    def _metrics(self) -> dict[str, float]:
        try:
            return parse_metrics(fetch(self._url + "/metrics").decode())
        except OSError:
            return {}

    def _joined(self, figures: dict[str, Any], at_end: dict[str, Any], rss_before: float) -> dict[str, Any]:
        turns, sessions = max(1, figures["turns"]), max(1, figures["sessions"])
        health = at_end.pop("health")
        return figures | {
            "target_alive": self._target.poll() is None,
            "cpu_ms_turn": round(at_end.pop("cpu_s") * 1000 / turns, 3),
            "engine_cpu_ms_turn": round(at_end.pop("engine_cpu_s") * 1000 / turns, 3),
            "mb_session": round((at_end["rss_mb"] - rss_before) / sessions, 3),
            "rss_start_mb": round(rss_before, 1),
            "rss_peak_mb": round(self._watch.peak_rss_mb, 1),
            "files_peak": self._watch.peak_files,
            "health_p50_s": round(health[len(health) // 2], 4),
            "health_p99_s": round(health[min(len(health) - 1, int(len(health) * 0.99))], 4),
            "health_max_s": round(health[-1], 4),
            "health_failures": self._watch.health_failures,
            "engine": json.loads(fetch(f"{self._engine_url}/stats")),
        } | at_end  # fmt: skip


class Killer:
    """Kills a random shard every so often, once the load is under way."""

    def __init__(self, supervisor: int, every_s: float) -> None:
        self.kills = 0
        self._supervisor, self._every_s = supervisor, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Killer:
        if self._every_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()

    def _work(self) -> None:
        rnd = random.Random(3)
        while not self._stop.wait(self._every_s):
            pids = shard_pids(self._supervisor)
            if pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rnd.choice(pids), signal.SIGKILL)
                    self.kills += 1


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a mapping from sample (with its labels) to value."""
    samples = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running process; ended on the way out, its last words shown when that is by an error."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
    try:
        yield process
    except Exception:
        print(f"bench: the end of {log.name}:\n{log.read_text()[-2000:]}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
