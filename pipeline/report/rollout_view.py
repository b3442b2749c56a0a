"""What the report's viewer shows of a rollout: its calls, as a tree, with the tokens that the model sampled.

A stored rollout holds rows, not calls. The calls are found again in them: a stretch of sampled tokens is an answer.
A call that no row holds (nothing after it was trained) is not seen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.records import RolloutRecord, Row

PROMPT_SHOWN = 6_000  # characters of what a call adds to its history, half from its beginning and half from its end
TRAINING = "training"
TOKENS_SHOWN = 4_000  # sampled tokens a rollout


class Vocabulary(Protocol):
    """Turns token ids into text."""

    def token(self, token_id: int) -> str: ...

    def text(self, ids: Sequence[int]) -> str: ...


class ModelVocabulary:
    """That of the run's tokenizer."""

    def __init__(self, tokenizer_json: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))

    def token(self, token_id: int) -> str:
        """A token that is part of a character is shown as the vocabulary spells it."""
        text = self.text([token_id])
        return text if text and "\ufffd" not in text else self._tokenizer.id_to_token(token_id) or f"⟨{token_id}⟩"

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class NoVocabulary:
    """Stands in where the tokenizer is not at hand: ids only."""

    def token(self, token_id: int) -> str:
        return f"⟨{token_id}⟩"

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class Answer:
    """The sampled tokens ``start:end`` of row ``row``, and where in the list of answers its parent stands."""

    row: int
    start: int
    end: int
    parent: int | None
    trained: bool


def answers(rows: Sequence[Row]) -> list[Answer]:
    """Every answer once, rows in order, a parent before its children."""
    found: list[Answer] = []
    for number, row in enumerate(rows):
        path = [place for place, answer in enumerate(found) if _passes(row, rows[answer.row], answer)]
        for start, end, trained in _new_stretches(row, max((found[place].end for place in path), default=0)):
            found.append(Answer(number, start, end, path[-1] if path else None, trained))
            path.append(len(found) - 1)
    return found


def _passes(row: Row, other: Row, answer: Answer) -> bool:
    """Whether ``row`` goes through an answer of ``other``. If it trains the same tokens, they were sampled again."""
    end = answer.end
    same = len(row.input_ids) >= end and np.array_equal(row.input_ids[:end], other.input_ids[:end])
    return same and not row.loss_mask[answer.start : end].any()


def _new_stretches(row: Row, known: int) -> list[tuple[int, int, bool]]:
    """(start, end, trained) of the sampled stretches after ``known``."""
    mask = row.loss_mask
    sampled = mask | (row.logprobs != 0.0)
    kind = np.where(mask, 2, sampled.astype(int))
    kind[:known] = 0
    edges = np.flatnonzero(np.diff(kind, prepend=0, append=0))
    return [(int(start), int(end), bool(kind[start] == 2)) for start, end in pairwise(edges) if kind[start]]


def view(
    record: RolloutRecord,
    vocabulary: Vocabulary,
    facts: Sequence[tuple[str, str]] = (),
    stage: str = TRAINING,
    twin: str | None = None,
) -> dict[str, Any]:
    """The scored rollout as plain data for the page. ``facts``: what its group and the run know of it besides;
    ``stage``: TRAINING, or which evaluation it is of; ``twin``: the id of the other evaluation's rollout of the same.
    """
    left = TOKENS_SHOWN
    calls = []
    found = answers(record.rows)
    for place, answer in enumerate(found):
        calls.append(_call(record.rows[answer.row], found, place, vocabulary, left))
        left = max(0, left - (answer.end - answer.start))
    return {
        "id": record.rollout_id,
        "stage": stage,
        "twin": twin,
        "task": record.task_id,
        "harness": record.harness,
        "index": record.index,
        "outcome": record.outcome.value,
        "reward": "none" if record.verdict.reward is None else f"{record.verdict.reward:.3f}",
        "version": _version(record),
        "facts": [[name, value] for name, value in (*_facts(record), *facts) if value],
        "calls": calls,
    }


def _call(row: Row, found: Sequence[Answer], place: int, vocabulary: Vocabulary, left: int) -> dict[str, Any]:
    answer = found[place]
    begins = found[answer.parent].end if answer.parent is not None else 0
    ids, logprobs = row.input_ids[answer.start : answer.end], row.logprobs[answer.start : answer.end]
    shown = min(len(ids), left)
    return {
        "parent": answer.parent,
        "kind": _kind(found, place),
        "row": answer.row,
        "history": begins,
        "prompt_tokens": answer.start - begins,
        "prompt": shorten(vocabulary.text(row.input_ids[begins : answer.start].tolist())),
        "trained": answer.trained,
        "size": len(ids),
        "mean_logprob": round(float(logprobs.mean()), 4),
        "ids": ids[:shown].tolist(),
        "texts": [vocabulary.token(token) for token in ids[:shown].tolist()],
        "logprobs": [round(float(value), 4) for value in logprobs[:shown]],
    }


def _kind(found: Sequence[Answer], place: int) -> str:
    """Where a call stands in the tree."""
    parent = found[place].parent
    if parent is None:
        return "start" if place == 0 else "new history"
    return "fork" if any(other.parent == parent for other in found[:place]) else "goes on"


def shorten(text: str, limit: int = PROMPT_SHOWN) -> str:
    """The beginning and the end of a long text, and how much was left out between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _facts(record: RolloutRecord) -> list[tuple[str, str]]:
    info = record.info
    return [
        ("Outcome", record.outcome.value.replace("_", " ")),
        ("Cause", str(info.get("cause", ""))),
        ("Verifier", record.verdict.reason),
        ("Calls", f"{record.calls} ({record.malformed} malformed, {record.undelivered} undelivered)"),
        ("Tool calls", str(record.verdict.tool_calls)),
        ("Tokens", f"{record.sampled_tokens:,} sampled, {record.prompt_tokens:,} read in prompts"),
        ("Policy version", _version(record)),
        ("Time", f"{record.wall_s:.1f} s"),
        ("Harness version", str(info.get("harness_version", ""))),
    ]


def _version(record: RolloutRecord) -> str:
    """Of the weights that sampled it; a stored rollout knows the oldest and the newest only."""
    oldest, newest = record.version, record.newest_version
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"
