"""A network that is evaluated with its own weights or with others, and what of it is left afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.evaluation.forward import evaluating
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import Losses, TrainStep, accumulate


def network() -> nn.Module:
    """Two layers and a batch norm, whose weights are no round numbers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that it holds."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def others_of(model: nn.Module) -> Weights:
    """Weights and statistics of the same shapes and other values."""
    return Weights({name: tensor * 3 + 1 for name, tensor in tensors_of(model).items()})


def test_within_it_the_network_has_the_given_weights_and_is_in_evaluation_mode():
    model, reference = network(), network()
    given = others_of(model)
    reference.load_state_dict(given.tensors)
    x_NC = torch.randn(4, 5)
    with evaluating(model, given):
        found = model(x_NC)
    assert torch.equal(found, reference.eval()(x_NC))
    assert not found.requires_grad


def test_other_weights_leave_those_of_the_network_bit_for_bit():
    model = network()
    before, addresses = tensors_of(model), [tensor.data_ptr() for tensor in model.state_dict().values()]
    with evaluating(model, others_of(model)):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
    assert model.training


def test_other_weights_leave_those_of_the_network_when_evaluation_fails():
    model = network()
    before = tensors_of(model)
    with pytest.raises(ZeroDivisionError), evaluating(model, others_of(model)):
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


def test_given_weights_are_not_changed():
    model = network()
    given = others_of(model)
    kept = {name: tensor.clone() for name, tensor in given.tensors.items()}
    with evaluating(model, given):
        pass
    assert all(torch.equal(tensor, kept[name]) for name, tensor in given.tensors.items())


def test_updates_of_the_networks_own_weights_stay():
    model = network()
    own = Weights(dict(model.named_parameters()))
    with evaluating(model, own):
        next(model.parameters()).fill_(2.0)
    assert bool((next(model.parameters()) == 2.0).all())


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_weights_of_another_network_are_an_error(change):
    model = network()
    given = others_of(model).tensors
    if change == "missing":
        del given["0.bias"]
    else:
        given["3.bias"] = torch.zeros(2)
    with (
        pytest.raises(KeyError, match=r"0\.bias" if change == "missing" else r"3\.bias"),
        evaluating(model, Weights(given)),
    ):
        pass


def test_an_evaluation_does_not_change_the_training():
    """The optimizer has moved the parameters into its flat buffers; momentum and masters are its own."""
    found = []
    for evaluated in (False, True):
        model = nn.Linear(5, 2).requires_grad_()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.3)
        layout = Layout()
        groups = [ParameterGroup(dict(model.named_parameters()))]
        optimizer = Optimizer(groups, SGD(0.9), lambda step: torch.tensor(0.1), layout, grad_divisor=1)

        def loss(batch: Batch, model: nn.Module = model) -> Losses:
            return Losses(model(batch.tensors["x"]).square().mean(), {})

        step = TrainStep(accumulate(loss), [optimizer], layout)
        for number in range(3):
            step([Batch({"x": torch.full((4, 5), 1.0 + number)}, 4)])
            if evaluated:
                with evaluating(model, Weights({name: tensor * 7 for name, tensor in model.state_dict().items()})):
                    model(torch.ones(4, 5))
        found.append(tensors_of(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
