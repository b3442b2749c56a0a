"""Which tests may run side by side: each file on one worker, and the whole runs of tests/launch one after the other."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests share its fixtures (a vLLM, a finished run); whole runs would starve each other of two cores."""
    whole_run = item.path.parent.name == "launch"
    item.add_marker(pytest.mark.xdist_group("launch" if whole_run else item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    items.sort(key=lambda item: item.path.parent.name != "launch")
