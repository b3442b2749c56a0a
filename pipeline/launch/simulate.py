"""`yoke simulate`: what a job of these settings would do on 1 to 128 nodes, before any node is asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.config import Config, SimulateConfig, UserError
from pipeline.launch.simulation import HOUR_S, Simulated, simulate

IDLE = 0.1  # share of the slots' time that is worth a word
SHARES = ("no_contrast", "ungraded", "sync_failures", "lost_calls", "warned")

COLUMNS: tuple[tuple[str, Callable[[Simulated], str]], ...] = (
    ("nodes", lambda end: str(end.nodes)),
    ("groups/h", lambda end: f"{end.groups_per_hour:,.0f}"),
    ("ideal", lambda end: "{ideal:.0%}"),
    ("upd./h", lambda end: f"{end.state.update / end.seconds * HOUR_S:.1f}"),
    ("busy", lambda end: f"{end.slot_share('busy'):.0%}"),
    ("starved", lambda end: f"{end.slot_share('hungry'):.1%}"),
    ("asking", lambda end: f"{end.slot_share('asking', 'supplied'):.2%}"),
    ("down", lambda end: f"{end.slot_share('starting', 'syncing', 'down'):.0%}"),
    ("waits", lambda end: f"{end.trainer_share('wait', 'start'):.0%}"),
    ("stale", lambda end: f"{fmean(end.tally.staleness):.1f}/{max(end.tally.staleness)}"),
    ("lost", lambda end: str(lost_rollouts(end))),
    ("rpc/s", lambda end: f"{sum(end.tally.calls.values()) / end.seconds:.0f}"),
)
LEGEND = """\
groups/h: groups trained an hour, and how near that is to the first row's rate times the nodes.
busy, starved (no credit), asking, down: what the slots of the engines did.
waits: the trainer's share of time without a batch.
stale: updates between the weights that sampled a group and those it trained, mean/most.
lost: rollouts that were running when an engine or the job was lost. rpc/s: calls to the coordinator."""


def run(config: Config) -> int:
    """Simulate each size, print a table and what bounds each. Returns 1 if a promise was broken."""
    check(config.simulate)
    results = []
    for nodes in config.simulate.nodes:
        with tempfile.TemporaryDirectory(prefix="yoke-simulate-") as place:
            results.append(simulate(config, nodes, Path(place)))
    console = Console()
    console.print(table(results))
    console.print(LEGEND, highlight=False)
    for end in results:
        console.print(f"{end.nodes} nodes: {bound(end)}", highlight=False)
    complaints = [f"{end.nodes} nodes: {text}" for end in results for text in end.complaints()]
    for text in complaints:
        console.print(f"BROKEN: {text}", highlight=False)
    return int(bool(complaints))


def check(settings: SimulateConfig) -> None:
    """Raises UserError for a value that cannot be."""
    if not settings.nodes or min(settings.nodes) < 1:
        raise UserError(f"simulate.nodes={settings.nodes}: a list of numbers from 1, for example [1,4,16]")
    if settings.updates < 1:
        raise UserError(f"simulate.updates={settings.updates}: must be at least 1")
    for name in SHARES:
        if not 0 <= getattr(settings, name) <= 1:
            raise UserError(f"simulate.{name}={getattr(settings, name)}: a share is between 0 and 1")
    for name, value in vars(settings).items():
        if isinstance(value, int | float) and value < 0:
            raise UserError(f"simulate.{name}={value}: must not be negative")
    if max(settings.sync_failures, settings.lost_calls) == 1 or settings.no_contrast == 1 or settings.rollout_s == 0:
        raise UserError(
            "simulate.no_contrast, sync_failures or lost_calls of 1, or rollout_s of 0: such a run would never end"
        )


def table(results: list[Simulated]) -> Table:
    """One row a size. The ideal is the smallest size, as many times as the nodes are more."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title, _ in COLUMNS:
        shown.add_column(title, justify="right")
    first = results[0]
    for end in results:
        ideal = end.groups_per_hour / (first.groups_per_hour * end.nodes / first.nodes)
        shown.add_row(*(show(end).format(ideal=ideal) for _, show in COLUMNS))
    return shown


def lost_rollouts(end: Simulated) -> int:
    return sum(lost for _, lost in (*end.tally.interruptions, *end.tally.engine_losses))


def bound(end: Simulated) -> str:
    """What keeps this size from going faster, and which setting to turn."""
    if end.slot_share("down", "starting") > IDLE:
        return "engines are down much of the time: losses and interruptions cost more than anything else"
    if end.slot_share("hungry") <= IDLE:
        return "bound by rollouts: all slots are busy; more nodes help"
    if end.trainer_share("update", "checkpoint", "sync") > 1 - 2 * IDLE:
        return "bound by the trainer: it is always busy; more rollouts cannot be used"
    return (
        "slots stand idle for want of credits: raise algorithm.max_outstanding_rollouts, or else "
        "algorithm.groups_per_update or algorithm.max_staleness"
    )
