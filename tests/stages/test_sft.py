"""The warm start: what it renders is what the harness sent, its shared prompt changes nothing, its phases end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

import pipeline
from pipeline.config import UserError
from pipeline.stages.sft import (
    CHOICE,
    CONTEXT,
    FORM,
    RECORDINGS,
    WORD,
    Phase,
    Recording,
    Renderer,
    SftConfig,
    WarmStart,
    read_recordings,
    token_logprobs,
    tokenizer_texts,
    warm_start,
)
from pipeline.tasks.generate import draw_tasks
from pipeline.tasks.teacher import Teacher, act
from pipeline.training.tiny import TinyShape

SHIPPED = Path(pipeline.__file__).parent / "assets" / "quickstart-model"
TASKS = draw_tasks("test", 3, 0)
TINY = TinyShape(vocab=1024, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64)


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return read_recordings(RECORDINGS)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast, recordings: list[Recording]) -> Renderer:
    return Renderer(tokenizer, recordings[0])


def test_generated_requests_are_the_recorded_ones(renderer: Renderer, recordings: list[Recording]) -> None:
    assert len(recordings) > 24 and any(len(recording.messages) > 4 for recording in recordings)
    renderer.check(recordings, Teacher())


def test_a_different_request_is_refused(renderer: Renderer, recordings: list[Recording]) -> None:
    altered = json.loads(json.dumps(recordings[-1].messages).replace("no output", "no  output"))
    altered[1]["content"] = [{"type": "text", "text": altered[1]["content"][0]["text"] + " "}]
    with pytest.raises(ValueError, match="differs"):
        renderer.check([Recording(altered, recordings[-1].tools)], Teacher())


def test_kinds_mark_the_models_own_tokens(renderer: Renderer, tokenizer: PreTrainedTokenizerFast) -> None:
    example = renderer.example(TASKS[0], act(TASKS[0], 1))
    trained = [(tokenizer.decode([i]), kind) for i, kind in zip(example.ids, example.kinds, strict=True) if kind]
    assert [text for text, kind in trained if kind == WORD] == [f" {TASKS[0].answer}"]
    assert [text for text, kind in trained if kind == CHOICE] == ["<tool_call>", "<tool_call>", "Done"]
    call = '{"name": "bash", "arguments": {"command": "%s"}}'
    turns = [f"<tool_call>\n{call % command}\n</tool_call>" for command in act(TASKS[0], 1)]
    assert "".join(text for text, _ in trained) == "<|im_end|>".join([*turns, "Done."]) + "<|im_end|>"
    first = renderer.example(TASKS[0], act(TASKS[0], 1), one_call=True)
    assert first.ids == example.ids[: len(first.ids)] and first.kinds[-1] == FORM


def test_a_shared_prompt_changes_no_logprob(renderer: Renderer, model: Qwen3ForCausalLM) -> None:
    examples = [renderer.example(task, act(task, looks)) for looks, task in enumerate(TASKS)]
    got, kinds, rows = token_logprobs(model, renderer.prompt_ids, examples)
    for row, example in enumerate(examples):
        ids = torch.tensor([renderer.prompt_ids + example.ids])
        plain = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        wanted = [len(renderer.prompt_ids) + i - 1 for i, kind in enumerate(example.kinds) if kind != CONTEXT]
        assert torch.allclose(got[rows == row], plain[wanted], atol=1e-4)
    assert int((kinds == WORD).sum()) == len(TASKS)


def test_shipped_checkpoint_starts_where_it_should(renderer: Renderer, model: Qwen3ForCausalLM) -> None:
    probe = WarmStart(SftConfig(), renderer, model).probe()
    assert 0.3 < probe.expected_pass < 0.5
    assert 0.7 < probe.word < 0.95 and probe.form > 0.93


def test_missing_or_empty_recordings_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="yoke collect"):
        read_recordings(tmp_path / "none.parquet")
    schema = pa.schema([("messages", pa.string()), ("tools", pa.string())])
    pq.write_table(pa.Table.from_pylist([], schema), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="holds no"):
        read_recordings(tmp_path / "empty.parquet")


def test_a_model_that_does_not_learn_writes_nothing(recordings: list[Recording], tmp_path: Path) -> None:
    config = SftConfig(
        threads=1, shape=TINY, copy=Phase(steps=2, batch=2, learning_rate=1e-3, prefix=(4, 8), one_call=True)
    )
    with pytest.raises(RuntimeError, match="copying was not learnt in 2 steps"):
        warm_start(config, recordings, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_every_phase_runs_and_learns_the_form(recordings: list[Recording], tmp_path: Path) -> None:
    config = SftConfig(
        threads=1,
        shape=TINY,
        copy=Phase(steps=12, batch=8, learning_rate=3e-3, prefix=(4, 8), one_call=True),
        bridge=Phase(steps=4, batch=4, learning_rate=2e-3, prefix=(8, 32)),
        full=Phase(steps=10, batch=4, learning_rate=2e-3, prefix=None),
        copied=-1.0,
        stop_act=(0.0, 1.0),
        stop_word=0.0,
        stop_form=0.0,
        probe_tasks=4,
    )
    probe = warm_start(config, recordings, tmp_path / "model")
    assert probe == warm_start(config, recordings, tmp_path / "again")
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "again"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="missed its marks"):
        warm_start(replace(config, stop_word=2.0), recordings, tmp_path / "never")


def test_tokenizer_is_trained_without_test_lists(recordings: list[Recording]) -> None:
    texts = "\n".join(tokenizer_texts(recordings[0], 0, tasks=500))
    assert not any(task.instruction in texts for task in draw_tasks("test", 500, 0))
