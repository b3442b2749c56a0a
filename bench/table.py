"""The bench's figures as a markdown table, and whether our proxy keeps within the limits that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Show = Callable[[Row, Sequence[Row]], str]
STALL = "yoke_loop_stall_max_seconds"


def table(rows: Sequence[Row]) -> str:
    """The table."""
    head = [title for title, _ in COLUMNS]
    lines = [head, ["---"] * len(head)]
    lines += [[show(row, rows) for _, show in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find(rows: Sequence[Row], scenario: str, adapter: str = "yoke") -> Row | None:
    """The row of a run."""
    return next((row for row in rows if row["scenario"] == scenario and row["adapter"] == adapter), None)


def ratio(row: Row, rows: Sequence[Row], other: str) -> float | None:
    """How many times the throughput of another target in the closed loop."""
    base = find(rows, "closed", other)
    if base is None or base is row or row["scenario"] != "closed" or not base["turns_per_s"]:
        return None
    return float(row["turns_per_s"] / base["turns_per_s"])


def times(other: str) -> Show:
    """A column of ratios."""

    def show(row: Row, rows: Sequence[Row]) -> str:
        value = ratio(row, rows, other)
        return "–" if value is None else f"{value:.2f}"

    return show


def milliseconds(name: str) -> Show:
    """A column in ms of a figure in s."""
    return lambda row, rows: "–" if row.get(name) is None else f"{row[name] * 1000:.1f}"


def plain(name: str) -> Show:
    """A column as it is."""
    return lambda row, rows: str(row.get(name, "–"))


def stall(row: Row) -> float | None:
    """Seconds of the longest stall of a shard's loop, by the target's own metrics."""
    return max((value for name, value in row.get("metrics", {}).items() if name.startswith(STALL)), default=None)


def stall_ms(row: Row, rows: Sequence[Row]) -> str:
    """The stall in ms."""
    seconds = stall(row)
    return "–" if seconds is None else f"{seconds * 1000:.1f}"


def memory(row: Row, rows: Sequence[Row]) -> str:
    """MB a session; an open loop or a longer load leaves more sessions than were counted."""
    return "–" if row["adapter"] == "direct" else f"{row['mb_session']:.2f}"


def breaks(row: Row, rows: Sequence[Row]) -> str:
    """Prompts that do not extend the call before."""
    return str(row["trace"]["continuity_breaks"])


COLUMNS: list[tuple[str, Show]] = [
    ("scenario", plain("scenario")),
    ("target", plain("adapter")),
    ("sessions", plain("sessions")),
    ("in flight", lambda row, rows: str(row["engine"]["max_inflight"])),
    ("turns/s", plain("turns_per_s")),
    ("x bare", times("direct")),
    ("x reference", times("openenv")),
    ("CPU ms/turn", plain("cpu_ms_turn")),
    ("MB/session", memory),
    ("added p50 ms", milliseconds("added_p50_s")),
    ("added p99 ms", milliseconds("added_p99_s")),
    ("stall max ms", stall_ms),
    ("health p99 ms", milliseconds("health_p99_s")),
    ("kills", plain("kills")),
    ("lost", plain("lost_sessions")),
    ("wrong", plain("wrong")),
    ("breaks", breaks),
    ("load avg", plain("load_average")),
]


# (scenario, what, how to get it, at least or at most, limit)
LIMITS: list[tuple[str, str, Callable[[Row, Sequence[Row]], float | None], str, float]] = [
    ("closed", "turns/s, times the bare engine's", lambda row, rows: ratio(row, rows, "direct"), "≥", 0.6),
    ("closed", "turns/s, times the reference's", lambda row, rows: ratio(row, rows, "openenv"), "≥", 5.0),
    ("closed", "CPU ms a turn", lambda row, rows: row["cpu_ms_turn"], "≤", 1.2),
    ("closed", "MB a session", lambda row, rows: row["mb_session"], "≤", 0.5),
    ("closed", "health p99 in s", lambda row, rows: row["health_p99_s"], "≤", 0.05),
    ("open", "added latency p99 in s", lambda row, rows: row["added_p99_s"], "≤", 0.05),
    ("open", "longest stall in s", lambda row, rows: stall(row), "≤", 0.1),
    ("open", "health p99 in s", lambda row, rows: row["health_p99_s"], "≤", 0.05),
    ("one-core", "turns/s of one process", lambda row, rows: row["mid_turns_per_s"], "≥", 500.0),
    ("inflight", "calls in flight at once", lambda row, rows: row["engine"]["max_inflight"], "≥", 2000.0),
    ("kill", "shards killed", lambda row, rows: row["kills"], "≥", 50.0),
    (
        "memory-40", "memory of 40 turns, times that of 10",
        lambda row, rows: row["mb_session"] / ten["mb_session"] if (ten := find(rows, "memory-10")) else None, "≤", 4.5,
    ),
]  # fmt: skip


def verdicts(rows: Sequence[Row], limits: bool = True) -> str:
    """One line for each limit that the runs can tell of; nothing lost and nothing wrong is asked of every run.

    ``limits=False``: the load was too small for them to mean anything.
    """
    lines = []
    for scenario, what, get, sign, limit in LIMITS if limits else []:
        row = find(rows, scenario)
        value = get(row, rows) if row is not None else None
        if value is not None:
            holds = value >= limit if sign == "≥" else value <= limit
            lines.append(
                f"- {'holds' if holds else 'FAILS'}: {scenario}: {what}: {value:.3g} (asked: {sign} {limit:g})"
            )
    for row in rows:
        if row["adapter"] == "yoke":
            lost, wrong = row["lost_sessions"], row["wrong"]
            lines.append(f"- {'FAILS' if lost or wrong else 'holds'}: {row['scenario']}: {lost} lost, {wrong} wrong")
    return "\n".join(lines)
