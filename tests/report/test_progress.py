"""The live view and its plain form say what the events said."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from pipeline.report.progress import Progress

METRICS = {
    "reward": 0.42,
    "pass_rate": 0.38,
    "pi/pass_rate": 0.36,
    "codex/pass_rate": 0.4,
    "sample/staleness_mean": 0.5,
    "sample/rollout_queue_size": 2.0,
    "perf/trained_tok_s_wall_clock": 1812.4,
    "perf/step_s": 18.24,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands in for time.monotonic."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pipeline.report.progress.time", clock)
    return clock


def plain(events: list[dict[str, Any]], total: int = 24, enabled: bool = True) -> list[str]:
    stream = io.StringIO()
    with Progress(total, enabled, stream) as progress:
        for event in events:
            progress.event(event)
    return stream.getvalue().splitlines()


def test_one_plain_line_an_update(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(24, stream=stream) as progress:
        progress.event({"kind": "update", "update": 3, "metrics": METRICS})
        clock.now += 20.0
        progress.event({"kind": "update", "update": 4, "metrics": {"reward": 0.5}})
    first, second = stream.getvalue().splitlines()
    assert first == ("update 3/24  reward 0.420  pass 38% (codex 40% pi 36%)  stale 0.5  queue 2  1,812 tok/s  18.2 s")
    assert second == "update 4/24  reward 0.500  left 6:40"


def test_plain_output_has_no_control_codes_and_does_not_wrap() -> None:
    lines = plain([{"kind": "message", "text": "x" * 400 + " [not markup]"}])
    assert len(lines) == 1
    assert lines[0].endswith("[not markup]")
    assert "\x1b" not in lines[0]


def test_a_phase_is_told_at_its_start_and_every_quarter() -> None:
    events = [{"kind": "phase", "name": "evaluation", "done": done, "total": 8} for done in range(9)]
    lines = plain([*events, {"kind": "phase", "name": "training"}])
    assert [line.split("] ")[1] for line in lines] == [
        *[f"evaluation {done}/8" for done in (0, 2, 4, 6, 8)],
        "training",
    ]


def test_rollouts_and_states_are_not_lines() -> None:
    events = [
        {"kind": "rollout", "harness": "pi", "reward": 1.0, "passed": True},
        {"kind": "state", "in_flight": 3, "queue": 1},
    ]
    assert plain(events) == []


def test_disabled_says_errors_only() -> None:
    events = [
        {"kind": "update", "update": 1, "metrics": METRICS},
        {"kind": "message", "text": "hello"},
        {"kind": "error", "text": "vLLM died"},
    ]
    lines = plain(events, enabled=False)
    assert len(lines) == 1 and lines[0].endswith("error: vLLM died")


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="surprise"):
        plain([{"kind": "surprise"}])


def test_the_live_view_shows_everything(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    stream = Terminal()
    with Progress(24, stream=stream) as progress:
        progress.event({"kind": "phase", "name": "training"})
        for passed, reward, differs in (
            (True, 1.0, True),
            (False, 0.0, False),
            (False, None, None),
            (True, 0.5, False),
        ):
            event = {"kind": "rollout", "harness": "pi", "reward": reward, "passed": passed, "differs": differs}
            progress.event(event)
        progress.event({"kind": "state", "in_flight": 17, "tokens_s": 900.0})
        progress.event({"kind": "update", "update": 3, "metrics": METRICS})
        clock.now += 30.0
        progress.event({"kind": "update", "update": 6, "metrics": METRICS})
        progress.event({"kind": "error", "text": "sandbox of g-1 lost\nsecond line"})
        stream.truncate(0)
        progress._live.refresh()
        shown = stream.getvalue()
    for text in ("yoke · training", "updates 6/24", "3:00 left", "in flight 17", "900 tok/s", "stale 0.5", "queue 2"):
        assert text in shown
    for text in ("pi", "67%", "0.500", "log differs", "33%", "errors: 1", "sandbox of g-1 lost"):
        assert text in shown
    assert "second line" not in shown


def test_an_evaluation_has_its_own_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    stream = Terminal()
    with Progress(24, stream=stream) as progress:
        progress.event({"kind": "phase", "name": "evaluate_after", "done": 7, "total": 50, "number": 3})
        stream.truncate(0)
        progress._live.refresh()
        assert "evaluate_after 7/50" in stream.getvalue()


def test_the_time_left_is_not_judged_across_a_rollback(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(24, stream=stream) as progress:
        for update in (7, 8, 5, 6):
            progress.event({"kind": "update", "update": update, "metrics": {}})
            clock.now += 10.0
    lefts = [line.partition("left ")[2] for line in stream.getvalue().splitlines()]
    assert lefts == ["", "2:40", "", "3:00"]


def test_events_may_come_from_several_threads() -> None:
    stream = Terminal()
    with Progress(1000, stream=stream) as progress:

        def feed(harness: str) -> None:
            for number in range(300):
                progress.event({"kind": "rollout", "harness": f"{harness}{number % 7}", "reward": 1.0, "passed": True})
                progress.event({"kind": "update", "update": number, "metrics": METRICS})

        threads = [threading.Thread(target=feed, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for _ in range(50):
            progress._live.refresh()
        for thread in threads:
            thread.join()
        counts = {name: recent.done for name, recent in progress._state.harnesses.items()}
    assert sum(counts.values()) == 1200
