"""The bench's figures as a markdown table: one row a run, with the ratios that the runs of one scenario have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
STALL = "yoke_loop_stall_max_seconds"


def table(rows: Sequence[Row]) -> str:
    """The table."""
    head = [title for title, _ in COLUMNS]
    lines = [head, ["---"] * len(head)]
    lines += [[show(row, rows) for _, show in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(row: Row, rows: Sequence[Row], other: str) -> str:
    """How many times the throughput of another target in the same scenario."""
    base = next((r for r in rows if r["scenario"] == row["scenario"] and r["adapter"] == other), None)
    if base is None or base is row or row["scenario"] != "closed" or not base["turns_per_s"]:
        return "–"
    return f"{row['turns_per_s'] / base['turns_per_s']:.2f}"


def milliseconds(name: str) -> Callable[[Row, Sequence[Row]], str]:
    """A column in ms of a figure in s."""
    return lambda row, rows: "–" if row.get(name) is None else f"{row[name] * 1000:.1f}"


def plain(name: str) -> Callable[[Row, Sequence[Row]], str]:
    """A column as it is."""
    return lambda row, rows: str(row.get(name, "–"))


def stall(row: Row, rows: Sequence[Row]) -> str:
    """The longest stall of a shard's loop, by the target's own metrics."""
    values = [value for name, value in row.get("metrics", {}).items() if name.startswith(STALL)]
    return f"{max(values) * 1000:.1f}" if values else "–"


def memory(row: Row, rows: Sequence[Row]) -> str:
    """MB a session; an open loop or a longer load leaves more sessions than were counted."""
    return "–" if row["adapter"] == "direct" else f"{row['mb_session']:.2f}"


def breaks(row: Row, rows: Sequence[Row]) -> str:
    """Prompts that do not extend the call before."""
    return str(row["trace"]["continuity_breaks"])


COLUMNS: list[tuple[str, Callable[[Row, Sequence[Row]], str]]] = [
    ("scenario", plain("scenario")),
    ("target", plain("adapter")),
    ("sessions", plain("sessions")),
    ("in flight", lambda row, rows: str(row["engine"]["max_inflight"])),
    ("turns/s", plain("turns_per_s")),
    ("x bare", lambda row, rows: ratio(row, rows, "direct")),
    ("x reference", lambda row, rows: ratio(row, rows, "openenv")),
    ("CPU ms/turn", plain("cpu_ms_turn")),
    ("MB/session", memory),
    ("added p50 ms", milliseconds("added_p50_s")),
    ("added p99 ms", milliseconds("added_p99_s")),
    ("stall max ms", stall),
    ("health p99 ms", milliseconds("health_p99_s")),
    ("kills", plain("kills")),
    ("lost", plain("lost_sessions")),
    ("wrong", plain("wrong")),
    ("breaks", breaks),
    ("load avg", plain("load_average")),
]
