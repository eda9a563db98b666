"""Behaviour that the dense networks of DLRM and DLRM-DCNv2 share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.dlrm.model import DlrmNetwork
from benchmarks.dlrm_dcnv2.model import DlrmDcnv2Architecture, DlrmDcnv2Network
from common.errors import ConfigError, UnsupportedImplementation
from common.recommendation.click_network import ClickArchitecture, ClickNetwork, loss
from tests.capturable import Capturable

CPU = torch.device("cpu")
SIZES = (13, 8, (16, 8), (12, 8, 1))
NETWORKS: dict[str, tuple[type, Any]] = {
    "dlrm": (DlrmNetwork, ClickArchitecture(*SIZES)),
    "dlrm_dcnv2": (DlrmDcnv2Network, DlrmDcnv2Architecture(*SIZES, 2, 4)),
}
TABLES, WIDTH = 3, 8
each = pytest.mark.parametrize("name", NETWORKS)


def small(name: str, dtype: torch.dtype, seed: int = 0, **implementations: str) -> Any:
    """Return a small network with weights from ``seed``."""
    network, architecture = NETWORKS[name]
    return network(architecture, TABLES, implementations, CPU, dtype, torch.Generator().manual_seed(seed))


def synthetic(samples: int, tables: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, vectors of the tables, and labels."""
    random = torch.Generator().manual_seed(5)
    dense = torch.randn(samples, 13, generator=random).to(dtype)
    vectors = 0.1 * torch.randn(samples, tables * width, generator=random)
    return dense, vectors.to(dtype), torch.randint(2, (samples,), generator=random).float()


def loss_and_gradients(model: ClickNetwork, dense: Tensor, vectors: Tensor, label: Tensor) -> list[Tensor]:
    """Return the output of the bottom MLP, the loss, and the gradients of all parameters."""
    bottom = model.bottom(dense)
    mean = loss(model.head(torch.cat([bottom, vectors], 1)), label)
    return [bottom, mean, *torch.autograd.grad(mean, list(model.parameters()))]


@each
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.004), (torch.bfloat16, 0.03)], ids=str)
def test_half_precision_only_rounds(name, dtype, bound):
    exact, half = small(name, torch.float64), small(name, dtype)
    dense, vectors, _ = synthetic(200, TABLES, WIDTH, torch.float64)
    bottom = half.bottom(dense.float())
    assert bottom.dtype == dtype
    logit = half.head(torch.cat([bottom, vectors.to(dtype)], 1))
    expected = exact.head(torch.cat([exact.bottom(dense), vectors], 1))
    assert logit.dtype == torch.float32
    assert (logit - expected).norm() < bound * expected.norm()


@each
def test_a_micro_batch_is_capturable(name):
    model = small(name, torch.bfloat16)
    dense, vectors, label = synthetic(11, TABLES, WIDTH, torch.float32)
    with Capturable():
        x0 = torch.cat([model.bottom(dense), vectors.bfloat16()], 1)
        loss(model.head(x0), label).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@each
def test_weights_follow_from_the_generator(name):
    one, same, other = (dict(small(name, torch.float64, seed).named_parameters()) for seed in (4, 4, 5))
    for parameter, value in one.items():
        assert torch.equal(value, same[parameter])
        assert torch.equal(value, other[parameter]) == parameter.startswith("crossnet.bias")  # zeros


@each
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bottom_mlp": (16, 9)}, r"bottom_mlp=\[16, 9\]: its last layer must be width=8"),
        ({"bottom_mlp": ()}, r"bottom_mlp=\[\]"),
        ({"top_mlp": (12, 2)}, r"top_mlp=\[12, 2\]: its last layer must be 1"),
        ({"top_mlp": ()}, r"top_mlp=\[\]: its last layer must be 1"),
    ],
)
def test_layer_sizes_that_contradict_the_width_are_refused(name, change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(NETWORKS[name][1], **change)


@pytest.mark.parametrize(
    ("name", "option"),
    [("dlrm", "linear_relu"), ("dlrm", "dot_interaction"), ("dlrm_dcnv2", "cross_network")],
)
def test_an_unknown_implementation_is_named_with_its_option(name, option):
    message = f"model.implementations.{option}=fast: .* no implementation 'fast'"
    with pytest.raises(UnsupportedImplementation, match=message):
        small(name, torch.float32, **{option: "fast"})
