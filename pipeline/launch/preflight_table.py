"""The table of the checks before a run, and who makes which of them when."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.launch import preflight, preflight_engine, preflight_machine, preflight_settings
from pipeline.launch.gates import SOUND, check_all
from pipeline.launch.preflight_check import (
    CONFIG,
    DATA,
    ENGINE,
    LATER,
    NEEDS,
    NODE,
    TRAINER,
    Check,
    Forward,
    Grounds,
    NotHere,
    Result,
    Tell,
    complaint,
    examine,
)
from pipeline.launch.run_directory import RunDirectory

log = logging.getLogger("yoke.preflight")


def _settings(grounds: Grounds) -> str:
    return f"sandbox: {preflight.check_settings(grounds.config)}"


def _tasks(grounds: Grounds) -> str:
    config = grounds.config
    if not config.tasks.check:
        raise NotHere("tasks.check=false")
    if not grounds.here:
        raise NotHere(LATER)
    with tempfile.TemporaryDirectory(prefix="yoke-preflight-") as scratch:
        run = RunDirectory(Path(scratch))
        preflight.check_tasks_readable(config, run)
        return f"{check_all(config, run, grounds.sample)} tasks: {SOUND}"


CHECKS = (
    Check(
        "settings",
        "each setting by itself: names, numbers, the model, installed harnesses, whether a sandbox can be built",
        CONFIG,
        "mend the setting that the message names",
        _settings,
        opens=NEEDS,
    ),
    Check(
        "budgets",
        "tokens, calls, context and time that one rollout may use, in training and in evaluation",
        CONFIG,
        "give the run and its evaluation jobs the same limits, or a fresh run_dir",
        preflight_settings.budgets,
    ),
    Check(
        "groups",
        "the group size against every limit under which a group would never start, close or be fresh enough",
        CONFIG,
        "raise the limit that the message names, or make algorithm.group_size or groups_per_update smaller",
        preflight_settings.groups,
    ),
    Check(
        "context",
        "the context window against the first prompts of the harnesses, an answer, and the model",
        CONFIG,
        "raise model.max_model_len, or lower harness.sampling.max_tokens",
        preflight_settings.context,
    ),
    Check(
        "waits",
        "each time limit against the one that waits for it: harness, call, group, batch, weight sync, job",
        CONFIG,
        "change one of the two limits that the message names",
        preflight_settings.waits,
    ),
    Check(
        "disk",
        "space for checkpoints, exported models and rollouts in the run directory",
        CONFIG,
        "make room or another run_dir; lower storage.rollouts, training.keep_checkpoints or evaluation.keep_exports",
        preflight_machine.disk,
    ),
    Check(
        "node",
        "memory, processes, open files and scratch of a node, for as many rollouts as run at once",
        NODE,
        "lower concurrency, raise the machine's limit, or point TMPDIR to a larger disk",
        preflight_machine.node,
    ),
    Check(
        "tasks",
        "the verifiers: a task's own solution scores 1, an untouched workspace scores 0, in the sandbox of the run",
        DATA,
        "mend the task or its verifier",
        _tasks,
    ),
    Check(
        "engine",
        "whether vLLM starts and serves the context window that harnesses are told",
        ENGINE,
        "read the end of vLLM's log; most often memory or a flag in engine.extra_args",
        preflight_engine.engine,
        opens=(ENGINE, TRAINER),
    ),
    Check(
        "parser",
        "whether a call, as the chat template writes it, comes out of the tool parser and the harness's dialect",
        ENGINE,
        "set model.tool_parser as docs/templates.md says for the model, and leave out a --reasoning-parser",
        preflight_engine.parser,
    ),
    Check(
        "thinking",
        "whether thoughts are off (or on) as harness.sampling.thinking says: the prompt's end, and some sampled tokens",
        ENGINE,
        "use a chat template that obeys enable_thinking, or set harness.sampling.thinking=null",
        preflight_engine.thinking,
    ),
    Check(
        "continuity",
        "whether a turn's prompt and sample begin the next turn's prompt, for the turns that each harness makes",
        ENGINE,
        "use another chat template (docs/templates.md); each turn would be a row of its own",
        preflight_engine.continuity,
    ),
    Check(
        "logprobs",
        "whether logprobs are those after temperature and top_p: two temperatures must give two gaps",
        ENGINE,
        "take --logprobs-mode out of engine.extra_args",
        preflight_engine.logprobs,
    ),
    Check(
        "trainer",
        "the type of the weights, and each sampled token's logprob, in the engine and in the trainer",
        TRAINER,
        "set model.dtype to the trainer's; if the gap stays, engine and trainer do not compute the same model",
        preflight_engine.trainer,
    ),
)


def chosen(needs: Collection[str]) -> list[Check]:
    """The checks that need one of these, in their order."""
    return [check for check in CHECKS if check.needs in needs]


def skipped(config: Config) -> list[str]:
    """The names in preflight.skip. Raises UserError for one that no check has."""
    names = [check.name for check in CHECKS]
    for name in config.preflight.skip:
        if name not in names:
            raise UserError(f"preflight.skip names {name}; the checks are: {', '.join(names)}")
    return config.preflight.skip


def look(
    config: Config, needs: Collection[str], grounds: Grounds, tell: Tell = lambda check, result: None
) -> list[Result]:
    """Make the checks that need one of these."""
    return examine(chosen(needs), grounds, skipped(config), tell)


def made_with(run: RunDirectory) -> Config | None:
    """The settings that an earlier start of the run left, if one did."""
    return run.saved_config() if run.is_made else None


# --- what `yoke train` makes of it


def refuse_at_start(config: Config, run: RunDirectory) -> None:
    """Before anything is submitted or started, and after `check_settings`: what settings alone can tell, and on this
    machine, if the agents will run here, what it has. Raises UserError with all that failed.
    """
    needs = (CONFIG, NODE) if config.cluster.name == "local" else (CONFIG,)
    grounds = Grounds(config, made_with(run))
    _refuse(examine([check for check in chosen(needs) if check.name != "settings"], grounds, skipped(config)))


def refuse_node(config: Config) -> None:
    """In a job, before it starts anything: what its node has. Raises UserError."""
    if config.cluster.name != "local":
        _refuse(look(config, (NODE,), Grounds(config)))


def refuse_engine(config: Config, url: str) -> None:
    """In a job, as soon as its engine is up. Raises UserError."""
    _refuse(_answered(look(config, (ENGINE,), Grounds(config, url=url))))


def refuse_trainer(config: Config, url: str, forward: Callable[[Sequence[int], Sequence[int]], Forward]) -> None:
    """In a job, when the engine has the trainer's weights and before the first rollout. Raises UserError."""
    _refuse(_answered(look(config, (TRAINER,), Grounds(config, url=url, forward=forward))))


def _answered(results: Sequence[Result]) -> list[Result]:
    """Without those in which the engine did not answer: one that dies is started again, which is no setting's fault."""
    for result in results:
        if not result.made:
            log.warning("%s: %s", result.name, result.said)
    return [result for result in results if result.made]


def _refuse(results: Sequence[Result]) -> None:
    if text := complaint(results):
        raise UserError(f"{text}. All checks: yoke preflight; preflight.skip=[NAME] leaves one out")
