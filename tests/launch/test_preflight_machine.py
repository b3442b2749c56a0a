"""What a machine must have: made-up disks, limits and measurements."""

from __future__ import annotations

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from preflight_helpers import assert_refused, outcome, settings
from safetensors.torch import save_file

from pipeline.config import Config
from pipeline.launch import preflight_machine, preflight_settings
from pipeline.launch.preflight_check import Grounds
from pipeline.launch.preflight_machine import STATE_BYTES, estimate_gb, parameters
from pipeline.report.store import write_json

Usage = namedtuple("Usage", "total used free")
QUICKSTART_PARAMETERS = 973_000  # about


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One harness was measured on this machine."""
    place = tmp_path / "home"
    monkeypatch.setenv("YOKE_HOME", str(place))
    preflight_settings._measured.cache_clear()
    write_json(
        place / "harness-check.json", {"pi": {"scenes": {"calls": {"memory_mb": 100.0}, "hang": {"memory_mb": 300.0}}}}
    )
    return place


def free(monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(0, 0, gigabytes * 1e9))


def limit(monkeypatch: pytest.MonkeyPatch, which: int, soft: int, hard: int, user: int = 1000) -> None:
    known = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, hard) if asked == which else known(asked))
    monkeypatch.setattr(os, "geteuid", lambda: user)


# --- disk


def test_parameters_are_counted_in_one_file_and_in_several(tmp_path: Path) -> None:
    path = settings().model.path
    count = parameters(path)
    assert abs(count - QUICKSTART_PARAMETERS) < 10_000
    shutil.copy(Path(path) / "model.safetensors", tmp_path / "a.safetensors")
    save_file({"y": torch.zeros(3, 7)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    assert parameters(str(tmp_path)) == count + 21
    assert parameters(str(tmp_path / "nothing")) == 0


@pytest.mark.parametrize(
    ("words", "checkpoints", "models"),
    [
        ([], 3, 1),
        (["training.keep_checkpoints=5"], 6, 1),
        (["training.lora.rank=8"], 3 * 2 * 8 / 128, 1),
        (["evaluation.every=1"], 3, 4),  # 12 updates, every 4th
        (["evaluation.every=1", "evaluation.keep_exports=2"], 3, 4),  # without Slurm they are evaluated at the end
        (["evaluation.every=1", "evaluation.keep_exports=2", "cluster.name=slurm"], 3, 3),
        (["evaluation.every=1", "evaluation.keep_exports=0", "training.checkpoint_every=1"], 3, 13),
        (["training.keep_every=4"], 3, 4),
    ],
)
def test_what_is_kept_is_counted(words: list[str], checkpoints: float, models: int) -> None:
    config = settings(*words)
    weights, parts = parameters(config.model.path), estimate_gb(config)
    assert parts["checkpoints"] == pytest.approx(checkpoints * weights * STATE_BYTES / 1e9)
    assert parts["models"] == pytest.approx(models * weights * 4 / 1e9)


def test_rollouts_whose_tokens_go_are_not_counted() -> None:
    every, few = (estimate_gb(settings("training.updates=1000", *words)) for words in ((), ("storage.rollouts=88",)))
    assert few["rollouts"] == pytest.approx(every["rollouts"] * (88 + 3 * 4) / 1000)


def test_a_quota_must_hold_what_always_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = parameters(settings().model.path)
    least = (2 * STATE_BYTES + 4) * weights / 1e9
    free(monkeypatch, 1000)
    refused = outcome("disk", Grounds(settings(f"storage.quota_gb={0.99 * least}", run_dir=tmp_path)))
    assert_refused(refused, f"but 2 checkpoints and the exports that stay take {least:.2f} GB")
    passed = outcome("disk", Grounds(settings(f"storage.quota_gb={1.01 * least}", run_dir=tmp_path)))
    assert passed.result == "ok" and "old files go" in passed.said


def test_a_quota_bounds_what_is_asked_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("training.updates=100000", "storage.quota_gb=1")
    free(monkeypatch, 2.01)
    assert outcome("disk", Grounds(settings(*words[:1], run_dir=tmp_path))).result == "failed"
    assert outcome("disk", Grounds(settings(*words, run_dir=tmp_path))).result == "ok"


def test_a_disk_that_would_fill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(run_dir=tmp_path / "run")
    needed = sum(estimate_gb(config).values()) + 1
    free(monkeypatch, needed + 0.01)
    assert outcome("disk", Grounds(config)).result == "ok"
    free(monkeypatch, needed - 0.01)
    assert_refused(outcome("disk", Grounds(config)), f"GB free, the run needs {needed:.2f} GB more (checkpoints")


def test_what_a_run_has_written_already_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(run_dir=tmp_path)
    free(monkeypatch, sum(estimate_gb(config).values()) + 1 - 0.01)
    assert outcome("disk", Grounds(config)).result == "failed"
    (tmp_path / "checkpoints" / "one").mkdir(parents=True)
    (tmp_path / "checkpoints" / "one" / "state").write_bytes(b"x" * 20_000_000)
    assert outcome("disk", Grounds(config)).result == "ok"


# --- the node


def test_this_machine_passes() -> None:
    assert outcome("node", Grounds(settings())).result == "ok"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sandbox.memory_mb=299"], "sandbox.memory_mb=299, but a harness of the mix took 300 MB"),
        (["sandbox.processes=31"], "sandbox.processes=31: a harness takes up to 32"),
        (
            ["concurrency=8", "cluster.name=slurm", "cluster.mem_gb=2"],
            "harnesses of 300 MB are more than",
        ),
    ],
)
def test_settings_that_no_node_can_obey(words: list[str], said: str) -> None:
    assert_refused(outcome("node", Grounds(settings(*words))), said)


@pytest.mark.parametrize(
    "words", [["sandbox.memory_mb=300"], ["sandbox.processes=32"], ["cluster.name=slurm", "cluster.mem_gb=2"]]
)
def test_settings_at_the_limit_pass(words: list[str]) -> None:
    assert outcome("node", Grounds(settings(*words))).result == "ok"


@pytest.mark.parametrize(
    ("which", "soft", "hard", "words", "said"),
    [
        (resource.RLIMIT_NOFILE, 351, 9999, [], "ulimit -n is 351; concurrency=4 takes 352"),
        (resource.RLIMIT_NOFILE, 4000, 4000, [], "sandbox.open_files=4096 is above this machine's hard limit of 4000"),
        (resource.RLIMIT_NPROC, 127, 127, [], "ulimit -u is 127; concurrency=4 takes 128"),
    ],
)
def test_limits_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, which: int, soft: int, hard: int, words: list[str], said: str
) -> None:
    config = settings(*words)
    limit(monkeypatch, which, soft, hard)
    assert_refused(outcome("node", Grounds(config)), said)
    limit(monkeypatch, which, soft + 1, hard + 96)
    assert outcome("node", Grounds(config)).result == "ok"
    limit(monkeypatch, which, -1, -1)
    assert outcome("node", Grounds(config)).result == "ok", "no limit"


def test_root_is_bound_by_open_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NPROC, 1, 1, user=0)
    assert outcome("node", Grounds(settings())).result == "ok"


def scratch_of(config: Config) -> float:
    return preflight_machine._scratch_gb(config)


def test_scratch_for_weights_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("engine.weight_transfer=file")
    needed = scratch_of(config)
    assert needed == pytest.approx(2 * parameters(config.model.path) * 4 / 1e9 + 256 * 2**20 / 1e9)
    assert scratch_of(settings("engine.weight_transfer=nccl")) == pytest.approx(256 * 2**20 / 1e9)
    free(monkeypatch, needed - 0.001)
    assert_refused(outcome("node", Grounds(config)), "rollouts and weights on their way need")
    free(monkeypatch, needed + 0.001)
    assert outcome("node", Grounds(config)).result == "ok"
