"""Every harness keeps the contract of `yoke harness check`; and the check fails when the capture is broken."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness_installs import provided

from pipeline.capture import supervisor
from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.harness import get_harness, harness_names
from pipeline.harness.base import Action, harness_root
from pipeline.harness.install import install
from pipeline.records import Call, Trace
from pipeline.stages import harness_check, harness_check_stage
from pipeline.stages.harness_check import check_on_vllm, check_scripted
from pipeline.stages.harness_check_result import FILE, Result, entry_of, keep, read
from pipeline.stages.harness_check_scenes import SCENES, Director, Play, ending, plays, run, tag_of_prompt
from pipeline.stages.harness_check_stage import TOGETHER, alive
from pipeline.stages.harness_check_table import DOCS, TABLES, table, write_table
from pipeline.stages.harness_check_view import View


def failures(results: list[Result]) -> list[str]:
    return [f"{result.scene}: {line}" for result in results for line in result.failures]


def silent(harness: str, scene: str, result: Result | None) -> None:
    """Tell nobody."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", harness_names())
def test_a_harness_keeps_the_contract(name: str) -> None:
    recipe = provided(name)
    (results,) = check_scripted(compose_config([]), [recipe], silent).values()
    assert failures(results) == []
    played = {result.scene for result in results}
    assert played == {scene.name for scene in SCENES.values() if scene.needs(recipe)} | {TOGETHER}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_harness_on_a_real_vllm() -> None:
    recipes = [recipe for recipe in map(get_harness, harness_names()) if not recipe.missing()]
    assert recipes
    assert install([recipe.name for recipe in recipes], harness_root()) == {}
    results = check_on_vllm(compose_config([]), recipes, silent)
    assert failures(list(results.values())) == []
    assert all(result.facts["trained_tokens"] for result in results.values())


# --- a check that cannot fail is none


def _token(call: Call) -> Call:
    ids = call.sampled_ids.copy()
    ids[0] += 1
    return dataclasses.replace(call, sampled_ids=ids)


def _logprob(call: Call) -> Call:
    return dataclasses.replace(call, logprobs=call.logprobs - np.float32(0.001))


INVENTED = "answers in the trace that the engine did not give: expected 0, saw 1"
LACKING = "answers that the engine gave and the trace lacks: expected 0, saw 1"
BROKEN: dict[str, tuple[Callable[[Trace], Trace], str]] = {
    "one id": (lambda t: _with(t, _token), INVENTED),
    "one logprob": (
        lambda t: _with(t, _logprob),
        LACKING,
    ),
    "undelivered": (
        lambda t: _with(t, lambda call: dataclasses.replace(call, delivered=False)),
        "undelivered answers: expected 0, saw 1",
    ),
    "a lost call": (
        lambda t: dataclasses.replace(t, calls=t.calls[:-1]),
        LACKING,
    ),
    "a second row": (
        lambda t: _with(t, lambda call: dataclasses.replace(call, parent=None)),
        "rows: expected 1, saw 2",
    ),
    "drift": (lambda t: dataclasses.replace(t, counters={"drift": 1}), "drift: expected 0, saw 1"),
}


def _with(trace: Trace, change: Callable[[Call], Call]) -> Trace:
    return dataclasses.replace(trace, calls=(*trace.calls[:-1], change(trace.calls[-1])))


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_capture_fails(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, complaint = BROKEN[broken]
    whole = supervisor.read_trace
    monkeypatch.setattr(supervisor, "read_trace", lambda path: breaks(whole(path)))
    monkeypatch.setattr(harness_check_stage, "SCENES", {"calls": SCENES["calls"]})
    (results,) = check_scripted(compose_config([]), [provided("pi")], silent).values()
    assert complaint in results[0].failures


@pytest.mark.slow
def test_an_unsolved_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = dataclasses.replace(SCENES["calls"], script=lambda recipe, tag: [run("step", recipe, "echo no")])
    monkeypatch.setattr(harness_check_stage, "SCENES", {"calls": lazy})
    (results,) = check_scripted(compose_config([]), [provided("pi")], silent).values()
    assert "outcome: expected solved, saw unsolved" in results[0].failures
    assert "correctness: expected 1.0, saw 0.0" in results[0].failures


# --- the parts


def prompt(*messages: tuple[str, str]) -> list[int]:
    from pipeline.engine.scripted import render

    return render([{"role": role, "content": text} for role, text in messages])


def test_the_director_follows_the_first_mark_that_is_not_a_system_message() -> None:
    director = Director()
    recipe = get_harness("pi")
    for tag in ("a-1", "b-2"):
        director.plays[tag] = Play(tag, [run("first", recipe, f"echo {tag}")], ending(recipe))
    both = prompt(("system", "[scene b-2]"), ("user", "do [scene a-1]"), ("tool", "[scene b-2]"))
    assert tag_of_prompt(both) == "a-1"
    assert "echo a-1" in director(both).text
    assert [director(both).text for _ in range(3)] == ["Done."] * 3
    assert director(prompt(("user", "no mark"))).text == "ok" and len(director.strangers) == 1


def test_a_compaction_goes_on_from_what_the_history_shows() -> None:
    recipe = get_harness("pi")
    (play,) = plays(SCENES["compaction"], recipe, "c-1", lambda: None)
    history = [("user", "[scene c-1]")]
    assert "seq" in play.answer([], history).text
    history += [("assistant", "…"), ("tool", "1001 … out_42_c-1")]
    assert "seq" in play.answer([], history).text
    summary = play.answer([], [*history, ("user", "Summarise.")]).text
    assert "[summary c-1]" in summary and "[scene c-1]" in summary
    assert "answer.txt" in play.answer([], [("user", summary)]).text
    assert play.answer([], [("user", summary), ("tool", "done_42_c-1")]).text == "Done."


def test_processes_are_found_by_their_command_line() -> None:
    assert alive("no-such-word-in-any-command-line-7391") == 0
    assert alive("pytest") >= 1


def test_the_view_says_each_scene_in_a_line_without_a_terminal() -> None:
    stream = io.StringIO()
    facts = {"outcome": "solved", "calls": 9, "rows": 1, "wall_s": 1.0}
    with View(["pi"], ["calls", "cut"], stream) as view:
        view.tell("pi", "calls", None)
        view.tell("pi", "calls", Result("calls", (), facts))
        view.tell("pi", "cut", Result("cut", ("rows: expected 1, saw 2",), {}))
    assert stream.getvalue().splitlines() == ["pi: calls: holds (solved, 9 calls, 1 row, 1.0 s)", "pi: cut: FAILED"]


def test_one_that_cannot_be_installed_is_not_checked_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOKE_HOME", str(tmp_path))
    monkeypatch.setattr(harness_check, "install", lambda names, root, tell: {"pi": "no tmux: install it\nmore"})
    assert harness_check.check_harnesses(compose_config([]), ["pi"]) == 1
    assert "pi: not checked: no tmux: install it\n0 of 1 passed" in capsys.readouterr().out


def test_one_that_a_script_cannot_move_is_not_checked_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOKE_HOME", str(tmp_path))
    monkeypatch.setattr(harness_check, "install", lambda names, root, tell: {})
    dumb = dataclasses.replace(get_harness("pi"), shell=Action())
    monkeypatch.setattr(harness_check, "get_harness", lambda name: dumb)
    assert harness_check.check_harnesses(compose_config([]), ["pi"]) == 1
    assert "pi: not checked: its recipe has no `shell`" in capsys.readouterr().out


def test_results_of_other_harnesses_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    assert read(place) == {}
    for name in ("pi", "codex"):
        keep({name: entry_of(get_harness(name), [Result("calls", ("rows: expected 1, saw 2",), {"rows": 2})])}, place)
    entries = read(place)
    assert list(entries) == ["codex", "pi"]
    assert entries["pi"]["failures"] == ["calls: rows: expected 1, saw 2"]
    assert "- pi: calls: rows: expected 1, saw 2" in table(entries)
    place.write_text("no")
    with pytest.raises(UserError, match="not a file of results"):
        read(place)


def test_the_table_needs_results_of_the_pinned_versions(tmp_path: Path) -> None:
    entry = entry_of(get_harness("pi"), [Result("calls", (), {"rows": 1})])
    assert write_table({"pi": entry}, ["pi"], tmp_path).read_text() == table({"pi": entry})
    with pytest.raises(UserError, match="yoke harness check pi"):
        write_table({"pi": entry | {"version": "0.0.1"}}, ["pi"], tmp_path)


def test_the_documented_table_is_made_from_the_results_beside_it() -> None:
    entries = json.loads((DOCS / FILE).read_text())
    assert (DOCS / "harness-table.md").read_text() == table(entries)
    assert len(TABLES) == 5 and all(name in (DOCS / "harness-table.md").read_text() for name in entries)
