"""Stage 3: rewards from outcomes, and advantages inside a group.

Group-relative policy gradient (GRPO, arXiv 2402.03300) with the baseline of Dr. GRPO (arXiv 2503.20783): reward minus
the group's mean, no division by the deviation unless asked for. The mean is over rollouts, never over rows. DAPO's
overlong term (arXiv 2503.14476, eq. 13) is part of the reward when asked for.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean, pstdev

from pipeline.config import Config, UserError
from pipeline.records import Outcome, RolloutRecord, TrainGroup

RewardFunction = Callable[[RolloutRecord], float | None]
log = logging.getLogger("yoke.reward")

REWARD_FAILED = "reward_failed"  # in a rollout's info: why the reward function gave it none
CONTRAST = 1e-9  # rewards closer than this are equal
STD_EPSILON = 1e-6


def default_reward(outcome: RolloutRecord) -> float | None:
    """``correctness · (1 + 0.1 · 15 / (15 + tool_calls))``: a right answer counts, and a little more with few calls."""
    correctness = outcome.verdict.correctness
    if correctness is None:
        return None
    return correctness * (1.0 + 0.1 * 15.0 / (15.0 + outcome.verdict.tool_calls))


def correctness(outcome: RolloutRecord) -> float | None:
    """The verifier's word and nothing else: few tool calls earn nothing."""
    return outcome.verdict.correctness


def reward_for_tests(outcome: RolloutRecord) -> float | None:
    """``1 / (1 + index)``: any two rollouts of a group differ, whatever they did. For tests of the machinery only."""
    return 1.0 / (1 + outcome.index)


def configured_reward(config: Config) -> RewardFunction:
    """The reward of a run: its function, the penalty for malformed calls, and DAPO's overlong term if asked for."""
    reward = load_reward(**asdict(config.reward))
    length, cache = config.algorithm.overlong_tokens, config.algorithm.overlong_cache
    if not length:
        return reward

    def shaped(outcome: RolloutRecord) -> float | None:
        value = reward(outcome)
        return None if value is None else value + overlong(outcome.sampled_tokens, length, cache)

    return shaped


def overlong(tokens: int, length: int, cache: int) -> float:
    """0 up to ``length − cache`` sampled tokens, then linearly down to −1 at ``length``, and −1 beyond."""
    if tokens >= length:
        return -1.0
    return min(0.0, (length - cache - tokens) / cache) if cache else 0.0


def load_reward(fn: str, malformed_is_call: bool = True, malformed_penalty: float = 0.0) -> RewardFunction:
    """The reward function named ``package.module:function``, guarded, less the penalty for each malformed call.

    What comes back gives None for an ungraded rollout without asking the user's function, shows it malformed calls as
    tool calls if ``malformed_is_call`` (else a broken call would be the cheapest one), and refuses answers that are not
    finite.
    Raises UserError when there is no such function.
    """
    function = _resolve(fn)

    def reward(outcome: RolloutRecord) -> float | None:
        if outcome.outcome is Outcome.INFRASTRUCTURE or outcome.verdict.correctness is None:
            return None
        value = _checked(fn, function(_as_seen(outcome, malformed_is_call)))
        return None if value is None else value - malformed_penalty * outcome.malformed

    return reward


def score(records: Sequence[RolloutRecord], reward: RewardFunction) -> tuple[RolloutRecord, ...]:
    """The same rollouts with ``verdict.reward`` set by ``reward``; may be repeated with another reward.

    Where the function fails the rollout is ungraded, never 0, and its info says why.
    """
    return tuple(_scored(record, reward) for record in records)


def reward_failures(records: Sequence[RolloutRecord]) -> list[str]:
    """Why the reward function gave some of these rollouts nothing, one text a rollout."""
    return [record.info[REWARD_FAILED] for record in records if REWARD_FAILED in record.info]


def _scored(record: RolloutRecord, reward: RewardFunction) -> RolloutRecord:
    info = {key: value for key, value in record.info.items() if key != REWARD_FAILED}
    try:
        value = reward(replace(record, info=info))
    except Exception as error:  # whatever a user's function does costs its rollout only
        log.warning("rollout %s has no reward: %s", record.rollout_id, error, exc_info=not isinstance(error, UserError))
        value = None
        info[REWARD_FAILED] = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return replace(record, verdict=replace(record.verdict, reward=value), info=info)


def advantages(group: Sequence[RolloutRecord], normalize_std: bool = False) -> list[float | None]:
    """One advantage a rollout, in order: reward minus the mean over the graded ones; None where the reward is None.

    ``normalize_std`` divides by their population deviation plus STD_EPSILON.
    """
    rewards = graded_rewards(group)
    if not rewards:
        return [None] * len(group)
    mean = fmean(rewards)
    scale = pstdev(rewards) + STD_EPSILON if normalize_std else 1.0
    return [None if record.verdict.reward is None else (record.verdict.reward - mean) / scale for record in group]


def graded_rewards(group: Sequence[RolloutRecord]) -> list[float]:
    """The rewards of the rollouts that have one."""
    return [record.verdict.reward for record in group if record.verdict.reward is not None]


def why_ungraded(records: Sequence[RolloutRecord]) -> str:
    """The causes of the rollouts without a reward, each once, in at most 300 characters."""
    ungraded = [record for record in records if record.verdict.reward is None]
    return "; ".join(sorted({r.info.get(REWARD_FAILED, r.verdict.reason) for r in ungraded}))[:300]


def enough_graded(records: Sequence[RolloutRecord], size: int) -> bool:
    """Whether at least max(2, size / 2) of a group of ``size`` rollouts are graded; else it is rolled again."""
    return len(graded_rewards(records)) >= max(2, size / 2)


def rewards_differ(records: Sequence[RolloutRecord]) -> bool:
    """Whether the graded rewards differ; without that every advantage is zero."""
    rewards = graded_rewards(records)
    return bool(rewards) and max(rewards) - min(rewards) > CONTRAST


def to_train_group(records: Sequence[RolloutRecord], size: int, normalize_std: bool = False) -> TrainGroup | None:
    """The graded rollouts of a closed group and their advantages; None if too few are graded or all score the same."""
    if not enough_graded(records, size) or not rewards_differ(records):
        return None
    values = advantages(records, normalize_std)
    kept = [(record, value) for record, value in zip(records, values, strict=True) if value is not None]
    first = records[0]
    if any((record.group_id, record.harness) != (first.group_id, first.harness) for record in records):
        raise ValueError(f"rollouts of several groups or harnesses were given as group {first.group_id}")
    return TrainGroup(
        group_id=first.group_id,
        harness=first.harness,
        rollouts=tuple(record for record, _ in kept),
        advantages=tuple(value for _, value in kept),
    )


def _resolve(fn: str) -> RewardFunction:
    module_name, _, name = fn.partition(":")
    if not module_name or not name:
        raise UserError(f"reward.fn = {fn!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever stands in a user's module
        hint = "" if not isinstance(error, ModuleNotFoundError) else "; it must be installed or lie on PYTHONPATH"
        raise UserError(
            f"reward.fn = {fn!r}: cannot import {module_name}: {type(error).__name__}: {error}{hint}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"reward.fn = {fn!r}: {module_name} has no function {name}")
    if not _takes_one(function):
        raise UserError(f"reward.fn = {fn!r} must take one argument, the rollout")
    return function


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # no signature to look at
        return True
    return True


def _as_seen(outcome: RolloutRecord, malformed_is_call: bool) -> RolloutRecord:
    extra = outcome.malformed if malformed_is_call else 0
    return replace(outcome, verdict=replace(outcome.verdict, tool_calls=outcome.verdict.tool_calls + extra))


def _checked(fn: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"reward.fn = {fn!r} answered {value!r}; it must answer a finite number, or None for ungraded")
    return float(value)
