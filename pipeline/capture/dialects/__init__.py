"""The model APIs that harnesses speak, and which of them a path belongs to."""

from __future__ import annotations

from functools import lru_cache

from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect, Route
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.gemini import Gemini
from pipeline.capture.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (Chat(), Anthropic(), Responses(), Gemini())


@lru_cache(maxsize=1024)
def find(method: str, path: str) -> tuple[Dialect, Route | None]:
    """The dialect and route of a request; without a route, the dialect in whose shape the error should be."""
    nearest = DIALECTS[0]
    for dialect in DIALECTS:
        for route in dialect.routes:
            if route.pattern.fullmatch(path):
                if route.method == method:
                    return dialect, route
                nearest = dialect
    return nearest, None


@lru_cache(maxsize=1024)
def methods(path: str) -> tuple[str, ...]:
    """The methods by which a path may be asked for; none for an unknown path."""
    routes = (route for dialect in DIALECTS for route in dialect.routes)
    return tuple(sorted({route.method for route in routes if route.pattern.fullmatch(path)}))
