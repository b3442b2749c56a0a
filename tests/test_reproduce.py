"""REPRODUCE.md and the program that does its steps small: they name the same steps, pins and figures, and it stops at
what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.harness.base import get_harness
from pipeline.report.statistics import wilson
from tools import reproduce
from tools.reproduce import Bench, Plan, StepFailed

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "REPRODUCE.md").read_text()
FOUR = {
    "OpenCode": "opencode",
    "Claude Code": "claude-code",
    "Codex": "codex",
    "mini-SWE-agent": "mini-swe-agent",
}
SOLVED = {  # published: solved rollouts of (250, 250, 250, 250); of the base, mini-SWE-agent has 248
    "base": (84, 83, 100, 154),
    "OpenCode-only RL": (145, 105, 108, 165),
    "four-harness RL": (124, 122, 134, 162),
    "OpenCode SFT": (129, 83, 116, 147),
    "four-harness SFT": (95, 106, 117, 113),
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "root", tmp_path / "pilot", ("pi",), False, ())


# --- the page


def test_page_and_program_have_the_same_steps() -> None:
    headings = re.findall(r"^## (\d+)\. (.+)$", PAGE, re.M)
    assert headings == [(str(number), name) for number, (name, _) in enumerate(reproduce.STEPS, 1)]
    assert len(re.findall(r"^\*Small:\* ", PAGE, re.M)) == len(headings), "each says what it does small"


def test_the_page_has_the_pins() -> None:
    for digest in reproduce.PINS.values():
        assert f"`{digest}`" in PAGE
    for title, name in FOUR.items():
        assert f"| {title} | {get_harness(name).version} (the reference" in PAGE


def test_each_pin_stands_where_the_page_says() -> None:
    """A row names a value and the files that fix it: a revision must be in each, and each must be there."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.partition("## 2.")[0], re.M)
    assert len(rows) > 10
    for value, places in rows:
        revision = re.search(r"revision `(\w{40})`", value)
        for place in re.findall(r"`((?:conf|pipeline|requirements|setup)[\w./-]+)`", places):
            assert (ROOT / place).exists(), place
            assert revision is None or revision[1] in (ROOT / place).read_text(), f"{revision[1]} in {place}"


def test_model_and_tasks_are_as_pinned() -> None:
    assert reproduce.hashes() == reproduce.PINS


def cell(solved: int, of: int) -> str:
    low, high = wilson(solved, of)
    return f"{100 * solved / of:.1f} ({100 * low:.1f} to {100 * high:.1f})"


@pytest.mark.parametrize("training", SOLVED)
def test_the_intervals_of_the_published_figures(training: str) -> None:
    of = (250, 250, 250, 248 if training == "base" else 250)
    cells = [cell(sum(SOLVED[training]), sum(of)), *map(cell, SOLVED[training], of)]
    assert f"| {training} | {' | '.join(cells)} |" in PAGE


def test_the_page_says_what_the_small_run_is_held_to() -> None:
    assert reproduce.said_of(reproduce.EXPECTED) in re.sub(r"\s+", " ", PAGE)


# --- the program


@pytest.mark.parametrize(("words", "flags"), [((), ""), (("FRESH=1", "ARGS=--quick"), "--fresh --quick")])
def test_make_starts_it(words: tuple[str, ...], flags: str) -> None:
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "VENV", "ARGS", "FRESH")
    }
    plan = subprocess.run(
        ["make", "-n", "--no-print-directory", "reproduce-small", *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert plan.index("tools/install.py") < plan.index("-m tools.reproduce")
    assert plan.split("-m tools.reproduce")[1].split() == flags.split()


def test_a_package_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = "alpha==1.0 \\\n    --hash=x\nbeta==2.0 ; python_version < '3' \\\ngamma==2.13.0 \\\ndelta==1 \\\n"
    installed = {"alpha": "1.1", "beta": "1.0", "gamma": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in installed:
            raise reproduce.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(reproduce.metadata, "version", version)
    assert list(reproduce.other_versions(lock)) == ["alpha 1.1 instead of 1.0", "delta missing instead of 1"]


def test_the_digest_of_a_folder_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    first = reproduce.digest(tmp_path)
    (tmp_path / "a" / "x").write_text("2")
    second = reproduce.digest(tmp_path)
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert len({first, second, reproduce.digest(tmp_path)}) == 3


def test_evaluations_of_the_same_weights_may_differ_by_noise_only() -> None:
    reproduce.require_same((0.45, 200), (0.49, 200), "one", "other")
    with pytest.raises(StepFailed, match=r"one: 45\.0% of 200; other: 88\.0% of 200"):
        reproduce.require_same((0.45, 200), (0.88, 200), "one", "other")
    with pytest.raises(StepFailed):
        reproduce.require_same((0.45, 75), (0.88, 75), "one", "other")


def test_figures_are_held_to_three_seeds() -> None:
    reproduce.hold((0.42, 200), "before")
    reproduce.hold((0.85, 200), "after")
    for wrong in ((0.05, 200, "before"), (0.95, 200, "before"), (0.6, 200, "after")):
        with pytest.raises(StepFailed, match="expected"):
            reproduce.hold(wrong[:2], wrong[2])


def figures(before: float, after: float, **more: object) -> dict[str, object]:
    sides = {"before": {"pass@1": before, "n": 200}, "after": {"pass@1": after, "n": 200}}
    return sides | {"updates": 12, "provisional": False} | more


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (figures(0.45, 0.88), ""),
        (figures(0.45, 0.5), "after: 50.0%"),
        (figures(0.45, 0.5, updates=5), ""),
        (figures(0.45, 0.44, updates=5), "did not rise"),
        (figures(0.45, 0.88, provisional=True), "not every"),
    ],
)
def test_the_last_step_judges_the_pilot(plan: Plan, found: dict[str, object], wrong: str) -> None:
    (plan.pilot / "report").mkdir(parents=True)
    (plan.pilot / "report" / "results.json").write_text(json.dumps(found))
    if not wrong:
        assert "over three seeds" in reproduce.expected(Bench(plan, plan.root / "log"))
        return
    with pytest.raises(StepFailed, match=wrong):
        reproduce.expected(Bench(plan, plan.root / "log"))


def test_an_evaluation_must_be_whole() -> None:
    entries = [{"label": "base", "pass@1": 0.5, "graded": 7, "planned": 8}]
    for label in ("base", "other"):
        with pytest.raises(StepFailed, match="not whole"):
            reproduce.evaluated({"checkpoints": entries}, label)
    entries[0]["graded"] = 8
    assert reproduce.evaluated({"checkpoints": entries}, "base") == (0.5, 8)


def test_a_kill_takes_the_whole_tree() -> None:
    script = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert reproduce.descendants(parent.pid) == [child]
        assert reproduce.kill_all([parent.pid]) == 2
        parent.wait(30)
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_failed_command_shows_the_end_of_its_log(plan: Plan) -> None:
    plan.root.mkdir()
    with pytest.raises(StepFailed, match=r"(?s)ended with 2\n.*there is no setting nonsense") as failed:
        Bench(plan, plan.root / "log").yoke("check", "nonsense=1")
    assert str(plan.root / "log") in str(failed.value)


def test_what_is_done_is_skipped_and_what_failed_is_done_again(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    broken = {"second"}

    def step(name: str) -> reproduce.Step:
        def action(bench: Bench) -> str:
            calls.append(name)
            if name in broken:
                raise StepFailed("it broke")
            return f"{name} came out"

        return name, action

    steps = [step(name) for name in ("first", "second", "third")]
    assert reproduce.reproduce(plan, steps) == 1
    assert calls == ["first", "second"]
    assert "second              FAILED after 0 s: it broke" in capsys.readouterr().out
    broken.clear()
    assert reproduce.reproduce(plan, steps) == 0
    assert calls == ["first", "second", "second", "third"]
    said = capsys.readouterr().out
    assert "done before: first came out" in said and "| third | 0 | third came out |" in said
    assert reproduce.reproduce(plan, steps) == 0
    assert calls == ["first", "second", "second", "third"]


def test_another_plan_is_refused_and_fresh_starts_over(plan: Plan) -> None:
    plan.root.mkdir()
    (plan.root / "steps.json").write_text(json.dumps({"plan": {"quick": True}, "done": {}}))
    with pytest.raises(StepFailed, match="another plan"):
        reproduce.reproduce(plan, [])
    reproduce.start_over(plan)
    assert not plan.root.exists()
    (plan.root / "mine").mkdir(parents=True)
    with pytest.raises(StepFailed, match="holds other things"):
        reproduce.start_over(plan)
