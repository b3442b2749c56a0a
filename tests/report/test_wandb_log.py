"""W&B offline over several attempts, read back from its own files; broken and hanging W&B; the tables of rollouts."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb
from logged import ours
from waiting import wait_for
from wandb_files import config_of, history, metrics_of, offline_files, run_record, table_of
from wandb_server import wandb_server

from pipeline.config import LoggingConfig, UserError
from pipeline.records import RolloutRecord
from pipeline.report import wandb_log
from pipeline.report.metrics import MetricsLog, begin_metrics, read_metrics
from pipeline.report.wandb_log import ASIDE, COLUMNS, FOLDER, check_wandb, table_rows, without_secrets

Make = Callable[..., RolloutRecord]
SWEEP = LoggingConfig(wandb="offline", group="sweep-of-seeds", tags=["seed=seven"])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine is no reason to give W&B up."""
    monkeypatch.setattr(wandb_log, "CLOSE_S", 200.0)


def attempt(run_dir: Path, number: int, source: int | None, update: int) -> MetricsLog:
    """An attempt's log, which resumes from ``update`` of attempt ``source``."""
    place = run_dir / "attempts" / f"{number:04d}" / "metrics.jsonl"
    place.parent.mkdir(parents=True)
    begin_metrics(run_dir, place, source, update)
    return MetricsLog(run_dir, SWEEP, {"seed": 3, "proxy": {"admin_key": "hush", "port": 5}}, place)


def end(log: MetricsLog) -> None:
    """With W&B's service, as a process ends: one service does not take a run's next attempt while it ends this one."""
    log.close()
    wandb.teardown()


def rewards(path: Path) -> list[tuple[int, float]]:
    return [(row["update"], row["reward"]) for row in history(path) if "reward" in row]


@pytest.mark.slow
def test_all_attempts_are_one_run_in_which_each_update_counts_once(tmp_path: Path, rollout: Make) -> None:
    first = attempt(tmp_path, 1, None, 0)
    first.log(0, {"eval/pass@1": 0.25})
    first.rollouts(0, "before", lambda: [rollout("a"), rollout("b", "codex", passed=False)])
    for update in (1, 2, 3):
        first.log(update, {"reward": update / 10})
    end(first)  # and dies before update 3 is in a checkpoint
    second = attempt(tmp_path, 2, 1, 2)
    for update in (3, 4):
        second.log(update, {"reward": float(update)})
    second.log(2, {"eval/pass@1": 0.5})  # of an older checkpoint, and late
    second.rollouts(2, "late", lambda: [rollout("c")])
    end(second)
    (path,) = offline_files(tmp_path)
    assert rewards(path) == [(1, 0.1), (2, 0.2), (3, 3.0), (4, 4.0)]
    evaluated = [(row["update"], row["eval/pass@1"]) for row in history(path) if "eval/pass@1" in row]
    assert evaluated == [(0, 0.25), (2, 0.5)], "at the checkpoint's update"
    assert table_of(path, "rollouts/before")["data"][1][:4] == ["pi", "a", "solved", True]
    assert table_of(path, "rollouts/late")["columns"] == list(COLUMNS)
    (aside,) = (tmp_path / FOLDER / ASIDE).glob("offline-run-*/run-*.wandb")
    assert rewards(aside) == [(1, 0.1), (2, 0.2), (3, 0.3)], "what the dead attempt had logged is kept"
    identity = (tmp_path / "wandb_id").read_text().strip()
    assert {run_record(aside).run_id, run_record(path).run_id} == {identity}
    assert [entry["update"] for entry in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    check_the_run_page(path)
    check_what_sync_sends(tmp_path, identity)


def check_what_sync_sends(run_dir: Path, identity: str) -> None:
    """One run, each update once."""
    with wandb_server() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
        command = [str(Path(sys.executable).with_name("wandb")), "sync", str(run_dir / FOLDER)]
        own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        done = subprocess.run(command, env={**own, **account}, cwd=run_dir, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.runs == [identity]
    sent = server.history[identity]
    known = [(row["update"], row["reward"]) for row in sent if "reward" in row]
    assert known == [(1, 0.1), (2, 0.2), (3, 3.0), (4, 4.0)]


def check_the_run_page(path: Path) -> None:
    """Group, kind, tags, settings, and the update as every metric's x axis."""
    run = run_record(path)
    assert (run.run_group, run.job_type, list(run.tags)) == ("sweep-of-seeds", "train", ["seed=seven"])
    assert config_of(path) == {"seed": 3, "proxy": {"port": 5}}
    defined = metrics_of(path)
    (every,) = (metric for metric in defined if metric.glob_name == "*")
    assert every.step_metric == "update" or defined[every.step_metric_index - 1].name == "update"


@pytest.mark.slow
def test_what_was_synced_is_not_logged_again(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, None, 0)
    first.log(1, {"reward": 0.1})
    end(first)
    (synced,) = offline_files(tmp_path)
    synced.with_name(synced.name + ".synced").touch()  # as `wandb sync` leaves it
    second = attempt(tmp_path, 2, 1, 1)
    second.log(2, {"reward": 0.2})
    end(second)
    paths = offline_files(tmp_path)
    assert sorted(rewards(path) for path in paths) == [[(1, 0.1)], [(2, 0.2)]]
    assert len({run_record(path).run_id for path in paths}) == 1


class Run:
    """Stands in for wandb's."""

    def __init__(self, error: Exception | None = None, hangs: threading.Event | None = None) -> None:
        self.error, self.hangs = error, hangs
        self.finished = False

    def log(self, values: dict[str, float]) -> None:
        if self.hangs:
            self.hangs.wait(60)
        if self.error:
            raise self.error

    def finish(self) -> None:
        self.finished = True


def test_a_failure_of_wandb_is_told_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Run(OSError("no space left"))
    monkeypatch.setattr(wandb_log, "_open", lambda *_: broken)
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path, LoggingConfig()) as metrics:
        for update in range(3):
            metrics.log(update, {"reward": 1.0})
    (told,) = (record.getMessage() for record in ours(caplog))
    assert "no space left" in told
    assert not broken.finished, "a dropped mirror is not finished"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_wandb_that_cannot_start_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("wandb is broken")

    monkeypatch.setattr(wandb_log, "_open", refuse)
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path, LoggingConfig()) as metrics:
        metrics.log(1, {"reward": 1.0})
        metrics.summary({"pass@1": 0.5})
    assert len(ours(caplog)) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] == 1.0


def test_wandb_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    monkeypatch.setattr(wandb_log, "_open", lambda *_: Run(hangs=never))
    monkeypatch.setattr(wandb_log, "CLOSE_S", 0.2)
    ended: list[bool] = []
    monkeypatch.setattr(wandb_log, "_end_service", lambda: ended.append(True))
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path, LoggingConfig()) as metrics:
        metrics.log(1, {"reward": 1.0})
        metrics.log(2, {"reward": 1.0})
    never.set()
    assert ended
    assert any("not within 0.2 s" in record.getMessage() for record in ours(caplog))
    assert [entry["update"] for entry in read_metrics(tmp_path)] == [1, 2]


STOPPED = """
import os, signal, sys
from pathlib import Path
from pipeline.config import LoggingConfig, UserError
from pipeline.report import wandb_log
from pipeline.report.metrics import MetricsLog
wandb_log.CLOSE_S = 1.0
log = MetricsLog(Path(sys.argv[1]), LoggingConfig(wandb="offline"))
log.log(1, {"reward": 0.5})
log.summary({})
print("logged", flush=True)
sys.stdin.readline()
log.close()
print("closed", flush=True)
"""


def service_of(pid: int) -> int | None:
    """The W&B service among a process's children."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
        except (OSError, IndexError):
            continue
        if name == "wandb-core" and int(rest.split()[1]) == pid:
            return int(stat.parent.name)
    return None


@pytest.mark.slow
def test_a_service_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}  # not our service
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
    try:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "logged\n"
        wait_for(lambda: offline_files(tmp_path))
        service = service_of(process.pid)
        assert service
        os.kill(service, signal.SIGSTOP)
        out, _ = process.communicate("\n", timeout=120)
        assert out == "closed\n"
        assert process.returncode == 0
    finally:
        process.kill()
    assert [entry["reward"] for entry in read_metrics(tmp_path)] == [0.5]


def test_the_table_has_every_harness_and_outcome(rollout: Make) -> None:
    records = [rollout(f"t{task}", harness, True) for harness in ("pi", "codex") for task in range(9)]
    records += [rollout("hard", "pi", False, tool_calls=7), rollout("lost", "codex", None)]
    rows: list[Any] = table_rows(records, "after", 6)
    assert [row[:4] for row in rows] == [
        ["codex", "lost", "infrastructure", None],
        ["codex", "t7", "solved", True],
        ["codex", "t8", "solved", True],
        ["pi", "hard", "unsolved", False],
        ["pi", "t7", "solved", True],
        ["pi", "t8", "solved", True],
    ]
    assert rows[3][COLUMNS.index("tool_calls")] == 7
    assert rows[3][-1] == "evaluation/after/g0.parquet#0"


def test_secrets_are_not_for_the_run_page() -> None:
    told = without_secrets({"a": {"admin_key": 1, "keys": 2}, "hub_token": 3, "model": {"path": "x"}})
    assert told == {"a": {"keys": 2}, "model": {"path": "x"}}


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No account anywhere: the netrc file that would name one is not there yet."""
    for name in [*wandb_log.ACCOUNT, "WANDB_BASE_URL"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "complaint"), [("on", "logging.wandb=on is unknown"), ("online", "set WANDB_API_KEY or run `wandb login`")]
)
def test_a_mode_that_cannot_work_is_refused(nobody: Path, mode: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_wandb(LoggingConfig(wandb=mode), nobody)


def test_an_account_is_found_where_wandb_finds_it(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nobody / "netrc").write_text("machine wandb.example.org login user password key\n")
    with pytest.raises(UserError):
        check_wandb(LoggingConfig(wandb="online"), nobody)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    check_wandb(LoggingConfig(wandb="online"), nobody)
    (nobody / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    check_wandb(LoggingConfig(wandb="online"), nobody)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(UserError, match="is not a directory that you may write to"):
        check_wandb(LoggingConfig(wandb="offline"), tmp_path)
    check_wandb(LoggingConfig(wandb="disabled"), tmp_path)
