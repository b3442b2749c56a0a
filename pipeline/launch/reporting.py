"""The end of a run: results.json, the table, the learning curve, the page; made from the run directory alone, so it can
be done again. Also the page of several runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pipeline.config import Config
from pipeline.harness.base import get_harness, register
from pipeline.launch.cohort import RESERVED, read_cohort
from pipeline.launch.data import split_size
from pipeline.launch.evaluation import labels, late_results, pinned, planned_of, records, tries
from pipeline.launch.local import living
from pipeline.launch.report_page import page_run
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import SlurmError, queued
from pipeline.records import RolloutRecord
from pipeline.report.cohort import Cohort
from pipeline.report.difficulty_table import print_difficulty
from pipeline.report.measures import retries
from pipeline.report.metrics import MetricsLog, read_metrics
from pipeline.report.page import PageRun, write_page
from pipeline.report.results import Evaluated, Meta, build_results, checkpoint_summary, compared, write_results
from pipeline.report.store import write_text
from pipeline.report.table import against_sentences, markdown_table, print_results
from pipeline.stages.evaluation import INCOMPLETE
from pipeline.stages.weights import update_of

PAGE, COMPARED = "index.html", "compare.html"


def report_run(config: Config, run: RunDirectory, form: str = "") -> int:
    """Write and show the report. Returns 3 when rollouts of an evaluation are ungraded, else 0.

    ``form``: "json" or "md" for the results or the table, and nothing else, on stdout.
    """
    results, page = _made(config, run)
    write_page(run.report / PAGE, [page])
    if form:
        print(json.dumps(results, indent=2) if form == "json" else markdown_table(results))
    else:
        print_results(results, Console())
        if run.difficulty.exists():
            print_difficulty(json.loads(run.difficulty.read_text()), Console())
        print(f"results: {run.results}\ncurve:   {run.report / 'curve.png'}\npage:    {run.report / PAGE}")
    return _code(config, results)


def report_runs(runs: Sequence[RunDirectory], form: str = "") -> int:
    """The report of each run, and one page of all in the first one's: side by side, compared with the first.

    Returns and ``form`` as for `report_run`.
    """
    configs = [run.saved_config() for run in runs]
    made = []
    for config, run in zip(configs, runs, strict=True):
        register(config.harness.recipes)
        made.append(_made(config, run))
    names = _distinct([run.root for run in runs])
    against = [list(against_sentences(compare(runs[0], run))) if place else [] for place, run in enumerate(runs)]
    pages = [
        replace(page, name=name, comparisons=own) for (_, page), name, own in zip(made, names, against, strict=True)
    ]
    for run, (_, page) in zip(runs, made, strict=True):
        write_page(run.report / PAGE, [page])
    write_page(runs[0].report / COMPARED, pages)
    _show_runs(names, [results for results, _ in made], against, form)
    if not form:
        print(f"page:    {runs[0].report / COMPARED}")
    return max(_code(config, results) for config, (results, _) in zip(configs, made, strict=True))


def compare(first: RunDirectory, other: RunDirectory) -> dict[str, Any]:
    """What ``other`` does otherwise than ``first`` after training, as `compared` finds it, and whether that is
    ``provisional``: for want of grades, it has no difference.
    """
    old, new = _after(first), _after(other)
    lacking = bool(old.records and new.records) and not (old.whole and new.whole)
    return {**compared(old, new, seed=0), "provisional": lacking}


def _after(run: RunDirectory) -> Evaluated:
    own = records(run, "after")
    return Evaluated(own, _planned(run.saved_config(), run) if own else 0, read_cohort(run, "after"))


def _made(config: Config, run: RunDirectory) -> tuple[dict[str, Any], PageRun]:
    """Writes the run's results, table and curve; returns the results, and what the page shows of the run."""
    _log_late_results(config, run)
    metrics = read_metrics(run.root)
    results = run_results(config, run, metrics)
    draw_curve(metrics, run.report / "curve.png", results)
    write_text(run.report / "table.md", markdown_table(results))
    write_results(run.results, results)
    return results, page_run(config, run, results, metrics)


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path, results: Mapping[str, Any]) -> None:
    """`learning_curve`."""
    from pipeline.report.plot import learning_curve  # a second to import

    learning_curve(metrics, path, results)


def _code(config: Config, results: Mapping[str, Any]) -> int:
    wanted = [label for label in ("before", "after") if getattr(config.evaluation, label)]
    whole = all((results[label] or {"coverage": 0.0})["coverage"] >= 1.0 for label in wanted)
    return 0 if whole else INCOMPLETE


def _distinct(roots: Sequence[Path]) -> list[str]:
    """The directories' names, with those above where the names alone are not distinct."""
    names = [root.name for root in roots]
    return names if len(set(names)) == len(names) else [str(root) for root in roots]


def _show_runs(
    names: Sequence[str],
    results: Sequence[Mapping[str, Any]],
    against: Sequence[Sequence[tuple[str, str]]],
    form: str,
) -> None:
    """The runs one after the other, then what the others do otherwise than the first."""
    compared = {name: dict(own) for name, own in zip(names, against, strict=True) if own}
    if form == "json":
        print(json.dumps({"runs": dict(zip(names, results, strict=True)), "compared": compared}, indent=2))
        return
    for name, own in zip(names, results, strict=True):
        if form == "md":
            print(f"## {name}\n\n{markdown_table(own)}")
        else:
            Console().rule(escape(name))
            print_results(own, Console())
    for name, sentences in compared.items():
        for harness, sentence in sentences.items():
            print(f"- {name} against {names[0]}, {harness}: {sentence}")


def run_results(config: Config, run: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The contents of results.json, from what the run has so far. Writes nothing."""
    before, after = records(run, "before"), records(run, "after")
    begun = [*RESERVED, *labels(run)]
    return build_results(
        before,
        after,
        metrics,
        _meta(config, run, [*before, *after]),
        _checkpoints(config, run),
        cohorts={label: cohort for label in RESERVED if (cohort := read_cohort(run, label))},
        retries={label: retries(own) for label in begun if (own := tries(run, label))},
    )


def _checkpoints(config: Config, run: RunDirectory) -> list[dict[str, Any]]:
    """The evaluations of checkpoints, in the order of their updates, each against the base weights."""
    found = {label: records(run, label) for label in labels(run)}
    base = _base(config, run)
    made = []
    for label, own in found.items():
        planned, cohort = planned_of(config, run, label, own), read_cohort(run, label)
        side = Evaluated(own, sum(planned.values()), cohort)
        against = None
        if base and base[0] != label:
            against = {"label": base[0], **compared(_on_tasks_of(base[1], cohort), side, config.seed)}
        weights = pinned(run, label)
        entry = checkpoint_summary(label, update_of(weights or ""), own, planned, cohort, against)
        made.append(entry | {"weights": weights})
    return made


def _on_tasks_of(base: Evaluated, small: Cohort | None) -> Evaluated:
    """``base`` on the tasks of an evaluation that had only some of its tasks; else as it is."""
    if base.cohort is None or small is None or not small["tasks"].keys() < base.cohort["tasks"].keys():
        return base
    tasks = {name: task for name, task in base.cohort["tasks"].items() if name in small["tasks"]}
    planned = base.planned * len(tasks) // len(base.cohort["tasks"])
    own = [record for record in base.records if record.task_id in tasks]
    return Evaluated(own, planned, {**base.cohort, "tasks": tasks})


def _base(config: Config, run: RunDirectory) -> tuple[str, Evaluated] | None:
    """The evaluation of the base weights: training's own, else the first that `yoke evaluate` made."""
    names = ["before", *(label for label in labels(run) if pinned(run, label) == "base")]
    for label in names:
        if own := records(run, label):
            of_job = sum(planned_of(config, run, label, own).values())
            planned = _planned(config, run) if label in RESERVED else of_job
            return label, Evaluated(own, planned, read_cohort(run, label))
    return None


def _log_late_results(config: Config, run: RunDirectory) -> None:
    """Results that came in after the training ended: metrics have one writer, so not while the run is alive."""
    if may_be_alive(run):
        return
    late = late_results(config, run, read_metrics(run.root))
    if late:
        from pipeline.launch.checkpoint_evaluations import log_checkpoint  # imports torch

        with MetricsLog(run.root, config.logging, asdict(config)) as log:
            for update, values in late:
                log_checkpoint(log, run, update, values)


def may_be_alive(run: RunDirectory) -> bool:
    """Whether a process or a job of the run exists, or Slurm does not say."""
    try:
        return bool(living(run) or queued(run))
    except SlurmError:
        return True


def _meta(config: Config, run: RunDirectory, records: Sequence[RolloutRecord]) -> Meta:
    done = run.done or {}
    return Meta(
        seed=config.seed,
        rollouts=int(done.get("rollouts", 0)),
        wall_s={**_gates(run.root / "gates.json"), **done.get("wall_s", {})},
        harness_versions={name: _version(name, records) for name in config.mix.harnesses},
        set_aside=done.get("set_aside", {}),
        planned=_planned(config, run) if records else 0,  # else there may be no tasks yet, and nobody asks
    )


def _version(harness: str, records: Sequence[RolloutRecord]) -> str:
    """The version that ran, which is not today's after an upgrade; today's if nothing was evaluated."""
    ran = {str(record.info["harness_version"]) for record in records if record.harness == harness and record.info}
    return ", ".join(sorted(ran)) or get_harness(harness).version


def _gates(path: Path) -> dict[str, Any]:
    return {"gates": json.loads(path.read_text())["wall_s"]} if path.exists() else {}


def _planned(config: Config, run: RunDirectory) -> int:
    return split_size(config, run, "test") * len(config.mix.harnesses) * config.evaluation.rollouts_per_task
