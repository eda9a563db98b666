"""The network against Hugging Face's Llama with the scaling of Llama 3.1: loss and all gradients; its counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.llama31_8b.config import Facts
from common.language.architecture import TokenPositions
from common.language.head import UntiedHead
from common.language.network import Decoder
from common.mlperf.fixed import fixed_facts
from common.ops import cross_entropy, rope
from tests.benchmarks.llama31_8b.small_llama import decoder, facts, hugging_face, rows, theirs_of
from tests.generators import generator_of

CROSS_ENTROPY = cross_entropy.CROSS_ENTROPY.reference


class Network:
    """The decoder by autograd, with its head."""

    def __init__(self, ours: Decoder, chunk: int = 16) -> None:
        self._decoder, self._head = ours, UntiedHead(ours.head.weight, CROSS_ENTROPY, chunk)

    def loss(self, tokens_BR: Tensor) -> Tensor:
        """The mean of all tokens."""
        return self._head.summed_loss(*self._hidden(tokens_BR), 1.0 / tokens_BR[:, 1:].numel())

    @torch.no_grad()
    def losses(self, tokens_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (T,), and which are scored."""
        hidden_TE, labels_T = self._hidden(tokens_BR)
        return self._head.losses(hidden_TE, labels_T), labels_T >= 0

    def _hidden(self, tokens_BR: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = len(tokens_BR), tokens_BR.shape[1] - 1
        inputs_BS = tokens_BR[:, :-1].clamp(min=0)
        return self._decoder.hidden_states(inputs_BS, TokenPositions.whole(rows, length)), tokens_BR[:, 1:].flatten()


def test_loss_and_all_gradients_are_those_of_hugging_face():
    ours, given = decoder(), rows()
    theirs = hugging_face(ours)
    logits = theirs(input_ids=given[:, :-1].long()).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten().long())
    expected.backward()
    loss = Network(ours).loss(given)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0.0)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    wanted = dict(theirs.named_parameters())
    found = theirs_of(ours, gradients)
    assert {name for name, _ in found} == wanted.keys()
    for name, gradient in found:  # their norms and frequencies are in fp32 throughout
        difference = (gradient - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert difference < 2e-6, name


def test_the_rotation_is_scaled_as_hugging_face_scales_it():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = fixed_facts(Facts, "llama31_8b")
    config = LlamaConfig(
        hidden_size=shape.hidden, num_attention_heads=shape.heads, head_dim=shape.head_size,
        max_position_embeddings=131_072, rope_theta=shape.rope_base,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1.0
    cos, sin = shape.rope_tables(torch.arange(8192))
    angles = torch.arange(8192).double().unsqueeze(1) * frequencies.double()
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0.0, atol=2e-3)  # their frequencies are fp32
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0.0, atol=2e-3)


def test_dimensions_by_how_often_they_turn():
    """Hand-worked: over 64 tokens one dimension turns 8 times, one 2.5 times, one half a time."""
    scaling = rope.RopeScaling(factor=8.0, slow_turns=1.0, fast_turns=4.0, original_context=64)
    turns = torch.tensor([8.0, 2.5, 0.5], dtype=torch.float64)
    found = scaling.scaled(turns * 2 * math.pi / 64) / (turns * 2 * math.pi / 64)
    assert found.tolist() == pytest.approx([1.0, 0.5 + 0.5 / 8, 1 / 8])


def test_the_real_network_has_as_many_weights_as_the_rules_say():
    shape = fixed_facts(Facts, "llama31_8b")
    counted = sum(parameter.numel() for parameter in Decoder(shape, "meta").parameters())
    assert counted == shape.parameters == 8_030_261_248


def test_weights_on_the_residual_stream_are_drawn_smaller():
    shape = facts(hidden=256, layers=8, feed_forward=512, initializer_range=0.02, vocabulary=512)
    ours = Decoder(shape)
    ours.initialise(generator_of)
    for name, parameter in ours.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1.0).all()
            continue
        wanted = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02  # the root of 2 * 8
        assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.05), name


def test_the_first_loss_is_that_of_the_published_initialisation():
    """ln V plus half the variance of a logit: 256 times 0.02 squared, of normalised vectors."""
    shape = facts(hidden=256, initializer_range=0.02, vocabulary=4096)
    ours = Decoder(shape)
    ours.initialise(generator_of)
    found = float(Network(ours, 64).losses(rows(8, shape))[0].mean())
    assert found == pytest.approx(math.log(4096) + 256 * 0.02**2 / 2, abs=0.02)


@pytest.mark.parametrize("chunk", [7, 80, 1000])
def test_the_chunks_of_the_head_change_nothing(chunk):
    one, other, given = decoder(), decoder(), rows()
    whole, parts = Network(one, 80), Network(other, chunk)
    whole.loss(given).backward()
    parts.loss(given).backward()
    for (name, expected), found in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-13, msg=name)
    torch.testing.assert_close(parts.losses(given), whole.losses(given))


def test_padding_is_not_scored_and_gives_no_gradient():
    ours, given = decoder(), rows()
    given[1, 20:] = -1
    losses, scored = Network(ours).losses(given)
    assert scored.view(2, -1).sum(1).tolist() == [40, 19]
    assert not losses[~scored].any()
    Network(ours).loss(given).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in ours.parameters())


def test_a_factor_on_the_loss_is_one_on_the_gradients():
    one, other, given = decoder(), decoder(), rows()
    (1024.0 * Network(one).loss(given)).backward()
    Network(other).loss(given).backward()
    for (name, scaled), plain in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(scaled.grad, 1024.0 * plain.grad, rtol=1e-10, atol=0.0, msg=name)
