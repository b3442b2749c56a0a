"""The model APIs that harnesses speak, and which of them a path belongs to."""

from __future__ import annotations

from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect, Route
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.gemini import Gemini
from pipeline.capture.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (Chat(), Anthropic(), Responses(), Gemini())


def find(method: str, path: str) -> tuple[Dialect, Route | None]:
    """The dialect and route of a request; an unknown path gets the first dialect (for its error shape) and no route."""
    for dialect in DIALECTS:
        for route in dialect.routes:
            if route.method == method and route.pattern.fullmatch(path):
                return dialect, route
    return DIALECTS[0], None
