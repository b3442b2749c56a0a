"""docs/harness-table.md, from the results of `yoke harness check` and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pipeline
from pipeline.config import UserError
from pipeline.harness.base import get_harness
from pipeline.report.store import write_json, write_text
from pipeline.stages.harness_check_real import REAL
from pipeline.stages.harness_check_result import FILE, Entry
from pipeline.stages.harness_check_stage import TOGETHER
from pipeline.stages.harness_check_verdict import BAD_ANSWERS, FAULTS

DOCS = Path(pipeline.__file__).parents[1] / "docs"
NOTHING = "–"
INTRODUCTION = """\
# What each harness does

Written by `yoke harness table --all` from what `yoke harness check --all` found, which is kept beside it in
[{file}]({file}); never by hand. The scenes are in `pipeline/stages/harness_check_scenes.py`, what must hold in each
is in `harness_check_verdict.py`. In every scene that a harness passes, each answer in the trace is one that the
engine sampled, id for id and logprob for logprob; each is trained exactly once; nothing that the engine sampled is
missing; no history that continues a call rendered to other ids (drift 0); and no process is left.
"""

Cell = Callable[[Entry], Any]
Column = tuple[str, Cell]


def fact(scene: str, *names: str) -> Cell:
    """A fact of a scene, in a dictionary of it if there are two names; None where the scene was not played."""

    def cell(entry: Entry) -> Any:
        value: Any = entry["scenes"].get(scene, {})
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    return cell


def _version(entry: Entry) -> str:
    return f"{entry['version']} ({entry['dialect']})"


def _state(entry: Entry) -> str:
    return f"{len(entry['failures'])} failures" if entry["failures"] else f"passed {entry['checked']}"


def _tool_calls(entry: Entry) -> str:
    trace, log = fact("calls", "tool_calls")(entry), fact("calls", "tool_calls_logged")(entry)
    return f"{trace} / {_shown(log)}"


TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    (
        "Eight calls",
        """\
The file task, solved in eight answers that call tools (one of them two at once) and those that end the run. The
prompt is counted in bytes of its messages, without tools. Seconds and memory are of one run, on the machine that
checked it.""",
        (
            ("version", _version),
            ("check", _state),
            ("first prompt, bytes", fact("calls", "prompt_tokens")),
            ("calls", fact("calls", "calls")),
            ("rows", fact("calls", "rows")),
            ("drift", fact("calls", "drift")),
            ("tokens sampled", fact("calls", "sampled_tokens")),
            ("trained", fact("calls", "trained_tokens")),
            ("tool calls, trace / own log", _tool_calls),
            ("wall s", fact("calls", "wall_s")),
            ("CPU s", fact("calls", "cpu_s")),
            ("memory MB", fact("calls", "memory_mb")),
        ),
    ),
    (
        "Bad answers",
        """\
*goes on*: the next request continues the answer; *asks again*: it has the same prompt; *drops it*: it has a prompt
without the answer; *ends*: there is none. Each of these answers is trained all the same.""",
        tuple((name, fact("cut" if name == "cut" else "mistakes", "fates", name)) for name in BAD_ANSWERS),
    ),
    (
        "Faults",
        """\
Seconds until the harness asked again, after an error 429 with `retry-after: 1`, an error 500 with `retry-after: 5`,
and a connection that dropped because the proxy's process was killed. It has to solve the task after that.""",
        tuple((name, fact("faults", "retried_after_s", name)) for name in FAULTS),
    ),
    (
        "Sub-agents, compaction, the end",
        """\
A sub-agent's conversation and the history after a compaction are rows of their own. In the hang the model never
answers, and a process that the agent started lives on; all must be dead soon after the time limit.""",
        (
            ("rows with a sub-agent", fact("subagent", "rows")),
            ("rows with a compaction", fact("compaction", "rows")),
            ("hang", fact("hang", "outcome")),
            ("ended after s", fact("hang", "wall_s")),
            ("instances at once", fact(TOGETHER, "instances")),
        ),
    ),
    (
        "On a real vLLM",
        """\
A rollout of at most three calls with the quick start's model, to which such prompts mean nothing. Its rows were
scored anew as prompts; the last column is the largest difference of a logprob.""",
        (
            ("first prompt, tokens", fact(REAL, "prompt_tokens")),
            ("calls", fact(REAL, "calls")),
            ("rows", fact(REAL, "rows")),
            ("trained tokens", fact(REAL, "trained_tokens")),
            ("logprobs differ by", fact(REAL, "logprob_difference")),
        ),
    ),
)


def write_table(entries: Mapping[str, Entry], names: Sequence[str], docs: Path = DOCS) -> Path:
    """Write the table of these harnesses, and the results beside it. Raises UserError for one without fresh results."""
    for name in names:
        version = get_harness(name).version
        if entries.get(name, {}).get("version") != version:
            raise UserError(f"{name} {version} was not checked: yoke harness check {name}")
    chosen = {name: entries[name] for name in names}
    write_json(docs / FILE, chosen)
    write_text(docs / "harness-table.md", table(chosen))
    return docs / "harness-table.md"


def table(entries: Mapping[str, Entry]) -> str:
    """The page."""
    parts = [INTRODUCTION.format(file=FILE)]
    for title, words, columns in TABLES:
        head = ["harness", *(name for name, _ in columns)]
        body = [[name, *(_shown(cell(entry)) for _, cell in columns)] for name, entry in sorted(entries.items())]
        lines = [_line(head), _line(["---"] * len(head)), *map(_line, body)]
        parts.append(f"## {title}\n\n{words}\n\n" + "\n".join(lines) + "\n")
    failures = [f"- {name}: {line}" for name, entry in sorted(entries.items()) for line in entry["failures"]]
    return "\n".join(parts + (["## What does not hold\n\n" + "\n".join(failures) + "\n"] if failures else []))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: Any) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0e}" if isinstance(value, float) and 0 < value < 0.01 else str(value)
