"""Field tables: what becomes of each field of a request, and the fields of one request once a table was applied."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from pipeline.capture.canonical import Item


class Use(enum.StrEnum):
    """What becomes of a request field."""

    HONOURED = "honoured"
    OVERRIDDEN = "overridden"  # recorded as the harness's wish; the session's policy decides
    DROPPED = "dropped"  # has no meaning here; counted
    REJECTED = "rejected"  # the answer would not be what was asked for


@dataclass(frozen=True)
class Rule:
    """One row of a dialect's field table. ``kind`` is the JSON type (None is always allowed and means absent).

    A REJECTED field is harmless when its value is among ``harmless``. The fields of an object with a table of its own
    (``inner``) are placed one by one under dotted names.
    """

    use: Use
    kind: Any = Any
    harmless: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead of a REJECTED field
    inner: Mapping[str, Rule] | None = None


def honoured(kind: Any = Any) -> Rule:
    """A field that shapes the answer as its API says."""
    return Rule(Use.HONOURED, kind)


OVERRIDDEN = Rule(Use.OVERRIDDEN)
DROPPED = Rule(Use.DROPPED)


def rejected(*harmless: Any, hint: str = "") -> Rule:
    """A field that is refused unless its value is harmless."""
    return Rule(Use.REJECTED, Any, harmless, hint)


def inner(table: Mapping[str, Rule]) -> Rule:
    """An object whose fields have rules of their own."""
    return Rule(Use.HONOURED, dict[str, Raw], inner=table)


@dataclass
class Fields:
    """A request's fields after the field table was applied."""

    values: dict[str, Any]  # honoured fields that are present; those of kind Raw are still JSON text
    wishes: dict[str, Any]
    dropped: list[str]

    def get(self, name: str, default: Any = None) -> Any:
        """An honoured field."""
        return self.values.get(name, default)

    def instructions(self, name: str) -> list[Item]:
        """The item that a field of kind Raw makes when it holds the instructions; none when it is absent."""
        return [Item("system", bytes(self.values[name]))] if name in self.values else []
