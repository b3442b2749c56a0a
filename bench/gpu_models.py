"""Random models for `make gpu-smoke`, made on the spot: the shape of a real one, or small enough for a test."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from pipeline.training.tiny import train_tokenizer

KINDS = ("qwen3", "lfm2")
POSITIONS = 262_144
TEXTS = ("The agent reads a file, runs a command and writes the answer.", '{"name": "bash", "arguments": {}}')
# Layer counts, widths and vocabularies are those of Qwen3-0.6B and of LFM2-1.2B.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
        "lfm2": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention"] * 2, "vocab_size": 512},
    },
    "real": {
        "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
        "lfm2": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 65_536}
        | {"layer_types": ["conv", "conv", "full_attention"] * 3 + ["conv", "full_attention"] * 3 + ["conv"]},
    },
}


def make_model(kind: str, size: str, seed: int, directory: Path) -> Path:
    """A checkpoint in float32 with a tokenizer; its next-token distributions are peaked, as a trained model's are."""
    shape = SHAPES[size][kind]
    tokenizer = train_tokenizer(TEXTS, 400)
    common = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 2 / math.sqrt(shape["hidden_size"]),
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, **common))
    else:
        model = Lfm2ForCausalLM(Lfm2Config(**shape, **common, **_vllm_keys(shape)))
    model.float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _vllm_keys(shape: dict[str, Any]) -> dict[str, Any]:
    """What vLLM reads in an LFM2 checkpoint and transformers does not write by itself."""
    width = shape["hidden_size"]
    return {
        "conv_dim": width,
        "conv_dim_out": width,
        "block_dim": width,
        "block_ff_dim": shape["intermediate_size"],
        "block_norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
        "num_heads": shape["num_attention_heads"],
    }
