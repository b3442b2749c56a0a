"""A running proxy as a fixture; what it is made of lies in ``proxy_helpers``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from proxy_helpers import Proxies


@pytest.fixture
def proxies(tmp_path: Path) -> Proxies:
    return Proxies(tmp_path / "journals")
