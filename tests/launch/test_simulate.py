"""Runs of 1 to 128 nodes on a virtual clock: the real schedule, flow control, coordinator and ledger."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.launch import simulate as job
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.simulation import Simulated, simulate
from pipeline.report.store import read_jsonl

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@cache
def base() -> Config:
    """Two groups of four a node and update, three harnesses of which one is slow."""
    words = (
        "mix.harnesses=[pi,codex,openhands] concurrency=4 algorithm.group_size=4 algorithm.groups_per_update=2 "
        "algorithm.max_outstanding_rollouts=24 training.checkpoint_every=2 simulate.updates=4 "
        "+simulate.slower.openhands=2.5"
    )
    return compose_config(words.split())


def config(**changes: object) -> Config:
    """``group__key=value`` changes one setting."""
    chosen = copy.deepcopy(base())
    for name, value in changes.items():
        *groups, key = name.split("__")
        place = reduce(getattr, groups, chosen)
        assert hasattr(place, key)
        setattr(place, key, value)
    return chosen


def ledger(place: Path) -> Counter[str]:
    """How often each word stands in the ledgers of all attempts."""
    entries = [entry for path in sorted(place.glob("attempts/*/ledger.jsonl")) for entry in read_jsonl(path)]
    return Counter(entry["what"] for entry in entries)


@pytest.mark.slow
def test_every_size_keeps_its_promises_and_grows_evenly(tmp_path: Path) -> None:
    ends: dict[int, Simulated] = {}
    for nodes in SIZES:
        place = tmp_path / str(nodes)
        ends[nodes] = simulate(config(), nodes, place)
        assert ends[nodes].complaints() == []
        assert ledger(place)["trained"] == len(ends[nodes].tally.trained) > 6 * nodes
    assert ends[128].groups_per_hour > 0.6 * 128 * ends[1].groups_per_hour, "the slowest of many rollouts is waited for"
    shares = [end.slot_share("asking") for end in ends.values()]
    assert max(shares) < 0.01, "engines do not stand idle while they ask for work"
    lines = [sum(ledger(tmp_path / str(nodes)).values()) / end.tally.groups_closed for nodes, end in ends.items()]
    assert max(lines) <= 2, "a group's lines in the ledger do not grow with the nodes"


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    settings_ = config(simulate__engine_loss_h=1, simulate__interruption_h=1)
    first, second = (simulate(settings_, 4, tmp_path / name) for name in "ab")
    assert (first.seconds, first.state, first.tally.slots) == (second.seconds, second.state, second.tally.slots)
    assert simulate(config(seed=1), 4, tmp_path / "c").seconds != first.seconds


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    nodes=st.sampled_from([1, 2, 3, 8]),
    engine_loss_h=st.sampled_from([0.0, 0.1, 0.5]),
    interruption_h=st.sampled_from([0.0, 0.25, 1.0]),
    warned=st.sampled_from([0.0, 0.5, 1.0]),
    back_s=st.sampled_from([5.0, 300.0]),
    staleness=st.integers(1, 3),
    trouble=st.sampled_from([0.0, 0.1, 0.3]),
    curriculum=st.booleans(),
)
def test_promises_hold_whatever_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    nodes: int,
    engine_loss_h: float,
    interruption_h: float,
    warned: float,
    back_s: float,
    staleness: int,
    trouble: float,
    curriculum: bool,
) -> None:
    """Engines that come back before or after they are missed; interruptions with and without a checkpoint; pushes of
    weights that fail, and calls that get lost.
    """
    chosen = config(
        seed=seed, simulate__engine_loss_h=engine_loss_h, simulate__interruption_h=interruption_h,
        simulate__warned=warned, simulate__engine_back_s=back_s, algorithm__max_staleness=staleness,
        simulate__ungraded=0.05, simulate__sync_failures=trouble, simulate__lost_calls=trouble / 2,
        curriculum__enabled=curriculum,
    )  # fmt: skip
    end = simulate(chosen, nodes, tmp_path_factory.mktemp("run"))
    assert end.complaints() == []


def test_finished_rollouts_outlive_a_crash(tmp_path: Path) -> None:
    """Those of groups that were not closed, and those of groups that were trained since the checkpoint."""
    settings_ = config(simulate__interruption_h=0.2, simulate__warned=0, training__checkpoint_every=100)
    ends = [simulate(replace(settings_, seed=seed), 4, tmp_path / str(seed)) for seed in range(3)]
    assert all(end.complaints() == [] for end in ends)
    assert any(end.tally.interruptions and end.tally.kept for end in ends)


def test_the_job_tells_what_bounds_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    starved = config(simulate__nodes=[1, 8], simulate__per_node=False, algorithm__max_outstanding_rollouts=8)
    assert job.run(starved) == 0
    told = capsys.readouterr().out
    assert "8 nodes: slots stand idle for want of credits" in told and "max_outstanding_rollouts" in told
    assert job.run(config(simulate__nodes=[2], simulate__update_s=3000)) == 0
    assert "2 nodes: bound by the trainer" in capsys.readouterr().out


def test_wrong_settings_are_told_in_one_line() -> None:
    for change in ({"simulate__nodes": [0]}, {"simulate__no_contrast": 1.5}, {"simulate__update_s": -1.0}):
        with pytest.raises(UserError, match="simulate"):
            job.run(config(**change))


EVERYTHING = {
    "engine_loss_h": 0.5, "interruption_h": 0.5, "sync_failures": 0.1, "lost_calls": 0.05, "ungraded": 0.05,
    "rollout_s": 90, "update_s": 20, "updates": 12,
}  # fmt: skip


@pytest.mark.slow
def test_two_hours_of_everything_that_can_go_wrong(tmp_path: Path) -> None:
    """By what the engines saw: no torn group, no token too old, each group ended once, bounded queues, no deadlock.

    A trainer that waited half an hour for a batch would raise, as in a real run.
    """
    ends = []
    for seed in range(6):
        changes = {f"simulate__{name}": value for name, value in EVERYTHING.items()}
        chosen = config(seed=seed, algorithm__stale_wait_s=30.0, curriculum__enabled=seed < 3, **changes)
        end = simulate(chosen, 3, tmp_path / str(seed))
        assert end.complaints() == []
        assert end.seconds > 2 * 3600
        ages, tally = end.tally.ages, end.tally
        assert 0 <= min(ages) <= max(ages) <= chosen.algorithm.max_staleness and len(ages) >= len(tally.trained)
        assert 0 < tally.most_outstanding <= end.config.algorithm.max_outstanding_rollouts
        assert len(end.state.ended) == len(set(end.scheduled)) == len(end.scheduled)
        ends.append(tally)
    happened = {
        "partial syncs": [tally.failed_syncs for tally in ends],
        "lost calls": [tally.lost_calls for tally in ends],
        "rollouts over a sync": [tally.spanning for tally in ends],
        "crashes": [len(tally.interruptions) for tally in ends],
        "engine losses": [len(tally.engine_losses) for tally in ends],
        "kept rollouts": [tally.kept for tally in ends],
        "dropped groups": [sum(tally.dropped for tally in ends)],
    }
    assert all(count for counts in happened.values() for count in counts), happened
    drawn = RunDirectory(tmp_path / "0").curriculum
    assert any(drawn.iterdir()) and not RunDirectory(tmp_path / "5").curriculum.exists()


def test_a_run_that_can_get_no_batch_is_told(tmp_path: Path) -> None:
    """Every group has too few graded rollouts: half an hour later the trainer gives up, as the real one."""
    with pytest.raises(UserError, match="no batch within 1800 s"):
        simulate(config(simulate__ungraded=1.0), 1, tmp_path)
