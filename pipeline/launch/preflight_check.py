"""What a check before a run is, and how checks are run one after the other. The table of them is preflight_table.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from pipeline.capture.dialects.base import ApiError
from pipeline.config import Config, UserError
from pipeline.engine.server import EngineError

if TYPE_CHECKING:
    from pipeline.capture.continuity import Template

log = logging.getLogger("yoke.preflight")

CONFIG, NODE, DATA, ENGINE, TRAINER = NEEDS = ("config", "node", "data", "engine", "trainer")
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
BY_NAME = "as preflight.skip says"
LATER = "the job looks at this on its nodes, before its first rollout"


class Refused(Exception):
    """What a check found wrong, with the values, in one line."""


class NotHere(Exception):
    """Why a check cannot be made here, or has nothing to look at."""


@dataclass(frozen=True)
class Forward:
    """A trainer's view of one sequence: the logprobs of its sampled tokens, and the type of its weights."""

    logprobs: Sequence[float]
    dtype: str


@dataclass
class Grounds:
    """What checks look at. ``made_with``: the settings of an earlier start, which evaluation jobs read."""

    config: Config
    made_with: Config | None = None
    here: bool = True  # agents and engine will run on this machine
    url: str = ""  # of the engine
    start_engine: Callable[[ExitStack], str] | None = None  # where none is up yet: start one, stop it in the end
    forward: Callable[[Sequence[int], Sequence[int]], Forward] | None = None  # the trainer's, of (prompt, sampled)
    sample: int = 0  # tasks of each split that are checked; 0 = all
    stack: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def template(self) -> Template:
        """What the self-test finds out about the engine's chat template; it takes about a second, so it runs once."""
        from pipeline.launch.preflight_engine import learn_template

        return learn_template(self)


@dataclass(frozen=True)
class Check:
    """One row of the table. ``look`` returns what it saw. It raises Refused or UserError for what must be mended."""

    name: str
    looks_at: str
    needs: str
    cure: str
    look: Callable[[Grounds], str]
    opens: Collection[str] = ()  # the needs of later checks that cannot be met when this one fails


@dataclass(frozen=True)
class Result:
    """How a check ended. ``made``: False when it failed because something was away, and not for what it saw."""

    name: str
    result: str  # ok | failed | skipped
    said: str
    cure: str = ""
    seconds: float = 0.0
    made: bool = True

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value or key != "cure"}


Tell = Callable[[Check, Result | None], None]  # (check, None) when it begins, with its result when it has ended


def examine(
    checks: Iterable[Check],
    grounds: Grounds,
    skip: Collection[str] = (),
    tell: Tell = lambda check, result: None,
) -> list[Result]:
    """Make each check, in order. Those named in ``skip`` are passed over with a warning in the log."""
    closed: dict[str, str] = {}
    results = []
    for check in checks:
        tell(check, None)
        result = _one(check, grounds, skip, closed)
        if result.result != OK and result.said != BY_NAME:
            reason = f"{check.name} comes first" if result.result == FAILED else result.said
            closed |= dict.fromkeys(check.opens, reason)
        tell(check, result)
        results.append(result)
    return results


def _one(check: Check, grounds: Grounds, skip: Collection[str], closed: dict[str, str]) -> Result:
    if check.name in skip:
        log.warning("the check %s is skipped, %s: nobody looks at %s", check.name, BY_NAME, check.looks_at)
        return Result(check.name, SKIPPED, BY_NAME)
    if check.needs in closed:
        return Result(check.name, SKIPPED, closed[check.needs])
    started = time.monotonic()
    result, said, made = _look(check, grounds)
    seconds = round(time.monotonic() - started, 2)
    return Result(check.name, result, said, check.cure if result == FAILED else "", seconds, made)


def _look(check: Check, grounds: Grounds) -> tuple[str, str, bool]:
    """The result, what was said, and whether the check could be made."""
    try:
        return OK, check.look(grounds), True
    except NotHere as reason:
        return SKIPPED, str(reason), True
    except (Refused, UserError, EngineError) as error:
        return FAILED, str(error), True
    except (ApiError, httpx.HTTPError, OSError, ValueError) as error:
        return FAILED, f"the check could not be made: {type(error).__name__}: {error}", False


def complaint(results: Sequence[Result]) -> str:
    """What failed, for an error of one line; "" when nothing did."""
    failed = [result for result in results if result.result == FAILED]
    return "; ".join(f"{result.name}: {result.said} ({result.cure})" for result in failed)
