"""Each built-in harness, unmodified, in a real sandbox against a scripted model: it writes answer.txt by its tool."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from harness_installs import provided
from real_apptainer import MISSING
from scripted_model import DIALECTS, ScriptedServer, in_turns

from pipeline.config import SandboxConfig
from pipeline.harness import get_harness
from pipeline.harness.base import BUILT_IN, Action, Endpoint, HarnessRecipe, harness_root
from pipeline.harness.packages import Npm
from pipeline.sandbox import SandboxExit, SandboxSpec, make_sandbox

PROMPT = "Say $42 & \"go\"; 'now'"
KINDS = ["bubblewrap", "process"]
NPM = [name for name in BUILT_IN if isinstance(get_harness(name).packaging, Npm)]
BESIDE_THE_PROMPT = ("metadata", "client_metadata", "prompt_cache_key")
ITEM_ID = re.compile(r'"id": "msg_[0-9a-f-]{36}", ')  # of the Responses API, no part of a prompt either


@dataclasses.dataclass
class Run:
    """What came of one run."""

    server: ScriptedServer
    exit: SandboxExit
    workspace: Path
    log: str

    def first_prompt(self) -> str:
        body = self.server.requests[0].body
        return ITEM_ID.sub("", json.dumps({name: body[name] for name in body if name not in BESIDE_THE_PROMPT}))


def solution(recipe: HarnessRecipe) -> list[Action]:
    return [recipe.shell.filled(command="printf 42 > answer.txt"), *recipe.finish]


def run(name: str, folder: Path, turns: list[Action] | None = None, kind: str = "bubblewrap", **env: str) -> Run:
    """Run the harness on PROMPT with a model that acts in ``turns``."""
    recipe = provided(name)
    workspace, log = folder / "workspace", folder / "log"
    workspace.mkdir(parents=True)
    server = ScriptedServer(recipe.dialect, in_turns(recipe.dialect, turns or solution(recipe)))

    async def inner() -> SandboxExit:
        launch = recipe.launch(Endpoint("http://127.0.0.1:8000", "key-1", "a/model"), PROMPT, harness_root())
        launch = dataclasses.replace(launch, env={**launch.env, **env})
        spec = SandboxSpec(**vars(launch), workspace=workspace, listen_port=8000, stdout=log, timeout_s=120)
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        async with server.on(process.listener):
            process.go()
            return await process.wait()

    return Run(server, asyncio.run(inner()), workspace, log.read_text(errors="replace"))


def check_solved(name: str, done: Run) -> None:
    recipe = get_harness(name)
    assert done.exit.returncode == 0, done.log[-3000:]
    assert (done.workspace / "answer.txt").read_text() == "42", done.log[-3000:]
    assert [path.name for path in done.workspace.iterdir()] == ["answer.txt"]
    assert len(done.server.requests) == 1 + len(recipe.finish)
    header, before = DIALECTS[recipe.dialect].key
    assert all(request.headers[header] == before + "key-1" for request in done.server.requests)
    prompt = json.dumps(PROMPT)[1:-1]
    assert prompt in done.first_prompt()
    assert f'\\"{prompt}\\"' not in done.first_prompt()  # one that quotes it once more
    assert not recipe.loop_guard or not re.search(recipe.loop_guard, done.log)
    if recipe.tool_log:
        calls = 1 + sum(bool(action.tool) for action in recipe.finish)
        assert len(re.findall(recipe.tool_log, done.log)) == calls, done.log[-3000:]


def plain(entry: Any) -> Any:
    """Without the difference between a text and a list of one text, which means the same."""
    match entry:
        case {"content": [{"type": _, "text": text, **more}]} if not more:
            return {**entry, "content": text}
    return entry


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_harness_solves_its_task_and_asks_the_same_in_every_sandbox(name: str, tmp_path: Path) -> None:
    """Bit-identical prompts are what lets groups share a prefix; a history that only grows makes a rollout one row.

    The second sandbox is Apptainer's where there is one, so prompts are the same on every cluster. (But a shell that
    root runs there is root's, and says so in Terminus' prompts.)
    """
    bubblewrap = MISSING or (name == "terminus-2" and os.getuid() == 0)
    first = run(name, tmp_path / "a")
    second = run(name, tmp_path / "b", kind="bubblewrap" if bubblewrap else "apptainer")
    for done in (first, second):
        check_solved(name, done)
        before, after = (list(map(plain, done.server.history(request))) for request in (0, 1))
        assert after[: len(before)] == before
        assert not [path for path in (harness_root(), tmp_path) if str(path) in done.first_prompt()]
    assert first.first_prompt() == second.first_prompt()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NPM, "mini-swe-agent", "mistral-vibe"])
def test_harness_solves_its_task_without_isolation(name: str, tmp_path: Path) -> None:
    check_solved(name, run(name, tmp_path, kind="process"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "turn"), [("mini-swe-agent", Action("no_such_tool")), ("openhands", None)])
def test_guard_against_loops_is_recognised(name: str, turn: Action | None, tmp_path: Path) -> None:
    recipe = get_harness(name)
    done = run(name, tmp_path, [turn or recipe.shell.filled(command="ls")] * 20)
    assert re.search(recipe.loop_guard, done.log), done.log[-3000:]
    assert len(done.server.requests) < 20
    assert recipe.exit_codes.get(done.exit.returncode or 0, "loop_guard") == "loop_guard"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUILT_IN if get_harness(name).warm_up])
def test_harness_takes_its_code_from_the_warm_cache(name: str, tmp_path: Path) -> None:
    log = run(name, tmp_path, NODE_DEBUG_NATIVE="COMPILE_CACHE").log
    files = [line for line in log.splitlines() if line.startswith("[compile cache]") and "node_modules" in line]
    assert any("was accepted" in line for line in files), log[:3000]
    assert not any("rejected" in line or "was not initialized" in line for line in files)
