"""A whole rollout of a real harness, whose agent wants out: what it tries (``prober``), and what the host sees."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness_installs import runnable
from real_apptainer import INSTALLED, ISOLATED

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import HarnessConfig, SandboxConfig
from pipeline.engine.scripted import FakeEngine, Scripted
from pipeline.engine.server import SERVED_MODEL_NAME
from pipeline.harness import get_harness
from pipeline.harness.base import BUILT_IN, Endpoint, harness_root
from pipeline.harness.install import install
from pipeline.harness.packages import NODE_INSIDE
from pipeline.records import GroupSpec, Outcome, RolloutRecord, TaskRef, Trace
from pipeline.sandbox import make_sandbox
from pipeline.sandbox.seccomp import MACHINES, REFUSED
from pipeline.stages.rollout import Workshop

HARNESS = "pi"
PROBER = Path(__file__).with_name("prober.py")
ANSWER = "the right answer"  # what the verifier looks for
TEST = f"""#!/bin/sh
# {{verifier}}
mkdir -p /logs/verifier
ls -l /workspace > /logs/verifier/seen
[ "$(cat /workspace/answer)" = "{ANSWER}" ] && [ ! -e /workspace/link-to-secret ] && [ -e /workspace/link-inside ] &&
    echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
COMMAND = f"python3 prober.py > report.json 2> errors; printf '%s' '{ANSWER}' > answer"


@dataclass
class Found:
    """The prober's report, and the rollout as the host has it."""

    kind: str
    report: dict[str, Any]
    record: RolloutRecord
    trace: Trace
    snapshot: Path


def session_key(name: str, text: str) -> int:
    """A key in a keyring of this process's: what holds Kerberos tickets on a cluster."""
    libc = ctypes.CDLL(None)
    column = MACHINES[os.uname().machine][1]
    add_key, keyctl = (REFUSED[call][column] for call in ("add_key", "keyctl"))
    assert libc.syscall(keyctl, 1, None) > 0  # KEYCTL_JOIN_SESSION_KEYRING
    key: int = libc.syscall(add_key, b"user", name.encode(), text.encode(), len(text), ctypes.c_int(-3))
    assert key > 0
    return key


def task(place: Path, targets: dict[str, Any], verifier: str) -> Path:
    """A task whose environment brings the prober along."""
    files = {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Get out.",
        "environment/prober.py": PROBER.read_text(),
        "environment/targets.json": json.dumps(targets),
        "tests/test.sh": TEST.format(verifier=verifier),
        "solution/solve.sh": f"# {verifier}\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


async def rolled_out(kind: str, place: Path, targets: dict[str, Any], verifier: str) -> Found:
    """The agent runs COMMAND by its shell tool, then ends."""
    recipe = get_harness(HARNESS)
    shell = recipe.shell.filled(command=COMMAND)
    turns = [json.dumps({"name": shell.tool, "arguments": dict(shell.arguments)})]

    def answer(ids: list[int]) -> Scripted:
        agents_own = b"Get out." not in bytes(i for i in ids if i < 256)
        return Scripted(f"<tool_call>{turns.pop()}</tool_call>" if turns and not agents_own else "Done.")

    engine = FakeEngine(answers=answer)
    await engine.start()
    supervisor = ShardSupervisor(engine.url, 1, place / "journal", SERVED_MODEL_NAME)
    try:
        await supervisor.start(60)
        targets |= {"engine": int(engine.url.rpartition(":")[2])}
        ref = TaskRef("t", task(place / "task", targets, verifier))
        for name in ("scratch", "snapshots"):
            (place / name).mkdir()
        limits = HarnessConfig(timeout_s=180, retries=0)
        workshop = Workshop(
            make_sandbox(SandboxConfig(kind=kind)),
            supervisor,
            limits,
            place / "scratch",
            harness_root(),
            snapshots=place / "snapshots",
        )
        record, trace = await workshop.roll_out_traced(GroupSpec("g", ref, HARNESS, 0, 1), 0)
    finally:
        await supervisor.stop()
        await engine.stop()
    snapshot = place / "snapshots" / "g" / "0"
    assert record.outcome is not Outcome.INFRASTRUCTURE, record.verdict
    assert (snapshot / "errors").read_text() == ""
    return Found(kind, json.loads((snapshot / "report.json").read_text()), record, trace, snapshot)


@pytest.fixture(scope="module", params=ISOLATED)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    assert install([HARNESS], harness_root()) == {}
    place = tmp_path_factory.mktemp("host")
    words = [secrets.token_hex(12) for _ in range(4)]
    in_file, in_environment, in_keyring, verifier = words
    (place / "secret").write_text(in_file)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOST_SECRET", in_environment)
        patch.setenv("PATH", f"{INSTALLED}:{os.environ['PATH']}")
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        abstract = f"yoke-test-{os.getpid()}"
        for name in ("\0" + abstract, str(place / "socket")):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(name)
            unix.listen()
        prefix = get_harness(HARNESS).prefix
        targets = {
            "secrets": [word[::-1] for word in words],
            "port": port,
            "abstract": abstract,
            "socket": str(place / "socket"),
            "file": str(place / "secret"),
            "folder": str(place),
            "prefixes": [prefix, sys.base_prefix],
            "installed": [f"{prefix}/package.json", NODE_INSIDE, "/usr/bin/env"],
            "python": sys.base_prefix,
            "pid": os.getpid(),
            "key": session_key("a ticket", in_keyring),
            "key name": "a ticket",
            "node": NODE_INSIDE,
            "numbers": {name: numbers[MACHINES[os.uname().machine][1]] for name, numbers in REFUSED.items()},
        }
        yield asyncio.run(rolled_out(request.param, place, targets, verifier))


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_harness_gets_anything_of_the_host_to_write_to(name: str) -> None:
    launch = runnable(name).launch(Endpoint("http://127.0.0.1:8000", "key", "model"), "prompt", harness_root())
    assert launch.mounts and not any(writable for _, _, writable in launch.mounts)
    for host in (*launch.read_only, *(host for host, _, _ in launch.mounts)):
        assert not Path.home().is_relative_to(host), f"{name} shows {host}"


def worked(attempts: dict[str, str]) -> list[str]:
    return [f"{name}: {result}" for name, result in attempts.items() if result.startswith("WORKED")]


def test_no_port_but_the_models(found: Found) -> None:
    network = found.report["network"]
    assert network["interfaces"] == ["lo"]
    assert network["listening"] == [[8000], []]
    assert len(network["refused"]) == 9 and worked(network["refused"]) == []
    assert network["unix"] == []


def test_no_file_of_the_host_and_none_of_the_verifier(found: Found) -> None:
    files = found.report["files"]
    assert files["with secrets"] == []
    assert files["exist"] == []
    assert files["links"] == dict.fromkeys(files["links"], False)


def test_nothing_can_be_written_but_what_is_the_agents(found: Found) -> None:
    files = found.report["files"]
    assert len(files["written"]) == 9
    if found.kind == "apptainer":  # its /proc is not read-only as a whole: what is a process's own can be opened
        for name in ("/proc/self/mem", "/proc/self/uid_map", "/proc/1/oom_score_adj"):
            del files["written"][name]
        assert worked({"/dev": files["made"].pop("/dev")})  # a memory file system of its own, which is watched
    assert worked(files["written"]) == []
    assert files["written"]["/proc/sys/kernel/core_pattern"] == "EROFS"
    assert len(files["made"]) >= 7 and worked(files["made"]) == []
    assert files["hard link"] in ("EXDEV", "EROFS", "EPERM")


def test_no_rights_can_be_had(found: Found) -> None:
    files, processes = found.report["files"], found.report["processes"]
    assert files["setuid"] == [{"bubblewrap": "1000", "apptainer": str(os.getuid())}[found.kind]] * 2
    if found.kind == "bubblewrap":  # Apptainer trusts that there are no new privileges and no right to make devices
        assert files["may set users"] == []
        assert all(place.startswith("/dev/") for place in files["may hold devices"])
    assert files["device"] == "EPERM"
    assert set(files["devices"]) <= set(
        "core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
    )
    assert processes["capabilities"] == ["0" * 16] * 5


def test_no_process_of_the_host_and_no_environment(found: Found) -> None:
    processes = found.report["processes"]
    assert len(processes["pids"]) < 10
    if found.kind == "apptainer":
        theirs = ("APPTAINER_", "SINGULARITY_", "PATH=", "HOME=", "LANG=", "PWD=", "PS1=", "PROMPT_COMMAND=")
        assert [v for v in processes["environment of 1"].split("\0") if v and not v.startswith(theirs)] == []
    else:
        assert processes["environment of 1"] == "PATH=/usr/local/bin:/usr/bin:/bin\0"
    assert processes["with secrets"] == []
    assert processes["signal the host"] == "ESRCH"
    assert set(processes["limits"]) == {"processes", "open files", "file size", "core file size"}
    assert "unlimited" not in "".join(processes["limits"].values())


def test_the_kernel_opens_no_other_door(found: Found) -> None:
    kernel = found.report["kernel"]
    assert len(kernel) == 14 and worked(kernel) == []


def test_an_unknown_name_is_known_to_be_unknown_at_once(found: Found) -> None:
    """A resolver that waits for an answer takes five seconds or more."""
    for name, (failed, seconds) in found.report["names"].items():
        assert failed and seconds < 4.5, name


def test_the_models_key_works_here_only_and_trains_nothing(found: Found) -> None:
    assert found.report["model"] == {"own key": 200, "another key": 401, "no key": 401}
    assert [call.foreign for call in found.trace.calls] == [False, True, False]
    assert [call.trainable for call in found.trace.calls] == [True, False, True]
    assert found.record.info["foreign"] == 1


def test_the_verifier_follows_no_link_out(found: Found) -> None:
    assert found.record.outcome is Outcome.SOLVED, found.record.verdict
    assert sorted(path.name for path in found.snapshot.iterdir() if path.is_symlink()) == ["link-inside"]


def test_nothing_keeps_its_setuid_bit(found: Found) -> None:
    assert stat.S_IMODE((found.snapshot / "setuid").stat().st_mode) & 0o7000 == 0
