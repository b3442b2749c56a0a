"""Rows of a skeleton rollout: what is learnt of each turn, in which row, and what a template can refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import pipeline
from pipeline.config import UserError
from pipeline.records import Row
from pipeline.stages.recording import Turn
from pipeline.stages.sft_rows import IGNORED, RowRules, Rows, write_rows

MODEL = Path(pipeline.__file__).parent / "assets" / "quickstart-model"
WHOLE = RowRules("conversation", 10_000, reasoning=True, thinking=None)
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}
START = [{"role": "system", "content": "You help."}, {"role": "user", "content": [{"type": "text", "text": "do it"}]}]

# Writes thoughts, and drops those of earlier turns, as many templates do.
THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning and loop.last %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


def with_template(tokenizer: Any, template: str | None) -> Any:
    other = AutoTokenizer.from_pretrained(MODEL)
    other.chat_template = template
    return other


def made(tokenizer: Any, rules: RowRules = WHOLE) -> Rows:
    return Rows(tokenizer, [tokenizer.eos_token_id], rules)


def said(command: str, **more: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}], **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


DONE = {"role": "assistant", "content": "Done."}
FIRST = Turn(START, [TOOL], said("ls"))
SECOND = Turn([*START, said("ls"), result("a b")], [TOOL], said("cat a"))
LAST = Turn([*SECOND.messages, said("cat a"), result("x")], [TOOL], DONE)
SUB = Turn([{"role": "system", "content": "You are a sub-agent."}, START[1]], [], DONE)  # a conversation of its own
REWRITTEN = Turn([*START, {"role": "user", "content": "summary: ls gave a b"}], [TOOL], said("cat b"))
SKELETON = [FIRST, SUB, SECOND, REWRITTEN, LAST]


def learnt(tokenizer: Any, row: Row) -> list[str]:
    """The learnt stretches of a row, as text."""
    texts: list[list[int]] = []
    before = False
    for token, mine in zip(row.input_ids, row.loss_mask, strict=True):
        if mine:
            texts = texts if before else [*texts, []]
            texts[-1].append(int(token))
        before = bool(mine)
    return [tokenizer.decode(ids) for ids in texts]


def call_text(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call><|im_end|>'


def test_a_conversation_is_one_row_and_each_fork_another(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = made(tokenizer)
    found = [learnt(tokenizer, row) for row in rows.of_rollout(SKELETON)]
    assert found == [
        ["Done.<|im_end|>"],  # the sub-agent
        [call_text("cat b")],  # after the harness rewrote its history
        [call_text("ls"), call_text("cat a"), "Done.<|im_end|>"],
    ]
    assert rows.counts["turns"] == 5 and rows.counts["rows"] == 3


def test_a_turn_is_a_row_behind_the_whole_history_that_the_harness_sent(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = list(made(tokenizer, replace(WHOLE, kind="turn")).of_rollout(SKELETON))
    assert [learnt(tokenizer, row) for row in rows] == [
        [call_text("ls")],
        ["Done.<|im_end|>"],
        [call_text("cat a")],
        [call_text("cat b")],
        ["Done.<|im_end|>"],
    ]
    history = tokenizer.decode(rows[4].input_ids[~rows[4].loss_mask])
    assert "You help." in history and call_text("cat a") in history
    assert rows[2].input_ids[-1] == tokenizer.eos_token_id, "a row ends where the student would stop"


def test_a_row_is_what_the_engine_would_be_sent_and_the_template_would_write(tokenizer: Any) -> None:
    row = next(iter(made(tokenizer).of_rollout([FIRST, SECOND, LAST])))
    flat = [{"role": "system", "content": "You help."}, {"role": "user", "content": "do it"}]
    for command, got in (("ls", "a b"), ("cat a", "x")):
        call = {"function": {"name": "bash", "arguments": {"command": command}}}
        flat += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": got}]
    text = tokenizer.apply_chat_template([*flat, DONE], tools=[TOOL], tokenize=False)
    assert tokenizer.decode(row.input_ids) == text.removesuffix("\n")


def test_thoughts_that_the_template_drops_make_rows_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    thinker = with_template(tokenizer, THINKING)
    turns = [
        Turn(START, [], said("ls", reasoning="hm")),
        Turn([*START, said("ls", reasoning="hm"), result("a")], [], DONE | {"reasoning": "ah"}),
    ]
    rows = list(made(thinker).of_rollout(turns))
    assert [text[0].startswith("<think>") for text in (learnt(thinker, row) for row in rows)] == [True, True]
    assert "hm" not in thinker.decode(rows[1].input_ids), "as the student will see its own earlier turns"
    without = list(made(thinker, replace(WHOLE, reasoning=False)).of_rollout(turns))
    assert len(without) == 1 and "think" not in thinker.decode(without[0].input_ids)


def test_the_switch_for_thoughts_belongs_to_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """This template closes an empty thought in the prompt that it does not write in the history: no row can be made."""
    rows = made(with_template(tokenizer, THINKING), replace(WHOLE, thinking=False))
    assert list(rows.of_rollout([FIRST])) == []
    assert rows.counts == {"turns refused: the template does not write the answer behind the prompt": 1}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no  tools\nhere') }}", "the template says 'no tools here'"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ends the answer without an end token"),
        ("{% if add_generation_prompt %}x{% endif %}{{ messages[-1].content }}", "does not write the answer behind"),
    ],
)
def test_what_a_template_cannot_express_is_counted(tokenizer: Any, template: str, reason: str) -> None:
    rows = made(with_template(tokenizer, template))
    assert list(rows.of_rollout([SUB])) == []
    assert [reason in name for name in rows.counts] == [True]


def test_messages_of_another_form_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    broken = said("ls")
    broken["tool_calls"][0]["function"]["arguments"] = "{"
    rows = made(tokenizer)
    assert len(list(rows.of_rollout([Turn(START, [], broken), Turn([{"content": "no role"}], [], DONE), SUB]))) == 1
    assert rows.counts["turns refused: not in Chat Completions form"] == 2


def test_a_row_that_is_too_long_is_left_out_whole_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(row.input_ids) for row in made(tokenizer).of_rollout(SKELETON)]
    rows = made(tokenizer, replace(WHOLE, max_length=max(lengths) - 1))
    assert [len(row.input_ids) for row in rows.of_rollout(SKELETON)] == sorted(lengths)[:-1]
    assert rows.counts["rows left out: too long"] == 1 and rows.counts["rows"] == 2


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no chat template"):
        made(with_template(tokenizer, None))


WORDS = st.text("ab <|>_im\n", max_size=8)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Turn]:
    """Histories that grow, fork back to an earlier length, or start anew."""
    turns: list[Turn] = []
    history: list[dict[str, Any]] = [*START]
    for _ in range(draw(st.integers(1, 6))):
        answer = said(draw(WORDS)) if draw(st.booleans()) else {"role": "assistant", "content": draw(WORDS)}
        turns.append(Turn(history, [TOOL], answer))
        history = [*history, answer, result(draw(WORDS))]
        if draw(st.booleans()):
            history = [*history[: draw(st.integers(1, len(history)))], {"role": "user", "content": draw(WORDS)}]
    return turns


def spans(rows: Rows, turns: Sequence[Turn]) -> set[tuple[int, ...]]:
    """Every turn as its prompt and answer, with the length of the prompt in front."""
    return {(len(prompt), *prompt.tolist(), *answer.tolist()) for prompt, answer in map(rows.tokens, turns)}


@settings(max_examples=30, deadline=None)
@given(turns=rollouts())
def test_every_turn_is_learnt_exactly_once_whatever_the_harness_does_to_its_history(
    tokenizer: PreTrainedTokenizerFast, turns: list[Turn]
) -> None:
    alone = list(made(tokenizer, replace(WHOLE, kind="turn")).of_rollout(turns))
    joined = list(made(tokenizer).of_rollout(turns))
    assert sum(row.trained_tokens for row in joined) == sum(row.trained_tokens for row in alone)
    assert len(alone) == len(turns) and len(joined) <= len(turns)
    prefixes = spans(made(tokenizer), turns)
    for row in joined:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]])))
        for start, end in edges.reshape(-1, 2):
            assert (start, *row.input_ids[:end].tolist()) in prefixes, "learnt behind its own prompt"


def test_rows_on_disk_have_labels_where_something_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    rows = list(made(tokenizer).of_rollout(SKELETON))
    assert write_rows(tmp_path / "sub" / "rows.arrow", rows) == 3
    with pa.memory_map(str(tmp_path / "sub" / "rows.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all().to_pylist()
    for row, written in zip(rows, table, strict=True):
        assert written["input_ids"] == row.input_ids.tolist()
        assert [label != IGNORED for label in written["labels"]] == row.loss_mask.tolist()
        assert all(
            label in (IGNORED, token) for label, token in zip(written["labels"], written["input_ids"], strict=True)
        )
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["rows.arrow"]
