"""What an evaluation measures: pass@k, how rollouts ended, what was tried again; and its metrics, ``eval/…``.

Pure functions over records; `pipeline.report.results` puts them into results.json, `docs/evaluation.md` says what they
mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean
from typing import Any

from pipeline.records import Outcome, RolloutRecord
from pipeline.report.metrics import (
    by_harness,
    graded,
    log_difference,
    malformed_rate,
    mean_tool_calls,
    pass_rate,
    solved,
)

NO_CAUSE = "not recorded"


def evaluation_metrics(records: Sequence[RolloutRecord], planned: int | None = None) -> dict[str, float]:
    """``eval/…`` over all harnesses and by harness. ``planned`` rollouts, if given, make ``eval/coverage``."""
    values: dict[str, float | None] = {
        "eval/pass@1": pass_rate(records),
        "eval/coverage": len(graded(records)) / (planned or len(records)) if records else None,
        **{f"eval/pass@{k}": value for k, value in pass_at(records).items()},
        **{f"eval/{name}": value for name, value in rates(records).items()},
    }
    for harness, own in by_harness(records).items():
        values[f"eval/{harness}/pass@1"] = pass_rate(own)
        values[f"eval/{harness}/tool_calls"] = mean_tool_calls(own)
        values[f"eval/{harness}/malformed_rate"] = malformed_rate(own)
        values[f"eval/{harness}/tool_log_difference"] = log_difference(own)
        values |= {f"eval/{harness}/{name}": value for name, value in rates(own).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that ``k`` of ``n`` rollouts, drawn without replacement, hold one of the ``c`` that solved the task.

    ``1 − C(n−c, k) / C(n, k)``: over rollouts, this is an unbiased estimate of pass@k (Chen et al. 2021, section 2.1).
    Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} solved in {n} rollouts")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_at(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """pass@k by k = 1, 2, 4, … up to the rollouts of a (task, harness): the mean over those with k graded ones.

    At k = 1 every graded rollout counts alike, as in ``pass@1``.
    """
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for record in graded(records):
        cells[record.task_id, record.harness].append(solved(record))
    first = pass_rate(records)
    if first is None:
        return {}
    found = {"1": first}
    k = 2
    while whole := [own for own in cells.values() if len(own) >= k]:
        found[str(k)] = fmean(pass_at_k(len(own), sum(own), k) for own in whole)
        k *= 2
    return found


def rates(records: Sequence[RolloutRecord]) -> dict[str, float | None]:
    """How the graded rollouts ended, and how many model calls they made. None where nothing is known.

    ``truncation_rate``: some call was cut at the token limit. ``submission_rate``: the harness ended by itself, neither
    stopped nor broken, whatever its work was worth. ``timeout_rate``: the time ran out.
    """
    known = graded(records)
    cut = [float(record.info["cut"] > 0) for record in known if "cut" in record.info]
    return {
        "truncation_rate": fmean(cut) if cut else None,
        "submission_rate": fmean(map(submitted, known)) if known else None,
        "timeout_rate": fmean(ending(record) is Outcome.AGENT_TIMEOUT for record in known) if known else None,
        "calls": fmean(record.calls for record in known) if known else None,
    }


def ending(record: RolloutRecord) -> Outcome:
    """How the rollout ended, had its workspace been worth nothing: a solved one may have been stopped too."""
    return Outcome(record.info.get("unless_solved", record.outcome))


def submitted(record: RolloutRecord) -> bool:
    """Whether the harness came to its own end. One that gives up with an error at a full window did not."""
    gave_up = record.info.get("context_full") and record.info.get("returncode")
    return ending(record) in (Outcome.SOLVED, Outcome.UNSOLVED) and not gave_up


def retries(tries: Iterable[RolloutRecord]) -> dict[str, Any]:
    """What was tried again, and why. ``tries``: every record that was written, those without a grade included.

    ``rollouts``: how many needed more than one try; ``tries``: of all rollouts together, the first ones included;
    ``causes``: of the tries that were not graded; ``cells``: the same for each cell that had such a try.
    """
    counts: Counter[tuple[str, int]] = Counter()
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for record in tries:
        failed, cell = _failed_tries(record), f"{record.harness}--{record.task_id}"
        counts[cell, record.index] += len(failed) + (record.verdict.correctness is not None)
        causes[cell].update(failed)
    of_cell: Counter[str] = Counter()
    for (cell, _), count in counts.items():
        of_cell[cell] += count
    return {
        "rollouts": sum(count > 1 for count in counts.values()),
        "tries": sum(counts.values()),
        "causes": dict(sorted(sum(causes.values(), Counter()).items())),
        "cells": {
            cell: {"tries": of_cell[cell], "causes": dict(sorted(own.items()))}
            for cell, own in sorted(causes.items())
            if own
        },
    }


def _failed_tries(record: RolloutRecord) -> list[str]:
    """The causes of this record's tries that were not graded, its own last.

    Rollouts from before 2026-11-30 kept only the wording of all but the last.
    """
    failed = [*record.info.get("causes", [NO_CAUSE] * len(record.info.get("failures", ())))]
    return failed if record.verdict.correctness is not None else [*failed, str(record.info.get("cause", NO_CAUSE))]
