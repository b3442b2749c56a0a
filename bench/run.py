"""Runs the bench: fake engine, target and generator, each a process of its own, one target after the other.

    python -m bench.run                       the table: bare engine, our proxy, and the reference if it is installed
    python -m bench.run --scenario kill …     one of the other scenarios (see --help)
    python -m bench.run --quick               a minute or two

Prints a markdown table with verdicts, and writes it and every figure (JSON lines) under runs/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.contract import NotInstalled
from bench.dialects import DIALECTS
from bench.limits import raise_open_files
from bench.measure import RunFailed
from bench.rig import Load, run_load
from bench.table import table, verdicts

QUICK = {"n": 64, "turns": 4, "latency": (0.2, 0.8), "rest": 1.0, "open_s": 4.0, "period": 1.3, "kills": 10}


@dataclass
class Bench:
    """Runs loads one after the other and keeps their figures."""

    out: Path
    dialects: str = ",".join(DIALECTS)
    logs: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False

    def run(self, adapter: str, load: Load) -> dict[str, Any] | None:
        """The figures of one run; None when there are none, which is said."""
        self._say(f"{load.name}: {adapter} …")
        try:
            row = run_load(adapter, replace(load, options=load.options | {"dialects": self.dialects}), self.logs)
        except NotInstalled as error:
            self._say(f"{adapter} is left out: {error}")
            return None
        except RunFailed as error:
            self._say(f"{load.name}: {adapter} FAILED: {error}")
            self.failed = True
            return None
        row |= {"scenario": load.name, "adapter": adapter, "load_average": round(os.getloadavg()[0], 1)}
        self.rows.append(row)
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._say(summary(row))
        return row

    @staticmethod
    def _say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)


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
    load = {"n": options.n, "turns": options.turns}
    closed = Load("closed", load, tuple(options.latency), options.shards, rest_s=options.rest)
    for adapter in options.adapters:
        row = bench.run(adapter, closed)
        if row is None or not row["turns"] or options.closed_only:
            continue
        capacity = row["mid_turns_per_s"] or row["turns_per_s"]
        steady = {
            "rate": round(capacity / 2, 1), "turns": options.turns, "duration": options.open_s,
            "readback": "after" if adapter == "direct" else "end", "period": options.period,
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
    parser.add_argument("--latency", type=float, nargs=2, default=(0.5, 2.0), help="of the engine, in compare")
    parser.add_argument("--rest", type=float, default=5.0, help="seconds between a load and the reading of memory")
    parser.add_argument("--open-s", type=float, default=30, help="measured seconds of the open loop")
    parser.add_argument("--period", type=float, default=3, help="seconds between turns of a session in the open loop")
    parser.add_argument("--closed-only", action="store_true", help="leave the open loop out")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kill-every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--kill-n", type=int, default=40, help="clients while shards are killed")
    parser.add_argument("--quick", action="store_true", help="few sessions, short ones; the limits do not apply")
    parser.add_argument("--logs", type=Path, help="keep what the processes wrote, journals included, in this folder")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-proxy.jsonl"), help="of JSON lines")
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        vars(options).update(QUICK)
    names = list(SCENARIOS) if "all" in options.scenario else options.scenario
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    raise_open_files()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    bench = Bench(options.out, options.dialects, options.logs)
    for name in names:
        SCENARIOS[name](bench, options)
    report = f"{table(bench.rows)}\n\n{verdicts(bench.rows, limits=not options.quick)}"
    options.out.with_suffix(".md").write_text(report + "\n")
    print(report)
    sys.exit(
        1
        if bench.failed or any(row["wrong"] or row["lost_sessions"] for row in bench.rows if row["adapter"] == "yoke")
        else 0
    )


if __name__ == "__main__":
    main()
