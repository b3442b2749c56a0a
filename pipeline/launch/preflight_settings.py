"""Checks that read settings only: budgets, group sizes, the context window, and limits that a run could stall on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.hub import model_file
from pipeline.launch.preflight_check import Grounds, Refused
from pipeline.launch.run_directory import STALL_S
from pipeline.stages.harness_check_result import read, results_place

# vLLM flags that Yoke sets from a setting, and everybody else relies on that setting.
OWNED_FLAGS = {
    "--max-model-len": "model.max_model_len",
    "--dtype": "model.dtype",
    "--tool-call-parser": "model.tool_parser",
    "--max-num-seqs": "engine.max_num_seqs",
    "--port": "engine.port",
    "--model": "model.path",
    **dict.fromkeys(
        ("--logprobs-mode", "--host", "--seed", "--served-model-name", "--worker-extension-cls"),
        "nothing: leave it out",
    ),
}
# What one rollout may use up. Agents behave otherwise where it ends, so training and evaluation must have the same.
BUDGETS: dict[str, Callable[[Config], Any]] = {
    "harness.sampling.max_tokens": lambda config: config.harness.sampling.max_tokens,
    "harness.sampling.max_calls": lambda config: config.harness.sampling.max_calls,
    "harness.sampling.max_session_tokens": lambda config: config.harness.sampling.max_session_tokens,
    "harness.sampling.max_wall_s": lambda config: config.harness.sampling.max_wall_s,
    "harness.sampling.max_concurrent": lambda config: config.harness.sampling.max_concurrent,
    "harness.timeout_s": lambda config: config.harness.timeout_s,
    "engine.request_timeout_s": lambda config: config.engine.request_timeout_s,
    "model.max_model_len": lambda config: config.model.max_model_len,
}
# Seconds without a byte after which a harness gives an answer up and asks again, as measured or read in its source.
BEFORE_HEADERS_S = {"gemini-cli": 60.0}  # qwen-code's 120 s are turned off in its recipe
WITHOUT_STREAM_S = {"openhands": 300.0, "mini-swe-agent": 600.0, "terminus-2": 600.0}  # no pings can reach these
REAL_SHARE = 0.4  # of the tokens that the tiny model of `yoke harness check` makes of a prompt, at least


def refuse_if(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises Refused with the texts of the rules that are broken."""
    if broken := "; ".join(text for wrong, text in rules if wrong):
        raise Refused(broken)


# --- budgets


def budgets(grounds: Grounds) -> str:
    """Training runs with the settings given now, evaluation jobs with those that the run was made with."""
    training, evaluation = grounds.config, grounds.made_with or grounds.config
    refuse_if(
        (value(training) != value(evaluation), f"{name} is {value(training)} in training, {value(evaluation)} in "
         "evaluation jobs, which read the run's config.yaml")
        for name, value in BUDGETS.items()
    )  # fmt: skip
    flags = set(_flags(training.engine.extra_args)) | set(_flags(evaluation.engine.extra_args))
    refuse_if(
        (flag in flags, f"engine.extra_args has {flag}, of which only vLLM would know; set {instead}")
        for flag, instead in OWNED_FLAGS.items()
    )
    sampling = training.harness.sampling
    calls = sampling.max_calls or "any number of"
    return f"{sampling.max_tokens} tokens an answer, {calls} calls, {training.harness.timeout_s:g} s, both times"


def _flags(words: list[str]) -> list[str]:
    """The names of vLLM's flags among words, in vLLM's spelling."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


# --- groups


def groups(grounds: Grounds) -> str:
    """Whether groups can start, close, and be trained before they are too old."""
    config, algorithm = grounds.config, grounds.config.algorithm
    size, credits = algorithm.group_size, algorithm.max_outstanding_rollouts
    needed = algorithm.groups_per_update * size
    out = credits // size
    in_all = config.training.updates * algorithm.groups_per_update
    updates_behind = max(0, min(out, in_all) - 1) // algorithm.groups_per_update
    refuse_if(
        (
            (size > credits, f"algorithm.group_size={size} is larger than algorithm.max_outstanding_rollouts={credits}:"
             " no group could ever start"),
            (size <= credits < needed, f"an update needs {algorithm.groups_per_update} groups of {size} = {needed} "
             f"rollouts, but algorithm.max_outstanding_rollouts={credits}: raise it or lower the groups"),
            (config.engine.max_num_seqs < config.concurrency, f"engine.max_num_seqs={config.engine.max_num_seqs} is "
             f"below concurrency={config.concurrency}: rollouts would wait for each other inside vLLM, unseen"),
            (updates_behind > algorithm.max_staleness, f"algorithm.max_outstanding_rollouts={credits} lets {out} "
             f"groups out, so the last one trains {updates_behind} updates later; algorithm.max_staleness="
             f"{algorithm.max_staleness} would drop it"),
            (algorithm.refill_factor < 0, f"algorithm.refill_factor={algorithm.refill_factor:g} is negative: updates "
             "would be made of fewer groups, down to none"),
        )
    )  # fmt: skip
    waves = math.ceil(size / config.concurrency)
    at_once = f"{min(size, config.concurrency)} at once" + (f", in {waves} turns" if waves > 1 else "")
    return (
        f"{size} rollouts a group, {at_once} on a node; {out} groups out, an update takes {algorithm.groups_per_update}"
    )


# --- context


def context(grounds: Grounds) -> str:
    """Whether a first prompt and an answer fit into the window, and the window into the model."""
    config, sampling = grounds.config, grounds.config.harness.sampling
    window, answer = config.model.max_model_len, sampling.max_tokens
    longest, name = max((least_prompt(name), name) for name in config.mix.harnesses)
    positions = _positions(config.model.path)
    refuse_if(
        (
            (answer >= window, f"harness.sampling.max_tokens={answer} leaves no room for a prompt in "
             f"model.max_model_len={window}"),
            (answer < window < longest + answer, f"{name}'s first prompt takes at least {longest} tokens; with "
             f"harness.sampling.max_tokens={answer} that is more than model.max_model_len={window}"),
            (0 < sampling.max_session_tokens <= longest + answer, f"harness.sampling.max_session_tokens="
             f"{sampling.max_session_tokens} ends a session with its first call"),
            (positions is not None and window > positions, f"model.max_model_len={window}, but the model knows "
             f"{positions} positions: vLLM would not start"),
        )
    )  # fmt: skip
    known = f"the longest first prompt takes {longest} at least ({name})" if longest else "no first prompt was measured"
    return f"{window} tokens, {answer} of them for an answer; {known}"


def least_prompt(harness: str) -> int:
    """Tokens of a harness's first prompt, at least: of what `yoke harness check` measured; 0 where it did not."""
    measured = figures(harness).get("real vLLM", {}).get("prompt_tokens", 0)
    return int(REAL_SHARE * measured)


def figures(harness: str) -> dict[str, dict[str, Any]]:
    """What `yoke harness check` measured on this machine, by scene; empty where it was not run."""
    found: dict[str, dict[str, Any]] = _measured(results_place()).get(harness, {}).get("scenes", {})
    return found


@cache
def _measured(place: Path) -> dict[str, dict[str, Any]]:
    return read(place)


def _positions(model_path: str) -> int | None:
    """How many positions a model was made for; None where its configuration does not say it plainly."""
    place = model_file(model_path, "config.json")
    if place is None:
        return None
    known = json.loads(place.read_text())
    known |= known.get("text_config", {})
    scaling = known.get("rope_scaling") or known.get("rope_parameters") or {}
    stretched = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    return None if stretched else known.get("max_position_embeddings")


# --- time


def waits(grounds: Grounds) -> str:
    """Every pair of limits of which the first must end before the second, or something would wait without a word."""
    from pipeline.capture.delivery import HEADERS_AFTER_S  # with the proxy's server, which a submission need not load

    config = grounds.config
    group_s = math.ceil(config.algorithm.group_size / config.concurrency) * config.harness.timeout_s
    call_s = config.engine.request_timeout_s
    refuse_if(
        (
            (group_s >= STALL_S, f"a group of {config.algorithm.group_size} may take {group_s:g} s (harness.timeout_s="
             f"{config.harness.timeout_s:g}, concurrency={config.concurrency}), but a batch is waited for "
             f"{STALL_S:g} s"),
            (not 0 <= config.algorithm.stale_wait_s < STALL_S, "algorithm.stale_wait_s="
             f"{config.algorithm.stale_wait_s:g} must be at least 0 and less than the {STALL_S:g} s that a batch "
             "is waited for"),
            (config.engine.sync_timeout_s >= call_s, f"engine.sync_timeout_s={config.engine.sync_timeout_s:g}: a call "
             f"in flight stands still for so long, but engine.request_timeout_s={call_s:g} ends it"),
            *((call_s > patience, f"engine.request_timeout_s={call_s:g}, but {name} gives an answer up after "
               f"{patience:g} s and asks again") for name, patience in _of_the_mix(config, WITHOUT_STREAM_S)),
            *((patience <= HEADERS_AFTER_S, f"{name} gives up after {patience:g} s without headers, which come after "
               f"{HEADERS_AFTER_S:g} s") for name, patience in _of_the_mix(config, BEFORE_HEADERS_S)),
            *_job_times(config),
        )
    )  # fmt: skip
    limits = f"a rollout {config.harness.timeout_s:g} s, a call {call_s:g} s, a group {group_s:g} s"
    return f"{limits}, a batch {STALL_S:g} s"


def _of_the_mix(config: Config, table: dict[str, float]) -> Iterable[tuple[str, float]]:
    return ((name, seconds) for name, seconds in table.items() if name in config.mix.harnesses)


def _job_times(config: Config) -> Iterable[tuple[bool, str]]:
    """A job that ends before its first rollout is requeued for ever, and nothing comes of it."""
    cluster = config.cluster
    if cluster.name == "local":
        return
    needed = config.engine.start_timeout_s + config.harness.timeout_s
    times = {"cluster.timeout_min": cluster.timeout_min}
    if config.evaluation.every and "timeout_min" in config.evaluation.cluster:
        times["evaluation.cluster.timeout_min"] = config.evaluation.cluster["timeout_min"]
    for name, minutes in times.items():
        yield (
            60 * minutes - cluster.signal_s <= needed,
            f"{name}={minutes} less cluster.signal_s={cluster.signal_s} is shorter than engine.start_timeout_s="
            f"{config.engine.start_timeout_s:g} and harness.timeout_s={config.harness.timeout_s:g} together",
        )
