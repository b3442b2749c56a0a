"""What the bench asks of an adapter, and the records that pass between them.

An adapter is a module with the functions of ``Adapter``. To measure another proxy, write such a file and give its path.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bench.wire import Connection


@dataclass(frozen=True)
class Place:
    """Where a target is to run."""

    port: int
    upstream: str
    shards: int
    directory: Path  # for what it keeps on disk


@dataclass(frozen=True)
class Opened:
    """A session of the target; its model API is at ``host:port``."""

    key: str
    host: str
    port: int


@dataclass(frozen=True)
class ReadCall:
    """One call of a trace as the target tells it."""

    prompt_ids: NDArray[np.int32]
    sampled_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    delivered: bool = True


@dataclass(frozen=True)
class ReadRow:
    """One row of a trace."""

    input_ids: NDArray[np.int32]
    supervised: int  # ids under the loss mask


class NotInstalled(Exception):
    """The target is not there; the message says how to get it."""


class Adapter(Protocol):
    """One target. ``control`` is a connection to the address that ``start_cmd`` serves on.

    It may also have ``read_rows(control, key) -> list[ReadRow]``; ``CHAT_EXTRA``, fields for each Chat Completions
    request; and ``DIALECTS``, clients of its own.
    """

    PREFIX: str  # of every path of the model API
    HEALTH: str  # a path that answers 200 when the target serves

    def start_cmd(self, place: Place) -> list[str] | None:
        """The command that serves on ``place.port``; None: the upstream itself is the target. Raises NotInstalled."""

    async def register(self, control: Connection, number: int) -> Opened:
        """Open a session."""

    async def read_trace(self, control: Connection, key: str) -> list[ReadCall]:
        """The calls of a session, in the order of their answers."""

    async def delete(self, control: Connection, key: str) -> None:
        """Forget a session."""


def load_adapter(name: str) -> Adapter:
    """The adapter of a name, or of the file at a path."""
    if not name.endswith(".py"):
        return cast(Adapter, importlib.import_module(f"bench.adapters.{name}"))
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Adapter, module)


def expect_status(status: int, body: bytes, *wanted: int) -> None:
    """Raise RuntimeError unless a control request went well."""
    if status not in wanted:
        raise RuntimeError(f"status {status}: {body[:200]!r}")
