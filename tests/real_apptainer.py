"""Whether this machine has a real Apptainer, and the kinds of sandbox that keep the same contract."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.config import yoke_home

# by tests/sandbox/install_apptainer.sh
INSTALLED = (Path("/opt/yoke-apptainer") if os.getuid() == 0 else yoke_home() / "apptainer") / "usr/bin"
MISSING = shutil.which("apptainer", path=f"{INSTALLED}:{os.environ['PATH']}") is None
needs_apptainer = pytest.mark.skipif(MISSING, reason="no apptainer: run tests/sandbox/install_apptainer.sh")
APPTAINER = pytest.param("apptainer", marks=needs_apptainer)
ISOLATED = ["bubblewrap", APPTAINER]
KINDS = [*ISOLATED, "process"]
