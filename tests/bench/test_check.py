"""The exact check finds whatever is wrong with a trace, and nothing in a right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bench.check import RENDERINGS, Checker, Said, Turn, json_result, prompts, split_answer, verbatim
from bench.contract import ReadCall, ReadRow
from bench.filler import SYSTEM, passage
from bench.tokens import CLOSE, CLOSE_LOGPROB, LOGPROBS, sampled_span

SIZES = {1: 130, 2: 300, 3: 512}


def script() -> tuple[list[Said], list[Turn]]:
    """Three turns."""
    said, turns = [Said("system", SYSTEM), Said("user", passage("task: ", 5_000, 1_500))], []
    for seed, size in SIZES.items():
        turns.append(Turn(seed, size, len(said)))
        said += [Said("assistant", None, seed, size), Said("tool", passage(f"t{seed}\n", 40_000 * seed, 9_000))]
    return said, turns


def right(show: Callable[[Said], bytes] = verbatim) -> list[ReadCall]:
    """The trace as it must be."""
    said, turns = script()
    known = prompts(said, turns, show)
    calls = []
    for turn, length in zip(turns, known.lengths, strict=True):
        span = sampled_span(turn.seed, turn.size)
        logprobs = np.append(LOGPROBS[span.offset : span.offset + span.size], np.float32(CLOSE_LOGPROB))
        calls.append(ReadCall(known.ids[:length], np.append(span.ids, np.int32(CLOSE)), logprobs))
    return calls


def verdict_of(calls: list[ReadCall], retried: bool = False, show: Callable[[Said], bytes] = verbatim) -> Checker:
    said, turns = script()
    digests = prompts(said, turns, show).digests
    checker = Checker({turn.seed: digest for turn, digest in zip(turns, digests, strict=True)}, retried)
    checker.check("chat", said, turns, calls)
    return checker


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("show", RENDERINGS.values(), ids=lambda show: show.__name__)
def test_a_right_trace_in_any_rendering(show: Callable[[Said], bytes], retried: bool) -> None:
    verdict = verdict_of(right(show), retried, show).verdict
    assert verdict.wrong == 0 and verdict.right_sessions == 1
    assert verdict.continuity_breaks == (2 if show is split_answer else 0)


def changed(position: int, **fields: object) -> list[ReadCall]:
    calls = right()
    calls[position] = replace(calls[position], **fields)  # type: ignore[arg-type]
    return calls


def bumped(array: np.ndarray, at: int) -> np.ndarray:
    copy = array.copy()
    copy[at] += 1
    return copy


WRONG = {
    "a prompt id": (lambda: changed(1, prompt_ids=bumped(right()[1].prompt_ids, 2_000)), "wrong_prompts"),
    "the last prompt's first id": (lambda: changed(2, prompt_ids=bumped(right()[2].prompt_ids, 0)), "wrong_prompts"),
    "a prompt cut short": (lambda: changed(0, prompt_ids=right()[0].prompt_ids[:-1]), "wrong_prompts"),
    "a sampled id": (lambda: changed(1, sampled_ids=bumped(right()[1].sampled_ids, 7)), "wrong_sampled"),
    "no end token": (lambda: changed(1, sampled_ids=right()[1].sampled_ids[:-1]), "wrong_sampled"),
    "a logprob": (
        lambda: changed(0, logprobs=np.nextafter(right()[0].logprobs, np.float32(0), dtype=np.float32)),
        "wrong_logprobs",
    ),
    "a call too few": (lambda: right()[:2], "missing_calls"),
    "a call too many": (lambda: [*right(), right()[0]], "extra_calls"),
    "one call that is not delivered": (lambda: changed(0, delivered=False), "wrong_delivered"),
    "two calls in the wrong order": (lambda: [right()[1], right()[0], right()[2]], "wrong_sampled"),
    "another rendering in one turn": (
        lambda: [*right()[:2], replace(right()[2], prompt_ids=right(json_result)[2].prompt_ids)],
        "wrong_prompts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_trace(name: str) -> None:
    make, counter = WRONG[name]
    verdict = verdict_of(make()).verdict
    assert getattr(verdict, counter) > 0
    assert verdict.right_sessions == 0


def test_what_the_engine_was_sent_is_compared_too() -> None:
    said, turns = script()
    checker = Checker({1: "0" * 16, 2: "0" * 16}, retried=False)
    checker.check("chat", said, turns, right())
    assert checker.verdict.wrong_engine_prompts == 3
    assert checker.verdict.right_sessions == 0


def test_when_clients_ask_again_an_undelivered_call_may_be_there_but_no_delivered_one() -> None:
    other = replace(right()[0], sampled_ids=sampled_span(9, 200).ids)
    assert verdict_of([*right(), replace(other, delivered=False)], retried=True).verdict.wrong == 0
    assert verdict_of([other, *right()], retried=True).verdict.extra_calls == 1
    assert verdict_of(right()[1:], retried=True).verdict.missing_calls == 1
    assert verdict_of(changed(1, delivered=False), retried=True).verdict.wrong_delivered == 1
    last = verdict_of(changed(2, delivered=False), retried=True).verdict
    assert (last.wrong, last.last_unnoted) == (0, 1)
    assert verdict_of(changed(2, delivered=False)).verdict.wrong_delivered == 1  # nothing was killed: a fault


def test_rows_hold_every_delivered_id_once() -> None:
    calls = right()
    whole = ReadRow(np.append(calls[-1].prompt_ids, calls[-1].sampled_ids), sum(len(c.sampled_ids) for c in calls))
    first = ReadRow(np.append(calls[0].prompt_ids, calls[0].sampled_ids), len(calls[0].sampled_ids))

    def wrong(*rows: ReadRow) -> int:
        checker = Checker({}, retried=False)
        checker.check_rows(calls, rows)
        return checker.verdict.wrong_rows

    assert wrong(whole) == 0
    assert wrong(replace(whole, supervised=whole.supervised - 1)) == 1
    assert wrong(whole, first) == 1  # the first answer twice
    assert wrong(replace(whole, input_ids=bumped(whole.input_ids, -1))) == 1
