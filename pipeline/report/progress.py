"""Live progress of a run: a rich view in a terminal, one plain line an update elsewhere. Fed by plain dict events.

Events by ``kind``: ``phase`` (name; done and total for work that is counted), ``update`` (update, metrics), ``state``
(any of in_flight, queue, tokens_s, staleness), ``rollout`` (harness, reward, passed; differs: whether its tool calls
are not those of the harness's own log, None without one), ``message`` and ``error`` (text).
The names inside ``metrics`` are those of metrics.jsonl.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ERRORS_SHOWN = 3
RECENT = 48  # rollouts a harness that its live figures are taken over
REFRESH_PER_S = 2
WIDTH = 100
PACE = 8  # updates that the time left is judged by

Event = Mapping[str, Any]


@dataclass
class _Recent:
    """The latest rollouts of one harness."""

    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    passed: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    differs: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    done: int = 0

    def add(self, reward: float | None, passed: bool, differs: bool | None) -> None:
        self.done += 1
        if differs is not None:
            self.differs.append(differs)
        if reward is not None:
            self.rewards.append(reward)
            self.passed.append(passed)


@dataclass
class _State:
    """What the view shows."""

    total_updates: int
    update: int = 0
    phase: str = "starting"
    phase_done: int | None = None
    phase_total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    harnesses: dict[str, _Recent] = field(default_factory=dict)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=ERRORS_SHOWN))
    error_count: int = 0
    started: float = field(default_factory=time.monotonic)
    ticks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE + 1))

    def quarters(self) -> int:
        """How many quarters of a counted phase are done."""
        return 4 * (self.phase_done or 0) // self.phase_total if self.phase_total else 0

    def seconds_left(self) -> float | None:
        """Judged by the pace of the latest updates; None before the second."""
        if len(self.ticks) < 2:
            return None
        (first_time, first), (last_time, last) = self.ticks[0], self.ticks[-1]
        pace = (last_time - first_time) / max(1, last - first)
        return max(0.0, pace * (self.total_updates - last) - (time.monotonic() - last_time))


class Progress:
    """``with Progress(total) as progress: progress.event({...})``. Safe to call from several threads."""

    def __init__(self, total_updates: int, enabled: bool = True, stream: TextIO | None = None) -> None:
        """``stream`` is stdout by default; whether it is a terminal decides on the form. Disabled: errors only."""
        self._state = _State(total_updates)
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._enabled = enabled
        self._lock = threading.Lock()
        self._live = Live(
            get_renderable=self._locked_view, console=self._console, refresh_per_second=REFRESH_PER_S, transient=True
        )
        self._is_live = enabled and self._console.is_terminal

    def __enter__(self) -> Progress:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def event(self, event: Event) -> None:
        """Take one event. Raises ValueError on an unknown kind."""
        handler = _HANDLERS.get(event["kind"])
        if handler is None:
            raise ValueError(f"unknown progress event {event['kind']!r}; known: {', '.join(_HANDLERS)}")
        with self._lock:
            line = handler(self._state, event)
        if line is not None and self._says(event["kind"]):
            self._console.print(Text(line, style="red" if event["kind"] == "error" else ""), soft_wrap=True)

    def _says(self, kind: str) -> bool:
        """In a terminal the view shows updates and phases; only what would scroll out of it is printed above."""
        if not self._enabled:
            return kind == "error"
        return kind in ("error", "message") or not self._is_live

    def _locked_view(self) -> RenderableType:
        with self._lock:
            return _view(self._state, self._console.width)


def _on_phase(state: _State, event: Event) -> str | None:
    before = (state.phase, state.quarters())
    state.phase, state.phase_done, state.phase_total = event["name"], event.get("done"), event.get("total")
    if (state.phase, state.quarters()) == before:
        return None
    return f"[{clock(time.monotonic() - state.started)}] {_phase_text(state)}"


def _on_update(state: _State, event: Event) -> str:
    if event["update"] <= state.update:  # a new attempt went back to its checkpoint
        state.ticks.clear()
    state.update = event["update"]
    state.metrics = dict(event["metrics"])
    state.ticks.append((time.monotonic(), state.update))
    return _update_line(state)


def _on_state(state: _State, event: Event) -> None:
    state.figures |= {name: value for name, value in event.items() if name != "kind"}


def _on_rollout(state: _State, event: Event) -> None:
    state.harnesses.setdefault(event["harness"], _Recent()).add(event["reward"], event["passed"], event.get("differs"))


def _on_message(state: _State, event: Event) -> str:
    return f"[{clock(time.monotonic() - state.started)}] {event['text']}"


def _on_error(state: _State, event: Event) -> str:
    state.errors.append(event["text"].splitlines()[0] if event["text"] else "")
    state.error_count += 1
    return f"[{clock(time.monotonic() - state.started)}] error: {event['text']}"


_HANDLERS: dict[str, Callable[[_State, Event], str | None]] = {
    "phase": _on_phase,
    "update": _on_update,
    "state": _on_state,
    "rollout": _on_rollout,
    "message": _on_message,
    "error": _on_error,
}


def _update_line(state: _State) -> str:
    """One update as one line; figures that are not known are left out."""
    get = state.metrics.get
    harnesses = sorted(name.removesuffix("/pass_rate") for name in state.metrics if name.endswith("/pass_rate"))
    rates = " ".join(f"{name} {_percent(get(f'{name}/pass_rate'))}" for name in harnesses)
    parts = [
        f"update {state.update}/{state.total_updates}",
        _labelled("reward", get("reward"), "{:.3f}"),
        _labelled("pass", get("pass_rate"), "{:.0%}") + (f" ({rates})" if rates else ""),
        _labelled("stale", get("sample/staleness_mean"), "{:.1f}"),
        _labelled("queue", get("sample/rollout_queue_size"), "{:.0f}"),
        _labelled("", get("perf/trained_tok_s_wall_clock"), "{:,.0f} tok/s"),
        _labelled("", get("perf/step_s"), "{:.1f} s"),
        _labelled("left", state.seconds_left(), clock),
    ]
    return "  ".join(part for part in parts if part)


def _view(state: _State, console_width: int) -> RenderableType:
    parts: list[RenderableType] = [_bars(state), _figures_line(state)]
    if state.harnesses:
        parts.append(_harness_table(state))
    if state.errors:
        parts.append(Text(f"errors: {state.error_count}, the latest:", style="red"))
        parts += [Text(f"  {text}", style="red", no_wrap=True, overflow="ellipsis") for text in state.errors]
    elapsed = clock(time.monotonic() - state.started)
    return Panel(
        Group(*parts),
        title=f"yoke · {state.phase}",
        subtitle=elapsed,
        title_align="left",
        width=min(WIDTH, console_width),
    )


def _phase_text(state: _State) -> str:
    return state.phase if state.phase_total is None else f"{state.phase} {state.phase_done}/{state.phase_total}"


def _bars(state: _State) -> Table:
    grid = Table.grid(padding=(0, 1))
    left = state.seconds_left()
    _bar(grid, "updates", state.update, state.total_updates, "" if left is None else f"{clock(left)} left")
    if state.phase_total is not None:
        _bar(grid, state.phase, state.phase_done or 0, state.phase_total)
    return grid


def _bar(grid: Table, name: str, done: int, total: int, note: str = "") -> None:
    bar = ProgressBar(total=max(1, total), completed=done, width=40)
    grid.add_row(Text(f"{name} {done}/{total}", style="bold"), bar, Text(note))


def _figures_line(state: _State) -> Text:
    known = state.metrics.get
    live = state.figures.get
    parts = [
        _labelled("reward", known("reward"), "{:.3f}"),
        _labelled("pass", known("pass_rate"), "{:.0%}"),
        _labelled("stale", live("staleness", known("sample/staleness_mean")), "{:.1f}"),
        _labelled("in flight", live("in_flight"), "{:.0f}"),
        _labelled("queue", live("queue", known("sample/rollout_queue_size")), "{:.0f}"),
        _labelled("", live("tokens_s", known("perf/trained_tok_s_wall_clock")), "{:,.0f} tok/s"),
        _labelled("sync", known("perf/weight_sync_s"), "{:.2f} s"),
    ]
    return Text("   ".join(part for part in parts if part))


def _harness_table(state: _State) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("harness")
    for heading in ("rollouts", f"pass, last {RECENT}", f"reward, last {RECENT}", "log differs"):
        table.add_column(heading, justify="right")
    for name, recent in sorted(state.harnesses.items()):
        rewards, passed = list(recent.rewards), list(recent.passed)
        table.add_row(
            name,
            str(recent.done),
            f"{sum(passed) / len(passed):.0%}" if passed else "–",
            f"{sum(rewards) / len(rewards):.3f}" if rewards else "–",
            f"{sum(recent.differs) / len(recent.differs):.0%}" if recent.differs else "–",
        )
    return table


def _labelled(label: str, value: float | None, form: str | Callable[[float], str]) -> str:
    if value is None:
        return ""
    shown = form.format(value) if isinstance(form, str) else form(value)
    return f"{label} {shown}".strip()


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
