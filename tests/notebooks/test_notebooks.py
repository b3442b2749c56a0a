"""The notebooks run from top to bottom, with their own checks; and are kept without what a run leaves in them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from pipeline.config import UserError

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_S = 240


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel uses this checkout and this interpreter, and no runs of whoever tests."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("YOKE_RUNS", raising=False)
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({**spec, "display_name": "Python 3", "language": "python"}))


def execute(notebook: Any) -> str:
    """Run every cell; returns what was printed. Raises CellExecutionError when one raises."""
    client = NotebookClient(notebook, timeout=CELL_S, startup_timeout=CELL_S, resources={"metadata": {"path": FOLDER}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") + output.get("data", {}).get("text/markdown", "") for output in outputs)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.slow
def test_a_rollout_is_traced() -> None:
    told = execute(read("trace_one_rollout"))
    assert "rollout 2, call 2, parent 0" in told
    assert "g000000-0: solved, 1 tool calls, reward 1.0938" in told


@pytest.mark.slow
def test_runs_are_compared() -> None:
    told = execute(read("compare_runs"))
    assert "long against short: +" in told
    assert "| codex |" in told


@pytest.mark.slow
def test_a_check_that_fails_fails_the_notebook() -> None:
    notebook = read("trace_one_rollout")
    notebook.cells = [nbformat.v4.new_code_cell("assert 1 + 1 == 3, 'sums'")]
    with pytest.raises(CellExecutionError, match="sums"):
        execute(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_clean(path: Path) -> None:
    """Without outputs, counters, or a path of somebody's machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code if cell.outputs or cell.execution_count] == []
    assert any("assert" in cell.source for cell in code), "a notebook checks what it shows"
    assert "/home/" not in path.read_text() and "/root/" not in path.read_text() and "/tmp/" not in path.read_text()
    assert path.stat().st_size < 20_000


def test_both_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare_runs", "trace_one_rollout"]


# --- where runs come from


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """notebooks/runs_to_compare.py."""
    spec = importlib.util.spec_from_file_location("runs_to_compare", FOLDER / "runs_to_compare.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "runs_to_compare", module)
    spec.loader.exec_module(module)
    return module


class WandbRun:
    """As wandb.Api gives it: rows with W&B's own columns, and empty ones where nothing was logged."""

    name = "mine"

    def scan_history(self) -> list[Mapping[str, Any]]:
        return [
            {"_step": 0, "update": 1, "reward": 0.1, "eval/pass@1": None},
            {"_step": 1, "update": 2, "reward": 0.2},
            {"_step": 2, "update": 1, "eval/pass@1": 0.5, "reward": None},
            {"_step": 3, "update": 2, "reward": 0.3},
            {"_step": 4, "_runtime": 3},
        ]


def test_a_run_on_wandb_has_one_entry_an_update(places: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Api:
        def run(self, path: str) -> WandbRun:
            asked.append(path)
            return WandbRun()

    monkeypatch.setattr("wandb.Api", Api)
    (run,) = places.load(["wandb:me/yoke/abc"])
    assert asked == ["me/yoke/abc"]
    assert run.metrics == [{"update": 1, "reward": 0.1, "eval/pass@1": 0.5}, {"update": 2, "reward": 0.3}]
    assert (run.name, run.before, run.after) == ("mine", (), ())


def test_a_directory_without_metrics_is_refused(places: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no metrics"):
        places.load([str(tmp_path)])


def test_made_up_runs_are_read_as_any_other(places: ModuleType, tmp_path: Path) -> None:
    (run,) = places.load([str(places.make_up(tmp_path, "one", 0.2, 3))])
    assert [entry["update"] for entry in run.metrics] == list(range(1, places.UPDATES + 1))
    assert {record.harness for record in run.after} == set(places.HARNESSES)
    assert places.pass_table(run).count("n = 40") == 6, "two rates and a difference for each of two harnesses"
