"""Tiny random checkpoints with a tokenizer of their own: enough for a real vLLM, small enough to start fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The agent reads a file, runs a command and writes the answer.",
    '{"name": "bash", "arguments": {"command": "ls"}}',
]
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{%- endfor %}"
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
# vLLM reads these keys of an LFM2 checkpoint; transformers does not write them.
LFM2_KEYS = {
    "conv_dim": 64,
    "conv_dim_out": 64,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_norm_eps": 1e-5,
    "num_heads": 2,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 300 tokens with a chat template that knows tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_checkpoint(kind: str, seed: int, directory: Path) -> Path:
    """Write a random fp32 checkpoint of ``kind`` (qwen3 or lfm2, tied head) and return its directory."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    words = tokenizer()
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(words),
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "initializer_range": 0.3,
    }
    model: torch.nn.Module
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=32, **common))
    else:
        layers = ["conv", "full_attention", "conv", "full_attention"]
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        model = Lfm2ForCausalLM(
            Lfm2Config(layer_types=layers, block_auto_adjust_ff_dim=False, **heads, **LFM2_KEYS, **common)
        )
    model.float().save_pretrained(directory)
    words.save_pretrained(directory)
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """``checkpoint(kind, seed)`` -> directory; one call writes it, later ones find it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find_or_make(kind: str, seed: int) -> Path:
        directory = root / f"{kind}-{seed}"
        return directory if directory.exists() else make_checkpoint(kind, seed, directory)

    return find_or_make
