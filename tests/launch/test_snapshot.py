"""The copy of the code in the run directory, and settings that hold in any working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import take_snapshot, with_absolute_paths


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name in ("pipeline/a.py", "pipeline/__pycache__/a.pyc", "pipeline/.hidden", "conf/local.yaml", "docs/x.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_what_is_copied(tmp_path: Path, source: Path) -> None:
    code, new = take_snapshot(RunDirectory(tmp_path / "run"), source)
    assert new and code.parent == tmp_path / "run" / "code"
    assert sorted(str(p.relative_to(code)) for p in code.rglob("*") if p.is_file()) == [
        "conf/local.yaml",
        "pipeline/a.py",
    ]
    assert list(code.parent.iterdir()) == [code]


def test_the_same_code_is_kept_and_other_code_lies_beside_it(tmp_path: Path, source: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    first, _ = take_snapshot(run, source)
    (first / "pipeline" / "__pycache__").mkdir()  # by a job
    (source / "pipeline" / "__pycache__" / "b.pyc").touch()
    assert take_snapshot(run, source) == (first, False)
    (source / "pipeline" / "a.py").write_text("other")
    second, new = take_snapshot(run, source)
    assert new and second != first
    assert (first / "pipeline" / "a.py").read_text() == "pipeline/a.py"


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copy2", full)
    monkeypatch.setattr("pipeline.launch.snapshot.shutil.copytree", full)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(OSError, match="No space"):
        take_snapshot(run, source)
    assert not list((run.root / "code").glob("*"))


def test_a_job_imports_the_copy(tmp_path: Path) -> None:
    code, _ = take_snapshot(RunDirectory(tmp_path / "run"))
    command = [sys.executable, "-c", "import pipeline.cli; print(pipeline.__file__, pipeline.cli.CONFIG_DIR)"]
    environment = os.environ | {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert said == [f"{code}/pipeline/__init__.py", f"{code}/conf"]


def test_no_path_depends_on_where_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    words = ["tasks=harbor", "tasks.train=a", "tasks.test=b", "run_dir=run", "harness.home=h", "model.path=model"]
    words += ["harness.recipes=[my/one.py:RECIPE,package.module,two.py]"]
    config = with_absolute_paths(compose_config(words))
    assert (config.run_dir, config.tasks.train, config.tasks.test, config.harness.home, config.model.path) == tuple(
        str(tmp_path / name) for name in ("run", "a", "b", "h", "model")
    )
    assert config.harness.recipes == [f"{tmp_path}/my/one.py:RECIPE", "package.module", f"{tmp_path}/two.py"]
    assert with_absolute_paths(compose_config([*words, "model.path=org/name"])).model.path == "org/name"
