"""One tiny random model that can speak for all chat templates under test, and the templates themselves.

The templates are data of the installed ``trl``; the tokenizer holds the markers of every family, the checkpoint ends a
turn at any of their stop ids, so one vLLM serves all families: each request brings its family's template.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from pipeline.training.tiny import TinyShape, build_model, save_checkpoint, train_tokenizer

SHAPE = TinyShape(vocab=1024, hidden=64, layers=2, intermediate=128)
FILLER = [
    "The agent reads a file, runs a command, looks at the output and writes the answer down.",
    '{"name": "bash", "arguments": {"command": "ls -la /tmp", "timeout": 10}}',
    "You are a careful assistant. Use the tools. Today is a good day for a short walk.",
]
# As in the released tokenizers: thoughts and calls of Qwen and GLM are plain added tokens, the rest is special.
PLAIN_MARKERS = ["<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
SPECIAL_MARKERS = [
    *("<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
]


@dataclass(frozen=True)
class Family:
    """A chat template, the markers at which its models stop, and what else a request needs to use it."""

    template: str  # file name in trl, without .jinja
    stops: tuple[str, ...]
    tool_parser: str  # vLLM's --tool-call-parser for it
    kwargs: dict[str, Any] = field(default_factory=dict)

    def render_fields(self) -> dict[str, Any]:
        """What a render or derender request must carry for this family."""
        return {"chat_template": template_text(self.template), "chat_template_kwargs": dict(self.kwargs)}


CHATML = ("<|im_end|>", "<|endoftext|>")
FAMILIES = {
    "lfm2.5": Family("lfm2_2_5", ("<|im_end|>",), "lfm2", {"bos_token": "<|startoftext|>"}),
    "qwen3": Family("qwen3", CHATML, "hermes"),
    "qwen3.5": Family("qwen3_5_think", CHATML, "qwen3_coder"),
    "qwen3.5-nothink": Family("qwen3_5_nothink", CHATML, "qwen3_coder", {"enable_thinking": False}),
    "llama3.1": Family("llama3_1", ("<|eot_id|>", "<|eom_id|>"), "llama3_json", {"bos_token": "<|begin_of_text|>"}),
    "glm4.5": Family("glm4moe", ("<|user|>", "<|observation|>", "<|endoftext|>"), "glm45"),
    "gpt-oss": Family("gptoss", ("<|return|>", "<|call|>", "<|endoftext|>"), "openai"),
}


def template_text(name: str) -> str:
    """The Jinja source that the installed trl ships, without importing trl."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the markers of all families; its own chat template is ``pipeline.training.tiny``'s."""
    tokenizer = train_tokenizer(FILLER, SHAPE.vocab)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in PLAIN_MARKERS])
    special = [AddedToken(marker, normalized=False, special=True) for marker in SPECIAL_MARKERS]
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def make_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Write the model; generation ends at the stops of every family."""
    tokenizer = make_tokenizer()
    save_checkpoint(build_model(tokenizer, SHAPE, seed), tokenizer, directory)
    stops = dict.fromkeys(stop for family in FAMILIES.values() for stop in family.stops)
    defaults = json.loads((directory / "generation_config.json").read_text())
    defaults["eos_token_id"] = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return directory
