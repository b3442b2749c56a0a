"""What the files of a task set give away: tasks that come twice, training tasks in the test split, leaked answers.

Nothing is run; stages/gates.py runs the oracle. Each kind of finding is an error, a warning or not looked for
(tasks.gates).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from pipeline.config import GatesConfig, UserError
from pipeline.tasks.harbor import HarborTask

LEVELS = ("error", "warning", "off")
KINDS = ("duplicate", "same_id", "same_instruction", "same_source", "leak")
TELLTALE = ("solution", "solution/*", "*/solution/*", "solve.sh", "*/solve.sh", "task.toml")
GOLD_KEYS = ("gold_answer", "expected_answer", "answer")  # of task.toml's metadata
GOLD_LENGTH = 12  # a shorter answer stands in many a text by chance
DATA_SUFFIXES = frozenset((".csv", ".tsv", ".parquet", ".db", ".sqlite", ".ipynb"))  # what answers are found in
SECRET_BYTES = 24  # a smaller file is nobody's secret: an empty __init__.py
TEXT_BYTES = 1 << 18  # longer texts are only compared whole
LINE_LENGTH = 8  # shorter lines (``else:``) tell nothing
FEWEST_LINES = 4
TESTS_SHARE = 0.9  # of a test file's lines; of the solution all: a fix differs from the bug in one line
_BUILD_FILE = ("Dockerfile*", "*.Dockerfile")
_QUESTION = re.compile(r"_qa_\d+$")  # several questions about one notebook are of one source


@dataclass(frozen=True)
class Finding:
    """``kind``: one of KINDS; ``text`` names the task and the file."""

    kind: str
    text: str


def check_gates(gates: GatesConfig) -> None:
    """Refuse, with a UserError, a level that is none."""
    for kind in KINDS:
        if (level := getattr(gates, kind)) not in LEVELS:
            raise UserError(f"tasks.gates.{kind}={level} is unknown; one of: {', '.join(LEVELS)}")
    for pattern in gates.allow:
        if ":" not in pattern:
            raise UserError(f"tasks.gates.allow: {pattern!r} must be TASK:FILE, as in 'fix-*:repo/tests/*'")


def inspect(train: Sequence[HarborTask], test: Sequence[HarborTask], gates: GatesConfig) -> list[Finding]:
    """Everything that is found, but for what is off or allowed."""
    looks: dict[str, Callable[[], Iterator[str]]] = {
        "duplicate": lambda: (text for split in (train, test) for text in _duplicates(split)),
        "same_id": lambda: _shared(train, test, "id", lambda task: task.ref.task_id),
        "same_instruction": lambda: _shared(train, test, "instruction", lambda task: _plain(task.instruction)),
        "same_source": lambda: _same_source(train, test, gates.source_keys),
        "leak": lambda: (text for task in (*train, *test) for text in leaks(task, gates.allow)),
    }
    return [Finding(kind, text) for kind, look in looks.items() if getattr(gates, kind) != "off" for text in look()]


def _duplicates(split: Sequence[HarborTask]) -> Iterator[str]:
    """Many tasks may ask the same of different environments, so both count."""
    by_instruction = defaultdict(list)
    for task in split:
        by_instruction[_plain(task.instruction)].append(task)
    for alike in by_instruction.values():
        first: dict[str, HarborTask] = {}
        for task in alike if len(alike) > 1 else ():
            other = first.setdefault(_environment_digest(task), task)
            if other is not task:
                yield f"{task.ref.path} is the task {other.ref.path} again: the same instruction and environment"


def _shared(
    train: Sequence[HarborTask], test: Sequence[HarborTask], what: str, key: Callable[[HarborTask], str]
) -> Iterator[str]:
    """At most one sentence: the tasks of ``test`` that have a ``key`` in common with one of ``train``; "" is none."""
    seen = {key(task): task for task in reversed(train)}
    pairs = [(task, seen[name]) for task in test if (name := key(task)) and name in seen]
    if pairs:
        held_out, trained = pairs[0]
        yield (
            f"{len(pairs)} of {len(test)} test tasks have the {what} of a training task: "
            f"{held_out.ref.path} that of {trained.ref.path}" + (", and others" if len(pairs) > 1 else "")
        )


def _same_source(train: Sequence[HarborTask], test: Sequence[HarborTask], keys: Sequence[str]) -> Iterator[str]:
    for key in keys:
        yield from _shared(train, test, key, partial(_source, key=key))


def _source(task: HarborTask, key: str) -> str:
    value = task.metadata.get(key)
    return "" if value is None else _QUESTION.sub("", str(value))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _environment_digest(task: HarborTask) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, path in _files(task.ref.path / "environment"):
        digest.update(b"%d %d " % (len(name), path.stat().st_size) + name.encode() + path.read_bytes())
    return digest.hexdigest()


# --- leaks


@dataclass(frozen=True)
class _Secret:
    """A file that no agent may see. ``lines``: those that tell something."""

    name: str
    data: bytes
    lines: frozenset[str]
    share: float


def leaks(task: HarborTask, allow: Sequence[str] = ()) -> Iterator[str]:
    """A sentence for each file below environment/ that holds the solution, the tests or the answer."""
    secrets = list(_secrets(task.ref.path))
    sizes = {len(secret.data) for secret in secrets}
    for name, path in _files(task.ref.path / "environment"):
        if any(fnmatch(f"{task.ref.task_id}:{name}", pattern) for pattern in allow):
            continue
        if why := _why(task, secrets, sizes, name, path):
            yield f"{path} {why}"


def _why(task: HarborTask, secrets: Sequence[_Secret], sizes: set[int], name: str, path: Path) -> str | None:
    if any(fnmatch(name, pattern) for pattern in TELLTALE) or (
        name.startswith("tests/") and (task.ref.path / name).is_file()
    ):
        return "has the name of what an agent must not see"
    size = path.stat().st_size
    if size > TEXT_BYTES and size not in sizes:
        return None
    data = path.read_bytes()
    for secret in secrets:
        if data == secret.data:
            return f"is a copy of {secret.name}"
    if size > TEXT_BYTES or b"\0" in data[:1024]:
        return None
    return _told(task, secrets, name, data.decode(errors="replace"))


def _told(task: HarborTask, secrets: Sequence[_Secret], name: str, text: str) -> str | None:
    lines = _lines(text)
    for secret in secrets:
        if len(secret.lines) >= FEWEST_LINES and len(secret.lines & lines) >= secret.share * len(secret.lines):
            return f"holds nearly all lines of {secret.name}"
    if any(fnmatch(Path(name).name, pattern) for pattern in _BUILD_FILE):
        for source in _copied(text):
            return f"copies {source} into the image"
    if Path(name).suffix not in DATA_SUFFIXES:
        for key in GOLD_KEYS:
            if len(answer := str(task.metadata.get(key) or "")) >= GOLD_LENGTH and answer in text:
                return f"holds the answer, {key} of task.toml"
    return None


def _secrets(root: Path) -> Iterator[_Secret]:
    places = [("tests", TESTS_SHARE), ("solution", 1.0)]
    found = [(f"{folder}/{name}", path, share) for folder, share in places for name, path in _files(root / folder)]
    for name, path, share in [*found, ("task.toml", root / "task.toml", TESTS_SHARE)]:
        data = path.read_bytes()
        if len(data) >= SECRET_BYTES:
            text = data.decode(errors="replace") if len(data) <= TEXT_BYTES and b"\0" not in data[:1024] else ""
            yield _Secret(name, data, _lines(text), share)


def _lines(text: str) -> frozenset[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return frozenset(line for line in lines if len(line) >= LINE_LENGTH and not line.startswith(("#", "//")))


def _copied(dockerfile: str) -> Iterator[str]:
    """Sources of COPY and ADD that are, or hold, the tests or the solution: the way out of environment/ included."""
    for line in re.sub(r"\\\s*\n", " ", dockerfile).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() not in ("COPY", "ADD") or "--from=" in rest:
            continue
        for source in _words(rest)[:-1]:
            parts = Path(source.lstrip("/")).parts
            if parts[:1] == ("..",) or set(parts) & {"solution", "solve.sh", "task.toml"} or parts[:1] == ("tests",):
                yield source


def _words(rest: str) -> list[str]:
    rest = re.sub(r"--\S+\s+", "", rest).strip()
    try:
        return [str(word) for word in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        return rest.split()


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name below ``root``, path) of every regular file, in a fixed order; links are not followed."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for file in sorted(files):
            path = Path(folder) / file
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(root)), path
