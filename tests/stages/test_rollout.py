"""One rollout with everything around it scripted: outcomes, bounded retries, what the record keeps."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_helpers import call, chain, left, recipe, trace

from pipeline.capture.shard_process import CaptureError
from pipeline.config import HarnessConfig, UserError
from pipeline.harness.base import HarnessRecipe
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict, VersionSpan
from pipeline.report.store import read_group, write_group
from pipeline.sandbox.base import SandboxError, SandboxExit, SandboxSpec
from pipeline.stages import rollout as stage
from pipeline.stages.rollout import Workshop, graded_again
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import load_tasks

LOG = recipe(tool_log='"tool_use"', loop_guard="^Loop detected", exit_codes={7: "call_budget"})


class Scripted:
    """A sandbox and a supervisor in one. Each try takes the next script: (exit, trace, output), or an error."""

    def __init__(self, *tries: tuple[SandboxExit, Trace, str] | Exception) -> None:
        self.tries = list(tries)
        self.launched = 0
        self.listener, self.inside = socket.socket(), None
        self.killed = False

    async def launch(self, spec: SandboxSpec) -> Scripted:
        self.launched += 1
        self.current = self.tries.pop(0) if len(self.tries) > 1 else self.tries[0]
        if isinstance(self.current, SandboxError):
            raise self.current
        assert spec.stdout is not None
        if not isinstance(self.current, Exception):
            spec.stdout.write_text(self.current[2])
        return self

    def go(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> SandboxExit:
        return left() if isinstance(self.current, Exception) else self.current[0]

    async def open_session(self, *words: object, **more: object) -> None:
        if isinstance(self.current, Exception):
            raise self.current

    async def close_session(self, session: str) -> Trace:
        assert not isinstance(self.current, Exception)
        return replace(self.current[1], session_id=session)


class Bench:
    """Rolls out on one task with a scripted surrounding; ``verdicts`` are the verifier's words, the last one again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.task = load_tasks(generate_tasks(folder / "tasks", "train", 1, 0))[0].ref
        self.recipe = LOG
        self.verdicts = [Verdict(0.0, 0.0, 0)]
        self.verified = 0
        self.complaint: str | None = None
        monkeypatch.setattr(stage, "get_harness", lambda name: self.recipe)
        monkeypatch.setattr(HarnessRecipe, "check_installed", self._check_installed)
        monkeypatch.setattr(stage, "verify", self._verify)

    def _check_installed(self, root: Path) -> None:
        if self.complaint:
            raise UserError(self.complaint)

    async def _verify(self, *words: object, **named: object) -> Verdict:
        self.verified += 1
        return self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]

    def run(self, *tries: tuple[SandboxExit, Trace, str] | Exception, retries: int = 2) -> RolloutRecord:
        self.scripted = Scripted(*tries)
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        surrounding: Any = self.scripted
        harness = HarnessConfig(retries=retries)
        self.workshop = Workshop(surrounding, surrounding, harness, scratch, self.folder)
        record = asyncio.run(self.workshop.roll_out(GroupSpec("g000000", self.task, "fake", 0, 4), 1))
        assert list(scratch.iterdir()) == [], "nothing is left behind"
        write_group(self.folder / "group.parquet", [record])
        assert read_group(self.folder / "group.parquet")[0].info == json.loads(json.dumps(record.info))
        return record


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def ended(*tools: int, exit_: SandboxExit | None = None, output: str = "", **counters: int) -> Any:
    return exit_ or left(), trace(chain(*tools), **counters), output


UNANSWERED = (left(1), trace([]), "cannot find module")


def test_a_rollout_over_syncs_is_as_old_as_its_oldest_token(bench: Bench, tmp_path: Path) -> None:
    """Whichever call or span it stands in; the file of the group keeps both ends."""
    old, middle, new = (PolicyVersion(1, n) for n in (9, 10, 11))
    spans = (VersionSpan(middle, 0, 3), VersionSpan(new, 3, 5))
    calls = [*chain(1, 0, versions=spans), call(2, None, versions=(VersionSpan(old, 0, 1), VersionSpan(middle, 1, 2)))]
    calls[0] = replace(calls[0], versions=(VersionSpan(middle, 0, 1),))
    record = bench.run((left(), trace(calls), ""))
    assert (record.version, record.newest_version) == (old, new)
    (read,) = read_group(tmp_path / "group.parquet")
    assert (read.version, read.newest_version) == (old, new)


def test_a_solved_rollout_and_what_its_record_keeps(bench: Bench) -> None:
    bench.verdicts = [Verdict(1.0, 1.0, 0)]
    record = bench.run(ended(1, 0, exit_=left(1), output='{"tool_use"}\n', over_budget=1, fork_root=2))
    assert record.outcome is Outcome.SOLVED and record.verdict == Verdict(None, 1.0, 1)
    kept = record.info
    assert (kept["tries"], kept["failures"], kept["harness_version"]) == (1, [], "1.2.3")
    assert (kept["returncode"], kept["timed_out"], kept["killed"], kept["fork_root"]) == (1, False, None, 2)
    assert (kept["tool_calls_logged"], kept["tool_calls_differ"], kept["unless_solved"]) == (1, False, "call_budget")
    assert "cause" not in kept


def test_infrastructure_is_tried_again_and_its_reasons_are_kept(bench: Bench) -> None:
    record = bench.run(UNANSWERED, ended(1, 0, engine_failures=1), ended(1, 0))
    assert record.outcome is Outcome.UNSOLVED and bench.scripted.launched == 3
    assert record.info["tries"] == 3
    assert [reason[:20] for reason in record.info["failures"]] == ["the harness got no a", "the engine did not a"]
    assert bench.verified == 1, "a spoilt rollout is not even looked at"


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_infrastructure_is_never_scored_and_not_tried_for_ever(bench: Bench, retries: int) -> None:
    record = bench.run(UNANSWERED, retries=retries)
    assert record.outcome is Outcome.INFRASTRUCTURE
    assert (record.verdict.reward, record.verdict.correctness) == (None, None)
    assert "cannot find module" in record.verdict.reason and record.info["cause"] == "unanswered"
    assert bench.scripted.launched == record.info["tries"] == retries + 1
    assert len(record.info["failures"]) == retries and bench.verified == 0
    assert bench.workshop.counters["outcome: infrastructure"] == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SandboxError("bwrap: no"), "sandbox"),
        (CaptureError("no shard"), "capture"),
        (OSError(28, "No space left on device"), "system"),
    ],
)
def test_what_fails_around_the_harness_is_infrastructure(bench: Bench, error: Exception, cause: str) -> None:
    record = bench.run(error)
    assert (record.outcome, record.info["cause"], record.info["tries"]) == (Outcome.INFRASTRUCTURE, cause, 3)
    assert str(error) in record.verdict.reason and record.rows == ()


def test_a_harness_that_vanished_costs_its_own_rollouts_only(bench: Bench) -> None:
    bench.complaint = "fake 1.2.3 is not installed"
    record = bench.run(ended(1, 0))
    assert (record.outcome, record.info["cause"]) == (Outcome.INFRASTRUCTURE, "installation")
    assert "is not installed" in record.verdict.reason and bench.scripted.launched == 0


def test_a_verifier_without_a_word_is_infrastructure(bench: Bench) -> None:
    bench.verdicts = [Verdict(None, None, 0, "verifier: no reward file"), Verdict(0.5, 0.5, 0)]
    record = bench.run(ended(1, 0))
    assert (record.outcome, record.verdict.correctness, record.info["tries"]) == (Outcome.UNSOLVED, 0.5, 2)
    assert record.info["failures"] == ["verifier: no reward file"]


def test_the_loop_guard_speaks_in_the_output(bench: Bench) -> None:
    bench.recipe = replace(LOG, loop_guard="Loop detected")
    noise = "x" * 5000 + "\n"  # longer than the tail that is kept for messages
    assert bench.run(ended(1, 0, output="Loop detected\n" + noise)).outcome is Outcome.LOOP_GUARD
    assert bench.run(ended(1, 0, output=noise)).outcome is Outcome.UNSOLVED


def test_a_log_that_differs_is_counted(bench: Bench) -> None:
    record = bench.run(ended(1, 1, 0, output='{"tool_use"}\n' * 5))
    assert (record.verdict.tool_calls, record.info["tool_calls_logged"]) == (2, 5)
    assert record.info["tool_calls_differ"] is True
    assert bench.workshop.counters["tool calls differ from the log: fake"] == 1
    bench.recipe = recipe()
    assert "tool_calls_logged" not in bench.run(ended(1, 0)).info


def test_foreign_calls_count_for_nothing(bench: Bench) -> None:
    calls = [call(0, None, 1), call(1, 0, 3, foreign=True, malformed=True, trainable=False), call(2, 0)]
    record = bench.run((left(), trace(calls), ""))
    assert (record.verdict.tool_calls, record.malformed, record.calls) == (1, 0, 3)
    record = bench.run((left(), trace([call(0, None, foreign=True, trainable=False)]), ""))
    assert (record.outcome, record.info["cause"]) == (Outcome.INFRASTRUCTURE, "foreign")


@pytest.mark.parametrize(
    ("exit_", "was", "then_solved", "then_half"),
    [
        (left(), "unsolved", (Outcome.SOLVED, 1.0), (Outcome.UNSOLVED, 0.5)),
        (left(7), "call_budget", (Outcome.SOLVED, 1.0), (Outcome.CALL_BUDGET, 0.5)),
        (left(139), "agent_crash", (Outcome.SOLVED, 1.0), (Outcome.AGENT_CRASH, 0.0)),
        (left(None, timed_out=True), "agent_timeout", (Outcome.AGENT_TIMEOUT, 0.0), (Outcome.AGENT_TIMEOUT, 0.0)),
        (left(None, killed="disk"), "agent_crash", (Outcome.AGENT_CRASH, 0.0), (Outcome.AGENT_CRASH, 0.0)),
    ],
)
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_new_verdict_decides_as_it_would_have_at_first(
    bench: Bench, exit_: SandboxExit, was: str, then_solved: Any, then_half: Any, first: float
) -> None:
    bench.verdicts = [Verdict(first, first, 0)]
    record = bench.run(ended(1, 0, exit_=exit_))
    assert first or record.outcome == was
    for correctness, expected in ((1.0, then_solved), (0.5, then_half)):
        again = graded_again(record, Verdict(correctness, correctness, 0, "again"))
        assert (again.outcome, again.verdict.correctness) == expected
        assert (again.verdict.tool_calls, again.verdict.reward, again.verdict.reason) == (1, None, "again")
        bench.verdicts = [Verdict(correctness, correctness, 0)]
        assert bench.run(ended(1, 0, exit_=exit_)).outcome is again.outcome
    assert graded_again(record, Verdict(None, None, 0, "no")).verdict == Verdict(None, None, 1, "no")
