"""Stage collect: a teacher's rollouts through the real harnesses, their sandbox and the proxy in text mode.

The teacher is any Chat Completions API; by default a scripted one is served here. What it leaves is verified like any
rollout's workspace, and the model requests of the rollouts that earned enough are kept with the reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config, UserError
from pipeline.harness.base import get_harness, harness_root
from pipeline.records import GroupSpec, Outcome, RolloutRecord, Trace
from pipeline.report.bar import Bar
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.credentials import CredentialFilter
from pipeline.stages.hosted import HostedModel, check_url, greet, teacher_model
from pipeline.stages.recording import about, fingerprint, rows_of, write_rows
from pipeline.stages.rollout import Workshop
from pipeline.stages.teachers import TeacherServer
from pipeline.tasks.harbor import HarborTask
from pipeline.tasks.sets import load_set
from pipeline.tasks.teacher import Teacher, parse_task

SCRIPTED_HARNESS = "pi"  # whose tools the scripted teacher calls
SILENT = 4  # so many rollouts of a harness without any tool call, and the teacher cannot call tools
KEPT, DUPLICATE = "kept", "the same as another"


def run_collect(config: Config) -> int:
    """Record each harness of the mix in ``<run_dir>/collect/<harness>.parquet``; a whole recording is not repeated.

    Raises UserError for a wrong setting, or when no rollout of the teacher was worth keeping.
    """
    _check(config)
    missing = [harness for harness in config.mix.harnesses if not _is_recorded(config, harness)]
    if missing:
        asyncio.run(collect(config, missing))
    for harness in config.mix.harnesses:
        out = recording_path(config, harness)
        _say(f"{out}: {pq.read_metadata(out).num_rows} model requests of {harness}" if out.exists() else f"no {out}")
    return 0


def recording_path(config: Config, harness: str) -> Path:
    """Where a harness's recording lies."""
    return Path(config.run_dir).absolute() / "collect" / f"{harness}.parquet"


def scripted_teacher(config: Config) -> Teacher:
    """The scripted teacher of a configuration."""
    return Teacher(lazy=config.collect.lazy, verify=config.collect.verify, seed=config.seed)


async def collect(config: Config, harnesses: list[str]) -> None:
    """Roll out each harness on the first ``collect.tasks`` training tasks and publish the requests of what is kept.

    Parquet, one row a model request, columns as in recording.SCHEMA. Raises UserError when nothing was kept, or when
    the teacher never calls a tool.
    """
    hosted = teacher_model(config.collect)
    teacher = None if hosted else scripted_teacher(config)
    key = hosted.key if hosted else None
    async with _upstream(hosted, teacher) as url, _workshop(config, url, key) as workshop:
        collector = Collector(config, workshop, teacher, CredentialFilter(os.environ, {"the teacher's key": key}))
        await collector.run(harnesses)
    kept = sum(_publish(config, harness, collector.failed[harness]) for harness in harnesses)
    for harness in harnesses:
        _forget(config, harness, published=not kept)  # with nothing kept the next try is a new one
    if not kept:
        raise UserError(f"the teacher's rollouts came to nothing; the last one: {collector.last}")


def as_it_should(record: RolloutRecord, task: HarborTask, teacher: Teacher | None, min_reward: float) -> bool:
    """Whether a rollout is kept: it earned enough, or the scripted teacher meant to be idle and was."""
    if teacher is not None and not teacher.plan(parse_task([{"role": "user", "content": task.instruction}])):
        return record.outcome is Outcome.UNSOLVED
    if min_reward >= 1.0:
        return record.outcome is Outcome.SOLVED
    return record.verdict.correctness is not None and record.verdict.correctness >= min_reward


@dataclass(frozen=True)
class Cell:
    """The attempts of one task in one harness; they run one after the other."""

    task: HarborTask
    harness: str


class Collector:
    """Rolls out cells, ``config.concurrency`` at once. Each attempt leaves a part file, also where it is not kept.

    What an earlier, killed try left counts.
    """

    def __init__(
        self, config: Config, workshop: Workshop, teacher: Teacher | None, credentials: CredentialFilter
    ) -> None:
        self.config, self.workshop, self.teacher, self.credentials = config, workshop, teacher, credentials
        self.last = "none ran"
        self._limit = asyncio.Semaphore(config.concurrency)
        self.failed: Counter[str] = Counter()  # rollouts that the infrastructure spoilt, by harness
        self._called: Counter[str] = Counter()  # tool calls by harness
        self._ran: Counter[str] = Counter()

    async def run(self, harnesses: list[str]) -> None:
        """Every cell, harnesses taking turns. Raises UserError when the teacher never calls a tool."""
        cells = [Cell(task, harness) for task in _tasks(self.config) for harness in harnesses]
        with Bar("collect", len(cells) * self.config.collect.attempts, self.config.logging.progress) as bar:
            work = [asyncio.create_task(self._work_through(cell, bar)) for cell in cells]
            try:
                await asyncio.gather(*work)
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)

    async def _work_through(self, cell: Cell, bar: Bar) -> None:
        kept = 0
        attempts = self.config.collect.attempts
        for attempt in range(attempts):
            place = _part(self.config, cell.harness, f"{cell.task.ref.task_id}--{attempt}")
            if not place.exists():
                async with self._limit:
                    ended = await self._attempt(cell, attempt, place)
            else:
                ended = about(place)["ended"]
            kept += ended == KEPT
            done = attempts - attempt if kept == self.config.collect.keep else 1
            bar.advance(done, f"{cell.harness}: {ended}")
            if kept == self.config.collect.keep:
                return

    async def _attempt(self, cell: Cell, attempt: int, place: Path) -> str:
        spec = GroupSpec(
            f"collect-{cell.task.ref.task_id}", cell.task.ref, cell.harness, 0, self.config.collect.attempts
        )
        record, trace = await self.workshop.roll_out_traced(spec, attempt)
        rows, ended = self._judge(cell.task, record, trace, f"{cell.harness}--{place.stem}")
        self.last = self._shown(record)
        if record.outcome is Outcome.INFRASTRUCTURE:  # no part: another start of a killed job tries again
            self.failed[cell.harness] += 1
        else:
            write_rows(place, [rows] if rows else [], {"ended": ended})
            self._note(cell.harness, trace)
        return ended

    def _judge(
        self, task: HarborTask, record: RolloutRecord, trace: Trace, rollout: str
    ) -> tuple[list[dict[str, Any]], str]:
        """The rows that are kept, and how the rollout ended in a word or two."""
        if not as_it_should(record, task, self.teacher, self.config.collect.min_reward):
            return [], str(record.outcome)
        rows = rows_of(rollout, record, trace)
        if kind := self.credentials.find(
            "\n".join(row[name] for row in rows for name in ("messages", "tools", "answer"))
        ):
            return [], f"held a credential ({kind})"
        return (rows, KEPT) if rows else ([], "no answer to learn from")

    def _shown(self, record: RolloutRecord) -> str:
        text = f"{record.task_id} in {record.harness} ended as {record.outcome} {record.verdict.reason}".strip()
        return text if self.credentials.find(text) is None else f"{record.task_id} ended as {record.outcome}"

    def _note(self, harness: str, trace: Trace) -> None:
        """Raises UserError after SILENT rollouts without a tool call in a harness that cannot do without."""
        self._ran[harness] += 1
        self._called[harness] += sum(call.tool_calls for call in trace.calls)
        silent = self._ran[harness] >= SILENT and not self._called[harness]
        if silent and self.teacher is None and not get_harness(harness).by_text:
            raise UserError(
                f"{self._ran[harness]} rollouts of {harness}, and no tool call in the answers of "
                f"collect.teacher_model={self.config.collect.teacher_model}: does its server read tool calls out of "
                "what the model writes? (vLLM: --enable-auto-tool-choice --tool-call-parser …)"
            )


@asynccontextmanager
async def _upstream(hosted: HostedModel | None, teacher: Teacher | None) -> AsyncIterator[str]:
    if hosted is not None:
        await greet(hosted)
        yield hosted.url
    else:
        assert teacher is not None
        async with TeacherServer(teacher).serving() as url:
            yield url


@asynccontextmanager
async def _workshop(config: Config, url: str, key: str | None) -> AsyncIterator[Workshop]:
    """What rollouts need, with the proxy in text mode in front of ``url``; only its shards are given the key."""
    with tempfile.TemporaryDirectory(prefix="yoke-collect-") as scratch:
        supervisor = ShardSupervisor(
            url, config.engine.shards, Path(scratch) / "journal", config.collect.teacher_model,
            request_timeout_s=config.engine.request_timeout_s, upstream="text", upstream_key=key,
        )  # fmt: skip
        try:
            await supervisor.start()
            home = harness_root(config.harness.home)
            yield Workshop(make_sandbox(config.sandbox), supervisor, config.harness, Path(scratch), home)
        finally:
            await supervisor.stop()


def _publish(config: Config, harness: str, failed: int) -> int:
    """Make a harness's recording of its parts; returns how many rollouts it holds."""
    counts = Counter({str(Outcome.INFRASTRUCTURE): failed} if failed else {})
    write_rows(recording_path(config, harness), _kept_parts(config, harness, counts), {"settings": _settings(config)})
    rest = ", ".join(f"{number} {how}" for how, number in sorted(counts.items()) if how != KEPT)
    _say(f"collect {harness}: kept {counts[KEPT]} of {counts.total()} rollouts" + (f" ({rest})" if rest else ""))
    return counts[KEPT]


def _kept_parts(config: Config, harness: str, counts: Counter[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each kept rollout, each once, in the order of tasks and attempts; counts how all of them ended."""
    seen: set[str] = set()
    for task in _tasks(config):
        for attempt in range(config.collect.attempts):
            place = _part(config, harness, f"{task.ref.task_id}--{attempt}")
            if not place.exists():
                continue
            ended = about(place)["ended"]
            rows = pq.read_table(place).to_pylist() if ended == KEPT else []
            if rows and (mark := fingerprint(rows)) in seen:
                ended, rows = DUPLICATE, []
            elif rows:
                seen.add(mark)
            counts[ended] += 1
            if rows:
                yield rows


def _parts(config: Config, harness: str) -> Path:
    """Where finished rollouts wait for the others, so that a killed job goes on with the rest."""
    name = hashlib.sha256(_settings(config).encode()).hexdigest()[:12]
    return recording_path(config, harness).with_name(f".{harness}-{name}")


def _part(config: Config, harness: str, rollout: str) -> Path:
    return _parts(config, harness) / f"{rollout}.parquet"


def _forget(config: Config, harness: str, published: bool) -> None:
    """Delete a harness's parts, and its ``published`` recording too."""
    shutil.rmtree(_parts(config, harness), ignore_errors=True)
    if published:
        recording_path(config, harness).unlink(missing_ok=True)


def _tasks(config: Config) -> list[HarborTask]:
    size = config.collect.tasks or config.tasks.train_size
    return load_set(replace(config.tasks, train_size=size), "train", Path(config.run_dir).absolute() / "tasks")


def _settings(config: Config) -> str:
    """What decides about a recording's content."""
    tasks = {"kind": config.tasks.kind, "train": config.tasks.train, "seed": config.tasks.seed}
    tasks |= {key: value for key in ("train_names", "source", "levels") if (value := getattr(config.tasks, key))}
    sampling = asdict(config.harness.sampling)
    whole = {"collect": asdict(config.collect), "tasks": tasks, "seed": config.seed, "sampling": sampling}
    return json.dumps(whole, sort_keys=True)


def _is_recorded(config: Config, harness: str) -> bool:
    """Whether there is nothing to do. Raises UserError for a recording that was made with other settings."""
    out = recording_path(config, harness)
    if config.fresh:
        _forget(config, harness, published=True)
    if out.exists() and about(out).get("settings") != _settings(config):
        raise UserError(f"{out} was recorded with other settings: fresh=true records again")
    return out.exists()


def _check(config: Config) -> None:
    """Raises UserError for what cannot work."""
    chosen = config.collect
    for harness in config.mix.harnesses:
        get_harness(harness).check_installed(harness_root(config.harness.home))
        if chosen.teacher_url is None and (harness != SCRIPTED_HARNESS or config.tasks.kind != "generated"):
            raise UserError(
                f"the scripted teacher knows only {SCRIPTED_HARNESS} and the generated tasks: "
                "collect.teacher_url=… takes any Chat Completions API as the teacher"
            )
    for name, least in (("tasks", 0), ("attempts", 1), ("keep", 0)):
        if (value := getattr(chosen, name)) < least:
            raise UserError(f"collect.{name}={value} must be at least {least}")
    if not 0 < chosen.min_reward <= 1:
        raise UserError(f"collect.min_reward={chosen.min_reward} must lie in (0, 1]")
    if (hosted := teacher_model(chosen)) is not None:
        check_url(hosted)


def _say(text: str) -> None:
    print(text, flush=True)
