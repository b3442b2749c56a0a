"""Each built-in harness, unmodified, in a real sandbox against a scripted model: it writes answer.txt by its tool."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from pipeline.config import SandboxConfig
from pipeline.harness import get_harness
from pipeline.harness.base import Endpoint, harness_root
from pipeline.harness.install import install
from pipeline.sandbox import SandboxExit, SandboxSpec, make_sandbox

PROMPT = "Say $42 & \"go\"; 'now'"
KINDS = ["bubblewrap", "process"]
KEYS = {"chat": ("authorization", "Bearer key-1"), "anthropic": ("x-api-key", "key-1")}


def run(name: str, kind: str, server, folder: Path, **env: str) -> tuple[SandboxExit, Path, str]:
    """Run the harness on PROMPT. Returns the exit, the workspace and the log."""
    recipe = get_harness(name)
    install([name], harness_root())
    workspace, log = folder / "workspace", folder / "log"
    workspace.mkdir(parents=True)

    async def inner() -> SandboxExit:
        launch = recipe.launch(Endpoint("http://127.0.0.1:8000", "key-1", "a/model"), PROMPT, harness_root())
        launch = dataclasses.replace(launch, env={**launch.env, **env})
        spec = SandboxSpec(**vars(launch), workspace=workspace, listen_port=8000, stdout=log, timeout_s=60)
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        async with server.on(process.listener):
            process.go()
            return await process.wait()

    return asyncio.run(inner()), workspace, log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["pi", "claude-code"])
def test_harness_writes_the_answer(name, kind, scripted, tmp_path):
    server = scripted(get_harness(name).dialect)
    exit, workspace, log = run(name, kind, server, tmp_path)
    assert exit.returncode == 0, log
    assert (workspace / "answer.txt").read_text() == "42", log
    assert [path.name for path in workspace.iterdir()] == ["answer.txt"]
    assert len(server.requests) == 2
    header, value = KEYS[get_harness(name).dialect]
    assert all(headers[header] == value for _, headers, _ in server.requests)
    assert json.dumps(PROMPT) in json.dumps(server.requests[0][2])


@pytest.mark.slow
def test_pi_asks_the_same_in_every_sandbox_and_extends_its_history(scripted, tmp_path):
    """Bit-identical prompts are what lets groups share a prefix and a small model learn."""
    first, second = scripted("chat"), scripted("chat")
    for server, folder in ((first, "a"), (second, "b")):
        run("pi", "bubblewrap", server, tmp_path / folder)
    assert [body for _, _, body in first.requests] == [body for _, _, body in second.requests]
    before, after = (body["messages"] for _, _, body in first.requests)
    assert after[: len(before)] == before
    assert str(Path.home() / ".cache") not in json.dumps(before)


@pytest.mark.slow
def test_pi_takes_its_code_from_the_warm_cache(scripted, tmp_path):
    _, _, log = run("pi", "bubblewrap", scripted("chat"), tmp_path, NODE_DEBUG_NATIVE="COMPILE_CACHE")
    bundle = [line for line in log.splitlines() if line.startswith("[compile cache]") and "dist/bundle" in line]
    assert any("was accepted" in line for line in bundle), log[:3000]
    assert not any("rejected" in line or "was not initialized" in line for line in bundle)
