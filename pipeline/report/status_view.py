"""How `yoke status` looks: one screen for a run, one line a run for a sweep. Fed by the object of `--json`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.report.progress import clock

COLOURS = {
    "running": "green",
    "done": "green",
    "queued": "yellow",
    "stopped": "yellow",
    "unknown": "yellow",
    "failed": "red",
    "not started": "dim",
}
NOTHING = "–"
BAR = 30
MIB_PER_GIB = 1024
BYTES_PER_GB = 1e9
LEAST_WIDTH = 120  # of what is not shown in a terminal
Status = Mapping[str, Any]


class Screen:
    """Shows views: one after the other in place (``live``, in a terminal), else one below the other."""

    def __init__(self, live: bool = False) -> None:
        console = Console(highlight=False)
        self._console = console if console.is_terminal else Console(highlight=False, width=LEAST_WIDTH)
        self._live = Live(console=console, auto_refresh=False) if live and console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: RenderableType) -> None:
        if self._live is not None:
            self._live.update(view, refresh=True)
        else:
            self._console.print(view)


# --- one run


def run_view(status: Status) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_title(status), _figures(status)]
    if status["attempts"]:
        parts += [Text(), _attempts(status)]
    if status["nodes"]:
        parts += [Text(), _nodes(status["nodes"])]
    if status["errors"]:
        parts += [Text(), _errors(status["errors"])]
    return Group(*parts)


def _title(status: Status) -> Text:
    why = f" ({status['reason']})" if status["reason"] else ""
    return Text.assemble((status["run"], "bold"), "  ", (status["state"], COLOURS[status["state"]]), why)


def _figures(status: Status) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    rows: dict[str, RenderableType] = {
        "job": _job(status),
        "phase": _phase(status),
        "updates": _updates(status["updates"]),
        "reward": _reward(status["reward"]),
        "evaluation": _evaluation(status["evaluations"]),
        "staleness": _staleness(status),
        "rollouts": _rollouts(status["rollouts"]),
        "counts": _counts(status["counts"]),
        "checkpoint": _checkpoint(status["checkpoint"], status["time"]),
        "disk": _disk(status["disk"], status["time"]),
        "set aside": "\n".join(f"{harness}: {why}" for harness, why in status["set_aside"].items()),
        "silent": _silent(status),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, value)
    return grid


def _job(status: Status) -> str:
    job = status["job"]
    if job is None:
        return ""
    if job["kind"] == "local":
        gone = " (gone)" if job["alive"] is False else ""
        return f"process {job['pid']}{gone}" + (f" on {job['host']}" if job["host"] else "")
    parts = [
        f"Slurm {job['id']} {job['state'] or ''}".strip(),
        f"on {job['nodes']}" if job["nodes"] else _labelled("nodes", job["count"]),
        f"{job['left']} left" if job["on"] and job["left"] else "",
        f"expected to start {job['start']}" if job["waits"] and job["start"] not in (None, "N/A") else "",
        f"requeues {status['requeues']['used']} of {_or_nothing(status['requeues']['max'])}",
    ]
    return _joined(parts)


def _phase(status: Status) -> str:
    if status["state"] != "running":
        return ""
    phase = status["phase"]
    if phase is None:
        return "its ranks are starting"
    return phase["name"] + (f" {phase['done']} of {phase['total']}" if phase["total"] is not None else "")


def _updates(updates: Status) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(1, updates["planned"]), completed=updates["done"], width=BAR)
    pace = f"{updates['seconds_each']:.1f} s each" if updates["seconds_each"] is not None else ""
    left = f"{clock(updates['eta_s'])} to go" if updates["eta_s"] is not None else ""
    grid.add_row(f"{updates['done']} of {updates['planned']}", bar, _joined([pace, left]))
    return grid


def _reward(reward: Status) -> str:
    if reward["update"] is None:
        return ""
    harnesses = [f"{name} {_rewards(own)}" for name, own in reward["harnesses"].items()]
    return _joined([f"{_rewards(reward)} at update {reward['update']}", *harnesses])


def _rewards(values: Status) -> str:
    rate = NOTHING if values["pass_rate"] is None else f"{values['pass_rate']:.0%}"
    return f"{_number(values['reward'], '.3f')} (pass {rate})"


def _evaluation(evaluations: Sequence[Status]) -> str:
    return _joined([f"pass@1 {entry['pass@1']:.1%} after update {entry['update']}" for entry in evaluations[-3:]])


def _staleness(status: Status) -> str:
    values = status["staleness"]
    if values["mean"] is None:
        return ""
    sync, wait = status["weight_sync_s"], status["rollout_wait_s"]
    return _joined(
        [
            f"mean {values['mean']:.1f}, most {_number(values['max'], '.0f')} updates",
            "" if sync is None else f"weight sync {sync:.2f} s" + _phases(status["weight_sync_phases"]),
            "" if wait is None else f"waited {wait:.1f} s for rollouts",
        ]
    )


def _phases(phases: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {seconds:.2f}' for name, seconds in phases.items())})" if phases else ""


def _rollouts(rollouts: Status | None) -> str:
    if rollouts is None:
        return ""
    return _joined(
        [
            f"{rollouts['in_flight']} in flight",
            f"{rollouts['queued']} queued",
            f"{rollouts['groups_out']} groups out, {rollouts['groups_ready']} ready",
            f"credits {rollouts['credits_used']} of {rollouts['credits']}",
        ]
    )


def _counts(counts: Status | None) -> str:
    """Only what happened."""
    return _joined([f"{name.replace('_', ' ')} {count}" for name, count in (counts or {}).items() if count])


def _checkpoint(checkpoint: Status, now: float) -> str:
    newest = "none yet"
    if checkpoint["newest"] is not None:
        age = f", {clock(max(0.0, now - checkpoint['time']))} ago" if checkpoint["time"] else ""
        newest = f"{checkpoint['newest']}{age}"
    return _joined([newest, _labelled("next at update", checkpoint["next_update"])])


def _disk(disk: Status | None, now: float) -> str:
    """The run directory's size after the newest checkpoint."""
    if disk is None:
        return ""
    quota = f" of {disk['quota_gb']:g}" if disk["quota_gb"] else ""
    parts = sorted(disk["parts"].items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size / BYTES_PER_GB:.3g}" for name, size in parts if size)
    age = f"{clock(max(0.0, now - disk['time']))} ago"
    return _joined([f"{disk['bytes'] / BYTES_PER_GB:.3g}{quota} GB ({named})", age])


def _silent(status: Status) -> str:
    """Who does not answer, and how old the figures are because of that."""
    lines = [
        f"{name} for {source['silent_s']:.0f} s: {source['error']}"
        for name, source in status["sources"].items()
        if source["error"]
    ]
    figures = status["figures"]
    if status["state"] in ("running", "unknown") and figures["from"] == "status.json":
        lines.append(f"figures are from status.json, {status['time'] - figures['time']:.0f} s old")
    return "\n".join(lines)


def _attempts(status: Status) -> Table:
    table = _table("attempt", "started", "ended", "how", right=1)
    hidden = status["attempts_total"] - len(status["attempts"])
    if hidden:
        table.add_row("…", f"{hidden} before", "", "")
    for attempt in status["attempts"]:
        colour = {"running": "green", "done": "green", "failed": "red", "lost": "red"}.get(attempt["ending"], "yellow")
        how = Text(attempt["ending"], style=colour)
        if attempt["why"]:
            how.append(f": {attempt['why']}", style="")
        table.add_row(str(attempt["number"]), _moment(attempt["started"]), _moment(attempt["ended"]), how)
    return table


def _nodes(nodes: Sequence[Status]) -> Table:
    table = _table("node", "vLLM", "restarts", "weights", "tok/s", "in flight", "shards", "GPUs", "memory GiB", "load")
    for node in nodes:
        silent = (node["silent_s"] or 0.0) > 10.0
        vllm = f"silent {node['silent_s']:.0f} s" if silent else node["vllm"]
        table.add_row(
            node["name"],
            Text(vllm, style="green" if vllm == "up" else "red"),
            str(node["restarts"]),
            node["weights"] or NOTHING,
            f"{node['tokens_s']:,.0f}",
            str(node["in_flight"]),
            f"{node['shards_alive']} of {_or_nothing(node['shards'])}",
            _gpus(node),
            f"{_number(node.get('memory_used_gib'), '.0f')} of {_number(node.get('memory_gib'), '.0f')}",
            f"{_number(node.get('load'), '.1f')} of {_or_nothing(node.get('cpus'))}",
        )
    return table


def _gpus(node: Status) -> str:
    if "gpus" not in node:
        return NOTHING
    if node["gpus"] is None:
        return str(node["gpu_error"])
    return "\n".join(_gpu(gpu) for gpu in node["gpus"]) or "no GPU"


def _gpu(gpu: Status) -> str:
    used, total = ((gpu[key] or 0) / MIB_PER_GIB for key in ("used_mib", "total_mib"))
    busy = NOTHING if gpu["utilisation"] is None else f"{gpu['utilisation']}%"
    return f"{gpu['index']}: {busy}, {used:.0f} of {total:.0f} GiB"


def _errors(errors: Sequence[Status]) -> RenderableType:
    lines = [Text(f"{_moment(error['time'])}  {error['text'].splitlines()[0]}", style="red") for error in errors]
    return Group(Text("last errors", style="dim"), *lines)


# --- several runs


def runs_view(found: Sequence[Status]) -> Table:
    """One line a run."""
    table = _table("run", "state", "job", "updates", "reward", "to go", "why")
    for status in found:
        updates, job = status["updates"], status["job"]
        table.add_row(
            status["run"].rpartition("/")[2],
            Text(status["state"], style=COLOURS[status["state"]]),
            str(job["id"]) if job and job["kind"] == "slurm" else NOTHING,
            f"{updates['done']} of {updates['planned']}",
            _number(status["reward"]["reward"], ".3f"),
            clock(updates["eta_s"]) if updates["eta_s"] is not None else NOTHING,
            (status["reason"] or "").partition("\n")[0],
        )
    return table


# --- words


def _table(*headings: str, right: int = 0) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number < right else "left")
    return table


def _joined(parts: Sequence[str]) -> str:
    return " · ".join(part for part in parts if part)


def _labelled(label: str, value: object) -> str:
    return "" if value is None else f"{label} {value}"


def _or_nothing(value: object) -> str:
    return NOTHING if value is None else str(value)


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _moment(seconds: float | None) -> str:
    return NOTHING if seconds is None else time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
