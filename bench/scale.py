"""What coordination costs on node 0: the real coordinator behind its real server, asked by scripted engine ranks.

    python -m bench.scale                    1 to 128 nodes, half a minute each; prints a table
    python -m bench.scale --nodes 16,128     some sizes
    python -m bench.scale --out docs         also writes docs/scale.json and docs/images/scale.png

Engine ranks are threads of a second process: they lease, beat and close over HTTP as often as nodes with 32 slots and
rollouts of 83 s in the mean do, and write real group files. The trainer is scripted, its waits are real.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.launch import storage as storage_module
from pipeline.launch.coordinator import Coordinator, spec_from_json
from pipeline.launch.engine_rank import HEARTBEAT_S
from pipeline.launch.rpc import RpcClient, RpcError, RpcServer
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.simulation import simulate
from pipeline.launch.snapshotter import Snapshotter
from pipeline.launch.trainer_rank import ENGINE_SILENCE_S
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Row, TaskRef, Verdict
from pipeline.report.plot import BLUE, GREEN, GREY, ORANGE, RED
from pipeline.report.store import publish, read_group, write_group, write_json
from pipeline.stages.flow import FlowState, GroupFlow
from pipeline.stages.schedule import make_schedule

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
SLOTS = 32  # rollouts at once on a node
GROUP = 8
ROLLOUT_S = 83.0  # mean: a median of 60 s with the spread of `yoke simulate`
UPDATE_S = 10.0
TOKENS, SAMPLED = 20_000, 2_000  # of a rollout's row
NO_CONTRAST = 0.3
WARM_UP_S = 5.0
LOOK_S = 0.5
STATS = {
    "in_flight": SLOTS, "queued": 8, "tokens_s": 800.0, "engine_restarts": 0, "counters": {"outcome: solved": 5},
    "shards": {"sessions": 32, "in_flight": 16, "restarts": 0}, "health": {"gpus": [{"index": 0}] * 2},
}  # fmt: skip


def settings(nodes: int) -> Config:
    """A run that never ends and is never short of credits."""
    credits = 4 * SLOTS * nodes
    return compose_config(
        [
            "mix.harnesses=[pi,codex,opencode]", f"algorithm.group_size={GROUP}", "training.updates=100000",
            f"algorithm.groups_per_update={max(1, nodes // 2)}", f"algorithm.max_outstanding_rollouts={credits}",
            "algorithm.max_staleness=20",
        ]
    )  # fmt: skip


def serve(nodes: int, place: Path, seconds: float, pipe: Connection) -> None:
    """The coordinator's process: tells where it listens, and at the end what it cost."""
    config = settings(nodes)
    attempt = RunDirectory(place).new_attempt()
    tasks = [TaskRef(f"t{number}", Path(f"t{number}")) for number in range(512)]
    flow = GroupFlow(make_schedule(tasks, config), config.algorithm, config.training.updates, FlowState(), 1)
    coordinator = Coordinator(config, attempt, flow)
    coordinator.set_phase("train")
    counts: dict[str, int] = {}
    reading = _timed_reading()
    token = secrets.token_hex(8)
    server = RpcServer({name: _counted(name, method, counts) for name, method in coordinator.methods.items()}, token)
    snapshots = Snapshotter(attempt.run.status, coordinator.overview, lambda: coordinator.phase, attempt.check_fence)
    _warm(attempt.groups / "first.parquet", flow)
    pipe.send((server.url, token, str(attempt.groups)))
    _train(coordinator, lambda: pipe.poll())
    pipe.recv()  # all engine ranks have registered
    _train(coordinator, _for(WARM_UP_S))
    counts.clear()
    reading.clear()
    begun, cpu, main = time.monotonic(), time.process_time(), time.thread_time()
    updates = _train(coordinator, _for(seconds))
    wall = time.monotonic() - begun
    cpu, main = (time.process_time() - cpu) / wall, (time.thread_time() - main) / wall
    started = time.thread_time()
    coordinator.flow_state()
    state_s = time.thread_time() - started
    coordinator.stop()
    snapshots.stop()
    pipe.send({"cpu": cpu, "reading": sum(reading) / wall, "main": main, "updates": updates, "flow_state_s": state_s}
              | {f"{name}_s": count / wall for name, count in counts.items()})  # fmt: skip
    pipe.recv()  # the engines have ended
    server.stop()


def _timed_reading() -> list[float]:
    """CPU seconds of each group file that the coordinator reads from now on."""
    spent: list[float] = []

    def timed(path: Path) -> tuple[RolloutRecord, ...]:
        begun = time.thread_time()
        records = read_group(path)
        spent.append(time.thread_time() - begun)
        return records

    storage_module.read_group = timed
    return spent


def _warm(path: Path, flow: GroupFlow) -> None:
    """What happens once in a run's life, as the loading of libraries, is not counted."""
    write_group(path, _records(flow.schedule.group(0), _row()))
    for _ in range(10):
        read_group(path)


def _counted(name: str, method: Callable[..., Any], counts: dict[str, int]) -> Callable[..., Any]:
    def counted(**arguments: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return method(**arguments)

    return counted


def _for(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def _train(coordinator: Coordinator, over: Callable[[], bool]) -> int:
    """The trainer's loop, with updates that sleep as a trainer on a GPU does."""
    updates = 0
    flow = coordinator.flow
    assert flow is not None
    batch, done_at = None, 0.0
    while not over():
        if batch is None and (batch := coordinator.take_batch()) is not None:
            done_at = time.monotonic() + UPDATE_S
        if batch is not None:
            time.sleep(LOOK_S)
            if time.monotonic() < done_at:
                continue
            coordinator.finish_update(batch)
            batch, updates = None, updates + 1
        coordinator.attempt.check_fence()
        coordinator.lost_engines(ENGINE_SILENCE_S)
        for engine in coordinator.unsynced(str(flow.version)):
            coordinator.set_weights(engine, str(flow.version))
        coordinator.wait(LOOK_S)
    return updates


class Engine:
    """One node's calls: a beat a second, and its groups, each leased when another one was closed."""

    def __init__(
        self, number: int, url: str, token: str, groups: Path, row: Row, waits: dict[str, list[float]]
    ) -> None:
        self.name, self.groups, self.row, self.waits = f"node{number}", groups, row, waits
        self.client = RpcClient(url, token)
        self.random = random.Random(number)
        self.held: set[str] = set()
        self.over = threading.Event()

    def threads(self) -> list[threading.Thread]:
        return [threading.Thread(target=run, daemon=True) for run in (self._beat, *[self._work] * (SLOTS // GROUP))]

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        begun = time.monotonic()
        answer = self.client.call(method, 120.0, engine=self.name, **arguments)
        self.waits.setdefault(method, []).append(time.monotonic() - begun)
        return answer

    def _beat(self) -> None:
        self.over.wait(self.random.random())
        while not self.over.wait(HEARTBEAT_S):
            with suppress(RpcError):
                self.call("heartbeat", stats=STATS, held=sorted(self.held))

    def _work(self) -> None:
        share = self.random.random()  # the first one is under way already
        while not self.over.is_set():
            try:
                work = self.call("lease")["work"]
                if work is None:
                    continue
                self.held.add(work["group_id"])
                self.over.wait(share * self.random.gammavariate(4, ROLLOUT_S / 4))
                share = 1.0
                path = self.groups / f"{work['group_id']}.parquet"
                write_group(path, _records(spec_from_json(work), self.row))
                self.call("close", work=work, path=str(path))
                self.held.discard(work["group_id"])
            except RpcError:
                return  # the coordinator has ended


def _records(spec: GroupSpec, row: Row) -> list[RolloutRecord]:
    alike = random.Random(spec.group_id).random() < NO_CONTRAST
    version = PolicyVersion(1, 0)
    return [
        RolloutRecord(
            f"{spec.group_id}-{index}", spec.group_id, index, spec.task.task_id, spec.harness, Outcome.SOLVED,
            Verdict(None, 1.0 if alike else float(index % 2), 5), (row,), version, version, 10, 0, 0, 9 * TOKENS,
            SAMPLED, ROLLOUT_S, {"harness_version": "1.0.0"},
        )
        for index in range(spec.size)
    ]  # fmt: skip


def _row() -> Row:
    """Ids as frequent as words are; the last ones sampled."""
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) >= TOKENS - SAMPLED
    logprobs = np.where(mask, -rng.exponential(size=TOKENS), 0.0).astype(np.float32)
    return Row((rng.zipf(1.3, TOKENS) % 50_000).astype(np.int32), mask, logprobs)


def ask(nodes: int, url: str, token: str, groups: Path, pipe: Connection) -> None:
    """The engines' process: tells at the end how long calls took."""
    waits: dict[str, list[float]] = {}
    row = _row()
    engines = [Engine(number, url, token, groups, row, waits) for number in range(nodes)]
    for engine in engines:
        engine.call("register", url="", control_url="")
        for thread in engine.threads():
            thread.start()
    pipe.send("registered")
    pipe.recv()
    for engine in engines:
        engine.over.set()
    pipe.send({name: sorted(times) for name, times in waits.items()})


def measure(nodes: int, seconds: float) -> dict[str, Any]:
    """One size: what it cost, and how long calls took."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="yoke-scale-") as place:
        server, server_end = context.Pipe()
        clients, clients_end = context.Pipe()
        first = context.Process(target=serve, args=(nodes, Path(place), seconds, server_end), daemon=True)
        first.start()
        url, token, groups = server.recv()
        second = context.Process(target=ask, args=(nodes, url, token, Path(groups), clients_end), daemon=True)
        second.start()
        clients.recv()
        server.send("measure")
        figures = server.recv()
        clients.send("end")
        waits = clients.recv()
        server.send("end")
        first.join(30)
        second.join(30)
    figures |= {f"{name}_{share:.0%}_ms": 1000 * times[math.ceil(share * len(times)) - 1]
                for name, times in waits.items() for share in (0.5, 0.99)}  # fmt: skip
    return {"nodes": nodes, "seconds": seconds, "load": os.getloadavg()[0]} | figures


def simulated(nodes: int) -> dict[str, float]:
    """The same nodes on the virtual clock, with engines that are lost once a day and jobs that end twice a day."""
    config = compose_config(
        [
            "mix.harnesses=[pi,codex,opencode]", f"concurrency={SLOTS}", "simulate.updates=6", "training.updates=100",
            "simulate.engine_loss_h=24", "simulate.interruption_h=12", "+simulate.slower.opencode=2",
        ]
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="yoke-scale-") as place:
        end = simulate(config, nodes, Path(place))
    if complaints := end.complaints():
        raise RuntimeError(f"{nodes} nodes: {complaints}")
    return {
        "groups_h": end.groups_per_hour,
        "busy": end.slot_share("busy"),
        "asking": end.slot_share("asking"),
        "staleness": max(end.tally.staleness),
    }


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("nodes", "nodes", "{:.0f}".format),
    ("groups trained/h (simulated)", "groups_h", "{:,.0f}".format),
    ("slots busy", "busy", "{:.1%}".format),
    ("slots idle while asking", "asking", "{:.3%}".format),
    ("calls/s", "calls_s", "{:.0f}".format),
    ("groups closed/s", "close_s", "{:.2f}".format),
    ("coordination, of one core", "coordination", "{:.2%}".format),
    ("reading rows, of one core", "reading", "{:.2%}".format),
    ("heartbeat, median ms", "heartbeat_50%_ms", "{:.1f}".format),
    ("close, median ms", "close_50%_ms", "{:.1f}".format),
)
CALLS = ("lease_s", "close_s", "heartbeat_s", "register_s")
LIMITS = ((16, 0.01), (128, 0.05))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        row = row | {"calls_s": sum(value for name, value in row.items() if name in CALLS)}
        lines.append("| " + " | ".join(show(row[name]) if name in row else "–" for _, name, show in COLUMNS) + " |")
    return "\n".join(lines)


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What the coordinator costs, with its limits, and how the simulated job grows."""
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    nodes = [row["nodes"] for row in rows]
    left.plot(
        nodes, [100 * row["coordination"] for row in rows], color=BLUE, marker="o", label="coordination, measured"
    )
    left.plot(nodes, [100 * row["reading"] for row in rows], color=ORANGE, marker="o", label="reading rows, measured")
    left.plot(*zip(*((size, 100 * limit) for size, limit in LIMITS), strict=True), "x", color=RED, label="limits")
    left.set_ylabel("% of one core of node 0")
    right.plot(nodes, [row["groups_h"] for row in rows], color=GREEN, marker="o", label="simulated")
    right.plot(nodes, [rows[0]["groups_h"] / nodes[0] * size for size in nodes], ":", color=GREY, label="ideal")
    right.set_ylabel("groups trained an hour")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("nodes")
        axes.set_xticks(nodes, [str(size) for size in nodes])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)
    publish(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for nodes in map(int, given.nodes.split(",")):
        row = measure(nodes, given.seconds)
        rows.append(row | {"coordination": row["cpu"] - row["reading"]} | simulated(nodes))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if given.out:
        write_json(given.out / "scale.json", rows)
        picture(rows, given.out / "images" / "scale.png")


if __name__ == "__main__":
    main()
