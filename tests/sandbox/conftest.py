"""Lets the tests of this folder find the Apptainer that install_apptainer.sh put beside the harnesses, if it did."""

from __future__ import annotations

import os

import pytest
from real_apptainer import INSTALLED


@pytest.fixture(autouse=True)
def _apptainer_in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if INSTALLED.is_dir():
        monkeypatch.setenv("PATH", f"{INSTALLED}:{os.environ['PATH']}")
