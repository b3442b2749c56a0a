"""The screen of `yoke status`: what is known is there, what is not is left out, whatever the state."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import NODE, MadeUpRun, MadeUpSlurm, overview
from rich.console import Console

from pipeline.launch.status import RunWatcher, Watch
from pipeline.report.status_view import Screen, run_view


def shown(run: MadeUpRun, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(run_view(Watch([RunWatcher(run.root)]).look()[0]))
    return console.export_text()


def lines(text: str) -> dict[str, str]:
    """The named lines of the upper part."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpSlurm:
    return MadeUpSlurm(tmp_path / "bin", monkeypatch)


def test_how_large_the_run_is(run: MadeUpRun) -> None:
    run.local_attempt(alive=True)
    assert "disk" not in lines(shown(run))
    parts = {"checkpoints": 2_000_000_000, "rollouts": 500_000_000, "models": 0}
    size = {"time": time.time() - 65, "bytes": 2_500_000_000, "parts": parts, "quota_gb": 10}
    (run.root / "size.json").write_text(json.dumps(size))
    assert lines(shown(run))["disk"].startswith("2.5 of 10 GB (checkpoints 2, rollouts 0.5) · 1:0")
    (run.root / "size.json").write_text(json.dumps(size | {"quota_gb": None}))
    assert lines(shown(run))["disk"].startswith("2.5 GB (checkpoints 2, rollouts 0.5) · 1:0")


def test_everything_of_a_running_job(run: MadeUpRun, slurm: MadeUpSlurm) -> None:
    run.submitted("4711")
    slurm.job("4711", "RUNNING")
    attempt = run.slurm_attempt("4711", restart=1)
    run.checkpoint(4)
    run.updates(5, 6)
    told = overview(
        phase={"name": "evaluate_after", "done": 3, "total": 8},
        set_aside={"codex": "3 groups failed"},
        errors=[{"time": 1.0, "text": "ALARM: codex is set aside\nmore"}],
    )
    with run.coordinator(attempt, overview=lambda: told):
        text = shown(run)
    found = lines(text)
    assert text.splitlines()[0].split() == [str(run.root), "running"]
    assert found["job"] == "Slurm 4711 RUNNING · on n[1-2] · 1:02:03 left · requeues 1 of 20"
    assert found["phase"] == "evaluate_after 3 of 8"
    assert found["updates"].startswith("6 of 20")
    assert " 10.0 s each · 2:" in found["updates"]
    assert found["reward"] == "0.500 (pass 45%) at update 6 · codex 0.400 (pass 35%) · pi 0.600 (pass 55%)"
    sync = "weight sync 0.21 s (gather 0.05, load 0.16)"
    assert found["staleness"] == f"mean 0.8, most 2 updates · {sync} · waited 3.0 s for rollouts"
    assert found["rollouts"] == "4 in flight · 2 queued · 2 groups out, 1 ready · credits 24 of 96"
    assert found["counts"] == "forks 3 · undelivered 1 · groups trained 36", "what did not happen is left out"
    assert found["checkpoint"].startswith("000004-update-000004, 0:")
    assert found["checkpoint"].endswith("next at update 8")
    assert found["set"] == "aside codex: 3 groups failed"
    assert found["node0"] == "up 1 1.6 1,234 4 2 of 2 0: 97%, 70 of 80 GiB 40 of 128 12.5 of 64"
    assert text.rstrip().endswith("ALARM: codex is set aside")
    assert "silent" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": []}, "no GPU"),
        ({"gpus": None, "gpu_error": "nvidia-smi did not answer within 5 s"}, "nvidia-smi did not answer within 5 s"),
        ({"gpus": [NODE["gpus"][0] | {"utilisation": None}]}, "0: –, 70 of 80 GiB"),
        ({"silent_s": 14.0}, "silent 14 s"),
        ({"vllm": "down", "weights": None}, "down"),
    ],
)
def test_a_nodes_health(run: MadeUpRun, changes: dict[str, Any], said: str) -> None:
    attempt = run.local_attempt(alive=True)
    with run.coordinator(attempt, overview=lambda: overview(nodes=[NODE | changes])):
        assert said in lines(shown(run))["node0"]


def test_a_node_that_was_not_looked_at_yet(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    bare = {name: NODE[name] for name in list(NODE)[: list(NODE).index("memory_used_gib")]}
    with run.coordinator(attempt, overview=lambda: overview(nodes=[bare])):
        assert lines(shown(run))["node0"].endswith("2 of 2 – – of – – of –")


def test_who_is_silent_and_how_old_the_figures_are(run: MadeUpRun) -> None:
    attempt = run.local_attempt(alive=True)
    attempt.publish("coordinator", {"url": "http://127.0.0.1:9", "token": "x"})
    run.snapshot(age_s=42.0)
    text = shown(run)
    assert "silent      coordinator for " in text
    assert "figures are from status.json, 4" in text


@pytest.mark.parametrize("state", ["queued", "starting", "failed", "stopped", "unknown"])
def test_every_state_can_be_shown(run: MadeUpRun, slurm: MadeUpSlurm, state: str) -> None:
    run.submitted("4711")
    slurm.job("4711", {"queued": "PENDING", "starting": "RUNNING", "stopped": "CANCELLED"}.get(state, "NODE_FAIL"))
    if state == "unknown":
        slurm.program("squeue", "exit 1")
        run.slurm_attempt("4711")
    first, *rest = shown(run).splitlines()
    assert first.startswith(f"{run.root}  {'running' if state == 'starting' else state}")
    assert any("its ranks are starting" in line for line in rest) == (state == "starting")
    assert any("expected to start 2026-11-30T12:00:00" in line for line in rest) == (state == "queued")


def test_outside_a_terminal_it_is_printed_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(live=True) as screen:
        screen.show("one")
        screen.show("two")
    assert capsys.readouterr().out == "one\ntwo\n"
