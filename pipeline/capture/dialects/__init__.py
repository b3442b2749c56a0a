"""The model APIs that harnesses speak, and which of them a path belongs to."""

from __future__ import annotations

import re
from functools import lru_cache

from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect, Route
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.gemini import Gemini
from pipeline.capture.dialects.responses import Responses

CHAT, ANTHROPIC, RESPONSES, GEMINI = Chat(), Anthropic(), Responses(), Gemini()
DIALECTS: tuple[Dialect, ...] = (CHAT, ANTHROPIC, RESPONSES, GEMINI)
HINTS: tuple[tuple[str, Dialect], ...] = (  # in whose shape an unknown path gets its error
    (r"/messages\b|^/api/|^/v1/complete$", ANTHROPIC),
    (r"/responses\b|/conversations\b", RESPONSES),
    (r":\w+$|^/v1(alpha|beta)|/models/", GEMINI),
    ("", CHAT),
)


@lru_cache(maxsize=1024)
def find(method: str, path: str) -> tuple[Dialect, Route | None]:
    """The dialect and route of a request; without a route, the dialect in whose shape the error should be."""
    found = [(dialect, route) for dialect in DIALECTS for route in dialect.routes if route.pattern.fullmatch(path)]
    for dialect, route in found:
        if route.method == method:
            return dialect, route
    return found[0][0] if found else next(dialect for hint, dialect in HINTS if re.search(hint, path)), None


@lru_cache(maxsize=1024)
def methods(path: str) -> tuple[str, ...]:
    """The methods by which a path may be asked for; none for an unknown path."""
    routes = (route for dialect in DIALECTS for route in dialect.routes)
    return tuple(sorted({route.method for route in routes if route.pattern.fullmatch(path)}))
