"""One private Slurm for all tests of this folder that a pytest worker runs, and the helpers on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parent))
from slurm_helpers import SCRIPTS, Testbed


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Four idle nodes. ``testbed.env`` points Slurm's commands at them."""
    installed = subprocess.run([SCRIPTS / "install.sh"], capture_output=True, text=True, check=False, timeout=600)
    if installed.returncode != 0:
        give_up = pytest.fail if os.environ.get("YOKE_REQUIRE_SLURM") == "1" else pytest.skip
        give_up(f"no Slurm here: {installed.stderr.strip()}")
    bed = Testbed(tmp_path_factory.mktemp("bed"))
    bed.start()
    try:
        yield bed
    finally:
        bed.stop()


@pytest.fixture
def slurm(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    """The same, for a test that calls Slurm from its own process; jobs left over are cancelled after the test."""
    monkeypatch.setenv("SLURM_CONF", str(testbed.conf))
    yield testbed
    testbed.clear()
