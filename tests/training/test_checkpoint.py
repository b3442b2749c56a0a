"""Checkpoints: bit-equal after a restart, whole or ignored, and never lost to a full disk."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import random_groups, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import AlgorithmConfig, TrainingConfig, UserError
from pipeline.training import checkpoint
from pipeline.training.checkpoint import CheckpointError
from pipeline.training.trainer import Trainer

LAYOUTS = [(0, "none"), (1, "none"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "all")]
STATE = {"finished": ["g0", "g1"], "version": "0.4"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen3")


def make(model: Path, seed: int = 0, **training: object) -> Trainer:
    settings: dict = {"learning_rate": 1e-2, "keep_checkpoints": 2} | training
    return Trainer(model, TrainingConfig(**settings), AlgorithmConfig(minibatches=2), seed, total_updates=6)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.named_weights()}


def assert_equal(left: Trainer, right: Trainer) -> None:
    mine = weights(right)
    for name, value in weights(left).items():
        assert torch.equal(value, mine[name]), name


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_in_the_middle_changes_no_bit(model: Path, tmp_path: Path, layout: tuple[int, str]) -> None:
    stage, offload = layout
    straight = make(model, zero_stage=stage, offload=offload)
    metrics = [straight.update(random_groups(seed)) for seed in range(5)]
    expected = draws()
    first = make(model, zero_stage=stage, offload=offload)
    for seed in range(3):
        first.update(random_groups(seed))
    first.save(tmp_path, STATE)
    second = make(model, seed=99, zero_stage=stage, offload=offload)
    second.update(random_groups(77))
    assert second.load(tmp_path) == STATE
    assert second.updates == 3
    resumed = [second.update(random_groups(seed)) for seed in (3, 4)]
    assert draws() == expected
    assert_equal(straight, second)
    for before, after in zip(metrics[3:], resumed, strict=True):
        assert {k: v for k, v in before.items() if "perf" not in k} == {
            k: v for k, v in after.items() if "perf" not in k
        }


def test_nothing_to_load_is_a_fresh_start(model: Path, tmp_path: Path) -> None:
    trainer = make(model)
    assert trainer.load(tmp_path / "none") == {} and trainer.updates == 0


def saved(model: Path, root: Path, count: int) -> Trainer:
    trainer = make(model)
    for seed in range(count):
        trainer.update(random_groups(seed))
        trainer.save(root, {"count": seed + 1})
    return trainer


def test_only_the_last_are_kept_and_the_newest_is_loaded(model: Path, tmp_path: Path) -> None:
    trainer = saved(model, tmp_path, 4)
    trainer.save(tmp_path, {"count": 5})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["0000-000004-update-000004", "0000-000005-update-000004"]
    assert make(model).load(tmp_path) == {"count": 5}


def test_a_half_written_or_damaged_checkpoint_is_passed_over(model: Path, tmp_path: Path) -> None:
    saved(model, tmp_path, 1)
    good = checkpoint.newest(tmp_path)
    assert good is not None
    unmarked = shutil.copytree(good, tmp_path / "000002-update-000002")
    (unmarked / checkpoint.MANIFEST).unlink()
    cut = shutil.copytree(good, tmp_path / "000003-update-000003")
    largest = max((path for path in cut.rglob("*.pt")), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    missing = shutil.copytree(good, tmp_path / "000004-update-000004")
    (missing / "state.json").unlink()
    shutil.copytree(good, tmp_path / ".partial-000005-update-000005-abc")
    assert checkpoint.newest(tmp_path) == good
    trainer = make(model)
    assert trainer.load(tmp_path) == {"count": 1}
    trainer.save(tmp_path, {"count": 6})
    assert checkpoint.newest(tmp_path).name == "0000-000005-update-000001"
    assert not list(tmp_path.glob(".partial*"))
    assert make(model).load(tmp_path) == {"count": 6}


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 3000, 40000])
def test_a_failed_write_leaves_the_old_checkpoint(model: Path, tmp_path: Path, size: int) -> None:
    trainer = saved(model, tmp_path, 1)
    trainer.update(random_groups(8))
    with file_size_limit(size), pytest.raises(CheckpointError, match="could not write"):
        trainer.save(tmp_path, {"count": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["0000-000001-update-000001"]
    assert make(model).load(tmp_path) == {"count": 1}
    trainer.save(tmp_path, {"count": 2})
    resumed = make(model)
    assert resumed.load(tmp_path) == {"count": 2}
    assert_equal(trainer, resumed)


FILL_DISK = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_checkpoint import make, random_groups
from pipeline.training.checkpoint import CheckpointError
root = Path({mount!r}) / "checkpoints"
trainer = make(Path({model!r}))
trainer.save(root, {{"count": 1}})
filler = open(Path({mount!r}) / "filler", "wb")
try:
    while True:
        filler.write(b"x" * 65536)
        filler.flush()
except OSError:
    pass
trainer.update(random_groups(0))
try:
    trainer.save(root, {{"count": 2}})
except CheckpointError as error:
    print("REFUSED", error)
print("LOADED", make(Path({model!r})).load(root))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(model: Path, tmp_path: Path) -> None:
    """A real ENOSPC, on a small tmpfs in a mount namespace of its own."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespaces")
    (tmp_path / "disk").mkdir()
    script = FILL_DISK.format(
        path=[*sys.path, str(Path(__file__).parent)], mount=str(tmp_path / "disk"), model=str(model)
    )
    mount = f"mount -t tmpfs -o size=2m none {tmp_path / 'disk'} && exec {sys.executable} -"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], input=script, capture_output=True, text=True, timeout=240
    )
    assert "REFUSED could not write" in done.stdout and "0 MiB free" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "LOADED {'count': 1}" in done.stdout


@pytest.mark.parametrize("other", [{"zero_stage": 2}, {"offload": "optimizer"}])
def test_a_checkpoint_of_another_layout_is_refused(model: Path, tmp_path: Path, other: dict) -> None:
    saved(model, tmp_path, 1)
    with pytest.raises(UserError, match=r"zero_stage=1|offload=none"):
        make(model, **other).load(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_an_export_is_the_policy(tmp_path: Path, kind: str, stage: int) -> None:
    source = save_model(tmp_path / "source", kind)
    custom = json.loads((source / "config.json").read_text()) | {"block_dim": 32}
    (source / "config.json").write_text(json.dumps(custom))
    trainer = make(source, zero_stage=stage)
    trainer.update(random_groups(0))
    trainer.export(tmp_path / "export")
    trainer.export(tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert loaded.dtype == torch.float32
    parameters = dict(loaded.named_parameters())
    exported = weights(trainer)
    assert exported.keys() == parameters.keys()
    assert all(torch.equal(value, parameters[name]) for name, value in exported.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["block_dim"] == 32
    assert (tmp_path / "export" / "generation_config.json").exists()
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (source, tmp_path / "export")]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": "w5 w9"}]) for tokenizer in tokenizers]
    assert texts[0] == texts[1]


def test_a_failed_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    trainer = make(model)
    with file_size_limit(2000), pytest.raises(CheckpointError, match="export"):
        trainer.export(tmp_path / "export")
    assert not list(tmp_path.iterdir())
