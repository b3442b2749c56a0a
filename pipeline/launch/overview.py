"""How a run stands, as the coordinator knows it: the answer to `overview`, and the contents of status.json.

Plain data from memory; docs/status.md says what the keys mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pipeline.config import AlgorithmConfig
from pipeline.stages.flow import GroupFlow


def rollouts_overview(flow: GroupFlow | None, algorithm: AlgorithmConfig, stats: Mapping[str, Any]) -> dict[str, Any]:
    """The queue: rollouts on the engines, groups out and ready, and the credits that they take."""
    nodes = stats.values()
    return {
        "in_flight": sum(node.get("in_flight", 0) for node in nodes),
        "queued": sum(node.get("queued", 0) for node in nodes),
        "groups_out": len(flow.leases) if flow else 0,
        "groups_ready": len(flow.ready) if flow else 0,
        "credits_used": flow.outstanding_rollouts if flow else 0,
        "credits": algorithm.max_outstanding_rollouts,
    }


class EndedGroups:
    """How many groups ended which way. Looks at each once, since there may be very many."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seen = 0

    def count(self, flow: GroupFlow | None) -> Counter[str]:
        if flow is not None:
            ended = flow.state.ended  # in the order in which they ended
            self._counts.update(str(ending) for ending, _ in islice(ended.values(), self._seen, None))
            self._seen = len(ended)
        return self._counts


def counts_overview(flow: GroupFlow | None, ended: Counter[str], stats: Mapping[str, Any]) -> dict[str, int]:
    """What ended how: groups since the run's start, the rest since this attempt's."""
    total: Counter[str] = Counter()
    for node in stats.values():
        for name, amount in node.get("shards", {}).items():
            total["forks"] += amount * name.startswith("fork_")
            total["undelivered"] += amount * (name == "undelivered")
        for name, amount in node.get("counters", {}).items():
            total["infrastructure"] += amount * name.startswith("infrastructure: ")
    return {
        **{name: total[name] for name in ("forks", "undelivered", "infrastructure")},
        **{f"groups_{ending}": ended[ending] for ending in ("trained", "skipped", "abandoned")},
        "dropped_stale": flow.dropped_stale if flow else 0,
    }


def node_overview(name: str, stats: Mapping[str, Any], weights: str | None, silent_s: float | None) -> dict[str, Any]:
    """One node. ``weights``: what its registered vLLM serves ("" before the first sync), None while it is down."""
    shards = stats.get("shards", {})
    return {
        "name": name,
        "silent_s": silent_s,
        "vllm": "up" if weights is not None else "down",
        "weights": weights or None,
        "restarts": stats.get("engine_restarts", 0),
        "tokens_s": stats.get("tokens_s", 0.0),
        "in_flight": stats.get("in_flight", 0),
        "queued": stats.get("queued", 0),
        "shards_alive": shards.get("shards_alive", 0),
        "shard_restarts": shards.get("shard_restarts", 0),
        **stats.get("health", {}),
    }
