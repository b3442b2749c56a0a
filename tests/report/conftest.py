"""Lets the tests of this folder import their helpers, and gives them rollouts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.records import RolloutRecord

sys.path.insert(0, str(Path(__file__).parent))

from report_records import make_rollout


@pytest.fixture
def rollout() -> Callable[..., RolloutRecord]:
    """make_rollout."""
    return make_rollout
