"""Stacks of linear layers against PyTorch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.nn.mlp import MLP, padded_columns


def stack(*sizes: int, logit: bool, dtype: torch.dtype = torch.float64) -> MLP:
    """With random weights."""
    generator = torch.Generator().manual_seed(len(sizes))
    found = MLP(sizes[0], sizes[1:], logit)
    found.draw(lambda layer: [parameter.normal_(generator=generator) for parameter in layer.parameters()])
    return found.to(dtype)


def peer(mine: MLP, logit: bool) -> nn.Sequential:
    """PyTorch's layers with the same weights."""
    layers: list[nn.Module] = []
    for layer in mine.linears():
        layers += [nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64), nn.ReLU()]
        layers[-2].load_state_dict(layer.state_dict())
    return nn.Sequential(*([*layers[:-1], nn.Flatten(0)] if logit else layers))


def made_up(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("logit", [True, False])
def test_results_and_gradients_are_those_of_pytorchs_layers(logit):
    mine = stack(5, 7, 6, 1 if logit else 2, logit=logit)
    theirs, x = peer(mine, logit), made_up(9, 5)
    found, expected = mine(x), theirs(x)
    torch.testing.assert_close(found, expected)
    assert (found < 0).any() == logit
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_columns_for_alignment_count_as_zeros_and_their_gradient_is_zero():
    mine = stack(5, 4, 3, logit=False)
    x = made_up(9, 8).requires_grad_()
    torch.testing.assert_close(mine(x), mine(x[:, :5]))
    (gradient,) = torch.autograd.grad(mine(x).sum(), x)
    assert gradient[:, :5].any()
    assert not gradient[:, 5:].any()


def test_columns_are_a_multiple_of_eight():
    assert [padded_columns(columns) for columns in (1, 8, 13, 479, 3456)] == [8, 8, 16, 480, 3456]


def test_logits_of_a_half_network_are_in_fp32():
    mine = stack(8, 4, 1, logit=True, dtype=torch.bfloat16)
    x = made_up(300, 8).bfloat16()
    (hidden, last), logit = mine.linears(), mine(x)
    assert logit.dtype == torch.float32
    after = torch.relu(nn.functional.linear(x, hidden.weight, hidden.bias)).double()
    torch.testing.assert_close(
        logit.double(), nn.functional.linear(after, last.weight.double(), last.bias.double())[:, 0]
    )
    assert len(logit.unique()) > len(logit.bfloat16().unique())


def test_multiply_adds_and_a_global_generator_that_stays():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert MLP(13, (512, 256, 128)).multiply_adds == 13 * 512 + 512 * 256 + 256 * 128
    assert torch.equal(torch.get_rng_state(), before)


def test_a_logit_of_several_outputs_is_refused():
    with pytest.raises(ValueError, match="a logit is one output, not 2"):
        MLP(13, (8, 2), logit=True)
