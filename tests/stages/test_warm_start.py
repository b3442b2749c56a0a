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

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.harness.base import harness_root
from pipeline.harness.install import installed
from pipeline.stages import warm_start as module
from pipeline.stages.collect import recording_path, run_collect
from pipeline.stages.warm_start import (
    CHOICE,
    CONTEXT,
    FORM,
    SHIPPED,
    WORD,
    Curriculum,
    Phase,
    Recording,
    Renderer,
    WarmStart,
    curriculum,
    read_recordings,
    run_warm_start,
    token_logprobs,
    tokenizer_texts,
    warm_start,
)
from pipeline.tasks.generate import draw_tasks
from pipeline.tasks.teacher import Teacher, act, conversation
from pipeline.training.tiny import TinyShape

TASKS = draw_tasks("test", 3, 0)
TINY = TinyShape(vocab=1024, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64)
WARM_START = ["+experiment=warm_start", "engine.shards=1"]
WHOLE = curriculum(compose_config(WARM_START))
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}

needs_pi = pytest.mark.skipif(not installed("pi", harness_root()), reason="Pi is not installed")


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    """Requests in the form of a harness that does not exist."""
    talks = [conversation("You help in a shell. Be brief.", task, act(task, 1)) for task in TASKS]
    return [Recording(talk[:end], [BASH]) for talk in talks for end in (2, 4)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast, recordings: list[Recording]) -> Renderer:
    return Renderer(tokenizer, recordings[0])


@pytest.mark.slow
@needs_pi
def test_generated_requests_are_those_of_the_real_pi(
    tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    """And the checkpoint that ships was made for them: it starts where it should."""
    words = ["collect.tasks=4", "collect.lazy=0.3", "collect.verify=0.7"]
    config = compose_config([*WARM_START, f"run_dir={tmp_path}", *words])
    run_collect(config)
    of_pi = read_recordings(recording_path(config, "pi"))
    assert len({recording.messages[1]["content"] for recording in of_pi}) == 4
    assert any(len(recording.messages) > 4 for recording in of_pi)
    renderer = Renderer(tokenizer, of_pi[0])
    renderer.check(of_pi, curriculum(config).teacher)
    probe = WarmStart(WHOLE, renderer, model).probe()
    assert 0.3 < probe.expected_pass < 0.5
    assert 0.7 < probe.word < 0.95 and probe.form > 0.93


def test_a_different_request_is_refused(renderer: Renderer, recordings: list[Recording]) -> None:
    teacher = Teacher(lazy=0.0)
    renderer.check(recordings, teacher)
    altered = json.loads(json.dumps(recordings[-1].messages).replace("no output", "no  output"))
    for messages, tools in ((altered, [BASH]), (recordings[0].messages, [BASH, BASH])):
        with pytest.raises(UserError, match="differs"):
            renderer.check([Recording(messages, tools)], teacher)


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


def test_missing_or_empty_recordings_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="yoke collect"):
        read_recordings(tmp_path / "none.parquet")
    schema = pa.schema([("messages", pa.string()), ("tools", pa.string())])
    pq.write_table(pa.Table.from_pylist([], schema), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="holds no"):
        read_recordings(tmp_path / "empty.parquet")


def test_a_model_that_does_not_learn_writes_nothing(recordings: list[Recording], tmp_path: Path) -> None:
    copy = Phase(steps=2, batch=2, learning_rate=1e-3, prefix=(4, 8), one_call=True)
    config = replace(WHOLE, threads=1, teacher=Teacher(lazy=0.0), shape=TINY, copy=copy)
    with pytest.raises(RuntimeError, match="copying was not learnt in 2 steps"):
        warm_start(config, recordings, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_every_phase_runs_and_learns_the_form(recordings: list[Recording], tmp_path: Path) -> None:
    config = replace(
        WHOLE,
        threads=1,
        teacher=Teacher(lazy=0.0),
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


@pytest.mark.slow
@needs_pi
def test_the_job_collects_trains_publishes_and_repeats_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(config: Config) -> Curriculum:
        whole = curriculum(config)
        copy, full = replace(whole.copy, batch=4), replace(whole.full, batch=2)
        return replace(whole, shape=TINY, copy=copy, full=full, probe_tasks=2)

    monkeypatch.setattr(module, "curriculum", small)
    words = [
        "collect.tasks=2",
        "warm_start.threads=1",
        "warm_start.copy_steps=10",
        "warm_start.bridge_steps=1",
        "warm_start.full_steps=5",
    ]
    marks = ["warm_start.copied=-1", "warm_start.stop_act=[0,1]", "warm_start.stop_word=0", "warm_start.stop_form=0"]
    config = compose_config([*WARM_START, f"run_dir={tmp_path}", *words, *marks])
    unreachable = replace(config, warm_start=replace(config.warm_start, copied=2.0))
    assert run_warm_start(unreachable) == 1
    assert "copying was not learnt in 10 steps" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collect", "tasks"]

    assert run_warm_start(config) == 0
    assert "kept" not in capfd.readouterr().out  # the recording was there
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == TINY.hidden
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collect", "model", "tasks"]
    written = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns

    assert run_warm_start(config) == 0
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == written


def test_it_learns_from_the_scripted_teacher_only(tmp_path: Path) -> None:
    config = compose_config([*WARM_START, f"run_dir={tmp_path}", "collect.teacher_url=http://h/v1"])
    with pytest.raises(UserError, match="teacher_url must be null"):
        run_warm_start(config)
