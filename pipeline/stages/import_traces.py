"""Others' traces as recordings for `yoke sft`: conversations with tools, one a row, in one of the forms in use.

Read are `messages` (and `tools`), or TRL's `prompt` and `completion`; as lists or as JSON text. A conversation that
holds a credential, or that cannot be learnt from, is left out and counted with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.config import Config, UserError
from pipeline.report.bar import Bar
from pipeline.report.store import write_json
from pipeline.stages.credentials import CredentialFilter
from pipeline.stages.recording import SUFFIXES, Message, about, fingerprint, parsed, rows_in, write_rows

KEPT = "kept"
ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning", "reasoning_content", "thinking")
REWARDS = ("reward", "correctness")  # columns that say what a verifier gave, 0 to 1
NAMES = {"task_id": ("task_id", "task", "id"), "harness": ("harness", "agent")}  # ours ← theirs
HASH_BYTES = 1 << 22


class LeftOut(Exception):
    """A conversation that is not taken over; the text is the reason under which it is counted."""


def import_traces(config: Config, source: Path, given: str, label: str, credentials: CredentialFilter) -> str:
    """Write ``<run_dir>/collect/imported-<label>.parquet`` and beside it, as .json, what it was made of and left out.

    Returns what was done, for the person at the terminal. Raises UserError when nothing can be learnt from ``source``.
    """
    if Path(label).name != label or label.startswith("."):
        raise UserError(f"label={label}: give it a plain name")
    files = trace_files(source, given)
    out = Path(config.run_dir).absolute() / "collect" / f"imported-{label}.parquet"
    hashes = {str(path.relative_to(source) if path != source else path.name): sha256(path) for path in files}
    made_of = json.dumps({"files": hashes, "min_reward": config.collect.min_reward}, sort_keys=True)
    if out.exists() and not config.fresh:
        if about(out).get("imported") != made_of:
            raise UserError(f"{out} was made of other traces: choose another label, or fresh=true")
        return f"{out} is there already"
    counts: Counter[str] = Counter()
    kept = _kept(files, label, config, credentials, counts)
    try:
        write_rows(out, kept, {"imported": made_of})
    finally:
        out.with_name(f".{out.name}.partial").unlink(missing_ok=True)
    write_json(out.with_suffix(".json"), {"source": given, **json.loads(made_of), "counts": dict(counts)})
    return f"{out}: {_told(counts)}. Next: yoke sft with the same settings"


def trace_files(source: Path, given: str) -> list[Path]:
    """Every Parquet and JSONL file of a directory, or the file itself. Raises UserError when there is none."""
    found = [source] if source.is_file() else sorted(path for path in source.rglob("[!.]*") if path.is_file())
    files = [path for path in found if path.suffix in SUFFIXES]
    if not files:
        raise UserError(f"traces={given}: no {' or '.join(SUFFIXES)} file in {source}")
    return files


def sha256(place: Path) -> str:
    """Of a file's content."""
    digest = hashlib.sha256()
    with place.open("rb") as file:
        while part := file.read(HASH_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _told(counts: Mapping[str, int]) -> str:
    left = ", ".join(f"{number:,} left out: {why}" for why, number in sorted(counts.items()) if why != KEPT)
    return f"{counts[KEPT]:,} conversations kept" + (f" ({left})" if left else "")


def _kept(
    files: Sequence[Path], label: str, config: Config, credentials: CredentialFilter, counts: Counter[str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each conversation that is taken over, each once. Raises UserError when none is."""
    seen: set[str] = set()
    with Bar("import", sum(map(_size, files)), config.logging.progress) as bar:
        for path in files:
            for row in _readable(path):
                try:
                    rows = _rows(row, f"{label}--{counts.total()}", label, config.collect.min_reward, credentials)
                    if (mark := fingerprint(rows)) in seen:
                        raise LeftOut("the same as another")
                except LeftOut as reason:
                    counts[str(reason)] += 1
                else:
                    seen.add(mark)
                    counts[KEPT] += 1
                    yield rows
                bar.advance(1, path.name)
    if not counts[KEPT]:
        raise UserError(f"nothing to learn from in {files[0].parent}: {_told(counts)}")


def _readable(path: Path) -> Iterator[dict[str, Any]]:
    read = 0
    try:
        for row in rows_in(path):
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
            if row.get("answer") is not None and row.get("rollout") is not None:
                raise UserError(f"{path} is a recording of `yoke collect` already: sft.data={path} reads it as it is")
            yield row
            read += 1
    except (OSError, ValueError) as error:  # a pyarrow error is a ValueError
        raise UserError(f"{path} cannot be read behind row {read}: {str(error).splitlines()[0]}") from error


def _size(path: Path) -> int:
    """Rows of a file, for the bar."""
    try:
        if path.suffix == ".parquet":
            return int(pq.read_metadata(path).num_rows)
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _rows(
    row: Mapping[str, Any], rollout: str, label: str, min_reward: float, credentials: CredentialFilter
) -> list[dict[str, Any]]:
    """One row of a recording for each answer of a conversation. Raises LeftOut."""
    try:
        messages, tools = _numbered([_message(message) for message in _said(row)]), _tools(row)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise LeftOut("not in Chat Completions form") from None
    reward = next((float(row[name]) for name in REWARDS if row.get(name) is not None), None)
    if reward is not None and reward < min_reward:
        raise LeftOut(f"below collect.min_reward={min_reward:g}")
    if kind := credentials.find(json.dumps([messages, tools], ensure_ascii=False)):
        raise LeftOut(f"held a credential ({kind})")
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
    if not answers:
        raise LeftOut("no answer to learn from")
    own = {name: _named(row, keys) for name, keys in NAMES.items()}
    head: dict[str, Any] = {"rollout": rollout, "harness": own["harness"] or label}
    head |= {"task_id": own["task_id"] or _digest(messages[: answers[0]])}
    head |= {"reward": 1.0 if reward is None else reward, "tools": json.dumps(tools)}
    return [
        head | {"call": call, "messages": json.dumps(messages[:place]), "answer": json.dumps(messages[place])}
        for call, place in enumerate(answers)
    ]


def _digest(messages: list[Message]) -> str:
    """Stands for a task that has no name."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def _named(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((str(row[key]) for key in keys if row.get(key) is not None), "")


def _said(row: Mapping[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        return list(parsed(row["messages"]))
    if row.get("prompt") is not None and row.get("completion") is not None:
        return [*parsed(row["prompt"]), *parsed(row["completion"])]
    raise LeftOut("neither messages nor prompt and completion")


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = parsed(row.get("tools")) or []
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]


def _message(message: Message) -> Message:
    """As Chat Completions has it: arguments as JSON text, thoughts under one name."""
    role = message["role"]
    if role not in ROLES:
        raise LeftOut(f"a message of the role {str(role)[:20]!r}")
    flat: Message = {"role": role, "content": message.get("content")}
    flat |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    if thought := next((message[key] for key in THOUGHTS if message.get(key)), None):
        flat["reasoning"] = thought
    if message.get("tool_calls"):
        flat["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return flat


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not isinstance(json.loads(text or "{}"), dict):
        raise ValueError("arguments are no object")
    return {"id": call.get("id"), "type": "function", "function": {"name": str(function["name"]), "arguments": text}}


def _numbered(messages: list[Message]) -> list[Message]:
    """Each call with an id, and each result with that of its call: in their order, where none is given."""
    waiting: list[str] = []
    calls = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call_{calls}"
            calls += 1
            waiting.append(call["id"])
        if message["role"] == "tool":
            given = message.setdefault("tool_call_id", waiting[0] if waiting else f"call_{calls}")
            waiting = [name for name in waiting if name != given]
    return messages
