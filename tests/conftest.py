"""In which order tests run: whole runs first, since they take longest and the workers share the rest."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file stay together, on one worker: they share a vLLM or a finished run."""
    items.sort(key=lambda item: item.path.parent.name != "launch")
