"""Prometheus metrics of `yoke proxy`, made from the shards' heartbeats when they are asked for.

Counts are those since the proxy's start and do not fall when a shard is replaced; they lag by up to a heartbeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pipeline.capture.shard import LAG_MS
from pipeline.capture.shard_process import ShardFigures
from pipeline.capture.turn import ADDED_MS

# prefix of a shard's count -> metric, label, description
FAMILIES = {
    "turns_": ("yoke_turns", "dialect", "Answers given"),
    "fork_": ("yoke_forks", "cause", "Calls that started a new root in a session that had calls already"),
    "dropped_": ("yoke_dropped_fields", "field", "Request fields without effect"),
    "status_": ("yoke_errors", "status", "Requests answered by an error"),
}
# a shard's count -> description, in the metric yoke_events
EVENTS = {
    "aborted": "the client left before the answer",
    "undelivered": "the client left before the answer was all out",
    "redelivered": "a retry got the answer that its first try had not",
    "foreign": "a call that something made which the agent had started",
    "unattributed": "a call of which nobody could say who made it",
    "left_early": "the client left while it asked or waited",
    "over_budget": "a call was refused since the session's budget was used up",
    "context_full": "the prompt filled the model's window",
    "engine_failures": "the upstream could not serve a call",
    "outages": "in text mode: a call waited for an upstream that was away or busy",
    "engine_aborts": "the engine aborted a sample, which was drawn again",
    "resampled": "a sample had begun under newer weights and was drawn again",
    "unversioned": "the engine had no policy weights yet",
    "arguments_rewritten": "a harness changed the arguments of one of our calls",
    "drift": "a history that continues a call did not render to its ids",
    "audited": "a prompt of spliced ids was compared with the whole history rendered",
    "audit_failed": "such a comparison failed",
    "internal_errors": "the proxy itself failed",
}
GAUGES = {
    "sessions": "Open sessions",
    "in_flight": "Calls from the request to the delivered answer",
    "upstream": "Those of them that wait for the upstream",
    "journal_bytes": "Size of the shard's journal",
}
NOT_EVENTS = ("added_ms_", "added_us", "lag_ms_", "lag_us", "calls", *FAMILIES)


class ProxyMetrics(Collector):
    """What a scrape sees. ``sessions`` gives (open, closed, expired so far)."""

    def __init__(self, figures: Callable[[], list[ShardFigures]], sessions: Callable[[], Mapping[str, int]]) -> None:
        self._figures, self._sessions = figures, sessions
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """The families, for prometheus-client."""
        shards = self._figures()
        total: Counter[str] = Counter()
        for shard in shards:
            total.update(shard.totals)
        yield from _processes(shards)
        yield from _counts(total)
        yield _histogram("yoke_added_latency_seconds", "Time of a turn beside the upstream's", total, "added", ADDED_MS)
        yield _histogram("yoke_loop_lag_seconds", "Delays of the shards' event loops", total, "lag", LAG_MS)
        sessions = GaugeMetricFamily("yoke_sessions", "Sessions that are known", labels=["state"])
        counts = self._sessions()
        for state in ("open", "closed"):
            sessions.add_metric([state], counts[state])
        yield sessions
        yield CounterMetricFamily("yoke_sessions_expired", "Sessions closed for idleness", counts["expired"])


def _processes(shards: list[ShardFigures]) -> Iterator[Any]:
    """What is told a shard."""
    for name, about in GAUGES.items():
        gauge = GaugeMetricFamily(f"yoke_shard_{name}", about, labels=["shard"])
        for shard in shards:
            gauge.add_metric([str(shard.index)], shard.gauges.get(name, 0))
        yield gauge
    up = GaugeMetricFamily("yoke_shard_pid", "Process id of the shard; 0 while it is replaced", labels=["shard"])
    restarts = CounterMetricFamily("yoke_shard_restarts", "Shard processes that were replaced", labels=["shard"])
    stall = GaugeMetricFamily(
        "yoke_loop_stall_max_seconds", "Longest delay of the loop in the last minute", labels=["shard"]
    )
    for shard in shards:
        up.add_metric([str(shard.index)], shard.pid or 0)
        restarts.add_metric([str(shard.index)], shard.restarts)
        stall.add_metric([str(shard.index)], max(shard.stalls, default=0.0))
    yield from (up, restarts, stall)


def _counts(total: Counter[str]) -> Iterator[Any]:
    """What is summed over shards."""
    yield CounterMetricFamily("yoke_calls", "Calls recorded", total["calls"])
    for prefix, (name, label, about) in FAMILIES.items():
        family = CounterMetricFamily(name, about, labels=[label])
        for count in sorted(count for count in total if count.startswith(prefix)):
            family.add_metric([count.removeprefix(prefix)], total[count])
        yield family
    events = CounterMetricFamily("yoke_events", "Rare things; docs/capture.md says what each means", labels=["event"])
    for event in {**EVENTS, **dict.fromkeys(sorted(total), "")}:
        if not event.startswith(NOT_EVENTS):
            events.add_metric([event], total[event])
    yield events


def _histogram(name: str, about: str, total: Counter[str], prefix: str, bounds: tuple[int, ...]) -> Any:
    """A histogram from a shard's counts ``<prefix>_ms_<bound>`` (not cumulative) and the sum ``<prefix>_us``."""
    buckets, below = [], 0
    for bound, edge in (*((str(bound), str(bound / 1000)) for bound in bounds), ("more", "+Inf")):
        below += total[f"{prefix}_ms_{bound}"]
        buckets.append((edge, below))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=total[f"{prefix}_us"] / 1e6)
