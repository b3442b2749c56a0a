"""Calls are found again in rows, each once, with its parent; long texts and many tokens are cut, and it is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import EvilVocabulary, forked, row
from report_records import make_rollout
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.capture.rows import rows
from pipeline.records import Call, PolicyVersion, Trace, VersionSpan
from pipeline.report.rollout_view import (
    PROMPT_SHOWN,
    TOKENS_SHOWN,
    Answer,
    ModelVocabulary,
    NoVocabulary,
    answers,
    shorten,
    view,
)


def test_calls_of_a_chain_a_fork_and_a_new_history() -> None:
    assert answers(forked().rows) == [
        Answer(0, 3, 6, None, True),
        Answer(0, 8, 10, 0, True),
        Answer(1, 7, 9, 0, True),
        Answer(2, 2, 3, None, True),
    ]
    calls = view(forked(), EvilVocabulary())["calls"]
    assert [(call["kind"], call["parent"]) for call in calls] == [
        ("start", None),
        ("goes on", 0),
        ("fork", 0),
        ("new history", None),
    ]
    assert (calls[2]["history"], calls[2]["prompt_tokens"], calls[2]["ids"]) == (6, 1, [12, 13])
    assert calls[1]["logprobs"] == [-1.0, -1.1] and calls[1]["mean_logprob"] == pytest.approx(-1.05)


def test_an_answer_that_is_not_trained_is_shown_as_such() -> None:
    masked = row([([1], "read"), ([2, 3], "sampled"), ([4], "read"), ([5], "trained")])
    assert [(answer.start, answer.end, answer.trained) for answer in answers([masked])] == [(1, 3, False), (4, 5, True)]


def test_the_same_answer_sampled_twice_is_two_calls() -> None:
    twice = row([([1, 2], "read"), ([3], "trained")])
    assert answers([twice, twice]) == [Answer(0, 2, 3, None, True), Answer(1, 2, 3, None, True)]


def call(number: int, parent: Call | None, prompt: list[int], sampled: list[int]) -> Call:
    before = [*parent.prompt_ids, *parent.sampled_ids] if parent else []
    return Call(
        call_id=number,
        parent=parent.call_id if parent else None,
        prompt_ids=np.array([*before, *prompt], np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.full(len(sampled), -0.5, np.float32),
        versions=(VersionSpan(PolicyVersion(1, 0), 0, len(sampled)),),
        finish_reason="stop",
        delivered=True,
        trainable=True,
        tool_calls=0,
        malformed=False,
        seconds=0.0,
    )


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=8), st.integers(0, 10))
def test_the_rows_of_any_tree_give_its_calls_back(parents: list[int], salt: int) -> None:
    """Trees of delivered, trainable calls with prompts of their own: as many answers, with the same parents."""
    calls: list[Call] = []
    for number, parent in enumerate(parents):
        above = calls[min(parent, number - 1)] if parent >= 0 and number else None
        calls.append(call(number, above, [100 + number, salt], [200 + number] * (1 + number % 3)))
    built = rows(Trace("s", tuple(calls)))
    found = answers(built)
    tokens = [tuple(built[answer.row].input_ids[answer.start : answer.end].tolist()) for answer in found]
    parent_of = {tuple(own.sampled_ids.tolist()): own.parent for own in calls}
    assert sorted(tokens) == sorted(parent_of)
    for answer, own in zip(found, tokens, strict=True):
        above_it = parent_of[own]
        expected = None if above_it is None else tuple(calls[above_it].sampled_ids.tolist())
        assert (None if answer.parent is None else tokens[answer.parent]) == expected


def test_many_tokens_and_long_prompts_are_cut_and_counted() -> None:
    parts: list[tuple[list[int], str]] = []
    for number in range(3):
        parts += [([number + 1], "read"), ([50] * (TOKENS_SHOWN // 2), "trained")]
    calls = view(replace(make_rollout(), rows=(row(parts),)), NoVocabulary())["calls"]
    half = TOKENS_SHOWN // 2
    assert [(own["size"], len(own["ids"])) for own in calls] == [(half, half), (half, half), (half, 0)]
    text = shorten("a" * PROMPT_SHOWN + "b" * PROMPT_SHOWN)
    assert len(text) < PROMPT_SHOWN + 60 and "6,000 characters left out" in text
    assert text.startswith("aa") and text.endswith("bb")
    assert shorten("short") == "short"


def test_a_rollout_without_rows_has_no_calls_but_its_facts() -> None:
    shown = view(make_rollout(passed=None), NoVocabulary(), [("Group", "g0: skipped")])
    assert shown["calls"] == [] and ["Group", "g0: skipped"] in shown["facts"]
    assert shown["reward"] == "none" and json.dumps(shown)


def test_versions_are_one_or_a_span() -> None:
    record = make_rollout(version=3)
    assert view(record, NoVocabulary())["version"] == "0.3"
    assert view(replace(record, newest_version=PolicyVersion(0, 5)), NoVocabulary())["version"] == "0.3 to 0.5"


def test_the_models_vocabulary_spells_parts_of_characters(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = ModelVocabulary(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a ü").ids
    assert vocabulary.text(ids) == "a ü"
    assert [vocabulary.token(token) for token in ids] == ["a", " ", "Ã", "¼"]
    assert vocabulary.token(10_000) == "⟨10000⟩"
