"""The tasks of `yoke harness check`: a workspace that must hold certain files in the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_task(place: Path, tag: str, files: Mapping[str, str]) -> Path:
    """A task that is solved when the workspace holds ``files``."""
    tests = " && ".join(f'[ "$(cat /workspace/{name})" = "{text}" ]' for name, text in files.items())
    script = (
        f"#!/bin/sh\nmkdir -p /logs/verifier\nif {tests}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    content = {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": f"Write 42 to answer.txt, in the way that you are told. [scene {tag}]\n",
        "tests/test.sh": script,
    }
    for name, text in content.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place
