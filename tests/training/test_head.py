"""The head and its softmax in chunks: values, gradients and memory against the plain computation, also under ZeRO-3."""

from __future__ import annotations

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from training_helpers import partition_all, qwen3, random_groups

from bench.memory import LiveBytes, drop_gradients
from pipeline.config import AlgorithmConfig, TrainingConfig, UserError
from pipeline.training import deepspeed_engine, distributed, head
from pipeline.training.batch import RowBatch, collate, make_minibatch
from pipeline.training.deepspeed_engine import make_engine
from pipeline.training.forward import PolicyModel
from pipeline.training.head import Head, chunk_tokens, replace_head

EXACT = {"rtol": 1e-9, "atol": 1e-12}
TEMPERATURE = 0.7


def made_head(width: int, vocabulary: int, bias: bool) -> Head:
    torch.manual_seed(0)
    return Head(width, vocabulary, bias, dtype=torch.float64)


def hidden_and_targets(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(0, vocabulary, (tokens,))


def plain(own: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from all logits at once."""
    scores = (own(hidden) / TEMPERATURE).log_softmax(-1)
    return scores.gather(-1, targets[:, None])[:, 0], torch.distributions.Categorical(logits=scores).entropy()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 3, 11, 100])
def test_chunks_equal_the_plain_computation(monkeypatch: pytest.MonkeyPatch, size: int, bias: bool) -> None:
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: size)
    own = made_head(6, 13, bias)
    hidden, targets = hidden_and_targets(11, 6, 13)
    mine, other = own(hidden, targets, TEMPERATURE), plain(own, hidden, targets)
    assert not mine[1].requires_grad
    torch.testing.assert_close(mine, tuple(part.detach() for part in other), **EXACT, check_dtype=True)
    learnt = [hidden, *own.parameters()]
    factor = torch.randn(11, dtype=torch.float64)
    for left, right in zip(*(torch.autograd.grad(factor @ part[0], learnt) for part in (mine, other)), strict=True):
        torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_values(bias: bool) -> None:
    own = made_head(4, 5, bias)
    hidden, targets = hidden_and_targets(7, 4, 5)

    def logprobs(hidden: Tensor, *parameters: Tensor) -> Tensor:
        return head._Logprobs.apply(hidden, *(*parameters, None)[:2], targets, TEMPERATURE, 3)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, *own.parameters()))


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    own = made_head(6, 13, True)
    hidden, targets = hidden_and_targets(11, 6, 13)
    wanted = torch.autograd.grad(plain(own, hidden, targets)[0].sum(), hidden)[0]
    own.requires_grad_(False)
    own(hidden, targets, TEMPERATURE)[0].sum().backward()
    assert own.weight.grad is None and own.bias.grad is None
    torch.testing.assert_close(hidden.grad, wanted, **EXACT)


def test_half_precision_adds_its_chunks_up_in_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand chunks that each add one to the same element: bfloat16 alone would stop at 256."""
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: 1)
    own = Head(1, 2, False, dtype=torch.bfloat16)
    nn.init.zeros_(own.weight)
    logprobs, entropy = own(torch.ones(1000, 1, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long))
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert own.weight.grad.tolist() == [[500.0], [-500.0]] and own.weight.grad.dtype == torch.bfloat16


def peak_of_a_step(tokens: int, width: int, vocabulary: int) -> int:
    own = Head(width, vocabulary, False)
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
    drop_gradients(own)
    with LiveBytes() as memory:
        own(hidden, targets, TEMPERATURE)[0].sum().backward()
    return memory.peak


def test_memory_grows_by_the_hidden_states_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """4, then 256 chunks: neither their logits nor their parts of the weight's gradient pile up."""
    width, vocabulary, size = 32, 1000, 16
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: size)
    few, many = peak_of_a_step(64, width, vocabulary), peak_of_a_step(4096, width, vocabulary)
    assert many - few < (4096 - 64) * 3 * width * 4
    weight, logits = width * vocabulary * 4, size * vocabulary * 4
    assert 2 * weight < few < 2 * weight + 5 * logits, "the weight's gradient, what a chunk adds, some logits"


@pytest.mark.slow
def test_a_long_row_over_a_real_vocabulary_fits() -> None:
    """All logits of 131,072 tokens over 65,536 words would be 34 GB. Sizes only: nothing is computed on this device."""
    tokens, width, vocabulary = 131_072, 64, 65_536
    with torch.device("meta"):
        peak = peak_of_a_step(tokens, width, vocabulary)
    assert chunk_tokens(vocabulary) * vocabulary * 4 < 100e6 < peak < 600e6


def test_a_tied_head_stays_tied_and_keeps_its_name() -> None:
    model = qwen3()
    names = list(model.state_dict())
    replace_head(model)
    replace_head(model)
    assert list(model.state_dict()) == names
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert isinstance(model.lm_head, Head)
    model(torch.tensor([[1, 2]])).logits.sum().backward()


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = qwen3()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="its head is a Sequential"):
        replace_head(model)


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_parameters_are_gathered_for_the_chunks(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """ZeRO-3 against no DeepSpeed at all. (Over several ranks: test_ranks, in chunks too.)"""
    monkeypatch.setattr(deepspeed_engine, "deepspeed_config", deepspeed_engine.deepspeed_config)  # put back afterwards
    partition_all()
    distributed.initialise()
    micro = collate(RowBatch(make_minibatch(random_groups(0), AlgorithmConfig(), None).rows, True, 0))
    plain, sharded = (policy(tied) for _ in range(2))
    (plain(micro)[0] * micro.weights).sum().backward()
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: 7)
    assert len(micro.targets) > 3 * 7
    engine = make_engine(sharded, TrainingConfig(zero_stage=3))
    assert not sum(parameter.numel() for parameter in sharded.parameters())
    engine.backward((engine(micro)[0] * micro.weights).sum())
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        gradient, wanted = safe_get_full_grad(parameter), expected[name].grad
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm(), name


def policy(tied: bool) -> PolicyModel:
    model = qwen3()
    if not tied:
        model.lm_head.weight = nn.Parameter(0.7 * model.lm_head.weight.detach())
    return PolicyModel(model, TEMPERATURE)
