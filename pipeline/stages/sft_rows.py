"""From recorded turns to rows of token ids by the student's own template, with a label for what the teacher said only.

Here, and nowhere else, text is tokenised: a teacher's ids mean nothing to the student. What is learnt of a turn is
what the template writes behind the turn's own prompt, up to the end token: what the student would have had to sample.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.capture.rows import rows as tree_rows
from pipeline.config import UserError
from pipeline.records import Call, Row, Trace
from pipeline.stages.recording import Message, Turn

IGNORED = -100  # label of a token that is not learnt
IDS = pa.list_(pa.int32())
SCHEMA = pa.schema([("input_ids", IDS), ("labels", IDS)])


class Refused(Exception):
    """A turn that the student's template cannot express; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class RowRules:
    """How turns become rows."""

    kind: str  # one row a turn, or one a conversation and one more for each fork of it
    max_length: int
    reasoning: bool
    thinking: bool | None  # the template's switch; None = its default


def as_rendered(message: Message) -> Message:
    """A message as the engine hands it to the template: the content as text, the arguments of calls decoded."""
    content = message.get("content") or ""
    flat: Message = {
        "role": message["role"],
        "content": content if isinstance(content, str) else "".join(part.get("text", "") for part in content),
    }
    if message.get("tool_calls"):
        flat["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return flat | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {key: call[key] for key in ("id", "type") if key in call} | {
        "function": {"name": function["name"], "arguments": decoded}
    }


class Rows:
    """Rows of turns for one tokenizer (of transformers), and the counts of what became of the turns."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int], rules: RowRules) -> None:
        """``end_ids``: the tokens that end a turn. Raises UserError for a tokenizer without a chat template."""
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template: model.path must name a chat model")
        self.tokenizer, self.end_ids, self.rules = tokenizer, np.array(sorted(set(end_ids))), rules
        self.counts: Counter[str] = Counter()

    def of_rollout(self, turns: Sequence[Turn]) -> Iterator[Row]:
        """The rows of one rollout; every turn is learnt in one of them exactly once, or counted as refused."""
        calls: list[Call] = []
        for turn in turns:
            try:
                calls.append(self._as_call(turn, calls))
                self.counts["turns"] += 1
            except Refused as refusal:
                self.counts[f"turns refused: {refusal}"] += 1
        if self.rules.kind == "turn":
            calls = [replace(call, parent=None) for call in calls]
        for row in tree_rows(Trace("", tuple(calls))):
            if len(row.input_ids) > self.rules.max_length:
                self.counts["rows left out: too long"] += 1
            else:
                self.counts["rows"] += 1
                self.counts["learnt tokens"] += row.trained_tokens
                yield row

    def _as_call(self, turn: Turn, before: Sequence[Call]) -> Call:
        prompt, said = self.tokens(turn)
        return Call(
            call_id=len(before),
            parent=_parent(prompt, before),
            prompt_ids=prompt,
            sampled_ids=said,
            logprobs=np.zeros(len(said), np.float32),
            versions=(),
            finish_reason="stop",
            delivered=True,
            trainable=True,
            tool_calls=0,
            malformed=False,
            seconds=0.0,
        )

    def tokens(self, turn: Turn) -> tuple[np.ndarray, np.ndarray]:
        """The turn's prompt and what the student is to say, its end token included: both int32.

        Raises Refused when the template raises, or does not write the answer behind the prompt.
        """
        try:
            *messages, answer = [self._message(message) for message in (*turn.messages, turn.answer)]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused("not in Chat Completions form") from error
        prompt = self._ids(messages, turn.tools, generation=True)
        whole = self._ids([*messages, answer], turn.tools, generation=False)
        said = whole[len(prompt) :]
        if len(said) == 0 or not np.array_equal(whole[: len(prompt)], prompt):
            raise Refused("the template does not write the answer behind the prompt")
        ends = np.flatnonzero(np.isin(said, self.end_ids))
        if not len(ends):
            raise Refused("the template ends the answer without an end token")
        return prompt, said[: ends[-1] + 1]

    def _message(self, message: Message) -> Message:
        flat = as_rendered(message)
        thought = message.get("reasoning") or message.get("reasoning_content")
        if thought and self.rules.reasoning:
            flat |= {"reasoning": thought, "reasoning_content": thought}  # templates know it by either name
        return flat

    def _ids(self, messages: list[Message], tools: list[dict[str, Any]], generation: bool) -> np.ndarray:
        switch = {} if self.rules.thinking is None else {"enable_thinking": self.rules.thinking}
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=generation, **switch
            )
        except Exception as error:  # a template may raise anything about the messages it is given
            raise Refused(f"the template says {' '.join(str(error).split())[:80]!r}") from error
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _parent(prompt: np.ndarray, calls: Sequence[Call]) -> int | None:
    """The call whose prompt and answer are the longest that this prompt begins with."""
    best, longest = None, 0
    for call in calls:
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
        if (
            longest < end <= len(prompt)
            and np.array_equal(prompt[start:end], call.sampled_ids)
            and np.array_equal(prompt[:start], call.prompt_ids)
        ):
            best, longest = call.call_id, end
    return best


def write_rows(place: Path, rows: Iterable[Row]) -> int:
    """An Arrow stream of ``input_ids`` and ``labels``, whole or absent; returns the number of rows."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}.partial")
    count = 0
    with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for row in rows:
            labels = np.where(row.loss_mask, row.input_ids, IGNORED)
            columns = [pa.array([values.astype(np.int32)], IDS) for values in (row.input_ids, labels)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
            count += 1
    os.replace(draft, place)
    return count
