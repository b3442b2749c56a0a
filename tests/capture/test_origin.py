"""Calls that the agent makes with its harness's key are answered, but never trained: who calls is seen from outside."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from proxy_helpers import Proxies, Proxy, eventually

from pipeline.capture.origin import Inspector, Origin
from pipeline.capture.rows import rows
from pipeline.config import SandboxConfig, SessionPolicy
from pipeline.engine.scripted import Scripted
from pipeline.records import Trace
from pipeline.sandbox import SandboxSpec, make_sandbox

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
AGENTS_FILES = {
    "call.sh": """curl -sS --max-time 60 $URL -H "authorization: Bearer $KEY" -d "$BODY" > answer""",
    "call.py": """
import os, urllib.request
head = {"authorization": "Bearer " + os.environ["KEY"]}
request = urllib.request.Request(os.environ["URL"], os.environ["BODY"].encode(), head)
open("answer", "wb").write(urllib.request.urlopen(request, timeout=60).read())
""",
}
CURL = "sh call.sh"

# A harness: asks, lets its agent run a command, asks again.
HARNESS = """
import http.client, json, os, subprocess, sys
history, connection = [], None
def ask(text):
    global connection
    history.append({"role": "user", "content": text})
    body, key = json.dumps({"messages": history}), {"authorization": "Bearer " + os.environ["KEY"]}
    for attempt in range(50):
        try:
            connection = connection or http.client.HTTPConnection("127.0.0.1:8000", timeout=60)
            connection.request("POST", "/v1/chat/completions", body, key)
            reply = connection.getresponse()
            history.append(json.loads(reply.read())["choices"][0]["message"])
            break
        except (http.client.HTTPException, OSError):
            connection = None
    if "--reconnect" in sys.argv:
        connection = None
ask("first")
subprocess.run(["bash", "-c", sys.argv[1]], check=True)
ask("second")
assert [message["role"] for message in history] == ["user", "assistant"] * 2
"""
# A harness whose calls are made by a child.
PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"


async def traced(
    proxy: Proxy,
    workspace: Path,
    *argv: str,
    kind: str = "bubblewrap",
    during: Callable[[], Awaitable[None]] | None = None,
) -> Trace:
    """The trace of a harness in a sandbox, handed over as a rollout's is."""
    for name, text in AGENTS_FILES.items():
        (workspace / name).write_text(text)
    body = '{"messages": [{"role": "user", "content": "from the agent"}]}'
    spec = SandboxSpec(
        argv=("python3", "-c", *argv),
        env={"KEY": "sk-1", "URL": "http://127.0.0.1:8000/v1/chat/completions", "BODY": body},
        workspace=workspace,
        listen_port=8000,
        stdout=workspace / "output",
        timeout_s=120,
    )
    process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
    try:
        await proxy.supervisor.open_session("sk-1", SessionPolicy(), process.listener, inside=process.inside)
        process.go()
        if during is not None:
            await during()
        exit_ = await process.wait()
        assert exit_.returncode == 0, (workspace / "output").read_text()
        return await proxy.supervisor.close_session("sk-1")
    finally:
        process.kill()
        await process.wait()


def trace_of(proxies: Proxies, workspace: Path, *argv: str, kind: str = "bubblewrap") -> Trace:
    workspace.mkdir()

    async def inner() -> Trace:
        async with proxies.run() as proxy:
            return await traced(proxy, workspace, *argv, kind=kind)

    return asyncio.run(inner())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(CURL, id="curl"),
        pytest.param("exec python3 call.py", id="the harness's interpreter, its own child"),
        pytest.param("(setsid sh -c 'sh call.sh; touch over' &); until [ -e over ]; do sleep 0.05; done", id="daemon"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--reconnect"]], ids=["one connection", "a connection a call"])
def test_a_call_of_the_agents_own_is_answered_and_not_trained(command, arguments, proxies, tmp_path):
    trace = trace_of(proxies, tmp_path / "w", HARNESS, command, *arguments)
    assert "chat.completion" in (tmp_path / "w" / "answer").read_text()
    assert [call.foreign for call in trace.calls] == [False, True, False]
    assert [call.trainable for call in trace.calls] == [True, False, True]
    assert [call.delivered for call in trace.calls] == [True] * 3
    assert trace.counters == {"foreign": 1, "fork_root": 1}
    built = rows(trace)
    assert len(built) == 1  # the harness's two calls
    assert built[0].trained_tokens == sum(len(trace.calls[i].sampled_ids) for i in (0, 2))


def test_an_agent_cannot_spoil_its_rollout_by_calls_that_the_engine_fails_at(proxies, tmp_path):
    workspace = tmp_path / "w"
    workspace.mkdir()

    async def inner() -> Trace:
        async with proxies.run() as proxy:
            proxy.engine.script += [Scripted("first"), *(Scripted(status=500) for _ in range(3)), Scripted("second")]
            return await traced(proxy, workspace, HARNESS, CURL)

    trace = asyncio.run(inner())
    assert '"error"' in (workspace / "answer").read_text()
    assert len(trace.calls) == 2 and "engine_failures" not in trace.counters


def test_calls_of_a_harness_that_is_several_processes_are_its_own(proxies, tmp_path):
    trace = trace_of(proxies, tmp_path / "w", PARENT, HARNESS, CURL)
    assert [call.foreign for call in trace.calls] == [False, True, False]


def test_a_replacement_of_a_dead_shard_tells_them_apart_as_well(proxies, tmp_path):
    workspace = tmp_path / "w"
    workspace.mkdir()
    wait = f"touch asked; until [ -e go ]; do sleep 0.05; done; {CURL}"

    async def inner() -> Trace:
        async with proxies.run() as proxy:

            async def kill() -> None:
                await eventually((workspace / "asked").exists, "the first answer", 60)
                os.kill(proxy.pids()[0], signal.SIGKILL)
                await eventually(lambda: proxy.supervisor.stats()["shard_restarts"] == 1, "another shard", 60)
                (workspace / "go").touch()

            return await traced(proxy, workspace, HARNESS, wait, during=kill)

    assert [call.foreign for call in asyncio.run(inner()).calls] == [False, True, False]


def test_without_a_network_of_its_own_nobody_can_tell(proxies, tmp_path):
    workspace = tmp_path / "w"
    workspace.mkdir()

    async def inner() -> Trace:
        async with proxies.run() as proxy:
            trace = await traced(proxy, workspace, HARNESS, CURL, kind="process")
            await eventually(lambda: proxy.supervisor.stats().get("unattributed") == 3, "a heartbeat", 60)
            return trace

    trace = asyncio.run(inner())
    assert [call.trainable for call in trace.calls] == [True, True, True]
    assert trace.counters == {"fork_root": 1}


def test_descriptors_are_let_go_of(proxies, tmp_path):
    """Of the sandbox, in the supervisor's process and in the shard's."""

    async def inner() -> list[tuple[int, int]]:
        async with proxies.run() as proxy:
            counts = []
            for name in ("a", "b", "c"):
                (tmp_path / name).mkdir()
                await traced(proxy, tmp_path / name, HARNESS, CURL)
                places = "/proc/self/fd", f"/proc/{proxy.pids()[0]}/fd"
                counts.append(tuple(len(os.listdir(place)) for place in places))
            return counts

    _, second, third = asyncio.run(inner())
    assert second == third


AS_USER = """
import asyncio, os, sys
from pipeline.capture.origin import Inspector
from pipeline.config import SandboxConfig
from pipeline.sandbox import SandboxSpec, make_sandbox
CALL = "import socket, time; s = socket.create_connection(('127.0.0.1', 8000)); s.recv(1)"
async def main():
    spec = SandboxSpec(("python3", "-c", CALL), listen_port=8000)
    process = await make_sandbox(SandboxConfig()).launch(spec)
    process.go()
    client, address = await asyncio.get_running_loop().sock_accept(process.listener)
    for first in (float("inf"), 0.0):
        inside = process.inside
        print(Inspector(os.dup(inside.proc), os.dup(inside.sockets), 8000, lambda: first).origin(address[1]))
    client.close()
    await process.wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("user", [12345] if os.getuid() == 0 else [None])
@pytest.mark.skipif(SYSTEM_PYTHON is None, reason="needs a system Python of this version, which every user can read")
def test_a_plain_user_can_tell_as_well(user):
    path = ":".join([str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [SYSTEM_PYTHON, "-B", "-c", AS_USER],
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
            **({"user": user, "group": user, "extra_groups": []} if user else {}),
            cwd=folder if user is None else "/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.split() == ["harness", "foreign"], done.stderr


def test_a_client_that_has_left_and_a_session_that_has_ended_are_unknown():
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    questions = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inspector = Inspector(proc, questions.detach(), listener.getsockname()[1], lambda: math.inf)
        with socket.create_connection(listener.getsockname()) as client:
            port = client.getsockname()[1]
            assert inspector.origin(port) is Origin.HARNESS
        assert inspector.origin(port) is Origin.UNKNOWN
        with socket.create_connection(listener.getsockname()) as client:
            inspector.close()
            assert inspector.origin(client.getsockname()[1]) is Origin.UNKNOWN
