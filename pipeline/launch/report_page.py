"""What the report's page shows of a run, from its directory: how groups and rollouts ended, and some rollouts whole."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.config import Config, UserError
from pipeline.launch.evaluation import tries
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import RolloutRecord
from pipeline.report.page import PageRun
from pipeline.report.rollout_view import ModelVocabulary, NoVocabulary, Vocabulary, view
from pipeline.report.sample import spread
from pipeline.report.store import read_figures, read_group, read_jsonl
from pipeline.stages.advantage import RewardFunction, advantages, configured_reward, graded_rewards, overlong, score
from pipeline.stages.evaluation import is_graded, read_cell

SAMPLE = 24  # rollouts a run that the viewer holds
PAIRS = 8  # of rollouts before and after training, besides those
STAGES = {"before": "the evaluation before training", "after": "the evaluation after training"}
CAUSES = 8
LONG = 160  # characters of a cause
ENDINGS = ("trained", "skipped", "abandoned")
VERSIONS = ("yoke", "vllm", "torch", "deepspeed", "transformers", "python")

log = logging.getLogger("yoke.report")


def page_run(
    config: Config, run: RunDirectory, results: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], name: str = ""
) -> PageRun:
    """Everything of one run. ``name``: as the page calls it, by default that of its directory."""
    groups, vocabulary = TrainedGroups(config, run), find_vocabulary(config, run)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    causes: Counter[tuple[str, str]] = Counter()
    for _, record in groups.figures:
        outcomes[record.harness][record.outcome.value] += 1
        if cause := str(record.info.get("cause", "")):
            causes[record.harness, cause[:LONG]] += 1
    return PageRun(
        name=name or run.root.name,
        facts=_facts(config, run, results),
        results=results,
        metrics=metrics,
        outcomes=dict(sorted(outcomes.items())),
        causes=[(harness, cause, count) for (harness, cause), count in causes.most_common(CAUSES)],
        groups=Counter(entry["what"] for entry in groups.endings.values()),
        rollouts=[*evaluated_views(run, vocabulary), *groups.views(vocabulary)],
        kept=len(groups.figures),
        difficulty=json.loads(run.difficulty.read_text()) if run.difficulty.exists() else None,
    )


def evaluated_views(run: RunDirectory, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """Some rollouts of the evaluations before and after training, each with that of the same task and harness on the
    other side: of every harness, some that were newly solved, some that no longer were, …
    """
    sides = {label: {_key(record): record for record in tries(run, label) if is_graded(record)} for label in STAGES}
    before, after = sides["before"], sides["after"]
    both = sorted(before.keys() & after.keys() or before.keys() | after.keys())

    def kind(key: tuple[str, int]) -> tuple[str, ...]:
        found = [side[key] for side in sides.values() if key in side]
        return found[0].harness, *(record.outcome.value for record in found)

    for key in spread(both, kind, PAIRS):
        own = {label: side[key] for label, side in sides.items() if key in side}
        for label, figures in own.items():
            twin = next((record.rollout_id for other, record in own.items() if other != label), None)
            yield view(_whole(run, label, figures), vocabulary, [], STAGES[label], twin)


def _key(record: RolloutRecord) -> tuple[str, int]:
    return record.group_id, record.index


def _whole(run: RunDirectory, label: str, figures: RolloutRecord) -> RolloutRecord:
    """The same rollout with its rows."""
    cell = read_cell(run.evaluation(label) / f"{figures.group_id}.parquet")
    return next(record for record in cell if record.index == figures.index)


@dataclass(frozen=True)
class TrainedGroups:
    """The groups that a run has kept. Of a group that several attempts rolled out, the newest counts."""

    config: Config
    run: RunDirectory

    @cached_property
    def figures(self) -> list[tuple[Path, RolloutRecord]]:
        """Every kept rollout without its rows, in the order of the schedule, with the file that holds it."""
        files: dict[str, Path] = {}
        for number in self.run.attempt_numbers():
            attempt = self.run.attempt(number)  # in figures/ lie those whose tokens are gone (storage.rollouts)
            for place in (attempt.root / "figures", attempt.groups):
                files |= {path.name: path for path in place.glob("*.parquet")}
        return [(files[name], record) for name in sorted(files) for record in read_figures(files[name])]

    @cached_property
    def endings(self) -> dict[str, Mapping[str, Any]]:
        """Group → the ledger's last word on its end."""
        ledgers = [read_jsonl(self.run.attempt(number).ledger) for number in self.run.attempt_numbers()]
        return {entry["group"]: entry for ledger in ledgers for entry in ledger if entry["what"] in ENDINGS}

    def views(self, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
        """A sample of the rollouts for the viewer, with rewards by the run's own function."""
        chosen = choose([found for found in self.figures if found[0].parent.name != "figures"], SAMPLE)
        reward = self._reward()
        for path in sorted({path for path, _ in chosen}):
            wanted = {record.rollout_id for own, record in chosen if own == path}
            group = score(read_group(path), reward)
            for record, advantage in zip(group, advantages(group, self.config.algorithm.normalize_std), strict=True):
                if record.rollout_id in wanted:
                    yield view(record, vocabulary, self._reward_facts(record, group, advantage))

    def _reward(self) -> RewardFunction:
        try:
            return configured_reward(self.config)
        except UserError as error:
            log.warning("the report shows no rewards of rollouts: %s", error)
            return lambda outcome: None

    def _reward_facts(
        self, record: RolloutRecord, group: Sequence[RolloutRecord], advantage: float | None
    ) -> list[tuple[str, str]]:
        """Reward and its parts, and what became of them."""
        ending = self.endings.get(record.group_id, {"what": "not ended", "reason": ""})
        facts = [("Group", f"{record.group_id}: {ending['what']}, {ending['reason']}".rstrip(", "))]
        if record.verdict.reward is None or advantage is None:
            return [("Reward", "none: it does not count"), *facts]
        mean = fmean(graded_rewards(group))
        return [
            ("Reward", f"{record.verdict.reward:.4f}"),
            ("Its parts", reward_parts(record, record.verdict.reward, self.config)),
            (
                "Advantage",
                f"{advantage:+.4f}; the {len(graded_rewards(group))} graded of its group have {mean:.4f} on average",
            ),
            *facts,
        ]


def reward_parts(record: RolloutRecord, reward: float, config: Config) -> str:
    """The summands of a reward: the reward function's, the penalty for malformed calls, DAPO's overlong term."""
    penalty = config.reward.malformed_penalty * record.malformed
    length, cache = config.algorithm.overlong_tokens, config.algorithm.overlong_cache
    late = overlong(record.sampled_tokens, length, cache) if length else 0.0
    own, calls = reward + penalty - late, record.verdict.tool_calls
    text = f"{own:.4f} by {config.reward.fn} (correctness {record.verdict.correctness:g}, tool calls {calls})"
    text += f" − {penalty:.4f} for {record.malformed} malformed calls" if penalty else ""
    return text + (f" − {-late:.4f} for its length" if late else "")


def choose(found: Sequence[tuple[Path, RolloutRecord]], size: int) -> list[tuple[Path, RolloutRecord]]:
    """``size`` of the rollouts: one of each harness and outcome in turn, newest first."""
    return spread(found, lambda one: (one[1].harness, one[1].outcome.value), size)


def find_vocabulary(config: Config, run: RunDirectory) -> Vocabulary:
    """The run's tokenizer; ids alone if there is none on this machine."""
    places = [Path(config.model.path), *sorted(run.attempts.glob("*/model"), reverse=True), *run.models.glob("*")]
    for place in places:
        if (place / "tokenizer.json").exists():
            return ModelVocabulary(place / "tokenizer.json")
    log.warning("no tokenizer.json in %s nor in the run: the report shows token ids instead of text", config.model.path)
    return NoVocabulary()


def _facts(config: Config, run: RunDirectory, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    algorithm, versions, done = config.algorithm, results["versions"], run.done
    harness = ", ".join(f"{name} {version}" for name, version in versions["harness"].items())
    return [
        ("Directory", str(run.root)),
        ("Model", config.model.path),
        ("Harnesses", harness),
        ("Training", f"{results['updates']} of {config.training.updates} updates"),
        ("Rollouts", f"{results['rollouts']:,} trained or skipped" if done else "not known before the end of training"),
        (
            "An update",
            f"{algorithm.groups_per_update} groups of {algorithm.group_size}, loss by {algorithm.aggregation}",
        ),
        ("Seed", str(results["seed"])),
        ("Wall time", f"{results['wall_s']['total'] / 60:.1f} minutes" if done else "not known before the end"),
        ("Software", ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions[name])),
        ("Commit", str(results["git_commit"] or "not known")),
    ]
