"""What a rank's program does around its rank: before it begins, and when signals come."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import submitit

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.harness import base
from pipeline.launch import engine_rank, gates, jobs, program, trainer_rank
from pipeline.launch.program import YokeProgram, to_config
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.launch.trainer_rank import EndRequest, Interrupted

RECIPE = """
import dataclasses
from pipeline.harness.pi import RECIPE as PI
RECIPE = dataclasses.replace(PI, name="mine", installation="pi")
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose harness is a recipe of the user's own, in a process that has not heard of it."""
    (tmp_path / "mine.py").write_text(RECIPE)
    return compose_config(
        [
            f"run_dir={tmp_path / 'run'}",
            f"harness.recipes=[{tmp_path / 'mine.py'}]",
            "mix.harnesses=[mine]",
            "tasks.check=false",
        ]
    )


@pytest.mark.parametrize("rank", ["trainer", "engine"])
def test_every_rank_knows_the_users_own_harnesses(config: Config, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(config: Config, attempt: Attempt, *_: object) -> None:
        seen.append(base.get_harness("mine").installed_as)

    monkeypatch.setattr(trainer_rank, "run_trainer", note)
    monkeypatch.setattr(engine_rank, "run_engine", note)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    submitted = YokeProgram(asdict(config), config.run_dir, 1)
    submitted._run(rank, to_config(submitted.config), RunDirectory(Path(config.run_dir)).attempt(1), 0)
    assert seen == ["pi"]


def test_a_report_needs_no_word_of_where_the_recipes_are(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(Path(config.run_dir))
    run.new_attempt()
    run.save_config(config)
    monkeypatch.setattr(jobs, "_report", lambda config, run, form: base.get_harness("mine").version == "1.6.0")
    assert jobs.report(compose_config([f"run_dir={config.run_dir}"]))


def warned(config: Config, restarts: int, end: EndRequest | None, monkeypatch: pytest.MonkeyPatch) -> object:
    """What submitit is given at the warning, on a job that was restarted so often."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    submitted = YokeProgram(asdict(config), config.run_dir)
    submitted._end = end
    return submitted.checkpoint()


def test_the_warning_waits_for_the_checkpoint_and_requeues(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    end = EndRequest()
    threading.Timer(0.2, lambda: end.answer(saved=True)).start()
    again = warned(config, 0, end, monkeypatch)
    assert (end.reason, end.saved) == ("warning", True)
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert isinstance(again.function, YokeProgram)
    assert again.function.attempt is None, "the next start claims an attempt of its own"


def test_the_warning_before_training_requeues_at_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned(config, 0, None, monkeypatch) is not None


def test_requeues_are_bounded(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    end = EndRequest()
    end.answer(saved=True)
    assert warned(config, config.cluster.max_requeues - 1, end, monkeypatch) is not None
    assert warned(config, config.cluster.max_requeues, end, monkeypatch) is None


def test_the_first_wish_to_end_counts() -> None:
    end = EndRequest()
    end.ask("stop")
    end.ask("terminated")
    assert end.reason == "stop"


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, "stop"), (signal.SIGTERM, "terminated")])
def test_signals_reach_the_trainers_thread(number: int, reason: str) -> None:
    end, handlers = EndRequest(), {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        program._ask_on_signals(end)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()

        def work() -> None:
            deadline = time.monotonic() + 20
            while end.reason is None and time.monotonic() < deadline:
                time.sleep(0.01)
            raise Interrupted(end.reason or "none")

        with pytest.raises(Interrupted, match=reason):
            program._in_thread(work)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(("reason", "raises"), [("stop", False), ("terminated", True)])
def test_an_attempt_that_was_asked_to_end_leaves_word(
    config: Config, monkeypatch: pytest.MonkeyPatch, reason: str, raises: bool, saved: bool
) -> None:
    attempt = RunDirectory(Path(config.run_dir)).new_attempt()

    def interrupted(config: Config, attempt: Attempt, node: int, end: EndRequest) -> None:
        end.answer(saved)
        raise Interrupted(reason)

    monkeypatch.setattr(trainer_rank, "run_trainer", interrupted)
    monkeypatch.setattr(program, "_ask_on_signals", lambda end: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(Interrupted) if raises else nullcontext():
        YokeProgram(asdict(config), config.run_dir, 1)._train(config, attempt, 0)
    left = {name: attempt.read(name) for name in ("stopped", "terminated") if attempt.read(name)}
    assert left == {"terminated" if raises else "stopped": {"checkpoint": saved}}


@pytest.fixture
def checked(config: Config) -> tuple[Config, Attempt]:
    """The run with its tasks to be checked."""
    config.tasks.check = True
    return config, RunDirectory(Path(config.run_dir)).new_attempt()


def test_the_first_rank_checks_the_tasks_once(checked: tuple[Config, Attempt], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gates, "check_all", lambda config, run: asked.append(run) or 3)
    for _ in range(2):
        gates.pass_gates(*checked, first=True)
    assert len(asked) == 1


def test_the_other_ranks_wait_for_the_first(checked: tuple[Config, Attempt], monkeypatch: pytest.MonkeyPatch) -> None:
    _, attempt = checked
    place = attempt.run.root / gates.PLACE
    monkeypatch.setattr(gates.time, "sleep", lambda _: place.write_text("{}"))
    gates.pass_gates(*checked, first=False)
    assert place.exists()


def test_the_other_ranks_end_with_the_first(checked: tuple[Config, Attempt], monkeypatch: pytest.MonkeyPatch) -> None:
    _, attempt = checked
    monkeypatch.setattr(gates.time, "sleep", lambda _: attempt.fail("trainer", UserError("2 of 9 tasks fail")))
    with pytest.raises(RuntimeError, match="the trainer rank failed: 2 of 9 tasks fail"):
        gates.pass_gates(*checked, first=False)
    assert (attempt.read("failed") or {})["user_error"]


def test_waiting_for_the_first_rank_has_an_end(
    checked: tuple[Config, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "GATES_S", -1.0)
    with pytest.raises(TimeoutError, match=r"gates\.json is missing"):
        gates.pass_gates(*checked, first=False)
