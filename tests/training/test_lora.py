"""LoRA: steps as a plain peft loop makes them; what leaves the trainer is merged; checkpoints hold the adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from training_helpers import add_plain_gradients, partition_all, random_groups, save_model, token_logprobs
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.cli import compose_config
from pipeline.config import AlgorithmConfig, LoraConfig, TrainingConfig, UserError
from pipeline.records import TrainGroup
from pipeline.training import batch, deepspeed_engine, head, lora
from pipeline.training.checkpoint import CheckpointError, newest
from pipeline.training.export import export_checkpoint
from pipeline.training.trainer import Trainer

RATE = 5e-3
TARGETS = {"qwen3": ["q_proj", "v_proj", "down_proj"], "lfm2": ["in_proj", "q_proj", "w1"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(root / kind, kind) for kind in TARGETS}


def make(path: Path, targets: list[str], **training: object) -> Trainer:
    settings = LoraConfig(rank=4, alpha=6, targets=targets)
    defaults: dict = {"learning_rate": RATE, "decay_fraction": 0.0, "max_grad_norm": 0.0, "lora": settings}
    return Trainer(path, TrainingConfig(**(defaults | training)), AlgorithmConfig(minibatches=1), 0, 4)


def adapter(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer._values(lora.adapter_weights(trainer.policy.model))}


def random_adapter(trainer: Trainer, seed: int = 1) -> None:
    """As if it had been trained for long."""
    torch.manual_seed(seed)
    for weight in lora.adapter_weights(trainer.policy.model):
        torch.nn.init.normal_(weight.base, std=0.3)


def plain_steps(
    path: Path, targets: list[str], start: dict[str, torch.Tensor], groups: list[TrainGroup], steps: int
) -> tuple[PeftModel, float]:
    """GRPO with group_mean by peft and torch alone, row by row; also the last gradient's norm."""
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(base, PeftConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))
    set_peft_model_state_dict(model, start)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        add_plain_gradients(model, groups)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, float("inf")))
        optimizer.step()
    return model, norm


def assert_near(found: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float = 1e-3) -> None:
    assert (found - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize(
    ("kind", "stage", "budget"), [("qwen3", 1, 20), ("qwen3", 2, 8192), ("qwen3", 3, 60), ("lfm2", 1, 60)]
)
def test_updates_match_a_plain_peft_loop(
    models: dict[str, Path], kind: str, stage: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed with shared prefixes (Qwen3) or padded (LFM2), with a head that computes three tokens at a time."""
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: 3)
    monkeypatch.setattr(deepspeed_engine, "deepspeed_config", deepspeed_engine.deepspeed_config)  # put back afterwards
    partition_all()
    groups = random_groups(0)
    trainer = make(models[kind], TARGETS[kind], zero_stage=stage, token_budget=budget)
    assert trainer.policy.packs == (kind == "qwen3")
    start = adapter(trainer)
    expected, norm = plain_steps(models[kind], TARGETS[kind], start, groups, 2)
    for _ in range(2):
        metrics = trainer.update(groups)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    found = adapter(trainer)
    for name, value in expected.state_dict().items():
        if "lora_" in name:
            own = found[name.replace(".default.", ".")]
            assert_near(
                own - start[name.replace(".default.", ".")], value - start[name.replace(".default.", ".")], name
            )
    for name, value in AutoModelForCausalLM.from_pretrained(models[kind]).named_parameters():
        frozen = {weight.name: weight.base for weight in lora.weights(trainer.policy.model)}
        with trainer._gathered([frozen[name]]):
            assert torch.equal(frozen[name], value), f"{name} is not frozen"


@torch.no_grad()
def logprobs(model: Callable[..., object], groups: list[TrainGroup]) -> torch.Tensor:
    rows = [row for group in groups for member in group.rollouts for row in member.rows]
    return torch.cat([token_logprobs(model, row) for row in rows])  # type: ignore[arg-type]


@torch.no_grad()
def own_logprobs(trainer: Trainer, groups: list[TrainGroup]) -> torch.Tensor:
    """The trainer's, through its packing, in the order of the groups' rows."""
    rows = [row for group in groups for member in group.rollouts for row in member.rows]
    weighted = [batch.WeightedRow(row, 1.0, 1.0, True, "r", 0) for row in rows]
    return trainer.policy(batch.collate(batch.RowBatch(tuple(weighted), trainer.policy.packs, 1)))[0]


@pytest.mark.parametrize("kind", TARGETS)
def test_the_merged_export_computes_as_the_trainer_does(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    trainer, groups = make(models[kind], TARGETS[kind]), random_groups(3)
    random_adapter(trainer)
    trainer.export(tmp_path / "export")
    expected = own_logprobs(trainer, groups)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert_near(logprobs(merged, groups), expected, "merged", 1e-5)
    base = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    assert (logprobs(base, groups) - expected).abs().max() > 0.1, "the adapter must matter"
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / lora.ADAPTER_DIRECTORY))
    assert_near(logprobs(adapted, groups), expected, "peft", 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_holds_the_adapter_alone_and_resumes_to_the_bit(
    models: dict[str, Path], tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_engine, "deepspeed_config", deepspeed_engine.deepspeed_config)  # put back afterwards
    partition_all()

    def fresh() -> Trainer:
        return make(models["qwen3"], TARGETS["qwen3"], zero_stage=stage)

    def finish(trainer: Trainer) -> dict[str, torch.Tensor]:
        for seed in (1, 2):
            trainer.update(random_groups(seed))
        return adapter(trainer)

    trainer = fresh()
    trainer.update(random_groups(0))
    trainer.save(tmp_path / "checkpoints", {"count": 1})
    trainer.export(tmp_path / "live")
    whole = finish(trainer)
    resumed = fresh()
    assert resumed.load(tmp_path / "checkpoints") == {"count": 1}
    for name, value in finish(resumed).items():
        assert torch.equal(value, whole[name]), name

    path = newest(tmp_path / "checkpoints")
    assert path is not None
    saved = torch.load(next(path.rglob("*model_states.pt")), weights_only=False)["module"]
    assert [name for name in saved if "lora_" not in name] == []
    export_checkpoint(str(models["qwen3"]), path, tmp_path / "later", "float32")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        live, later = (load_file(tmp_path / name / file) for name in ("live", "later"))
        assert live.keys() == later.keys() and all(torch.equal(live[name], later[name]) for name in live)
    other = make(models["qwen3"], ["q_proj"], zero_stage=stage)
    with pytest.raises(CheckpointError, match=r"written with lora=.*this run has lora="):
        other.load(tmp_path / "checkpoints")


def test_only_the_blocks_with_adapters_travel(models: dict[str, Path]) -> None:
    """Whole blocks: vLLM fuses q, k and v, and a fused matrix of which a part is missing would hold garbage."""
    trainer = make(models["qwen3"], ["v_proj"])
    random_adapter(trainer)
    base = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32).state_dict()
    sent = dict(trainer.named_weights())
    assert sent.keys() == {name for name in base if ".self_attn." in name}
    changed = {name for name, value in sent.items() if not torch.equal(value, base[name])}
    assert changed == {name for name in base if name.endswith("v_proj.weight")}


def test_without_targets_every_linear_layer_but_the_head_is_adapted(models: dict[str, Path]) -> None:
    trainer = make(models["lfm2"], [])
    adapted = {weight.name for weight in lora.weights(trainer.policy.model) if weight.factors}
    base = AutoModelForCausalLM.from_pretrained(models["lfm2"])
    linear = {f"{name}.weight" for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)}
    assert adapted == linear - {"lm_head.weight"} and len(adapted) > 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ["q_proj", "w1"]},
            "no linear layer called w1; its linear layers are down_proj, gate_proj",
        ),
        ({"targets": ["lm_head"]}, "no linear layer called lm_head"),
        ({"rank": 0}, "training.lora.rank must be at least 1"),
        ({"alpha": 0.0}, "training.lora.alpha above 0"),
    ],
)
def test_settings_that_cannot_work_are_named(models: dict[str, Path], settings: dict, message: str) -> None:
    training = TrainingConfig(lora=LoraConfig(**({"rank": 4} | settings)))
    with pytest.raises(UserError, match=message):
        Trainer(models["qwen3"], training, AlgorithmConfig(), 0, 1)


def test_bfloat16_is_merged_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    base, down, up = (torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((6, 5), (2, 5), (6, 2)))
    exact = base.double() + 0.5 * up.double() @ down.double()
    merged = lora.Weight("w", base, (down, up), 0.5).value()
    assert torch.equal(merged, exact.bfloat16())


def test_adapters_are_asked_for_by_their_rank() -> None:
    assert compose_config([]).training.lora == LoraConfig(rank=None)
    words = ["training.lora.rank=16", "training.lora.alpha=32", "training.lora.targets=[q_proj,v_proj]"]
    assert compose_config(words).training.lora == LoraConfig(16, 32.0, ["q_proj", "v_proj"])
