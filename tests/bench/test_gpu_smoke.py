"""`make gpu-smoke` up to the border of what needs a GPU: every step on a CPU, and what it says where there is none.

Its engine step meets a real vLLM in tests/engine/test_weight_sync.py.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from bench import gpu_smoke
from bench.gpu_figures import Figure, Setting
from bench.gpu_models import KINDS, make_model

CPU = torch.device("cpu")
torch.set_num_threads(1)  # two fight over a busy machine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, "tiny", 0, root / kind) for kind in KINDS}


def setting(scratch: Path, dtype: torch.dtype = torch.float32) -> Setting:
    return Setting(CPU, dtype, scratch, length=512, scale=16)


@pytest.mark.parametrize(
    ("compiled", "said"),
    [(None, "is built for CPUs; docs/install.md"), ("13.0", "there is no /dev/nvidia0")],
)
def test_without_a_gpu_it_says_so_and_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiled: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", compiled)
    monkeypatch.setattr(gpu_smoke, "DEVICES", Path("/nonexistent"))
    monkeypatch.setattr(gpu_smoke, "run", lambda *_: pytest.fail("something was run"))
    assert gpu_smoke.main([]) == 3
    told = capsys.readouterr().err
    assert told.startswith("no GPU here: ") and said in told and told.count("\n") == 1


def test_with_a_gpu_it_runs_on_it_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_smoke, "run", lambda options, device, dtype: (options.length, device.type, dtype))
    assert gpu_smoke.main([]) == (131_072, "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    "words", [["--steps", "packing,pack"], ["--model", "llama=/tmp"], ["--model", "qwen3=/nowhere"]]
)
def test_a_wrong_option_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu_smoke.main(words)
    assert refused.value.code == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_but_the_engine_runs_on_a_cpu(models: dict[str, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    outcomes = list(gpu_smoke.run_all(setting(tmp_path, dtype), models, ["packing", "fused", "memory"]))
    assert [(outcome.step, outcome.kind, outcome.error) for outcome in outcomes] == [
        ("packing", "qwen3", ""),
        ("packing", "lfm2", ""),
        ("fused", "lfm2", ""),
        ("memory", "qwen3", ""),
        ("memory", "lfm2", ""),
    ]
    assert all(outcome.holds and outcome.figures for outcome in outcomes)
    figures = {(outcome.step, outcome.kind, figure.name): figure for outcome in outcomes for figure in outcome.figures}
    for kind in KINDS:
        error = figures["packing", kind, "logprobs row by row, error against float32"].value
        assert (error == 0) == (dtype is torch.float32)
    assert figures["fused", "lfm2", "packed without fused kernels, leak over a border"].value > 0.1
    assert figures["memory", "qwen3", "row of 512 tokens: peak memory"].value > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_that_is_a_little_wrong_exceeds_the_limits(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu_smoke, "PolicyModel", functools.partial(gpu_smoke.PolicyModel, temperature=1.1))
    (outcome,) = gpu_smoke.run_all(setting(tmp_path, dtype), {"qwen3": models["qwen3"]}, ["packing"])
    assert not outcome.error and not outcome.holds
    assert [figure.holds for figure in outcome.figures] == [False, True, False, True]


def test_the_fused_step_fails_where_installed_kernels_leak(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_smoke, "has_fused_kernels", lambda device: True)
    (outcome,) = gpu_smoke.run_all(setting(tmp_path), models, ["fused"])
    assert not outcome.error and not outcome.holds


def test_a_step_that_raises_fails_and_the_others_run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> list[Figure]:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setitem(gpu_smoke.STEPS, "packing", (KINDS, broken))
    options = gpu_smoke.parse(["--steps", "packing,fused", "--size", "tiny", "--out", str(tmp_path / "a" / "out.json")])
    assert gpu_smoke.run(options, CPU, torch.float32) == 1
    written = json.loads((tmp_path / "a" / "out.json").read_text())
    assert [(step["step"], step["kind"], step["holds"]) for step in written["steps"]] == [
        ("packing", "qwen3", False),
        ("packing", "lfm2", False),
        ("fused", "lfm2", True),
    ]
    assert written["steps"][0]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert not written["passed"] and written["machine"]["torch"] == torch.__version__
    table = capsys.readouterr().out
    assert "packing, qwen3: FAILED" in table and "fused, lfm2: ok" in table and "NOT every limit holds" in table


def test_given_checkpoints_are_used_and_the_rest_is_made(models: dict[str, Path], tmp_path: Path) -> None:
    options = gpu_smoke.parse(["--model", f"lfm2={models['lfm2']}", "--size", "tiny", "--steps", "fused"])
    assert gpu_smoke.make_models(options, tmp_path) == {"lfm2": models["lfm2"], "qwen3": tmp_path / "qwen3"}


def test_what_is_not_a_number_is_above_every_limit() -> None:
    assert not Figure("error", float("nan"), "", 1.0).holds
    assert Figure("error", 1.0, "", 1.0).holds
    assert not Figure("error", 1.1, "", 1.0).holds
