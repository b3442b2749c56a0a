"""A harness that keeps failing, as the coordinator and the trainer see it: alarms, ledger, checkpoint, the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.launch.coordinator import Coordinator
from pipeline.launch.run_directory import RunDirectory, differing_keys
from pipeline.launch.storage import Saving
from pipeline.launch.trainer_rank import EndRequest, TrainerRank
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.report.store import write_group
from pipeline.stages.flow import Ending, FlowState, GroupFlow
from pipeline.stages.schedule import make_schedule

WORDS = [
    "+experiment=smoke",
    "mix=four",
    "mix.harnesses=[pi,codex]",
    "mix.set_aside_after=2",
    "algorithm.max_rerolls=1",
]


class Harness:
    """A coordinator with one engine, and the groups that it hands out."""

    def __init__(self, folder: Path, *words: str, state: FlowState | None = None) -> None:
        self.config: Config = compose_config([*WORDS, f"run_dir={folder}", *words])
        self.attempt = RunDirectory(folder).new_attempt()
        tasks = [TaskRef(f"t{i}", Path(f"/tasks/t{i}")) for i in range(6)]
        mix = self.config.mix
        self.flow = GroupFlow(
            make_schedule(tasks, self.config), self.config.algorithm, 4, state or FlowState(), 1, mix.set_aside_after
        )
        self.coordinator = Coordinator(self.config, self.attempt, self.flow)
        self.coordinator.register("node0", "http://x", "http://y")
        self.coordinator.set_weights(self.coordinator.engines["node0"], str(self.flow.version))
        self.coordinator.set_phase("train")

    def close(self, cause: str, failing: tuple[str, ...] = ("codex",)) -> dict[str, Any]:
        """Lease a group and bring it back, spoilt by ``cause`` if its harness is failing. Returns the work."""
        work: dict[str, Any] = self.coordinator.lease("node0")["work"]
        bad = work["harness"] in failing
        records = [rollout(work, index, cause if bad else "") for index in work["indices"]]
        path = self.attempt.groups / f"{work['group_id']}.parquet"
        write_group(path, records)
        self.coordinator.close("node0", work, str(path))
        return work

    def ledger(self, what: str) -> list[dict[str, Any]]:
        assert self.coordinator.lines.flush(60.0)
        entries = map(json.loads, self.attempt.ledger.read_text().splitlines())
        return [entry for entry in entries if entry["what"] == what]

    def alarms(self) -> list[str]:
        return [event["text"] for event in self.coordinator.events if event["kind"] == "error"]


def rollout(work: dict[str, Any], index: int, cause: str) -> RolloutRecord:
    outcome = Outcome.INFRASTRUCTURE if cause else (Outcome.SOLVED, Outcome.UNSOLVED)[index % 2]
    verdict = Verdict(None, None if cause else float(outcome is Outcome.SOLVED), 1, "no answer" if cause else "")
    version = PolicyVersion(1, 0)
    return RolloutRecord(
        f"r{index}", work["group_id"], index, work["task_id"], work["harness"], outcome, verdict, (), version, version,
        2, 0, 0, 4, 2, 1.0, {"cause": cause} if cause else {},
    )  # fmt: skip


def test_the_alarm_is_raised_once_and_everywhere(tmp_path: Path) -> None:
    run = Harness(tmp_path)
    works = [run.close("unanswered") for _ in range(6)]
    bad = [work["group_id"] for work in works if work["harness"] == "codex"]
    assert len(run.alarms()) == 1 and "ALARM: codex is set aside" in run.alarms()[0]
    assert "no answer" in run.alarms()[0] and "mix.readmit=[codex]" in run.alarms()[0]
    (entry,) = run.ledger("set aside")
    assert entry["harness"] == "codex" and "2 groups in a row" in entry["reason"]
    assert run.coordinator.checkpoint_wanted
    assert run.coordinator.flow_state()["set_aside"] == run.flow.state.set_aside
    assert [entry["group"] for entry in run.ledger("rerolled")] == bad[:1]
    passed_over = run.ledger("abandoned")
    assert {entry["group"] for entry in passed_over} >= {bad[-1]}
    assert all(entry["reason"].startswith("harness set aside: codex") for entry in passed_over)
    ended = {group for group, (ending, _) in run.flow.state.ended.items() if ending == Ending.ABANDONED}
    assert sorted(entry["group"] for entry in passed_over) == sorted(ended), "each ends once, in the ledger too"


def test_what_all_harnesses_share_is_no_harness_s_fault(tmp_path: Path) -> None:
    run = Harness(tmp_path)
    for _ in range(6):
        run.close("engine")
    assert not run.alarms() and run.flow.state.set_aside == {}
    assert run.ledger("abandoned"), "the groups are given up all the same"


def test_a_harness_that_recovers_stays(tmp_path: Path) -> None:
    run = Harness(tmp_path)
    for number in range(6):
        run.close("unanswered", ("codex",) if number < 2 else ())
    assert not run.alarms() and run.flow.state.failing["codex"] == 0


class Trainer(TrainerRank):
    """Only what waits for groups."""

    def __init__(self, run: Harness) -> None:
        self.config, self.flow, self.coordinator, self.attempt = run.config, run.flow, run.coordinator, run.attempt
        self.saved: list[dict[str, Any]] = []
        self.end, self.team, self.storage = EndRequest(), Mock(), run.coordinator.storage
        self.saving = Saving(1.0, lambda *_: None)

    def save(self) -> bool:
        self.saved.append(self.coordinator.flow_state())
        return True

    def _sync_engines(self) -> None:
        return None


def test_the_run_ends_when_no_harness_is_left(tmp_path: Path) -> None:
    run = Harness(tmp_path)
    for _ in range(4):
        run.close("unanswered", ("codex", "pi"))
    trainer = Trainer(run)
    with pytest.raises(UserError, match=r"every harness of the mix is set aside.*mix\.readmit=\[.*codex: 2 groups"):
        trainer._await_batch()
    assert set(trainer.saved[0]["set_aside"]) == {"pi", "codex"}, "a checkpoint keeps it"

    resumed = Harness(tmp_path, state=FlowState.from_json(trainer.saved[0]))
    with pytest.raises(UserError, match="every harness of the mix is set aside"):
        Trainer(resumed)._recall_alarms()
    assert len(resumed.alarms()) == 2, "a resumed run says so again"

    lifted = Harness(tmp_path, "mix.readmit=[codex]", state=FlowState.from_json(trainer.saved[0]))
    Trainer(lifted)._recall_alarms()
    assert list(lifted.flow.state.set_aside) == ["pi"]
    assert [event["text"] for event in lifted.coordinator.events if event["kind"] == "message"]
    assert lifted.close("", ())["harness"] == "codex"


def test_groups_that_are_out_are_waited_for(tmp_path: Path) -> None:
    run = Harness(tmp_path)
    leased = run.coordinator.lease("node0")["work"]
    for harness in ("pi", "codex"):
        for _ in range(2):
            run.flow.judge_harness(harness, True, "no answer")
    Trainer(run)._check_stranded()
    assert leased is not None and run.flow.stranded


def test_the_two_settings_may_change_on_a_run_directory() -> None:
    old = {"mix": {"readmit": [], "set_aside_after": 3, "weights": {}}}
    assert differing_keys(_yaml(old), _yaml({"mix": old["mix"] | {"readmit": ["pi"], "set_aside_after": 0}})) == []
    assert differing_keys(_yaml(old), _yaml({"mix": old["mix"] | {"weights": {"pi": 2.0}}})) == ["mix.weights.pi"]


def _yaml(value: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(value)
