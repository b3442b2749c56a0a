"""The bar of countable work: plain lines where there is no terminal."""

from __future__ import annotations

import io

import pytest

from pipeline.report import bar as module
from pipeline.report.bar import Bar


def told(enabled: bool = True) -> list[str]:
    stream = io.StringIO()
    with Bar("collect", 3, enabled, stream) as bar:
        for number in range(3):
            bar.advance(1, f"[{number}] kept")
    return stream.getvalue().splitlines()


def test_the_end_is_told_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_EVERY_S", 1e9)
    assert told() == ["collect: 3 of 3, 0 s, [2] kept"]
    assert told(enabled=False) == []


def test_what_takes_longer_is_told_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_EVERY_S", -1.0)
    assert [line.split(",")[0] for line in told()] == [f"collect: {number} of 3" for number in (1, 2, 3)]
