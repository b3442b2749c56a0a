"""W&B's workspace for runs of Yoke: which panels it has, and the view that W&B takes. Making the view needs the package
wandb-workspaces (the extra `wandb`); no account and no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import UserError
from pipeline.report.metrics import FAILURES

NAME = "Yoke"
STEP = "update"
ANY = "{harness}"


@dataclass(frozen=True)
class Panel:
    """A line plot over updates. A metric with ANY in it stands for one of each harness; ``share``: from 0 to 1."""

    title: str
    metrics: tuple[str, ...]
    share: bool = False

    def names(self, harnesses: Sequence[str]) -> list[str]:
        """Its metrics when these harnesses run."""
        each = [[name.format(harness=own) for own in (harnesses if ANY in name else [""])] for name in self.metrics]
        return [name for names in each for name in names]


# Section → its panels, from top to bottom.
SHARED: dict[str, tuple[Panel, ...]] = {
    "Held-out tasks": (
        Panel("pass@1 of checkpoints", ("eval/pass@1", "eval/{harness}/pass@1"), share=True),
        Panel("Tool calls a rollout", ("eval/{harness}/tool_calls",)),
        Panel("Truncated at the token limit", ("eval/{harness}/truncation_rate",), share=True),
        Panel("Ended by the harness itself", ("eval/{harness}/submission_rate",), share=True),
        Panel("Out of time", ("eval/{harness}/timeout_rate",), share=True),
        Panel("Graded share of the planned rollouts", ("eval/coverage",), share=True),
    ),
    "Training": (
        Panel("Reward", ("reward", "{harness}/reward")),
        Panel("Pass rate", ("pass_rate", "{harness}/pass_rate"), share=True),
        Panel("Groups without contrast", ("frac_reward_zero_std",), share=True),
    ),
    "Shares by harness": (
        Panel("of rollouts", ("{harness}/rollout_share",), share=True),
        Panel("of rows", ("{harness}/row_share",), share=True),
        Panel("of tokens", ("{harness}/token_share",), share=True),
        Panel("of the loss's weight", ("{harness}/loss_weight_share",), share=True),
    ),
    "Learning": (
        Panel("Loss", ("loss",)),
        Panel("Gradient norm", ("grad_norm",)),
        Panel("Entropy", ("entropy",)),
        Panel("Logprobs: engine against trainer, largest difference", ("logprob_diff_max",)),
        Panel("KL to the sampling weights", ("mismatch_kl",)),
        Panel("Clipped tokens", ("clip_ratio/region_mean",), share=True),
    ),
    "Staleness": (
        Panel("Age in updates", ("sample/staleness_mean", "sample/staleness_max")),
        Panel("Groups dropped as too old, so far", ("sample/dropped_stale_total",)),
        Panel("Groups that wait for the trainer", ("sample/rollout_queue_size",)),
    ),
    "Throughput": (
        Panel("Trained tokens a second", ("perf/trained_tok_s_wall_clock",)),
        Panel("Seconds an update", ("perf/step_s", "perf/rollout_wait_s", "perf/update_s")),
        Panel("Trained tokens an update", ("batch/trained_tokens_per_step",)),
        Panel("Weight sync, seconds", ("perf/weight_sync_s", "perf/weight_sync_still_s")),
    ),
    "Failures": (
        Panel("Ungraded rollouts", ("ungraded_rate",), share=True),
        *(Panel(kind.replace("_", " "), (f"{{harness}}/{kind}_rate",), share=True) for kind in FAILURES),
        Panel("Malformed calls", ("{harness}/malformed_rate",), share=True),
        Panel("Harnesses set aside", ("harnesses_set_aside",)),
    ),
}
# The section that each harness has for itself.
OWN: tuple[Panel, ...] = (
    Panel("pass@1 of checkpoints", ("eval/{harness}/pass@1",), share=True),
    Panel("Reward", ("{harness}/reward",)),
    Panel("Pass rate in training", ("{harness}/pass_rate",), share=True),
    Panel("Tool calls and turns a rollout", ("{harness}/tool_calls", "{harness}/turns")),
    Panel("Shares", tuple(f"{{harness}}/{what}_share" for what in ("rollout", "row", "token", "loss_weight")), True),
    Panel("Seconds a rollout", ("{harness}/rollout_s",)),
    Panel("Failures", tuple(f"{{harness}}/{kind}_rate" for kind in FAILURES), share=True),
)
TABLES = ("rollouts/before", "rollouts/after")


def sections(harnesses: Sequence[str]) -> Iterator[tuple[str, list[tuple[Panel, list[str]]]]]:
    """(name, panels with their metrics) of each section: the shared ones, then one a harness."""
    for name, panels in SHARED.items():
        yield name, [(panel, panel.names(harnesses)) for panel in panels]
    for harness in harnesses:
        yield harness, [(panel, panel.names([harness])) for panel in OWN]


def missing(harnesses: Sequence[str], metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Metrics of panels that no entry of a run's metrics has."""
    known = {name for entry in metrics for name in entry}
    shown = {name for _, panels in sections(harnesses) for _, names in panels for name in names}
    return sorted(shown - known)


def workspace(harnesses: Sequence[str], entity: str = "entity", project: str = "yoke") -> Any:
    """The workspace, to be sent by its `save`. Raises UserError without the package."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(f"this needs the package wandb-workspaces: pip install 'yoke[wandb]' ({error})") from error
    made = [
        workspaces.Section(name=name, is_open=place < 2, panels=[_plot(reports, *panel) for panel in panels])
        for place, (name, panels) in enumerate(sections(harnesses))
    ]
    tables: list[Any] = [reports.WeavePanelSummaryTable(table_name=name) for name in TABLES]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[*made, workspaces.Section(name="Rollouts", panels=tables)],
        settings=workspaces.WorkspaceSettings(x_axis=STEP, smoothing_type="none"),
    )


def definition(harnesses: Sequence[str]) -> dict[str, Any]:
    """The view as W&B takes it, the same at every call: as it is kept in docs/wandb-workspace.json."""
    view = workspace(harnesses)._to_model()  # the package makes it public only on its way to the server
    spec: dict[str, Any] = view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for place, panel in enumerate(section["panels"]):
            panel["__id__"] = hashlib.sha256(f"{section['name']}/{place}".encode()).hexdigest()[:11]
    return spec


def _plot(reports: Any, panel: Panel, names: list[str]) -> Any:
    top = {"range_y": (0.0, 1.0)} if panel.share else {}
    return reports.LinePlot(title=panel.title, x=STEP, y=names, **top)
