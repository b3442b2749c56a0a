"""The tiny model's tokenizer, template and checkpoint, and the one that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import pipeline
from pipeline.tasks.generate import WORDS
from pipeline.training.tiny import (
    CHAT_TEMPLATE,
    MARKERS,
    TURN_END,
    TinyShape,
    build_model,
    save_checkpoint,
    train_tokenizer,
)

SHIPPED = Path(pipeline.__file__).parent / "assets" / "quickstart-model"
TOOL = {"name": "bash", "description": "Run.", "parameters": {"properties": {"command": {}, "timeout": {}}}}
CALL = {"function": {"name": "bash", "arguments": {"command": 'echo "a" > b'}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["echo apple > answer.txt"] * 20, 400)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    tools = [{"type": "function", "function": TOOL}]
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))


def test_template_extends_a_prompt_by_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = render(tokenizer, asked, add_generation_prompt=True)
    sampled = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"a\\" > b"}}\n</tool_call>' + TURN_END
    answered = [*asked, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}]
    assert render(tokenizer, answered).startswith(prompt + sampled)
    assert "bash(command, timeout)" in prompt


def test_template_lists_tools_without_a_system_message(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render(tokenizer, [{"role": "user", "content": "u"}]).count("bash(") == 1


def test_template_takes_a_tool_without_parameters(tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "stop"}}]
    asked = [{"role": "user", "content": "u"}]
    assert "stop()" in str(tokenizer.apply_chat_template(asked, tools=tools, tokenize=False))


@pytest.mark.parametrize("text", ["<tool_call>\n{}</tool_call>", "naïve ☃ \x00 \t tabs", "  two  spaces\n\n"])
def test_tokenizer_loses_nothing(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_checkpoint_comes_back_as_it_was(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = build_model(tokenizer, TinyShape(hidden=64, layers=1, heads=2, kv_heads=1, intermediate=96), seed=0)
    save_checkpoint(model, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(torch.tensor([[1, 2, 3]])).logits, model(torch.tensor([[1, 2, 3]])).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_shipped_checkpoint_is_small_and_whole() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 10 * 2**20
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    assert model.config.vocab_size == len(tokenizer) and model.config.head_dim == 32
    assert model.config.max_position_embeddings == TinyShape.positions and tokenizer.chat_template == CHAT_TEMPLATE
    assert all(len(tokenizer(f" {word}")["input_ids"]) == 1 for word in WORDS)
    assert all(len(tokenizer(marker)["input_ids"]) == 1 for marker in (*MARKERS, TURN_END))
