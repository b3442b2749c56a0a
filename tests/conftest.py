"""In which order tests run, that no test leaves its harness recipes to the next one, and where Apptainer is.

Whole runs come first, then checks of harnesses: they take longest, and the workers share the rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipeline.harness import base

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that all folders share


from real_apptainer import INSTALLED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file stay together, on one worker: they share a vLLM or a finished run."""
    items.sort(
        key=lambda item: (item.path.parent.name not in ("launch", "slurm"), "harness_check" not in item.path.name)
    )


@pytest.fixture(autouse=True)
def _own_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that a test registers are gone after it."""
    monkeypatch.setattr(base, "_registered", {})


@pytest.fixture(autouse=True)
def _apptainer_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that tests/sandbox/install_apptainer.sh has brought, if it did."""
    if INSTALLED.is_dir():
        monkeypatch.setenv("PATH", f"{INSTALLED}:{os.environ['PATH']}")
