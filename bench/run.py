"""Runs the bench: fake engine, target and generator, each a process of its own, one target after the other.

    python -m bench.run                       the table: bare engine, our proxy, and the reference if it is installed
    python -m bench.run --scenario kill …     one of the other scenarios (see --help)
    python -m bench.run --quick               a minute

Prints a markdown table with verdicts, and writes it and every figure (JSON lines) under runs/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.contract import Adapter, NotInstalled, Place, load_adapter
from bench.dialects import DIALECTS
from bench.limits import raise_open_files
from bench.measure import UsageMeter, Watch, await_http, fetch, shard_pids
from bench.table import table, verdicts

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PORT, TARGET_PORT = 18700, 18701
STOP_S = 15.0
SETTLE_S = 0.5


@dataclass(frozen=True)
class Load:
    """One run of the generator against one target."""

    name: str
    options: dict[str, Any]
    latency_s: tuple[float, float] = (0.5, 2.0)
    shards: int = 2
    kill_every_s: float = 0.0
    pins: dict[str, str] = field(default_factory=dict)  # process ("engine", "target", "load") -> cores
    cap_s: float = 1200.0


@dataclass
class Bench:
    """Runs loads; ``python`` processes start in the repository."""

    out: Path
    engine_port: int = ENGINE_PORT
    target_port: int = TARGET_PORT
    dialects: str = ",".join(DIALECTS)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, adapter_name: str, load: Load) -> dict[str, Any] | None:
        """The figures of one run; None when the target is not installed, which is said."""
        adapter = load_adapter(adapter_name)
        print(f"bench: {load.name}: {adapter_name} …", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="bench-") as directory:
                row = self._run(adapter_name, adapter, load, Path(directory))
        except NotInstalled as error:
            print(f"bench: {adapter_name} is left out: {error}", file=sys.stderr)
            return None
        row |= {"scenario": load.name, "adapter": adapter_name, "load_average": round(os.getloadavg()[0], 1)}
        self.rows.append(row)
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"bench: {summary(row)}", file=sys.stderr, flush=True)
        return row

    def _run(self, name: str, adapter: Adapter, load: Load, directory: Path) -> dict[str, Any]:
        engine_url = f"http://127.0.0.1:{self.engine_port}"
        place = Place(self.target_port, engine_url, load.shards, directory / "target")
        command = adapter.start_cmd(place)
        engine_command = [sys.executable, "-m", "bench.engine", str(self.engine_port)]
        engine_command += ["--latency", *map(str, load.latency_s)]
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(_process(_pinned(engine_command, load, "engine"), directory / "engine.log"))
            await_http(f"{engine_url}/v1/models", engine)
            target, url, started_s = engine, engine_url, 0.0
            if command is not None:
                url = f"http://127.0.0.1:{self.target_port}"
                target = stack.enter_context(_process(_pinned(command, load, "target"), directory / "target.log"))
                started_s = await_http(url + adapter.HEALTH, target)
            time.sleep(SETTLE_S)
            measured = _Measured(target, engine, url, adapter.HEALTH, engine_url)
            command = _load_command(name, url, engine_url, load, self.dialects)
            figures = measured.load(command, load)
            return figures | {"start_s": round(started_s, 2)}


class _Measured:
    """A running target, measured while the generator runs."""

    def __init__(
        self, target: subprocess.Popen[bytes], engine: subprocess.Popen[bytes], url: str, health: str, engine_url: str
    ) -> None:
        self._target, self._url, self._engine_url = target, url, engine_url
        self._meter, self._engine_meter = UsageMeter(target.pid), UsageMeter(engine.pid)
        self._watch = Watch(url + health, self._meter)

    def load(self, command: Sequence[str], load: Load) -> dict[str, Any]:
        """Run the generator; its figures and what was measured beside it."""
        before, engine_before = self._meter.read(), self._engine_meter.read()
        at_end: dict[str, Any] = {}
        with (
            self._watch,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process,
        ):
            killer = Killer(self._target.pid, load.kill_every_s)
            timer = threading.Timer(load.cap_s, process.kill)
            timer.start()
            assert process.stderr is not None and process.stdout is not None
            errors = []
            for line in process.stderr:
                if line.strip() == b"LOAD_DONE":
                    killer.stop()
                    at_end = self._at_end(before, engine_before)
                else:
                    errors.append(line)
            out = process.stdout.read()
            timer.cancel()
            killer.stop()
        if process.returncode:
            raise RuntimeError(f"the generator ended with {process.returncode}: {b''.join(errors[-20:]).decode()}")
        return self._joined(json.loads(out), at_end, before.rss_mb) | {"kills": killer.kills}

    def _at_end(self, before: Any, engine_before: Any) -> dict[str, Any]:
        """What the target used, and the metrics it gives of itself, at the end of the load."""
        now, engine_now = self._meter.read(), self._engine_meter.read()
        return {
            "cpu_s": now.cpu_s - before.cpu_s,
            "engine_cpu_s": engine_now.cpu_s - engine_before.cpu_s,
            "rss_mb": round(now.rss_mb, 1),
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
        if every_s:
            self._thread.start()

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
    """A process of a group of its own, ended with all it started."""
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


def _pinned(command: Sequence[str], load: Load, role: str) -> list[str]:
    cores = load.pins.get(role)
    return ["taskset", "-c", cores, *command] if cores else list(command)


def _load_command(adapter: str, url: str, engine_url: str, load: Load, dialects: str) -> list[str]:
    command = [sys.executable, "-m", "bench.load", "--adapter", adapter, "--base", url, "--engine", engine_url]
    command += ["--dialects", dialects]
    for name, value in load.options.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return _pinned(command, load, "load")


def summary(row: dict[str, Any]) -> str:
    """One line about a run."""
    return (
        f"{row['turns']} turns, {row['turns_per_s']}/s, {row['cpu_ms_turn']} ms CPU a turn, added p50 "
        f"{row['added_p50_s']} p99 {row['added_p99_s']} s, lost {row['lost_sessions']} {row['lost'] or ''}, "
        f"wrong {row['wrong']}, kills {row['kills']}, load average {row['load_average']}"
    )


# --- scenarios ---------------------------------------------------------------------------------------------------


def compare(bench: Bench, options: argparse.Namespace) -> None:
    """Each target in a closed loop, then in an open loop at half of what it could do."""
    closed = Load("closed", {"n": options.n, "turns": options.turns}, shards=options.shards)
    for adapter in options.adapters:
        row = bench.run(adapter, closed)
        if row is None or not row["turns"] or options.closed_only:
            continue
        capacity = row["mid_turns_per_s"] or row["turns_per_s"]
        steady = {
            "rate": round(capacity / 2, 1), "turns": options.turns, "duration": options.open_s, "readback": "end",
            "period": options.period,
        }  # fmt: skip
        bench.run(adapter, replace(closed, name="open", options=steady))


def inflight(bench: Bench, options: argparse.Namespace) -> None:
    """2,000 calls at once, upstream latency 15 to 30 s, four shards."""
    load = {"n": 200 if options.quick else 2000, "turns": 2 if options.quick else 3, "kb_end": 60, "ramp": 10}
    bench.run("yoke", Load("inflight", load, latency_s=(15.0, 30.0), shards=4))


def kill(bench: Bench, options: argparse.Namespace) -> None:
    """Shards die all the time; clients ask again as harnesses do."""
    load = {"n": options.kill_n, "turns": options.turns, "duration": options.kills * options.kill_every}
    load |= {"retry": True, "rows": True}
    bench.run("yoke", Load("kill", load, (0.1, 0.5), options.shards, kill_every_s=options.kill_every))


def one_core(bench: Bench, options: argparse.Namespace) -> None:
    """One shard on a core of its own; generator and engine share the other."""
    load = {"n": options.n, "turns": options.turns}
    pins = {"target": "0", "engine": "1", "load": "1"}
    bench.run("yoke", Load("one-core", load, latency_s=(0.3, 1.0), shards=1, pins=pins))


def memory(bench: Bench, options: argparse.Namespace) -> None:
    """Sessions of 10 and of 40 turns with the same text a turn."""
    for turns in (10, 40):
        load = {"n": 20 if options.quick else 60, "turns": turns, "kb_step": 10}
        bench.run("yoke", Load(f"memory-{turns}", load, latency_s=(0.05, 0.2), shards=options.shards))


SCENARIOS = {"compare": compare, "inflight": inflight, "kill": kill, "one-core": one_core, "memory": memory}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", choices=[*SCENARIOS, "all"], default=["compare"])
    parser.add_argument("--adapters", nargs="+", default=["direct", "yoke", "openenv"], help="names or paths")
    parser.add_argument("--n", type=int, default=640, help="sessions")
    parser.add_argument("--turns", type=int, default=10, help="of a session")
    parser.add_argument("--dialects", default=",".join(DIALECTS))
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--open-s", type=float, default=30, help="measured seconds of the open loop")
    parser.add_argument("--period", type=float, default=3, help="seconds between turns of a session in the open loop")
    parser.add_argument("--closed-only", action="store_true", help="leave the open loop out")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kill-every", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--kill-n", type=int, default=60, help="clients while shards are killed")
    parser.add_argument("--quick", action="store_true", help="64 sessions of 5 turns")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-proxy.jsonl"), help="of JSON lines")
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.n, options.turns, options.open_s, options.period, options.kills = 64, 5, 6.0, 2.2, 10
    names = list(SCENARIOS) if "all" in options.scenario else options.scenario
    raise_open_files()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    bench = Bench(options.out, dialects=options.dialects)
    for name in names:
        SCENARIOS[name](bench, options)
    report = f"{table(bench.rows)}\n\n{verdicts(bench.rows)}"
    options.out.with_suffix(".md").write_text(report + "\n")
    print(report)
    sys.exit(1 if any(row["wrong"] or row["lost_sessions"] for row in bench.rows if row["adapter"] == "yoke") else 0)


if __name__ == "__main__":
    main()
