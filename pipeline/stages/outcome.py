"""How a rollout ended: one table of rules, the first that applies decides. docs/outcomes.md shows the same table.

The proxy's record and the workspace speak before the exit code, which lies: harnesses end with 0 after failures, and
with 1 after success.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.harness.base import HarnessRecipe
from pipeline.records import Call, Outcome, RolloutRecord, Trace
from pipeline.sandbox.base import SandboxExit

OUTPUT_SHOWN = 200
SHELL_SIGNAL = 128  # a command that a signal ended is reported as this much more than the signal's number
SIGNALS = {  # those that end a program; Gemini CLI's exit codes of 144 (status 400) and more are no signals
    SHELL_SIGNAL + getattr(signal, name): name
    for name in (
        *("SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV"),
        *("SIGPIPE", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGXFSZ", "SIGSYS"),
    )
}


@dataclass(frozen=True)
class End:
    """What is known when a rollout has ended. ``correctness`` is the verifier's word, None before it spoke."""

    recipe: HarnessRecipe
    trace: Trace
    exit: SandboxExit
    output: str = ""  # the end of what the harness printed
    guarded: bool = False  # its output says that its own guard against loops ended the run
    outage: bool = False  # the engine was down at some time meanwhile
    correctness: float | None = None

    @property
    def own(self) -> list[Call]:
        """The answers that the harness itself asked for and got."""
        return [call for call in self.trace.calls if call.delivered and not call.foreign]

    @property
    def meaning(self) -> str:
        """What the harness means by its exit code, if its recipe knows."""
        return "" if self.exit.returncode is None else self.recipe.exit_codes.get(self.exit.returncode, "")

    def counted(self, counter: str) -> int:
        """How often the proxy counted something in this session."""
        return self.trace.counters.get(counter, 0)


Test = Callable[[End], str | None]


@dataclass(frozen=True)
class Rule:
    """``outcome`` if ``test`` gives a reason (which may be empty) and not None. ``when`` is for people.

    Of an infrastructure failure ``cause`` is the short name, and ``shared`` tells that no harness is to blame for it.
    """

    when: str
    outcome: Outcome
    test: Test
    cause: str = ""
    shared: bool = False


@dataclass(frozen=True)
class Decision:
    """An outcome and why; of an infrastructure failure also its cause."""

    outcome: Outcome
    reason: str = ""
    cause: str = ""


def _unanswered(end: End) -> str | None:
    if any(call.delivered for call in end.trace.calls) or end.counted("over_budget"):
        return None
    return f"the harness got no answer (exit {end.exit.returncode}): {end.output[-OUTPUT_SHOWN:]}"


def _not_its_own(end: End) -> str | None:
    answered = sum(call.delivered for call in end.trace.calls)
    return f"none of {answered} answers was to the harness itself" if answered and not end.own else None


def _outside(end: End) -> str | None:
    code = end.exit.returncode
    return None if code is None or code >= 0 else f"the sandbox was killed from outside (signal {-code})"


def _signalled(end: End) -> str | None:
    name = SIGNALS.get(end.exit.returncode or 0)
    return f"ended by {name}" if name and not end.meaning else None


def _window(end: End) -> str | None:
    return "the model's window was full" if end.counted("context_full") and end.exit.returncode else None


def _broke_off(end: End) -> str | None:
    """A harness that is done ends on an answer that asks for nothing."""
    if not end.exit.returncode or end.meaning or not end.own or not end.own[-1].tool_calls:
        return None
    return f"exit {end.exit.returncode} after an answer that asked for a tool call"


def _means(outcome: Outcome) -> Test:
    return lambda end: f"exit {end.exit.returncode}" if end.meaning == outcome else None


def _when(condition: Callable[[End], object], reason: str = "") -> Test:
    return lambda end: reason if condition(end) else None


def _budget(end: End) -> str | None:
    if end.counted("over_budget"):
        return "the session's budget was used up"
    return _means(Outcome.CALL_BUDGET)(end)


def _loop(end: End) -> str | None:
    return "its guard against loops ended it" if end.guarded else _means(Outcome.LOOP_GUARD)(end)


def _crash(end: End) -> str | None:
    return _broke_off(end) or _means(Outcome.AGENT_CRASH)(end)


# Decided before the workspace is looked at: what happened after such a failure is not the model's doing, good or bad,
# and grading only those that came through would make every figure too good.
SPOILT: tuple[Rule, ...] = (
    Rule(
        "the engine could not serve a call", Outcome.INFRASTRUCTURE,
        _when(lambda end: end.counted("engine_failures"), "the engine did not answer"), "engine", shared=True,
    ),
    Rule(
        "the proxy's journal could not be written", Outcome.INFRASTRUCTURE,
        _when(lambda end: end.counted("journal_failures"), "the proxy's journal could not be written"),
        "journal", shared=True,
    ),
    Rule(
        "the time ran out, and the engine was down (a hosted one: or busy) meanwhile", Outcome.INFRASTRUCTURE,
        _when(
            lambda end: end.exit.timed_out and (end.outage or end.counted("outages")),
            "the time ran out while the engine was down, or a hosted one was busy",
        ),
        "outage", shared=True,
    ),
    Rule(
        "Yoke stopped it", Outcome.INFRASTRUCTURE,
        _when(lambda end: end.exit.killed == "asked", "Yoke stopped it"), "stopped", shared=True,
    ),
    Rule("the sandbox was killed from outside", Outcome.INFRASTRUCTURE, _outside, "killed"),
    Rule(
        "the exit code means `infrastructure`", Outcome.INFRASTRUCTURE, _means(Outcome.INFRASTRUCTURE), "exit_code",
    ),
    Rule("no answer was delivered", Outcome.INFRASTRUCTURE, _unanswered, "unanswered"),
    Rule("no answer was to the harness itself", Outcome.INFRASTRUCTURE, _not_its_own, "foreign"),
)  # fmt: skip
# Decided with the verifier's word.
GRADED: tuple[Rule, ...] = (
    Rule(
        "its time ran out", Outcome.AGENT_TIMEOUT,
        lambda end: f"stopped after {end.exit.wall_s:.0f} s" if end.exit.timed_out else None,
    ),
    Rule(
        "it was killed at a limit: memory, processes, disk", Outcome.AGENT_CRASH,
        lambda end: f"killed at its limit of {end.exit.killed}" if end.exit.killed else None,
    ),
    Rule("the verifier gives full marks", Outcome.SOLVED, _when(lambda end: (end.correctness or 0.0) >= 1.0)),
    Rule("the proxy refused a call, or the exit code means `call_budget`", Outcome.CALL_BUDGET, _budget),
    Rule("its output matches `loop_guard`, or the exit code means it", Outcome.LOOP_GUARD, _loop),
    Rule("the exit code means `agent_timeout`", Outcome.AGENT_TIMEOUT, _means(Outcome.AGENT_TIMEOUT)),
    Rule("a signal ended it", Outcome.AGENT_CRASH, _signalled),
    Rule("the model's window was full, and the exit code is not 0", Outcome.UNSOLVED, _window),
    Rule(
        "the exit code means `agent_crash`; or it is not 0, without meaning, and the last answer asked for a tool call",
        Outcome.AGENT_CRASH, _crash,
    ),
    Rule("anything else", Outcome.UNSOLVED, lambda end: f"exit {end.exit.returncode}" if end.exit.returncode else ""),
)  # fmt: skip
# What else can fail: no rule sees it, since there is no end to look at.
BROKEN: dict[str, tuple[str, bool]] = {  # cause: (when, shared)
    "installation": ("the harness is not installed, or at another version", False),
    "sandbox": ("the sandbox could not be built, or something outlived its end", False),
    "capture": ("the proxy could not open or close the session", True),
    "system": ("the operating system refused a file or a process", True),
    "verifier": ("the verifier's sandbox, time or reward file failed", True),
    "job_end": ("a signal ended the harness while the whole job was told to end", True),
}
SHARED = frozenset(
    {rule.cause for rule in SPOILT if rule.shared} | {cause for cause, (_, shared) in BROKEN.items() if shared}
)
FAILED = frozenset({Outcome.AGENT_TIMEOUT, Outcome.AGENT_CRASH})


def spoilt(end: End) -> Decision | None:
    """The infrastructure failure because of which a rollout must not be graded; None if there was none."""
    return _first(SPOILT, end)


def decide(end: End) -> Decision:
    """The outcome of a rollout that the verifier graded."""
    decision = _first(GRADED, end)
    assert decision is not None, "the last rule takes everything"
    return decision


def credit(outcome: Outcome, correctness: float) -> float:
    """Whatever the workspace holds: an agent that ran out of time or broke down has failed."""
    return 0.0 if outcome in FAILED else correctness


def harness_failed(records: Sequence[RolloutRecord], size: int) -> bool:
    """Whether a group of ``size`` has too few graded rollouts, and would have even if all that is shared had worked."""
    own = [r for r in records if r.outcome is Outcome.INFRASTRUCTURE and r.info.get("cause") not in SHARED]
    return size - len(own) < max(2, size / 2)


def _first(rules: Sequence[Rule], end: End) -> Decision | None:
    for rule in rules:
        reason = rule.test(end)
        if reason is not None:
            return Decision(rule.outcome, reason, rule.cause)
    return None
