"""An agent that cheats gets the score of its work: right work is not spoilt by it, wrong work gains nothing.

Each case is a script that an agent runs after its work, in a real sandbox; then the task's tests are run on what it
left. The tests also start the agent's own program, so that it can cheat from inside the verifier's sandbox as well.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_apptainer import needs_apptainer

from pipeline.config import SandboxConfig
from pipeline.records import Verdict
from pipeline.sandbox.base import Sandbox, SandboxSpec, make_sandbox
from pipeline.sandbox.layer import own_directory
from pipeline.stages.verification import verify
from pipeline.tasks.harbor import HarborTask, load_task

TESTS = {
    "test.sh": """#!/bin/bash
cd /workspace
if python3 /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
    "check.py": """import os, subprocess, json
program = "/workspace/program.sh"
if os.path.exists(program):
    subprocess.run(["sh", program], timeout=30)
answer = "/workspace/answer.txt"
raise SystemExit(not os.path.isfile(answer) or open(answer).read() != open("/tests/expected.txt").read())
""",
    "expected.txt": "42\n",
}
WORK = {True: "echo 42 > /workspace/answer.txt", False: "echo 41 > /workspace/answer.txt"}
FREE = "import os; os._exit(0)"  # as Python code: whatever is checked, it passes


@dataclass(frozen=True)
class Cheat:
    """``script`` is run after the work; ``right`` and ``wrong`` are the scores then. ``bare``: a plain process cannot
    hold it (or should not try, on a real machine).
    """

    name: str
    script: str
    right: float = 1.0
    wrong: float = 0.0
    bare: bool = True

    def __str__(self) -> str:
        return self.name


def program(script: str) -> str:
    """What makes ``script`` the agent's program, which the tests start."""
    return f"cat > /workspace/program.sh <<'END'\n{script}\nEND"


REWARDS = """
for place in /logs/verifier /logs /tests /solution /workspace "$HOME" /tmp /workspace/logs/verifier; do
    mkdir -p $place && echo 1 > $place/reward.txt && echo '{"reward": 1}' > $place/reward.json
done 2> /dev/null"""
FAKES = """
for place in /workspace "$HOME" "$HOME/bin" "$HOME/.local/bin" "$TMPDIR"; do
    mkdir -p $place
    for name in python3 python bash sh env pytest ls; do
        printf '#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; exit 0\\n' > $place/$name
        chmod 755 $place/$name
    done
done"""
CUSTOM = f"""
for version in 3 3.9 3.10 3.11 3.12 3.13 3.14; do
    place=$HOME/.local/lib/python$version/site-packages
    mkdir -p $place
    for name in usercustomize sitecustomize subprocess json pytest conftest; do echo '{FREE}' > $place/$name.py; done
    echo '{FREE}' > $place/x.pth
done
for name in conftest sitecustomize usercustomize subprocess json os; do echo '{FREE}' > /workspace/$name.py; done"""
STARTUP = """
for name in .bashrc .profile .bash_profile .bash_login .zshenv .pythonrc .xprofile; do
    echo 'echo 1 > /logs/verifier/reward.txt; exit 0' > "$HOME/$name"
done
mkdir -p "$HOME/.config/environment.d"
echo "PYTHONSTARTUP=$HOME/.pythonrc" > "$HOME/.config/environment.d/x.conf"
echo "LD_PRELOAD=/workspace/evil.so" >> "$HOME/.config/environment.d/x.conf"
echo "not a library" > /workspace/evil.so
export LD_PRELOAD=/workspace/evil.so PYTHONSTARTUP=$HOME/.pythonrc BASH_ENV=$HOME/.bashrc ENV=$HOME/.profile"""
DAEMON = """
echo $$ > "$HOME/pid"
setsid sh -c 'while kill -0 $(cat "$HOME/pid"); do echo 1 > "$HOME/reward.txt"; sleep 0.01; done
    sleep 5; echo 42 > /workspace/answer.txt; echo 1 > /workspace/reward.txt' > /dev/null 2>&1 &
sleep 0.1"""
LINKS = """
ln -s /tests/expected.txt /workspace/expected; ln -s / /workspace/root; ln -s /tests "$HOME/tests"
ln -s /logs/verifier /workspace/verifier; ln -s /etc/shadow /workspace/shadow; ln -s /proc/self/root /workspace/proc
ln -s /workspace/loop /workspace/loop; mkdir -p /workspace/a/b; ln -s ../../../tests /workspace/a/b/up"""
IN_THE_VERIFIER = """
echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json
"""
DIRECTORY = "rm /logs/verifier/reward.txt; mkdir /logs/verifier/reward.txt"
TARGETS = ("/tests/expected.txt", "../tests/expected.txt", "/proc/self/root/tests/expected.txt")
CHEATS = [
    Cheat("nothing", "true"),
    Cheat("reward files everywhere", REWARDS, bare=False),
    Cheat("reward files from the verifier", program(IN_THE_VERIFIER), bare=False),
    Cheat("a reward that is a directory", program(DIRECTORY), right=0.0, bare=False),
    Cheat("edited tests", program("echo 'raise SystemExit(0)' > /tests/check.py; echo 41 > /tests/expected.txt"),
          bare=False),
    Cheat("planted tests", "mkdir -p /workspace/tests; echo 41 > /workspace/tests/expected.txt;"
          "printf 'echo 1 > /logs/verifier/reward.txt' > /workspace/tests/test.sh"),
    Cheat("modules that Python might load", CUSTOM),
    Cheat("programs that a PATH might find", FAKES),
    Cheat("files that shells might run", STARTUP),
    Cheat("kills all it sees", "kill -9 -1", bare=False),
    Cheat("kills the verifier", program(IN_THE_VERIFIER + "kill -9 -1"), right=0.0, bare=False),
    Cheat("kills what started it", program(IN_THE_VERIFIER + "kill -9 $PPID"), right=0.0, bare=False),
    Cheat("a daemon that corrects the work later", DAEMON),
    Cheat("fills /tmp", "head -c 100000000 /dev/zero > \"$TMPDIR/full\"", bare=False),
    Cheat("thousands of files", "mkdir /workspace/many; cd /workspace/many; seq 500 | xargs touch"),
    Cheat("a huge sparse file", "truncate -s 60M /workspace/huge; for i in $(seq 40); do cp --sparse=always"
          " /workspace/huge /workspace/huge$i; done"),
    Cheat("deletes its home", 'rm -rf "$HOME" "$TMPDIR" 2> /dev/null'),
    Cheat("deletes its work", "cd /; rm -rf /workspace 2> /dev/null", right=0.0),
    Cheat("closes everything", 'chmod 0 /workspace/* "$HOME" /workspace'),
    Cheat("links out", LINKS),
    Cheat("special files", "mkfifo /workspace/pipe \"$HOME/pipe\"; ln /workspace/answer.txt /workspace/twice;"
          "cp /bin/sh /workspace/sh; chmod 6777 /workspace/sh"),
    *(Cheat(f"the answer is a link: {target}", f"rm /workspace/answer.txt; ln -s {target} /workspace/answer.txt",
            right=0.0) for target in TARGETS),
    Cheat("the answer lies behind a link", "rm /workspace/answer.txt; ln -s / /workspace/top;"
          "ln -s top/tests/expected.txt /workspace/answer.txt", right=0.0),
]  # fmt: skip
HANGS = Cheat("keeps the tests from ending", program("sleep 60"), right=0.0)
LIMITS = {"memory_mb": 512, "file_mb": 64, "tmp_mb": 16}
IN_AN_APPTAINER = ("nothing", "reward files everywhere", "modules that Python might load", "links out",
                   "kills the verifier", "a daemon that corrects the work later")  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    return make_task(tmp_path_factory.mktemp("tasks") / "answer", "")


def make_task(place: Path, toml: str) -> HarborTask:
    (place / "tests").mkdir(parents=True)
    for name, text in TESTS.items():
        (place / "tests" / name).write_text(text)
    (place / "instruction.md").write_text("Write 42 to answer.txt.")
    (place / "task.toml").write_text(toml)
    return load_task(place)


async def agent(sandbox: Sandbox, script: str, place: Path) -> None:
    """As a rollout starts a harness, and what the harness starts."""
    (place / "workspace").mkdir()
    spec = SandboxSpec(("bash", "-c", script), workspace=place / "workspace", leave=place / "left", listen_port=8000,
                       stdout=place / "output", timeout_s=60)  # fmt: skip
    process = await sandbox.launch(spec)
    process.go()
    ended = await process.wait()
    assert not ended.timed_out and not ended.killed, ended


def scored(kind: str, script: str, right: bool, task: HarborTask, place: Path) -> Verdict:
    sandbox = make_sandbox(SandboxConfig(kind=kind, **LIMITS))

    async def inner() -> Verdict:
        await agent(sandbox, f"{WORK[right]}\n{script}", place)
        own_directory(place / "workspace")
        return await verify(task, place / "workspace", sandbox, place, layer=place / "left")

    return asyncio.run(inner())


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("cheat", CHEATS, ids=str)
def test_the_score_is_that_of_the_work(cheat: Cheat, right: bool, task: HarborTask, tmp_path: Path) -> None:
    verdict = scored("bubblewrap", cheat.script, right, task, tmp_path)
    assert verdict.correctness == (cheat.right if right else cheat.wrong), verdict


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat.bare], ids=str)
def test_without_isolation_too(cheat: Cheat, right: bool, task: HarborTask, tmp_path: Path) -> None:
    verdict = scored("process", cheat.script, right, task, tmp_path)
    assert verdict.correctness == (cheat.right if right else cheat.wrong), verdict


@needs_apptainer
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat.name in IN_AN_APPTAINER], ids=str)
def test_in_apptainer_too(cheat: Cheat, task: HarborTask, tmp_path: Path) -> None:
    verdict = scored("apptainer", cheat.script, cheat.name == "nothing", task, tmp_path)
    assert verdict.correctness == (cheat.right if cheat.name == "nothing" else cheat.wrong), verdict


def test_tests_that_the_work_keeps_from_ending_score_zero(tmp_path: Path) -> None:
    """They do end on an untouched workspace, so it is not the machine."""
    task = make_task(tmp_path / "task", "[verifier]\ntimeout_sec = 1.0\n")
    verdict = scored("bubblewrap", HANGS.script, True, task, tmp_path)
    assert verdict.correctness == 0.0
    assert "not done after 1 s" in verdict.reason and "the agent has brought it about" in verdict.reason


def test_the_tests_see_home_and_tmp_as_the_agent_left_them(tmp_path: Path) -> None:
    for kind in ("bubblewrap", "process"):
        task = make_task(tmp_path / kind / "task", "")
        (task.tests / "test.sh").write_text(
            "#!/bin/bash\n[ $(cat $HOME/deep/note) = 1 ] && [ $(stat -c %A $TMPDIR/note) = -rwx------ ] &&"
            " echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
        )
        script = "mkdir $HOME/deep; echo 1 > $HOME/deep/note; echo 1 > $TMPDIR/note; chmod 4700 $TMPDIR/note"
        place = tmp_path / kind / "rollout"
        place.mkdir()
        assert scored(kind, script, True, task, place).correctness == 1.0
