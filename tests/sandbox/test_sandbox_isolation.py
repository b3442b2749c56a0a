"""What a command in a real sandbox, by bubblewrap or Apptainer, cannot see or do, each probed from inside."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from real_apptainer import INSTALLED, ISOLATED

from pipeline.config import SandboxConfig, UserError
from pipeline.sandbox import SandboxError, SandboxExit, SandboxSpec, make_sandbox
from pipeline.sandbox.bubblewrap import find_bwrap

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SYSTEM_PYTHON = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")


@pytest.fixture(params=ISOLATED)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def run(script: str, tmp_path: Path, **spec) -> tuple[SandboxExit, str]:
    """Run ``script`` in bubblewrap."""
    return run_in("bubblewrap", script, tmp_path, **spec)


def run_in(kind: str, script: str, tmp_path: Path, **spec) -> tuple[SandboxExit, str]:
    """Run ``script`` in a sandbox that starts at once. Returns the exit and its output."""

    async def inner() -> SandboxExit:
        sandbox = make_sandbox(SandboxConfig(kind=kind))
        options = {"argv": ("bash", "-c", script), "stdout": tmp_path / "log", "timeout_s": 20.0, **spec}
        process = await sandbox.launch(SandboxSpec(**options))
        return await process.wait()

    exit = asyncio.run(inner())
    return exit, (tmp_path / "log").read_text()


def test_output_and_exit_code_are_kept(kind, tmp_path):
    exit, log = run_in(kind, "echo to stdout; echo to stderr >&2; exit 7", tmp_path)
    assert (exit.returncode, exit.timed_out, exit.killed) == (7, False, None)
    assert log.splitlines() == ["to stdout", "to stderr"]


def test_working_directory_home_and_user_are_fixed(kind, tmp_path):
    workspace = tmp_path / "somewhere"
    workspace.mkdir()
    files = {".config/tool.json": '{"a": 1}'}
    _, log = run_in(
        kind,
        "pwd; echo $HOME; id -un; cat ~/.config/tool.json; touch made",
        tmp_path,
        workspace=workspace,
        home_files=files,
    )
    assert log.split("\n") == ["/workspace", "/home/agent", "agent", '{"a": 1}']
    assert (workspace / "made").exists()
    assert list(workspace.iterdir()) == [workspace / "made"]


def test_environment_is_what_the_spec_says(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    _, log = run_in(kind, "env; cat /proc/*/environ | tr '\\0' '\\n'", tmp_path, env={"GIVEN": "yes"})
    assert "GIVEN=yes" in log
    assert "hunter2" not in log


def test_secrets_are_in_no_argument_list(kind, tmp_path):
    async def inner() -> str:
        spec = SandboxSpec(("sleep", "5"), env={"API_KEY": "hunter2"}, home_files={"key": "hunter2"}, listen_port=8000)
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        process.go()
        await asyncio.sleep(0.2)
        seen = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        process.kill()
        await process.wait()
        return seen

    seen = asyncio.run(inner())
    assert {"bubblewrap": "bwrap --args", "apptainer": "apptainer --silent exec"}[kind] in seen
    assert "hunter2" not in seen


def test_host_files_are_out_of_reach(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("opensesame")
    script = f"cat {secret}; ls -A /root /home /tmp /etc; cat /etc/shadow; ln -s {secret} link; cat link; echo over"
    _, log = run_in(kind, script, tmp_path)
    assert "opensesame" not in log and "root:x:" not in log and "root:$" not in log
    assert log.rstrip().endswith("over")
    visible = log.split("/root:\n")[1].split("\n\n")[0].split()
    assert (
        set(visible) <= {Path(sys.base_prefix).relative_to("/root").parts[0]}
        if "/root" in sys.base_prefix
        else not visible
    )


@pytest.mark.parametrize("place", ["/usr/x", "/etc/x", "/x", "/dev/x", "/root/x", "/opt/x"])
def test_system_is_read_only(kind, place, tmp_path):
    exit, _ = run_in(kind, f"echo > {place}", tmp_path)
    assert exit.returncode != 0 or (kind, place) == ("apptainer", "/dev/x")  # its own memory file system
    assert not os.path.exists(place)


def test_read_only_mounts_cannot_be_written_and_writable_can(kind, tmp_path):
    for name in ("ro", "rw", "same"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "here").write_text(name)
    mounts = ((tmp_path / "ro", "/tests", False), (tmp_path / "rw", "/logs/verifier", True))
    script = f"cat /tests/here {tmp_path}/same/here; touch /logs/verifier/a /tests/b {tmp_path}/same/c"
    _, log = run_in(kind, script, tmp_path, mounts=mounts, read_only=(tmp_path / "same",))
    assert log.startswith("rosame")
    made = [path.name for name in ("ro", "rw", "same") for path in (tmp_path / name).iterdir()]
    assert sorted(made) == ["a", "here", "here", "here"]


def test_no_rights_and_no_new_namespace(kind, tmp_path):
    _, log = run_in(
        kind,
        "grep -E 'CapEff|NoNewPrivs' /proc/self/status; unshare -Ur true; mount -t tmpfs x /tmp; echo over",
        tmp_path,
    )
    assert "CapEff:\t0000000000000000" in log and "NoNewPrivs:\t1" in log
    assert log.count("failed") + log.count("denied") + log.count("permitted") + log.count("superuser") >= 2


@pytest.mark.parametrize("listen_port", [None, 8000])
def test_no_descriptor_of_the_host_is_inherited(kind, listen_port, tmp_path):
    async def inner() -> None:
        spec = SandboxSpec(("ls", "-l", "/proc/self/fd"), listen_port=listen_port, stdout=tmp_path / "log")
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        process.go()
        await process.wait()

    asyncio.run(inner())
    targets = [line.split("-> ")[1] for line in (tmp_path / "log").read_text().splitlines()[1:]]
    assert targets[:3] == ["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")]
    assert [target for target in targets[3:] if not target.startswith("/proc")] == []


def test_host_processes_are_invisible(kind, tmp_path):
    _, log = run_in(kind, f"ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()} && echo reached", tmp_path)
    assert int(log.split()[0]) < 8
    assert "reached" not in log


NETWORK = """
import socket, sys
for family, address in ((socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), (socket.AF_INET, ("1.1.1.1", 80)),
                        (socket.AF_UNIX, sys.argv[2]), (socket.AF_UNIX, "\\0" + sys.argv[3])):
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); print("REACHED", address)
    except OSError as error: print("refused", error)
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("REACHED packets")
except OSError: print("refused packets")
"""


def test_no_network_but_the_listener(kind, tmp_path):
    abstract = f"yoke-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        hidden.bind("\0" + abstract)
        hidden.listen()
        argv = ("python3", "-c", NETWORK, str(tcp.getsockname()[1]), str(tmp_path / "s"), abstract)
        _, log = run_in(kind, "", tmp_path, argv=argv)
    assert [line.split()[0] for line in log.splitlines()] == ["refused"] * 5, log
    assert "REACHED" not in log


def test_four_sandboxes_share_an_inside_port(kind, tmp_path):
    script = "exec 3<>/dev/tcp/127.0.0.1/8000; read -r word <&3; echo $word"

    async def one(index: int) -> str:
        log = tmp_path / f"log{index}"
        process = await sandbox.launch(SandboxSpec(("bash", "-c", script), listen_port=8000, stdout=log, timeout_s=20))
        assert process.base_url == "http://127.0.0.1:8000"
        process.go()
        connection, _ = await asyncio.get_running_loop().sock_accept(process.listener)
        with connection:
            connection.sendall(f"sandbox-{index}\n".encode())
            await process.wait()
        return log.read_text().strip()

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(index) for index in range(4)))

    sandbox = make_sandbox(SandboxConfig(kind=kind))
    assert asyncio.run(all_of_them()) == [f"sandbox-{index}" for index in range(4)]


def test_nothing_runs_before_go(kind, tmp_path):
    async def inner() -> None:
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(
            SandboxSpec(("touch", "/workspace/ran"), workspace=tmp_path, listen_port=8000)
        )
        await asyncio.sleep(0.3)
        assert not (tmp_path / "ran").exists()
        process.go()
        assert (await process.wait()).returncode == 0
        assert (tmp_path / "ran").exists()

    asyncio.run(inner())


AS_USER = """
import asyncio, os, sys
from pathlib import Path
from pipeline.config import SandboxConfig
from pipeline.sandbox import SandboxSpec, make_sandbox
async def main():
    sandbox = make_sandbox(SandboxConfig(kind=sys.argv[2], processes=64))
    for port in (None, 8000):
        many = "for i in $(seq 200); do sleep 3 & done 2>&1 | grep -m1 -o 'Resource temporarily'"
        script = "id -u; unshare -Ur echo nested 2>/dev/null; touch made-$0; " + many
        spec = SandboxSpec(("bash", "-c", script, str(port)), workspace=Path(sys.argv[1]), listen_port=port,
                           stdout=Path(sys.argv[1], "log"))
        process = await sandbox.launch(spec)
        process.go()
        print(await process.wait())
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="all other tests of this file run as a plain user")
@pytest.mark.skipif(SYSTEM_PYTHON is None, reason="needs a system Python of this version, which every user can read")
def test_works_for_a_plain_user_with_a_process_limit(kind):
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        path = ":".join([str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))])
        done = subprocess.run(
            [SYSTEM_PYTHON, "-B", "-c", AS_USER, folder, kind],
            env={"PYTHONPATH": path, "PATH": f"{INSTALLED}:/usr/bin:/bin", "YOKE_HOME": f"{folder}/home"},
            **{"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        log = Path(folder, "log").read_text() if done.returncode == 0 else done.stderr
        assert (
            log.splitlines() == [{"bubblewrap": "1000", "apptainer": str(NOBODY)}[kind], "Resource temporarily"] * 2
        ), log
        assert done.stdout.count("returncode=0, timed_out=False, killed=None") == 2
        assert {"made-None", "made-8000"} <= set(os.listdir(folder))


@pytest.mark.parametrize("listen_port", [None, 8000])
def test_a_sandbox_that_cannot_be_built_is_an_error_in_its_own_words(kind, listen_port, tmp_path):
    async def inner() -> None:
        spec = SandboxSpec(("true",), workspace=tmp_path / "missing", listen_port=listen_port)
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        await process.wait()

    with pytest.raises(SandboxError, match=r"missing.*(No such file|doesn't exist)"):
        asyncio.run(inner())


def test_a_command_that_does_not_exist_is_its_own_failure(kind, tmp_path):
    exit, log = run_in(kind, "", tmp_path, argv=("no-such-command",))
    assert exit.returncode == 127
    assert "no-such-command" in log


def test_auto_without_user_namespaces_says_how_to_ask_for_a_process(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    fake.chmod(0o755)
    assert os.access(find_bwrap(), os.X_OK)
    monkeypatch.setattr("pipeline.sandbox.bubblewrap.find_bwrap", lambda: str(fake))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"uid map: Permission denied.*no apptainer.*sandbox=process"):
        make_sandbox(SandboxConfig(kind="auto"))


def test_unknown_kind_lists_the_known_ones():
    with pytest.raises(UserError, match="auto, bubblewrap, apptainer, process"):
        make_sandbox(SandboxConfig(kind="docker"))


def test_a_sandbox_that_gave_up_before_it_was_held_is_the_same_error(tmp_path, monkeypatch):
    """Between bubblewrap's word of its first process and our hold on it, that process may be gone."""
    held = os.pidfd_open

    def too_late(pid: int) -> int:
        descriptor = held(pid)
        select.select([descriptor], [], [], 20.0)
        os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(os, "pidfd_open", too_late)
    with pytest.raises(SandboxError, match="missing: No such file"):
        run("true", tmp_path, workspace=tmp_path / "missing", listen_port=8000)
