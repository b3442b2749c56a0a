"""`yoke stop`: each way to ask, in its order, once; and what it says when the run has ended, or has not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from made_up_runs import MadeUpRun, MadeUpSlurm
from run_helpers import ENVIRONMENT, processes, start
from waiting import wait_for

from pipeline.cli import main
from pipeline.launch import stop
from pipeline.launch.processes import job_of
from pipeline.launch.status import RunWatcher, Watch
from pipeline.launch.stop import Stopper, stop_all
from pipeline.launch.sweep_points import RECORD

UPDATES = 6
REAL = [
    "+experiment=smoke",
    f"training.updates={UPDATES}",
    "training.checkpoint_every=100",  # so that only the stop makes one
    "evaluation.before=false",
    "evaluation.after=false",
    "tasks.check=false",
    "cluster.max_attempts=2",
]
RUN_S = 400.0
COMMAND_S = 240.0
FOREVER = "import time\ntime.sleep(600)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "POLL_S", 0.05)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpSlurm:
    return MadeUpSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", FOREVER])
    yield started
    started.kill()
    started.wait()


def yoke_stop(capsys: pytest.CaptureFixture[str], run: MadeUpRun, *words: str) -> tuple[int, list[str], str]:
    with pytest.raises(SystemExit) as end:
        main(["stop", str(run.root), *words])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out.splitlines(), captured.err


def noting(calls: list[str], then: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """An `interrupt` that is written down."""

    def interrupt() -> dict[str, Any]:
        calls.append("interrupt")
        then()
        return {}

    return interrupt


def test_a_local_run_is_asked_and_waited_for(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], process: subprocess.Popen[bytes]
) -> None:
    attempt = run.attempt(job_of(process.pid))
    calls: list[str] = []

    def end() -> None:
        run.checkpoint(7)
        attempt.publish("stopped", {"checkpoint": True})
        process.kill()
        process.wait()

    with run.coordinator(attempt, interrupt=noting(calls, end)):
        code, out, error = yoke_stop(capsys, run)
    assert (code, error, calls) == (0, "", ["interrupt"])
    assert out == [
        "run: asked it to stop; it ends after a checkpoint …",
        f"{run.root}: stopped (stopped as asked, after a checkpoint); its checkpoint is of update 7. "
        "The same `yoke train` command goes on from there.",
    ]


def test_a_run_that_does_not_run_is_left_alone(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.local_attempt(alive=False, stopped={"checkpoint": True})
    for _ in range(2):
        code, out, error = yoke_stop(capsys, run)
        assert (code, error) == (0, "")
        assert out == [f"{run.root} is not running: stopped (stopped as asked, after a checkpoint)"]


def test_when_the_time_is_up_it_says_how_to_be_harsher(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], process: subprocess.Popen[bytes]
) -> None:
    attempt = run.attempt(job_of(process.pid))
    calls: list[str] = []
    with run.coordinator(attempt, interrupt=noting(calls, lambda: None)):
        code, _, error = yoke_stop(capsys, run, "--timeout", "1")
    assert (code, calls) == (1, ["interrupt"]), "asked once, however long it takes"
    assert "is still running, phase train, after 1 s" in error
    assert f"kill -INT {process.pid}" in error


def test_a_local_run_that_has_not_begun_is_ended(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], process: subprocess.Popen[bytes]
) -> None:
    run.attempt(job_of(process.pid))
    code, out, _ = yoke_stop(capsys, run, "--timeout", "30")
    assert (code, out[0]) == (0, "run: it had not begun: ended it")
    assert out[1].endswith("it had no checkpoint yet. The same `yoke train` command goes on from there.")


def test_a_run_that_its_launcher_starts_again_is_stopped_then(
    run: MadeUpRun, capsys: pytest.CaptureFixture[str], process: subprocess.Popen[bytes], monkeypatch: Any
) -> None:
    run.local_attempt(alive=False, failed={"rank": "engine", "text": "boom"})
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            run.attempt(job_of(process.pid))

    monkeypatch.setattr(stop.time, "sleep", pause)
    code, out, _ = yoke_stop(capsys, run, "--timeout", "30")
    assert (code, out[0]) == (0, "run: it had not begun: ended it")


def test_a_queued_job_is_cancelled(run: MadeUpRun, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run.submitted("4711")
    slurm.job("4711", "PENDING")
    slurm.program("scancel", f'echo "$@" >> {slurm.calls}; sed -i s/PENDING/CANCELLED/ {slurm.queue}')
    code, out, _ = yoke_stop(capsys, run)
    assert (code, slurm.calls.read_text()) == (0, "4711\n")
    assert out[0] == "run: job 4711 is taken out of the queue"


def test_a_job_whose_coordinator_is_out_of_reach_gets_a_signal(
    run: MadeUpRun, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    attempt = run.slurm_attempt("4711")
    attempt.publish("coordinator", {"url": "http://127.0.0.1:9", "token": "x"})
    stopped = attempt.root / "stopped.json"
    slurm.program(
        "scancel", f'echo "$@" >> {slurm.calls}; echo "{{}}" > {stopped}; sed -i s/RUNNING/COMPLETED/ {slurm.queue}'
    )
    code, out, _ = yoke_stop(capsys, run)
    assert (code, slurm.calls.read_text()) == (0, "--signal=USR1 4711\n")
    assert out[0] == "run: signalled job 4711; it ends after a checkpoint …"


def test_a_reachable_coordinator_spares_the_signal_and_the_job_is_waited_for(
    run: MadeUpRun, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    attempt = run.slurm_attempt("4711")
    calls: list[str] = []
    ended = noting(calls, lambda: (attempt.publish("stopped", {}), slurm.job("4711", "COMPLETING")))
    with run.coordinator(attempt, interrupt=ended):
        code, _, error = yoke_stop(capsys, run, "--timeout", "1")
        assert (code, calls) == (1, ["interrupt"]), "a job that is completing cannot be started anew yet"
        assert "scancel 4711" in error
    assert "--signal" not in slurm.calls.read_text()
    slurm.queue.write_text("")
    assert yoke_stop(capsys, run)[0] == 0


def test_a_job_that_comes_back_meanwhile_is_cancelled_then(
    run: MadeUpRun, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    attempt = run.slurm_attempt("4711")
    slurm.program("scancel", f'echo "$@" >> {slurm.calls}; sed -i s/PENDING/CANCELLED/ {slurm.queue}')
    crash = noting([], lambda: (attempt.publish("failed", {"rank": "x", "text": "y"}), slurm.job("4711", "PENDING")))
    with run.coordinator(attempt, interrupt=crash):
        code, *_ = yoke_stop(capsys, run, "--timeout", "60")
    assert (code, slurm.calls.read_text()) == (0, "4711\n")


def test_a_hanging_slurm_does_not_hang_it(
    run: MadeUpRun, slurm: MadeUpSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.launch.status.QUEUE_S", 0.3)
    monkeypatch.setattr("pipeline.launch.squeue.cancel.__defaults__", (0.3,))
    monkeypatch.setattr("pipeline.launch.squeue.ask_job_to_stop.__defaults__", (0.3,))
    slurm.program("squeue", "sleep 600")
    slurm.program("scancel", "sleep 600")
    run.submitted("4711")
    began = time.monotonic()
    code, _, error = yoke_stop(capsys, run, "--timeout", "1")
    assert (code, time.monotonic() - began < 60) == (1, True)
    assert "is still unknown" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--timeout", "soon"], "a number of seconds is needed"), (["--now"], "--now is unknown"), (["more"], "one RUN")],
)
def test_wrong_words_are_told(run: MadeUpRun, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    run.local_attempt(alive=False)
    code, _, error = yoke_stop(capsys, run, *words)
    assert code == 2
    assert said in error


def test_all_runs_of_a_sweep_are_stopped_together(
    tmp_path: Path, slurm: MadeUpSlurm, process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """One is asked and takes its time, one is taken out of the queue meanwhile, one has not begun."""
    sweep = MadeUpRun(tmp_path / "sweep-two")
    runs = [MadeUpRun(sweep.root / name) for name in ("seed-1", "seed-2", "seed-3")]
    points = [{"name": run.root.name, "overrides": []} for run in runs]
    (sweep.root / RECORD).write_text(json.dumps({"points": points}))
    runs[1].submitted("4711")
    slurm.job("4711", "PENDING")
    slurm.program("scancel", f'echo "$@" >> {slurm.calls}; sed -i s/PENDING/CANCELLED/ {slurm.queue}')
    attempt = runs[0].attempt(job_of(process.pid))
    calls: list[str] = []

    def end() -> None:
        Thread(target=late, daemon=True).start()

    def late() -> None:
        wait_for(lambda: slurm.calls.read_text())
        attempt.publish("stopped", {"checkpoint": False})
        process.kill()
        process.wait()

    with runs[0].coordinator(attempt, interrupt=noting(calls, end)):
        code, out, _ = yoke_stop(capsys, sweep)
    assert (code, calls, slurm.calls.read_text()) == (0, ["interrupt"], "4711\n")
    assert sum("it had no checkpoint yet" in line for line in out) == 2, "both, each once"
    assert f"{runs[2].root} is not running: not started" in out


# --- a real run


def yoke(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env=ENVIRONMENT)


def await_update(watch: Watch, count: int, launcher: subprocess.Popen[str]) -> dict[str, Any]:
    """In this process: a command would start more slowly than an update is made."""
    deadline = time.monotonic() + RUN_S
    while (now := watch.look()[0])["updates"]["done"] < count:
        assert launcher.poll() is None, now
        assert time.monotonic() < deadline, now
        time.sleep(0.2)
    assert now["figures"]["from"] == "coordinator", now["sources"]
    return now


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_run_is_watched_stopped_and_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    watch = Watch([RunWatcher(run_dir)])
    launcher = start(run_dir, *REAL)
    try:
        now = await_update(watch, 1, launcher)
        assert stop_all([Stopper(RunWatcher(run_dir))]) == 0
        check_a_run_that_was_on(run_dir, now)
        assert launcher.wait(COMMAND_S) == 130, "the command that showed the run ends too, and starts nothing again"
        assert list(processes(run_dir)) == []
        now = watch.look()[0]
        assert (now["state"], [a["ending"] for a in now["attempts"]]) == ("stopped", ["stopped"])
        assert 1 <= now["updates"]["done"] == now["checkpoint"]["update"] < UPDATES
        again = yoke("stop", str(run_dir))
        assert (again.returncode, again.stdout.split(" (")[0]) == (0, f"{run_dir} is not running: stopped")
        launcher = start(run_dir, *REAL)
        assert launcher.wait(RUN_S) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    finally:
        launcher.kill()
        for pid, _, _ in list(processes(run_dir)):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
    now = json.loads(yoke("status", str(run_dir), "--json").stdout)
    assert (now["state"], now["updates"]["done"], len(now["attempts"])) == ("done", UPDATES, 2)
    assert json.loads((run_dir / "status.json").read_text())["updates"]["done"] == UPDATES


def check_a_run_that_was_on(run_dir: Path, now: dict[str, Any]) -> None:
    """What it told of itself by its coordinator, and by the snapshot that it left."""
    node = now["nodes"][0]
    assert (now["state"], now["phase"]["name"], now["updates"]["planned"]) == ("running", "train", UPDATES)
    assert (node["vllm"], node["shards_alive"], node["restarts"]) == ("up", node["shards"], 0)
    assert node["memory_gib"] > 1
    assert node["gpus"] is not None or node["gpu_error"]
    assert now["rollouts"]["credits_used"] <= now["rollouts"]["credits"]
    snapshot = json.loads((run_dir / "status.json").read_text())
    assert (snapshot["attempt"], snapshot["phase"]["name"]) == (1, "train")
    assert snapshot["time"] >= now["time"]
