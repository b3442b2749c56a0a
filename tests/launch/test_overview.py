"""What the coordinator says of a run when `yoke status` asks."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.cli import compose_config
from pipeline.launch.coordinator import ERRORS_KEPT, Coordinator
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import TaskRef
from pipeline.stages.flow import FlowState, GroupFlow
from pipeline.stages.schedule import make_schedule

HEALTH = {"memory_used_gib": 3.0, "gpus": [], "gpu_error": None}
STATS = {
    "in_flight": 3,
    "queued": 2,
    "tokens_s": 12.5,
    "engine_restarts": 1,
    "counters": {"infrastructure: the sandbox died": 2, "outcome: solved": 9},
    "shards": {"fork_compaction": 4, "fork_retry": 1, "undelivered": 6, "shards_alive": 2, "shard_restarts": 1},
    "health": HEALTH,
}


def make_coordinator(folder: Path) -> Coordinator:
    config = compose_config(
        ["+experiment=smoke", f"run_dir={folder}", "cluster.nodes=3", "algorithm.max_outstanding_rollouts=20"]
    )
    state = FlowState(
        update=3, ended={"a": ["trained", ""], "b": ["trained", ""], "c": ["skipped", ""]}, set_aside={"codex": "why"}
    )
    tasks = [TaskRef(f"t{i}", Path(f"/tasks/t{i}")) for i in range(6)]
    flow = GroupFlow(make_schedule(tasks, config), config.algorithm, 8, state, 1)
    return Coordinator(config, RunDirectory(folder).new_attempt(), flow)


def test_it_tells_the_queue_the_counts_and_each_node(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run")
    coordinator.register("node0", "http://x", "http://y")
    coordinator.set_weights(coordinator.engines["node0"], "1.0")
    coordinator.heartbeat("node0", STATS, [])
    coordinator.heartbeat("node1", STATS | {"queued": 5}, [])  # its vLLM starts
    coordinator.set_phase("train")
    assert coordinator.lease("node0")["work"]
    for number in range(ERRORS_KEPT + 2):
        coordinator.emit("error", text=f"error {number}")
    seen = json.loads(json.dumps(coordinator.overview()))
    size = coordinator.config.algorithm.group_size
    assert seen["updates"] == {"done": 3, "planned": 8}
    assert seen["phase"] == {"name": "train", "done": None, "total": None}
    assert seen["rollouts"] == {
        "in_flight": 6,
        "queued": 7,
        "groups_out": 1,
        "groups_ready": 0,
        "credits_used": size,
        "credits": 20,
    }
    assert seen["counts"] == {
        "forks": 10,
        "undelivered": 12,
        "infrastructure": 4,
        "groups_trained": 2,
        "groups_skipped": 1,
        "groups_abandoned": 0,
        "dropped_stale": 0,
    }
    assert seen["set_aside"] == {"codex": "why"}
    assert [error["text"] for error in seen["errors"]] == [f"error {n}" for n in range(2, ERRORS_KEPT + 2)]
    first, second, third = seen["nodes"]
    assert (first["name"], first["vllm"], first["weights"], first["restarts"]) == ("node0", "up", "1.0", 1)
    assert (first["shards_alive"], first["shard_restarts"], first["memory_used_gib"]) == (2, 1, 3.0)
    assert (second["name"], second["vllm"], second["weights"]) == ("node1", "down", None)
    assert 0 <= first["silent_s"] < 60
    assert (third["name"], third["vllm"], third["silent_s"]) == ("node2", "down", None), "one that has not called yet"
    assert coordinator.flow
    coordinator.flow.state.ended["d"] = ["skipped", ""]
    again = coordinator.overview()["counts"]
    assert (again["groups_trained"], again["groups_skipped"]) == (2, 2)


def test_it_can_be_asked_before_anything_is_there(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run")
    assert [node["vllm"] for node in coordinator.overview()["nodes"]] == ["down"] * 3
    bare = Coordinator(coordinator.config, coordinator.attempt, None)  # an evaluation by itself has no schedule
    assert bare.overview()["updates"] == {"done": 0, "planned": 0}
