"""What the engine's parser of each model family makes of a call that its chat template spelt: the call again.

Only vLLM's render servers run here (no weights, no sampling), all parsers in one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import template_models
from template_models import FAMILIES

from pipeline.capture import ids
from pipeline.capture.upstream import Engine, Message, Sampled
from pipeline.engine.server import SERVED_MODEL_NAME, reserve_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

START_S = 300
REASONING = {"qwen3.5": "qwen3", "glm4.5": "glm45"}
NAMES = ("lfm2.5", "qwen3", "qwen3.5", "llama3.1", "glm4.5")  # gpt-oss' parser wants its own architecture
SERVE = """
import asyncio, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser

def arguments(line):
    return make_arg_parser(FlexibleArgumentParser()).parse_args(line)  # parsing changes the defaults

async def serve(lines):
    await asyncio.gather(*(run_launch_fastapi(arguments(line)) for line in lines))

asyncio.run(serve(json.loads(sys.argv[1])))
"""
TOKENIZER = template_models.make_tokenizer()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "run a command",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
]
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URL of each family's render server."""
    folder = tmp_path_factory.mktemp("parsers")
    model = template_models.make_checkpoint(folder / "model")
    reserved = {name: reserve_port(0) for name in NAMES}
    ports = {name: listener.getsockname()[1] for name, listener in reserved.items()}
    lines = [command_line(model, name, port) for name, port in ports.items()]
    guarded = [sys.executable, "-m", "pipeline.engine.guard", sys.executable, "-c", SERVE, json.dumps(lines)]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            guarded, env=os.environ | settings, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    try:
        for url in urls.values():
            wait_healthy(url, process, folder / "vllm.log")
        yield urls
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the guard ends the group
        process.wait(30)
        for listener in reserved.values():
            listener.close()


def command_line(model: Path, name: str, port: int) -> list[str]:
    options = {
        "--model": str(model),
        "--served-model-name": SERVED_MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "8192",
        "--tool-call-parser": FAMILIES[name].tool_parser,
        **({"--reasoning-parser": REASONING[name]} if name in REASONING else {}),
    }
    switches = ["--enable-auto-tool-choice", "--enable-scale-out", "--trust-request-chat-template"]
    return [word for option in options.items() for word in option] + switches


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"no render server at {url}: {log.read_text()[-2000:]}")


def call(index: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"c{index}",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps(arguments)},
    }


async def heard(url: str, name: str, message: dict[str, Any]) -> Message:
    """What the engine hears when the model says ``message`` as its template spells it."""
    family = FAMILIES[name]
    engine = Engine(url, SERVED_MODEL_NAME, extra=family.render_fields())
    fields = engine.fields(json.dumps(TOOLS).encode(), None)
    after = [{"role": "tool", "tool_call_id": each["id"], "content": "o"} for each in message["tool_calls"]]
    prompt = await engine.render([USER], fields)
    whole = await engine.render([USER, {"role": "assistant", **message}, *after], fields)
    before, everything = (TOKENIZER.decode(ids.numbers(rendered.text)) for rendered in (prompt, whole))
    assert everything.startswith(before)
    said = everything[len(before) :]
    said = said[: min(said.index(stop) for stop in family.stops if stop in said)]
    tokens = [*TOKENIZER.encode(said, add_special_tokens=False), TOKENIZER.eos_token_id]
    sampled = Sampled(ids.text_of(tokens), len(tokens), [0.0] * len(tokens), "stop", None, [], 0)
    return await engine.derender(prompt.text, ids.count(prompt.text), prompt.frame, sampled, fields)


def run(url: str, name: str, message: dict[str, Any]) -> Message:
    return asyncio.run(asyncio.wait_for(heard(url, name, message), 60))


def arguments_of(message: Message) -> list[Any]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or ()]


COMMANDS = [{"command": "ls -la", "timeout": 7}, {"command": 'cat "é b"\necho', "timeout": 1}]


@pytest.mark.parametrize("name", NAMES)
def test_calls_come_back(name: str, servers: dict[str, str]) -> None:
    commands = COMMANDS[:1] if name == "llama3.1" else COMMANDS
    calls = [call(index, arguments) for index, arguments in enumerate(commands)]
    message = run(servers[name], name, {"content": None, "tool_calls": calls})
    assert arguments_of(message) == [("bash", arguments) for arguments in commands], message
    assert not message.content
    assert not (message.reasoning or "").strip()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama3.1"])
def test_words_before_a_call_come_back(name: str, servers: dict[str, str]) -> None:
    """Llama 3's template drops them."""
    message = run(servers[name], name, {"content": "I look.", "tool_calls": [call(0, COMMANDS[0])]})
    assert (message.content or "").strip() == "I look."
    assert arguments_of(message) == [("bash", COMMANDS[0])]


@pytest.mark.parametrize("name", REASONING)
def test_thoughts_before_a_call_come_back(name: str, servers: dict[str, str]) -> None:
    message = run(servers[name], name, {"content": None, "reasoning": "hmm", "tool_calls": [call(0, COMMANDS[0])]})
    assert (message.reasoning or "").strip() == "hmm"
    assert arguments_of(message) == [("bash", COMMANDS[0])]
