"""A shard's append-only journal: what must outlive a dead shard, written before an answer leaves.

Frames are a four-byte length and a msgpack record. There is no fsync: the journal guards against a dead process, not a
dead node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeline.capture.dialects.base import Answer
from pipeline.capture.origin import Origin


class Policy(msgspec.Struct, frozen=True):
    """What every call of a session is sampled with, and how much there may be of everything (0: no limit).

    ``thoughts``: what happens where the chat template strips earlier thoughts from the history: "fork" starts a new
    row there, as a plain server would behave, "keep" goes on with them. ``thinking`` is the template's switch for new
    thoughts (None: its default). ``continuity`` off renders every history anew.
    """

    temperature: float
    max_tokens: int
    max_calls: int
    model_name: str
    thoughts: str = "fork"
    thinking: bool | None = None
    continuity: bool = True
    max_session_tokens: int = 0
    max_wall_s: float = 0.0
    max_concurrent: int = 0
    ttl_s: float = 0.0


class Asked(msgspec.Struct, frozen=True):
    """A canonical request: the first ``keep`` messages of the call before, then ``messages``."""

    keep: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class Node(msgspec.Struct):
    """One call. Its sequence (prompt + sampled) is the base's first ``keep`` bytes, ``suffix`` and ``sampled``.

    Ids are text as in ``capture.ids``; ``logprobs`` are float32 bytes of the sampled ids. ``parent`` is the call whose
    whole sequence is a prefix of this prompt; ``base`` only saves memory. ``chain`` identifies the history that was
    answered. ``ended``: the last sampled id is an end token. ``versions`` holds (version, start, end) spans.
    ``wishes`` is None where they equal the last call's. ``answered`` is a time of CLOCK_BOOTTIME.
    A call of a text upstream has no ids; ``asked`` is its request instead.
    """

    call_id: int
    parent: int | None
    base: int | None
    keep: int
    suffix: bytes
    sampled: bytes
    logprobs: bytes
    versions: list[tuple[str, int, int]]
    answer: Answer
    chain: bytes
    constraint: str
    dialect: str
    trainable: bool
    malformed: bool
    ended: bool = True
    seconds: float = 0.0
    agent: str = ""
    wishes: dict[str, Any] | None = None
    delivered: bool = False
    asked: Asked | None = None
    origin: Origin = Origin.UNSEEN
    answered: float = 0.0


class Opened(msgspec.Struct, tag="open"):
    """A session began, at ``time`` (Unix seconds)."""

    session: str
    policy: Policy
    time: float = 0.0


class Answered(msgspec.Struct, tag="call"):
    """A call was answered by the engine."""

    session: str
    node: Node


class Delivered(msgspec.Struct, tag="delivered"):
    """The harness got the answer of a call."""

    session: str
    call_id: int


class Counted(msgspec.Struct, tag="count"):
    """Something rare happened."""

    session: str
    counter: str
    amount: int = 1


class Closed(msgspec.Struct, tag="close"):
    """A session ended; its records are no longer needed."""

    session: str


Record = Opened | Answered | Delivered | Counted | Closed
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)
_HEAD = 4


class Journal:
    """Appends records to a file. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = _whole(path)
        self._file = _open(path, self.size)

    def append(self, record: Record) -> None:
        """Write one record. Raises OSError (disk full) and then leaves the file as it was."""
        data = _frame(record)
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written to {self.path}")
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(data)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the journal by these records, atomically."""
        write(self.path, records)
        os.close(self._file)
        self.size = self.path.stat().st_size
        self._file = _open(self.path, self.size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def write(path: Path, records: Iterable[Record]) -> None:
    """Publish a whole file of records by an atomic rename. Raises OSError and then leaves nothing behind."""
    draft = path.with_suffix(path.suffix + ".tmp")
    try:
        with draft.open("wb") as file:
            for record in records:
                file.write(_frame(record))
    except OSError:
        draft.unlink()
        raise
    draft.replace(path)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, up to a torn last one; nothing when there is no file."""
    for frame in _frames(path):
        yield _DECODER.decode(frame)


def _frame(record: Record) -> bytes:
    data = _ENCODER.encode(record)
    return len(data).to_bytes(_HEAD, "little") + data


def _frames(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while len(head := file.read(_HEAD)) == _HEAD:
            length = int.from_bytes(head, "little")
            frame = file.read(length)
            if len(frame) < length:
                return
            yield frame


def _whole(path: Path) -> int:
    """Bytes of whole frames: what follows was torn by a death in mid-write."""
    return sum(_HEAD + len(frame) for frame in _frames(path))


def _open(path: Path, size: int) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.ftruncate(file, size)
    return file
