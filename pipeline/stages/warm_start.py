"""Stage warm_start: the quick start's model from nothing, by supervised learning on the scripted teacher's words.

A few recorded runs of the real harness give the system prompt and the tools; a generator writes as many further
conversations of the same shape, after a check that it renders every recorded request token for token. Format and word
have a loss each, and the context grows in three phases: a plain run over whole conversations never learns to copy.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import pipeline
from pipeline.config import Config, UserError
from pipeline.stages.collect import recording_path, run_collect, scripted_teacher
from pipeline.stages.sft_rows import as_rendered
from pipeline.tasks.generate import WordTask, draw_task
from pipeline.tasks.teacher import LOOK, MOST_LOOKS, Message, Teacher, act, conversation, parse_task, text_of
from pipeline.training.tiny import ASSISTANT_TURN, TURN_END, TinyShape, build_model, save_checkpoint, train_tokenizer

log = logging.getLogger(__name__)
SHIPPED = Path(pipeline.__file__).parent / "assets" / "quickstart-model"
WRITE = "echo"  # the word to copy is the token that follows
CONTEXT, FORM, WORD, CHOICE = range(4)  # CHOICE: the first token of a turn


@dataclass(frozen=True)
class Phase:
    """One stretch of the curriculum. ``prefix``: smallest and largest number of prompt tokens kept, None for all."""

    steps: int
    batch: int
    learning_rate: float
    prefix: tuple[int, int] | None
    one_call: bool = False  # rows end after the first call, and every row has one


@dataclass(frozen=True)
class Curriculum:
    """The warm start, whole: what ``curriculum`` makes of the configuration, and what has one right value."""

    seed: int
    threads: int
    teacher: Teacher
    copy: Phase
    bridge: Phase
    full: Phase
    copied: float  # the first phase ends at this share of right words, over 10 batches
    stop_act: tuple[float, float]  # the last phase ends with these held-out probabilities of acting,
    stop_word: float  # with this one of the right word (held there: above it, words are not trained)
    stop_form: float  # and with this one of a run of MOST_LOOKS + 1 calls that is well-formed
    shape: TinyShape = field(default_factory=TinyShape)
    muon_ratio: float = 6.0  # learning rate of the matrices (Muon) over that of the rest (AdamW)
    drill: float = 0.25  # share of rows after the first phase that train the form of long runs and no choice
    probe_every: int = 5
    probe_tasks: int = 96


class NotLearnt(RuntimeError):
    """A phase of the warm start ended without what it is for."""


@dataclass(frozen=True)
class Recording:
    """One recorded model request, in Chat Completions form."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """Token ids after the shared prompt; ``kinds`` says what each is: CONTEXT (no target), FORM, WORD or CHOICE."""

    ids: list[int]
    kinds: list[int]


@dataclass(frozen=True)
class Probe:
    """Held-out probabilities: of acting at all, of the right word once acting, of an otherwise well-formed rollout."""

    act: float
    word: float
    form: float

    @property
    def expected_pass(self) -> float:
        return self.act * self.word * self.form

    def __str__(self) -> str:
        return f"acts {self.act:.2f}, right word {self.word:.2f}, well-formed {self.form:.2f}"


def read_recordings(path: Path) -> list[Recording]:
    """Read what stage collect wrote. Raises UserError if the file is missing or empty."""
    if not path.is_file():
        raise UserError(f"no recorded teacher runs at {path}: make them with `yoke collect`")
    rows = pq.read_table(path, columns=["messages", "tools"]).to_pylist()
    if not rows:
        raise UserError(f"{path} holds no recorded requests: run `yoke collect` again")
    return [Recording(json.loads(row["messages"]), json.loads(row["tools"])) for row in rows]


class Renderer:
    """Turns conversations into token ids behind one shared prompt (system message and tools)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, first: Recording) -> None:
        self.tokenizer = tokenizer
        self.tools = first.tools
        self.system = text_of(first.messages[0])
        self.prompt = self.text([{"role": "system", "content": self.system}])
        self.prompt_ids = self._encode(self.prompt)
        self._start = self._encode(ASSISTANT_TURN)
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)
        self._write = tokenizer.convert_tokens_to_ids(WRITE)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, messages: list[Message], generation: bool = False) -> str:
        """The chat template's text, as the engine renders it: flat contents, decoded tool arguments."""
        return str(
            self.tokenizer.apply_chat_template(
                [as_rendered(message) for message in messages],
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=generation,
            )
        )

    def example(self, task: WordTask, commands: tuple[str, ...], one_call: bool = False) -> Example:
        """One conversation, or its part up to the end of the first call, as ids with the kind of every token."""
        text = self.text(conversation(self.system, task, commands))
        ids = self._encode(text[len(self.prompt) :])
        kinds = self._kinds(ids)
        end = ids.index(self._end, kinds.index(WORD)) + 1 if one_call else len(ids)
        return Example(ids[:end], kinds[:end])

    def _kinds(self, ids: list[int]) -> list[int]:
        kinds = [CONTEXT] * len(ids)
        for at in range(len(ids)):
            if ids[at : at + len(self._start)] != self._start:
                continue
            stop = ids.index(self._end, at + len(self._start))
            for i in range(at + len(self._start), stop + 1):
                kinds[i] = WORD if ids[i - 1] == self._write else FORM
            kinds[at + len(self._start)] = CHOICE
        return kinds

    def check(self, recordings: list[Recording], teacher: Teacher) -> None:
        """Every recorded request must equal the generated one. Raises UserError with the first pair that differs."""
        for recording in recordings:
            task = parse_task(recording.messages)
            made = conversation(self.system, task, teacher.plan(task))[: len(recording.messages)]
            want, got = self.text(recording.messages, True), self.text(made, True)
            if want != got or recording.tools != self.tools:
                raise UserError(f"a generated request differs from the recorded one:\n{got[-400:]!r}\n{want[-400:]!r}")


def tokenizer_texts(first: Recording, seed: int, tasks: int = 3000) -> list[str]:
    """What the tokenizer is trained on: the harness's prompt, many tasks with their calls, a little shell and JSON."""
    rng = random.Random(seed)
    texts = [text_of(first.messages[0]), json.dumps(first.tools)] * 8
    for _ in range(tasks):
        task = draw_task(rng, "train")
        call = json.dumps({"name": "bash", "arguments": {"command": f"echo {task.answer} > answer.txt"}})
        look = json.dumps({"name": "bash", "arguments": {"command": LOOK}})
        texts.append(f"user\n{task.instruction}\nassistant\n{call}\ntool\n(no output)\n{look}\n{task.answer}\nDone.")
    return texts


def token_logprobs(
    model: Qwen3ForCausalLM, prefix: list[int], examples: list[Example]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of all target tokens behind ``prefix``, which is run once and shared with its gradient.

    Returns (logprobs [T], kinds [T], row of each token [T]) over the T targets of the batch.
    """
    length = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    kinds = torch.zeros(len(examples), length, dtype=torch.long)
    for i, example in enumerate(examples):
        ids[i, : len(example.ids)] = torch.tensor(example.ids)
        kinds[i, : len(example.kinds)] = torch.tensor(example.kinds)
    cache = model.model(torch.tensor([prefix]), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys = layer.keys.expand(len(examples), -1, -1, -1)
        layer.values = layer.values.expand(len(examples), -1, -1, -1)
    hidden = model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state[:, :-1]
    wanted = kinds[:, 1:] > CONTEXT
    logprobs = torch.log_softmax(model.lm_head(hidden[wanted]), -1)
    picked = logprobs.gather(-1, ids[:, 1:][wanted][:, None])[:, 0]
    return picked, kinds[:, 1:][wanted], wanted.nonzero()[:, 0]


class WarmStart:
    """The curriculum over one model."""

    def __init__(self, config: Curriculum, renderer: Renderer, model: Qwen3ForCausalLM) -> None:
        self.config = config
        self.renderer = renderer
        self.model = model
        self.rng = random.Random(f"sft/{config.seed}")
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        # Muon finds the copying circuit in a third of the steps that AdamW takes
        self.muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0)
        self.adam = torch.optim.AdamW(others, lr=0.0, weight_decay=0.0, betas=(0.9, 0.98))
        self.held_out = [draw_task(random.Random(f"probe/{i}"), "test") for i in range(config.probe_tasks)]
        self.started = time.monotonic()

    def run(self) -> Probe:
        """All three phases. Raises NotLearnt if copying is not learnt or the last phase misses its marks."""
        self._copy()
        for step in range(self.config.bridge.steps):
            self._step(self.config.bridge, 1.0, step)
        return self._full()

    def _copy(self) -> None:
        recent: list[float] = []
        for step in range(self.config.copy.steps):
            recent = [*recent[-9:], self._step(self.config.copy, min(1.0, (step + 1) / 20), step)]
            if len(recent) == 10 and sum(recent) / 10 > self.config.copied:
                log.info("copying is learnt after %d steps, %.0f s", step + 1, time.monotonic() - self.started)
                return
        raise NotLearnt(f"copying was not learnt in {self.config.copy.steps} steps (right words {recent[-1]:.2f})")

    def _full(self) -> Probe:
        phase = self.config.full
        probe = self.probe()
        for step in range(phase.steps):
            scale = min(1.0, (step + 1) / 10) * (1 - 0.8 * step / phase.steps)
            self._step(phase, scale, step, float(probe.word < self.config.stop_word))
            if step % self.config.probe_every == self.config.probe_every - 1:
                probe = self.probe()
                log.info("full prompt, step %d: %s, %.0f s", step + 1, probe, time.monotonic() - self.started)
                if self._done(probe):
                    return probe
        raise NotLearnt(f"the warm start missed its marks after {phase.steps} steps: {probe}")

    def _done(self, probe: Probe) -> bool:
        low, high = self.config.stop_act
        firm = probe.word >= self.config.stop_word and probe.form >= self.config.stop_form
        return firm and low <= probe.act <= high

    def _step(self, phase: Phase, scale: float, step: int, word_weight: float = 1.0) -> float:
        """One optimiser step; returns the share of right words."""
        for group in self.adam.param_groups:
            group["lr"] = phase.learning_rate * scale
        for group in self.muon.param_groups:
            group["lr"] = phase.learning_rate * scale * self.config.muon_ratio
        logprobs, kinds, _ = token_logprobs(self.model, self._prefix(phase), self._batch(phase))
        words, form = logprobs[kinds == WORD], logprobs[kinds != WORD]
        loss = -form.mean() - word_weight * words.mean()
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        right = float((words.detach().exp() > 0.5).float().mean())
        if step % 20 == 0:
            losses = -form.mean().item(), -words.mean().item()
            log.info("step %d: format %.4f, word %.3f, right %.2f", step, *losses, right)
        return right

    def _prefix(self, phase: Phase) -> list[int]:
        ids = self.renderer.prompt_ids
        return ids if phase.prefix is None else ids[-self.rng.randint(*phase.prefix) :]

    def _batch(self, phase: Phase) -> list[Example]:
        return [self._draw(phase) for _ in range(phase.batch)]

    def _draw(self, phase: Phase) -> Example:
        task = draw_task(self.rng, "train")
        if phase.one_call:
            return self.renderer.example(task, act(task, 0), one_call=True)
        if self.rng.random() >= self.config.drill:
            return self.renderer.example(task, self.config.teacher.plan(task))
        drill = self.renderer.example(task, act(task, self.rng.randint(1, MOST_LOOKS)))
        return Example(drill.ids, [CONTEXT if kind == CHOICE else kind for kind in drill.kinds])

    @torch.no_grad()
    def probe(self) -> Probe:
        """Teacher-forced probabilities of the longest held-out runs: of acting, the word, all but the choices.

        Whether to act, to look or to stop, the first token of a turn, is the policy's choice and no matter of form.
        """
        rows = [self.renderer.example(task, act(task, MOST_LOOKS)) for task in self.held_out]
        logprobs, kinds, owner = token_logprobs(self.model, self.renderer.prompt_ids, rows)
        first = torch.cat([torch.ones(1, dtype=torch.bool), owner[1:] != owner[:-1]])
        rest = kinds == FORM
        form = torch.zeros(len(rows)).index_add_(0, owner[rest], logprobs[rest])
        return Probe(
            act=float(logprobs[first].exp().mean()),
            word=float(logprobs[kinds == WORD].exp().mean()),
            form=float(form.exp().mean()),
        )


def run_warm_start(config: Config) -> int:
    """Make ``<run_dir>/model`` from the recording that `yoke collect` makes; neither is made again when it is there.

    Returns 1 when the model did not learn what it should. Raises UserError for a wrong setting.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    out = Path(config.run_dir).absolute() / "model"
    if config.collect.teacher_url:
        raise UserError("yoke warm_start learns from the scripted teacher only: collect.teacher_url must be null")
    if config.fresh:
        shutil.rmtree(out, ignore_errors=True)
    if not out.exists():
        run_collect(config)
        try:
            _make(config, out)
        except NotLearnt as error:
            print(f"yoke: {error}; another seed=… may do better", file=sys.stderr)
            return 1
    log.info("the model is in %s; to ship it: cp %s/* %s/", out, out, SHIPPED)
    return 0


def _make(config: Config, out: Path) -> None:
    """Train and publish the checkpoint by one rename."""
    draft = out.with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    warm_start(curriculum(config), read_recordings(recording_path(config, config.mix.harnesses[0])), draft)
    draft.rename(out)


def curriculum(config: Config) -> Curriculum:
    """The warm start that a configuration asks for."""
    knobs = config.warm_start
    low, high = knobs.stop_act
    return Curriculum(
        seed=config.seed,
        threads=knobs.threads,
        teacher=scripted_teacher(config),
        copy=Phase(knobs.copy_steps, batch=64, learning_rate=3e-3, prefix=(4, 32), one_call=True),
        bridge=Phase(knobs.bridge_steps, batch=32, learning_rate=1.5e-3, prefix=(32, 400)),
        full=Phase(knobs.full_steps, batch=24, learning_rate=1.0e-3, prefix=None),
        copied=knobs.copied,
        stop_act=(low, high),
        stop_word=knobs.stop_word,
        stop_form=knobs.stop_form,
    )


def warm_start(config: Curriculum, recordings: list[Recording], out: Path) -> Probe:
    """Make the tokenizer and the model, train, check and write the checkpoint to ``out``."""
    torch.set_num_threads(config.threads)
    tokenizer = train_tokenizer(tokenizer_texts(recordings[0], config.seed), config.shape.vocab)
    renderer = Renderer(tokenizer, recordings[0])
    renderer.check(recordings, config.teacher)
    model = build_model(tokenizer, config.shape, config.seed)
    log.info("prompt %d tokens, %d recorded requests match", len(renderer.prompt_ids), len(recordings))
    trainer = WarmStart(config, renderer, model)
    probe = trainer.run()
    save_checkpoint(model, tokenizer, out)
    log.info("wrote %s: %s, expected pass rate %.2f", out, probe, probe.expected_pass)
    return probe
