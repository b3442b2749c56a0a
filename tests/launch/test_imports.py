"""`yoke import model=…`: a checkpoint under a label that `yoke evaluate` takes, and what is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from evaluation_helpers import fake_engine
from safetensors.torch import load_file, save_file

import pipeline
from pipeline import cli
from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.launch import import_model as module
from pipeline.launch import imports, standalone
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.stages.evaluation import Cells
from pipeline.stages.weights import exported, imported, kept

SHIPPED = Path(pipeline.__file__).parent / "assets" / "quickstart-model"
SETTINGS = ("tasks.check=false", "tasks.train_size=2", "tasks.test_size=2", "logging.wandb=disabled")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The quick start's model with other weights, as somebody may have published it: without a tokenizer."""
    place = tmp_path / "published"
    place.mkdir()
    shutil.copyfile(SHIPPED / "config.json", place / "config.json")
    weights = {name: value + 1 for name, value in load_file(SHIPPED / "model.safetensors").items()}
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    (place / "optimizer.pt").write_text("not for an engine")
    return place


def run_import(tmp_path: Path, *words: str) -> RunDirectory:
    root = tmp_path / "run"
    imports.run(compose_config([f"run_dir={root}", *SETTINGS]), words)
    return RunDirectory(root)


def test_an_imported_checkpoint_has_a_hash_of_each_file_and_what_it_lacked(tmp_path: Path, published: Path) -> None:
    run = run_import(tmp_path, f"model={published}", "label=theirs")
    place = run.models / "theirs"
    record = json.loads((place / "import.json").read_text())
    assert {name: entry["of"] for name, entry in record["files"].items()} == {
        **{"config.json": "checkpoint", "model.safetensors": "checkpoint"},
        **{"tokenizer.json": "base model", "tokenizer_config.json": "base model"},
        **{"chat_template.jinja": "base model", "generation_config.json": "base model"},
    }
    assert all(entry["sha256"] == module.sha256(place / name) for name, entry in record["files"].items())
    assert (record["source"], record["revision"]) == (str(published), None)
    assert (place / "model.safetensors").stat().st_ino == (published / "model.safetensors").stat().st_ino, "linked"
    assert imported(run.models) == ["theirs"]
    assert exported(run.models) == kept(run.checkpoints, run.models) == [], "newest and all do not mean it"


def test_it_is_evaluated_under_its_label(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_import(tmp_path, f"model={published}", "label=theirs")
    fake_engine(monkeypatch)
    served: list[Path] = []
    grade = standalone.work_through

    def noted(config: Config, attempt: Attempt, model: Path, cells: Cells) -> None:
        served.append(model)
        grade(config, attempt, model, cells)

    monkeypatch.setattr(standalone, "work_through", noted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", f"run_dir={run.root}", "stage.checkpoint=theirs"])
    assert ended.value.code == 0
    assert served == [run.models / "theirs"]
    weights = load_file(served[0] / "model.safetensors")
    assert torch.equal(weights["model.norm.weight"], load_file(published / "model.safetensors")["model.norm.weight"])
    assert json.loads((run.evaluation("theirs") / "weights.json").read_text()) == {"weights": "theirs"}


def test_again_is_nothing_and_another_one_needs_another_label(tmp_path: Path, published: Path) -> None:
    run = run_import(tmp_path, f"model={published}", "label=theirs")
    before = (run.models / "theirs" / "import.json").read_bytes()
    run_import(tmp_path, f"model={published}", "label=theirs")
    assert (run.models / "theirs" / "import.json").read_bytes() == before
    (published / "model.safetensors").unlink()
    values = load_file(SHIPPED / "model.safetensors")
    save_file({name: value.half() for name, value in values.items()}, published / "model.safetensors")
    with pytest.raises(UserError, match="choose another label"):
        run_import(tmp_path, f"model={published}", "label=theirs")


def test_what_a_killed_import_left_is_cleared(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(place: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "sha256", killed)
        run_import(tmp_path, f"model={published}", "label=theirs")
    run = RunDirectory(tmp_path / "run")
    other = run.models / ".partial-theirs-too-01234567"
    other.mkdir()
    assert len(list(run.models.iterdir())) == 2 and imported(run.models) == []
    run_import(tmp_path, f"model={published}", "label=theirs")
    assert {path.name for path in run.models.iterdir()} == {"theirs", other.name}


def config_with(**changes: object) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | changes))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(place: Path) -> None:
        weights = load_file(place / "model.safetensors")
        change(weights)
        save_file(weights, place / "model.safetensors")

    return rewrite


def with_index(place: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (config_with(hidden_size=7), "hidden_size is 7, not "),
        (config_with(model_type="lfm2"), 'model_type is "lfm2", not "qwen3"'),
        (
            with_tensors(lambda weights: weights.update({"model.norm.weight": torch.zeros(3)})),
            r"model.norm.weight has the shape \[3\], not ",
        ),
        (with_tensors(lambda weights: weights.pop("model.norm.weight")), "model.norm.weight is only in the base model"),
        (with_index, "model-00001-of-00002.safetensors is missing, which its index names"),
        (lambda place: (place / "model.safetensors").unlink(), "no whole model"),
        (lambda place: (place / "config.json").unlink(), "no whole model"),
    ],
)
def test_another_model_is_refused_in_one_line(
    tmp_path: Path, published: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(published)
    with pytest.raises(UserError, match=said) as refused:
        run_import(tmp_path, f"model={published}", "label=theirs")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "models").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "yoke import model="),
        (["model=x", "traces=y"], "yoke import model="),
        (["model=x"], "label=NAME is missing"),
        (["model=x", "label="], "what is label"),
        (["model=x", "label=y", "--force"], "what is --force"),
        (["model=x/y", "label=z"], "of the hub it is ORG/NAME@REVISION"),
        (["traces=x"], "no such file or directory"),
        *(([f"model={SHIPPED}", f"label={label}"], "plain name") for label in ("a/b", ".a", "newest", "before", "7")),
        ([f"model={SHIPPED}", "label=0001-000002-update-000003"], "plain name"),
    ],
)
def test_wrong_words_are_told_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        run_import(tmp_path, *words)
    assert "\n" not in str(refused.value)


def test_a_tied_head_may_be_written_twice(tmp_path: Path, published: Path) -> None:
    weights = load_file(published / "model.safetensors")
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, published / "model.safetensors")
    assert imported(run_import(tmp_path, f"model={published}", "label=theirs").models) == ["theirs"]


def test_its_own_words_are_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model=` and `label=` on the command line go to the job; what else there is are settings."""
    words = ["import", f"model={SHIPPED}", "label=base-again", f"run_dir={tmp_path / 'run'}", *SETTINGS]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0, capsys.readouterr()
    assert "yoke evaluate run_dir=" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:  # the run directory is there now: no settings are needed
        cli.main(["import", f"model={SHIPPED}", "label=more", f"run_dir={tmp_path / 'run'}"])
    assert ended.value.code == 0
