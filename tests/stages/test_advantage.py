"""Rewards and advantages against hand computation; ungraded rollouts and groups without contrast."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.stages.advantage import (
    advantages,
    configured_reward,
    default_reward,
    enough_graded,
    load_reward,
    overlong,
    reward_failures,
    rewards_differ,
    score,
    to_train_group,
)

DEFAULT = "pipeline.stages.advantage:default_reward"


def rollout(
    reward: float | None = None,
    correctness: float | None = 1.0,
    tool_calls: int = 0,
    malformed: int = 0,
    index: int = 0,
    outcome: Outcome = Outcome.SOLVED,
    harness: str = "pi",
) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=f"g-{index}",
        group_id="g",
        index=index,
        task_id="t",
        harness=harness,
        outcome=outcome,
        verdict=Verdict(reward, correctness, tool_calls),
        rows=(),
        version=PolicyVersion(0, 1),
        newest_version=PolicyVersion(0, 1),
        calls=tool_calls + malformed,
        malformed=malformed,
        undelivered=0,
        prompt_tokens=0,
        sampled_tokens=0,
        wall_s=1.0,
    )


def group(*rewards: float | None) -> list[RolloutRecord]:
    return [rollout(reward=reward, index=index) for index, reward in enumerate(rewards)]


@pytest.fixture
def user_module() -> Iterator[Callable[[Callable[[RolloutRecord], object]], str]]:
    """Installs a function as ``user_rewards:f`` and gives its name."""

    def install(function: Callable[[RolloutRecord], object]) -> str:
        module = types.ModuleType("user_rewards")
        module.f = function  # type: ignore[attr-defined]
        sys.modules["user_rewards"] = module
        return "user_rewards:f"

    yield install
    sys.modules.pop("user_rewards", None)


@pytest.mark.parametrize(
    ("correctness", "calls", "expected"),
    [(1.0, 0, 1.1), (1.0, 15, 1.05), (1.0, 135, 1.01), (0.0, 0, 0.0), (0.5, 15, 0.525), (None, 3, None)],
)
def test_default_reward_by_hand(correctness: float | None, calls: int, expected: float | None) -> None:
    reward = default_reward(rollout(correctness=correctness, tool_calls=calls))
    assert reward == (None if expected is None else pytest.approx(expected))


def test_malformed_calls_cost_their_penalty() -> None:
    clean, broken = rollout(), replace(rollout(), malformed=2)
    reward = load_reward(DEFAULT, malformed_is_call=False, malformed_penalty=0.25)
    plain, less = reward(clean), reward(broken)
    assert plain is not None and less == pytest.approx(plain - 0.5)
    ungraded = replace(broken, verdict=replace(broken.verdict, correctness=None))
    assert reward(ungraded) is None


def test_malformed_calls_count_as_calls_only_if_asked() -> None:
    outcome = rollout(tool_calls=5, malformed=10)
    assert load_reward(DEFAULT)(outcome) == pytest.approx(1.05)
    assert load_reward(DEFAULT, malformed_is_call=False)(outcome) == pytest.approx(1 + 0.1 * 15 / 20)
    assert outcome.verdict.tool_calls == 5


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (99999, -1.0)],
)
def test_the_overlong_term_by_hand(tokens: int, expected: float) -> None:
    """DAPO's own lengths: 20,480 tokens, of which the last 4,096 cost."""
    assert overlong(tokens, 20480, 4096) == pytest.approx(expected)
    assert overlong(tokens, 20480, 0) == (-1.0 if tokens >= 20480 else 0.0)


def test_the_overlong_term_is_part_of_the_configured_reward() -> None:
    base = ["+experiment=smoke", "reward=default"]
    long = replace(rollout(correctness=0.0), sampled_tokens=18432)
    assert configured_reward(compose_config(base))(long) == 0.0
    shaped = configured_reward(compose_config([*base, "algorithm=dapo"]))
    assert shaped(long) == pytest.approx(-0.5) and shaped(replace(long, sampled_tokens=100)) == 0.0
    assert shaped(replace(long, verdict=replace(long.verdict, correctness=None))) is None
    same = [replace(long, index=0), replace(long, index=1, sampled_tokens=1)]
    assert rewards_differ(score(same, shaped)) and not rewards_differ(
        score(same, configured_reward(compose_config(base)))
    )


def test_ungraded_rollouts_never_reach_the_users_function(user_module: Callable[..., str]) -> None:
    seen: list[RolloutRecord] = []
    reward = load_reward(user_module(lambda outcome: seen.append(outcome) or 1.0))
    assert reward(rollout(outcome=Outcome.INFRASTRUCTURE)) is None
    assert reward(rollout(correctness=None)) is None
    assert seen == []
    assert reward(rollout()) == 1.0


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), "1"])
def test_an_answer_that_is_no_finite_number_is_refused(user_module: Callable[..., str], answer: object) -> None:
    with pytest.raises(UserError, match="user_rewards:f"):
        load_reward(user_module(lambda outcome: answer))(rollout())


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        ("nowhere.to.find:f", "cannot import"),
        ("pipeline.stages.advantage:missing", "has no function missing"),
        ("pipeline.stages.advantage", "package.module:function"),
        ("pipeline.stages.advantage:CONTRAST", "has no function CONTRAST"),
    ],
)
def test_a_wrong_reward_name_is_a_user_error(fn: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_reward(fn)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(outcome) return 1", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("from os import nothing_there", "cannot import name"),
        ("import no_such_thing_at_all", "PYTHONPATH"),
        ("def f(): return 1.0", "one argument"),
        ("def f(outcome, config): return 1.0", "one argument"),
    ],
)
def test_a_module_that_cannot_serve_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    name = f"broken_rewards_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=said) as caught:
        load_reward(f"{name}:f")
    assert "\n" not in str(caught.value)


def test_a_function_that_fails_leaves_its_rollout_ungraded_with_the_cause(user_module: Callable[..., str]) -> None:
    def picky(outcome: RolloutRecord) -> float | None:
        if outcome.index == 3:
            return None
        return {0: 2.0, 1: 1.0, 2: 1 / 0 if outcome.index == 2 else 0.0, 4: float("nan")}[outcome.index]

    records = score([rollout(index=index) for index in range(6)], load_reward(user_module(picky)))
    assert [record.verdict.reward for record in records] == [2.0, 1.0, None, None, None, None], "never 0"
    causes = reward_failures(records)
    assert [cause.partition(":")[0] for cause in causes] == [
        "ZeroDivisionError",
        "reward.fn = 'user_rewards",
        "KeyError",
    ]
    assert "nan" in causes[1] and records[3].info == {}, "None is an answer"
    assert advantages(records)[:2] == [pytest.approx(0.5), pytest.approx(-0.5)], "out of the baseline too"
    made = to_train_group(records[:4], size=4)
    assert made is not None and len(made.rollouts) == 2, "and out of N"
    mended = score(records, load_reward(DEFAULT))
    assert reward_failures(mended) == [] and len(mended) == 6, "another reward forgets it"


def test_the_function_sees_the_outcome_and_the_trajectory(user_module: Callable[..., str]) -> None:
    row = Row(np.arange(5, dtype=np.int32), np.array([False, False, True, True, True]), np.zeros(5, np.float32))
    record = replace(rollout(tool_calls=3, malformed=1), rows=(row, row), info={"forks": 1})

    def short(outcome: RolloutRecord) -> float:
        assert outcome.outcome is Outcome.SOLVED and outcome.verdict.tool_calls == 4 and outcome.info["forks"] == 1
        return 1.0 / sum(part.trained_tokens for part in outcome.rows)

    (scored,) = score([record], load_reward(user_module(short)))
    assert scored.verdict.reward == pytest.approx(1 / 6) and scored.rows == record.rows


def test_the_plain_reward_pays_nothing_for_few_calls() -> None:
    reward = configured_reward(compose_config(["+experiment=smoke", "reward=plain"]))
    assert [reward(rollout(correctness=c, tool_calls=n)) for c, n in [(1.0, 0), (1.0, 99), (0.5, 0)]] == [1.0, 1.0, 0.5]


def test_scoring_replaces_rewards_and_may_be_repeated() -> None:
    records = [rollout(reward=9.0, tool_calls=15), rollout(correctness=None)]
    once = score(records, load_reward(DEFAULT))
    assert [record.verdict.reward for record in once] == [pytest.approx(1.05), None]
    assert score(once, load_reward(DEFAULT)) == once


def test_the_baseline_is_the_mean_of_the_graded_rollouts_only() -> None:
    assert advantages(group(1.0, 0.0, None, 0.5)) == [pytest.approx(0.5), pytest.approx(-0.5), None, pytest.approx(0.0)]


def test_dividing_by_the_deviation_is_an_option() -> None:
    rewards = [1.1, 0.0, 1.05, 0.0]
    plain, scaled = advantages(group(*rewards)), advantages(group(*rewards), normalize_std=True)
    np.testing.assert_allclose(plain, np.array(rewards) - np.mean(rewards))
    np.testing.assert_allclose(scaled, (np.array(rewards) - np.mean(rewards)) / np.std(rewards), rtol=1e-5)


def test_a_group_with_nothing_graded_has_no_advantages() -> None:
    assert advantages(group(None, None)) == [None, None]


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=16), st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_constant(rewards: list[float | None], shift: float) -> None:
    values = advantages(group(*rewards))
    moved = advantages(group(*(None if reward is None else reward + shift for reward in rewards)))
    assert [value is None for value in values] == [reward is None for reward in rewards]
    graded = [value for value in values if value is not None]
    assert sum(graded) == pytest.approx(0.0, abs=1e-9)
    assert [value for value in moved if value is not None] == pytest.approx(graded, abs=1e-9)


@pytest.mark.parametrize(
    ("graded", "size", "enough"),
    [(4, 8, True), (3, 8, False), (2, 3, True), (1, 2, False), (3, 7, False), (4, 7, True)],
)
def test_half_a_group_and_never_one_alone(graded: int, size: int, enough: bool) -> None:
    assert enough_graded(group(*[1.0] * graded, *[None] * (size - graded)), size) is enough


def test_contrast_is_a_difference_between_graded_rewards() -> None:
    assert rewards_differ(group(1.0, 0.0, None))
    assert rewards_differ(group(1.1, 1.05))
    assert not rewards_differ(group(1.0, 1.0, None))
    assert not rewards_differ(group(None, None))
    assert not rewards_differ(group(1.05, 1.0 + 0.1 * 15.0 / 30.0))


def test_a_train_group_holds_graded_rollouts_with_their_advantages() -> None:
    records = group(1.0, None, 0.0, 0.5)
    made = to_train_group(records, size=4)
    assert made is not None
    assert made.rollouts == (records[0], records[2], records[3])
    assert made.advantages == (pytest.approx(0.5), pytest.approx(-0.5), pytest.approx(0.0))
    assert (made.group_id, made.harness) == ("g", "pi")


def test_no_train_group_without_contrast_or_with_too_few_graded() -> None:
    assert to_train_group(group(1.0, 1.0, 1.0, 1.0), size=4) is None
    assert to_train_group(group(1.0, None, None, None), size=4) is None
    assert to_train_group(group(1.0, 0.0, None, None, None), size=5) is None


def test_rollouts_of_two_harnesses_are_no_group() -> None:
    mixed = [*group(1.0), replace(group(0.0)[0], harness="claude-code")]
    with pytest.raises(ValueError, match="several groups or harnesses"):
        to_train_group(mixed, size=2)


def test_the_test_reward_gives_contrast_whatever_the_model_did() -> None:
    config = compose_config(["+experiment=quickstart", "reward=test"]).reward
    assert config.malformed_penalty == 0.0, "a penalty could even two rollouts out"
    reward = load_reward(**asdict(config))
    same = [replace(rollout(correctness=0.0, malformed=3), index=index) for index in range(8)]
    rewards = [record.verdict.reward for record in score(same, reward)]
    assert len(set(rewards)) == 8
    assert reward(rollout(outcome=Outcome.INFRASTRUCTURE, correctness=None)) is None
