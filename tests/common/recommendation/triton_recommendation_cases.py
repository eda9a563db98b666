"""Test special inputs, refusals and selection of the Triton kernels for recommendation.

The cases of the operations test the results of the kernels. tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm_dcnv2.ops import cross_network
from common.errors import UnsupportedImplementation
from common.nn.mlp import MLP
from common.ops import embedding_bags, logit
from common.ops.cases import Draw
from common.ops.catalogue import cases_of
from common.ops.embedding_bags import PeerVectors, SgdRows, reference
from common.ops.embedding_bags.cases import bags_of
from common.ops.operation import AUTO, Operation, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

CPU = torch.device("cpu")
BAGS = bags_of(((9, 2), (30, 3), (4, 3)), CPU)
WIDTH, SAMPLES = 12, 16
EMBEDDINGS = embedding_bags.EMBEDDING_BAGS.function("triton")


def keys() -> Tensor:
    return torch.arange(SAMPLES * 8).view(SAMPLES, 8).remainder(4).to(torch.int32)


# Embedding bags


def test_keys_that_fill_the_last_block_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{EMBEDDINGS.sort.__module__}.BLOCK", 64)
    found, expected = EMBEDDINGS.sort(keys(), BAGS), reference.sort_reference(keys(), BAGS)
    assert found.ours == SAMPLES * 8
    assert torch.equal(found.row_M, expected.row_M)
    assert torch.equal(found.source_M, expected.source_M)


def test_embeddings_that_do_not_fit_are_refused() -> None:
    rows, vectors = torch.ones(BAGS.rows, WIDTH), torch.zeros(SAMPLES, len(BAGS), WIDTH)
    for bad in (rows[1:], torch.ones(WIDTH, BAGS.rows).T):
        with pytest.raises(ValueError, match="rows are contiguous"):
            EMBEDDINGS.pool(bad, keys(), BAGS, vectors)
    with pytest.raises(ValueError, match="sum in fp32"):
        EMBEDDINGS.update(EMBEDDINGS.sort(keys(), BAGS), vectors.double(), rows, None, SgdRows(), *torch.ones(3))


RANKS, OWN = 3, 5  # a program has 4 samples, so that some programs write to two ranks


def peer_vectors(positions: tuple[tuple[int, int], ...], dtype: torch.dtype) -> PeerVectors:
    """Return buffers of 30 vectors of which all elements are 7."""
    buffers = tuple(torch.full((30, WIDTH), 7.0, dtype=dtype) for _ in range(RANKS))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return PeerVectors(buffers, addresses, OWN, positions, torch.tensor(positions, dtype=torch.int32))


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_go_to_their_rows_in_the_memory_of_the_rank_that_has_the_sample(name: str, dtype: torch.dtype) -> None:
    positions = ((1, 4), (3, 4), (21, 2))
    found = peer_vectors(positions, dtype)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-8, 8, (BAGS.rows, WIDTH), generator=generator) / 4.0
    ids = torch.randint(-2, 40, (RANKS * OWN, 8), generator=generator, dtype=torch.int32)
    expected = torch.full((RANKS, 30, WIDTH), 7.0)
    for sample in range(RANKS * OWN):
        for bag, (first, stride) in zip(BAGS.bags, positions, strict=True):
            keys_of_bag = ids[sample, bag.column : bag.column + bag.hotness].tolist()
            total = sum((rows[bag.base + k] for k in keys_of_bag if 0 <= k < bag.rows), torch.zeros(WIDTH))
            expected[sample // OWN, first + sample % OWN * stride] = total
    embedding_bags.EMBEDDING_BAGS.function(name).pool(rows, ids, BAGS, found)
    assert torch.equal(torch.stack(found.buffers).float(), expected)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_memory_for_other_bags_or_samples_is_refused(name: str) -> None:
    pool = embedding_bags.EMBEDDING_BAGS.function(name).pool
    for positions, samples in ((((0, 1),), RANKS * OWN), (((0, 1),) * len(BAGS), SAMPLES)):
        with pytest.raises(ValueError, match=f"vectors of {samples} samples and 3 bags are not"):
            pool(torch.ones(BAGS.rows, WIDTH), keys()[:samples], BAGS, peer_vectors(positions, torch.float32))


# Layers


def test_all_but_the_logit_of_a_stack_run_by_the_fused_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.ops.linear_relu import triton

    launches, given = [], torch.ones(9, 13)
    monkeypatch.setattr(
        triton,
        "relu_gradient",
        lambda *args, pass_=triton.relu_gradient, **rest: launches.append(1) or pass_(*args, **rest),
    )
    stack = MLP(13, (8, 4, 1), logit=True)
    stack.draw(lambda layer: [parameter.fill_(0.1) for parameter in layer.parameters()])
    stack.choose(AUTO, torch.float32)
    with Capturable():
        stack(given).sum().backward()
    assert len(launches) == 2


def test_logits_are_capturable_with_a_gradient_of_a_mean() -> None:
    """The gradient of a mean is one element, expanded."""
    given = [torch.ones(shape).requires_grad_() for shape in ((5, 8), (1, 8), (1,))]
    with Capturable():
        gradients = torch.autograd.grad(logit.LOGIT.function("fused")(*given).mean(), given)
    assert torch.allclose(gradients[1], torch.ones(1, 8))
    assert torch.allclose(gradients[2], torch.ones(1))


def test_rows_that_do_not_fit_are_left_to_the_reference() -> None:
    request = OperationRequest(CPU, torch.bfloat16, {"inputs": 2049})
    assert logit.LOGIT.select(AUTO, request).name == "reference"
    with pytest.raises(UnsupportedImplementation, match="inputs is at most 2048, not 2049"):
        logit.LOGIT.select("fused", request)


@pytest.mark.parametrize(
    ("operation", "name"), [(dot_interaction.DOT_INTERACTION, "triton"), (cross_network.CROSS_NETWORK, "fused")]
)
def test_interactions_are_capturable(operation: Operation, name: str) -> None:
    case = cases_of(operation)[0]
    passes = case.passes(operation.function(name), Draw(CPU, torch.float32), **case.tests[0])
    with Capturable():
        for each in passes:
            each.run()


def test_cross_networks_take_no_samples_and_refuse_other_memory() -> None:
    function = cross_network.CROSS_NETWORK.function("fused")
    parameters = [[torch.ones(shape)] for shape in ((16, 32), (32, 16), (32,))]
    assert function(torch.zeros(0, 32), *parameters).shape == (0, 32)
    with pytest.raises(ValueError, match="x0 must be contiguous"):
        function(torch.ones(32, 16).t(), *parameters)
