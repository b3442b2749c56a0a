"""Lets the tests of this folder import their helpers, and gives them rollouts and a browser."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.records import RolloutRecord

sys.path.insert(0, str(Path(__file__).parent))

from browser import Page, browser, find_chromium
from report_records import make_rollout


@pytest.fixture
def rollout() -> Callable[..., RolloutRecord]:
    """make_rollout."""
    return make_rollout


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all pages of these tests."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: tests/report/install_chromium.sh installs one")
    home = tmp_path_factory.mktemp("chromium") / "profile"
    home.mkdir()
    with browser(program, home) as opened:
        yield opened
