"""What a session may use up: calls, tokens, time. Several harnesses have no such limit of their own."""

from __future__ import annotations

from pipeline.capture.dialects.base import Answer, ApiError, Fault
from pipeline.capture.journal import Policy

LAST_WORDS = "The budget of this session is used up. Stop here."
LAST_ANSWERS = 3  # so many refused calls get the last words, which end most harnesses; further ones get an error


class BudgetSpent(ApiError):
    """A call is refused. ``budget`` is the one that is used up: calls, tokens or wall."""

    def __init__(self, budget: str, message: str) -> None:
        super().__init__(Fault.BUDGET, message)
        self.budget = budget


def check(policy: Policy, calls: int, tokens: int, age_s: float) -> None:
    """Raises BudgetSpent when a session that has used so much may not make another call. A limit of 0 is none.

    ``tokens`` are the prompts and samples of all calls: what the engine was given to read, and what it wrote. The last
    call may go beyond the limit, since its length is known only afterwards.
    """
    spent = {
        "calls": (calls, policy.max_calls, "model calls"),
        "tokens": (tokens, policy.max_session_tokens, "tokens"),
        "wall": (age_s, policy.max_wall_s, "seconds"),
    }
    for budget, (used, limit, unit) in spent.items():
        if limit and used >= limit:
            raise BudgetSpent(budget, f"this session's budget of {limit:g} {unit} is used up")


def last_answer(session: str, created: int) -> Answer:
    """An ordinary answer, after which a harness has nothing to do; it is no call and never trained."""
    return Answer(f"{session}-over", LAST_WORDS, "", (), "stop", 0, 0, 0, created)
