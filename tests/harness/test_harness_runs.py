"""Each built-in harness, unmodified, in a real sandbox against a scripted model: it writes answer.txt by its tool."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipeline.config import SandboxConfig
from pipeline.harness import get_harness
from pipeline.harness.base import DEFAULT_ROOT
from pipeline.harness.install import install, installed
from pipeline.sandbox import SandboxSpec, make_sandbox

PROMPT = "Say $42 & \"go\"; 'now'"
KINDS = ["bubblewrap", "process"]
KEYS = {"chat": ("authorization", "Bearer key-1"), "anthropic": ("x-api-key", "key-1")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["pi", "claude-code"])
def test_harness_writes_the_answer(name, kind, scripted, tmp_path):
    recipe = get_harness(name)
    if not installed(name, DEFAULT_ROOT):
        install([name], DEFAULT_ROOT)
    server = scripted[recipe.dialect]
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    async def run():
        sandbox = make_sandbox(SandboxConfig(kind=kind))
        launch = recipe.launch("http://127.0.0.1:8000", "key-1", "a/model", PROMPT, DEFAULT_ROOT)
        spec = SandboxSpec(**vars(launch), workspace=workspace, listen_port=8000, stdout=tmp_path / "log", timeout_s=60)
        process = await sandbox.launch(spec)
        async with server.on(process.listener):
            process.go()
            return await process.wait()

    exit = asyncio.run(run())
    log = (tmp_path / "log").read_text()
    assert exit.returncode == 0, log
    assert (workspace / "answer.txt").read_text() == "42", log
    assert [path.name for path in workspace.iterdir()] == ["answer.txt"]
    assert len(server.requests) == 2
    header, value = KEYS[recipe.dialect]
    assert all(headers[header] == value for _, headers, _ in server.requests)
    assert json.dumps(PROMPT) in json.dumps(server.requests[0][2])
