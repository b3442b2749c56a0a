"""Writes docs/fields.md: ``python -m pipeline.capture.dialects > docs/fields.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pipeline.capture.dialects import DIALECTS
from pipeline.capture.dialects.fields import Rule, Use

HEAD = """\
# What becomes of each request field

Written by `python -m pipeline.capture.dialects > docs/fields.md` from the tables by which requests are read.

- **honoured**: it shapes the answer as its API says.
- **overridden**: the session's policy decides (sampling, thinking); what the harness asked for is in the trace.
- **dropped**: it has no meaning here; counted in `dropped_<name>`. A field in no table is dropped as `dropped_unknown`.
- **rejected**: the answer would not be what was asked for, so the request gets the API's own "invalid request" error;
  a harmless value passes.

Over a WebSocket (`GET /v1/responses` with an upgrade) OpenAI Responses also honours `generate`, `stream_id` and
`previous_response_id`, which must name the last response of one of that connection's lanes.

`null` is the same as leaving a field out. Tools that the API's own servers run (web search, code execution, …) and
their items in a history are dropped and counted by kind; images and files are passed on for the engine to take or
refuse.
"""
TITLES = {
    "chat": "OpenAI Chat Completions",
    "anthropic": "Anthropic Messages",
    "responses": "OpenAI Responses",
    "gemini": "Gemini generateContent",
}


def rows(table: Mapping[str, Rule], prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Every field of a table and of the tables in it, by its dotted name."""
    for name, rule in table.items():
        if rule.inner is None:
            yield prefix + name, rule
        else:
            yield from rows(rule.inner, f"{prefix}{name}.")


def described(name: str, rule: Rule) -> str:
    """A field as the page names it."""
    harmless = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in rule.harmless)
    notes = [f"unless {harmless}" if harmless else "", rule.hint]
    note = "; ".join(filter(None, notes))
    return f"`{name}`" + (f" ({note})" if note else "")


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for dialect in DIALECTS:
        lines += [f"## {TITLES[dialect.name]}", "", "| use | fields |", "|---|---|"]
        for use in Use:
            fields = [described(name, rule) for name, rule in rows(dialect.fields) if rule.use is use]
            lines.append(f"| {use} | {', '.join(fields)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
