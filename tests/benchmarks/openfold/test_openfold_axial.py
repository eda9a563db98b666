"""Test dynamic axial parallelism of degree 2 and 4 against one rank: transfers, and the blocks of the trunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_folds import CPU, EXTRA, MAIN, SIZES, SPLIT, TEMPLATE, WEIGHTS, chooser, generator, randomised
from torch import Tensor, nn

from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.evoformer import Stack, TemplateBlock
from benchmarks.openfold.features import FeatureSizes, random_features
from benchmarks.openfold.labels import labels_of
from benchmarks.openfold.layers import Masks
from benchmarks.openfold.losses import all_losses
from benchmarks.openfold.model import AlphaFold
from common.distributed.layout import Layout
from tests.gloo_ranks import on_ranks

RANKS = 4
DEGREES = (2, 4)
SHAPE = (2, 8, 4, 3)
TRUNKS = ("main", "extra", "template")
FEATURES = FeatureSizes(crop_size=8, msa_clusters=6, extra_msa=8, templates=2, recycling_iters=1)


def whole(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Return a random tensor, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, dim: int, rank: int, world: int) -> Tensor:
    """Return a rank's part of a tensor."""
    return x.chunk(world, dim)[rank]


def gradient_of(result: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the sum of ``weight * result``."""
    (gradient,) = torch.autograd.grad((result * weight).sum(), x)
    return gradient


def trunk(kind: str, split: AxialSplit, recompute: bool) -> nn.Module:
    """Return blocks of the main stack, of the one of extra sequences, or of the templates, in float64."""
    torch.manual_seed(0)  # of the layers' first weights
    if kind == "template":
        return randomised(TemplateBlock(TEMPLATE, chooser(), split))
    sizes, blocks = (MAIN, 2) if kind == "main" else (EXTRA, 1)
    return randomised(Stack(sizes, blocks, kind == "extra", chooser(), split, recompute=recompute))


def passed_through(kind: str, split: AxialSplit, recompute: bool = False) -> dict[str, Tensor]:
    """Return the results of a trunk with dropout, and all gradients, after the sums that the optimizer would make."""
    sequences, residues = 8, 8
    sizes = TEMPLATE if kind == "template" else MAIN if kind == "main" else EXTRA
    z = whole(1, (2, residues, residues, sizes.pair)).requires_grad_()
    inputs = [z]
    masks = [(torch.rand(2, residues, residues, generator=generator(5)) > 0.2).double()]
    if kind != "template":
        inputs = [whole(2, (2, sequences, residues, sizes.msa)).requires_grad_(), z]
        masks = [(torch.rand(2, sequences, residues, generator=generator(6)) > 0.2).double(), *masks]
    blocks = trunk(kind, split, recompute)
    dropout = Masks(torch.tensor(77), 40, True)
    outputs = [split.gather(each, 1) for each in blocks(*(split.shard(each, 1) for each in inputs), *masks, dropout)]
    sum((each * whole(7 + number, each.shape)).sum() for number, each in enumerate(outputs)).backward()
    found = {f"output {number}": each.detach() for number, each in enumerate(outputs)}
    found |= {f"gradient {number}": each.grad for number, each in enumerate(inputs)}
    for name, parameter in blocks.named_parameters():
        if split.group is not None:
            dist.all_reduce(parameter.grad, group=split.group)
        found[name] = parameter.grad
    return found


def trained(split: AxialSplit) -> dict[str, Tensor]:
    """Return the loss of the whole network, and all gradients as the optimizer sums or averages them."""
    made = AlphaFold(SIZES, chooser(), split)
    made.initialise(generator())
    made = randomised(made).place(CPU, torch.float64)
    tensors = random_features(FEATURES, 1, 2, FEATURES.crop_size, generator(3))
    labels = labels_of(tensors, made.tables)
    loss, _ = all_losses(made(tensors), labels, tensors, WEIGHTS, FEATURES.crop_size)
    loss.backward()
    partial = {id(parameter) for part in made.sharded for parameter in part.parameters()}
    found = {"loss": loss.detach()}
    for name, parameter in made.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if split.group is not None:
            dist.all_reduce(gradient, group=split.group)
        found[name] = gradient if id(parameter) in partial else gradient / split.ranks
    return found


def run_rank(rank: int, world: int, _: str) -> dict[int, dict[str, Any]]:
    """Return what a rank finds at every degree."""
    found = {}
    for degree in DEGREES:
        split = AxialSplit.from_layout(Layout({"dp": world // degree, "cp": degree}, rank))
        found[degree] = transfers(split) | {kind: passed_through(kind, split, kind == "main") for kind in TRUNKS}
        found[degree]["network"] = trained(split)
    return found


def transfers(split: AxialSplit) -> dict[str, Any]:
    """Return results and gradients of every transfer on one rank."""
    rank, world = split.index, split.ranks
    found: dict[str, Any] = {"offset": split.offset(8)}
    for dim in (1, 2):
        own = part(whole(1), dim, rank, world).clone().requires_grad_()
        for name, gather in (("gather", split.gather), ("gather_summed", split.gather_summed)):
            y = gather(own, dim)
            weight = whole(2 if name == "gather" else 3 + rank)
            found[f"{name} {dim}"] = y.detach(), gradient_of(y, own, weight)
        x = whole(1).requires_grad_()
        y = split.shard(x, dim)
        found[f"shard {dim}"] = y.detach(), gradient_of(y, x, part(whole(2), dim, rank, world))
        other = 3 - dim
        y = split.transpose(own, dim, other)
        found[f"transpose {dim}"] = y.detach(), gradient_of(y, own, part(whole(2), other, rank, world))
    own = part(whole(1), 1, rank, world).clone().requires_grad_()
    pending = split.start_gather(own, 1, summed=True), split.start_transpose(own, 1, 2)
    between = own * 2.0
    gathered, transposed = (each.wait() for each in pending)
    y = gathered.sum() + (transposed * part(whole(2), 2, rank, world)).sum() + between.sum()
    found["overlapped"] = torch.autograd.grad(y, own)[0]
    with torch.no_grad():
        found["contiguous"] = all(
            each.is_contiguous() for each in (split.gather(own, 2), split.transpose(own, 1, 2), split.shard(own, 2))
        )
    for dim, name in ((0, "shard"), (3, "transpose")):
        with pytest.raises(ValueError, match="3 positions cannot be sharded evenly"):
            split.shard(whole(1, (3, 4)), 0) if name == "shard" else split.transpose(own, 1, dim)
    return found


@pytest.fixture(scope="module")
def of_all_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """Return the results of each of four ranks, by degree."""
    return on_ranks(run_rank, RANKS, tmp_path_factory.mktemp("axial"))


@pytest.fixture(params=DEGREES)
def found(request: pytest.FixtureRequest, of_all_ranks: list[dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the results of the ranks that share the last sample, for every degree."""
    return [of[request.param] for of in of_all_ranks[-request.param :]]


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, dict[str, Tensor]]:
    """Return the results of each trunk, and of the network, on a single rank."""
    return {"network": trained(SPLIT)} | {kind: passed_through(kind, SPLIT) for kind in TRUNKS}


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``expected``, or the former if the latter is below 1.

    A shift of all pairs before the row attention changes no probability, so its gradient is 0 up to rounding.
    """
    return ((found - expected).norm() / expected.norm().clamp(min=1.0)).item()


@pytest.mark.parametrize("kind", [*TRUNKS, "network"])
def test_ranks_that_share_a_sample_have_the_results_and_gradients_of_one_rank(found, on_one_rank, kind):
    expected = on_one_rank[kind]
    for of in found:
        assert of[kind].keys() == expected.keys()
        assert max(difference(of[kind][name], tensor) for name, tensor in expected.items()) < 1e-12


def test_dropout_is_active_and_every_weight_has_a_gradient(on_one_rank):
    for kind in TRUNKS:
        assert all(
            gradient.norm() > 1e-3 for name, gradient in on_one_rank[kind].items() if "row.layer_norm_z.b" not in name
        )
    blocks = trunk("template", SPLIT, recompute=False)
    z, mask = whole(1, (2, 8, 8, TEMPLATE.pair)), torch.ones(2, 8, 8, dtype=torch.float64)
    first, second = (blocks(z, mask, Masks(torch.tensor(seed), 40, True))[0] for seed in (1, 2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dim", [1, 2])
def test_gathered_tensors_are_whole_and_their_gradients_are_those_of_one_loss_or_the_sum(found, dim):
    world = len(found)
    summed = sum(whole(3 + rank) for rank in range(world))
    for rank, of in enumerate(found):
        for name, gradient in (("gather", whole(2)), ("gather_summed", summed)):
            y, own = of[f"{name} {dim}"]
            assert torch.equal(y, whole(1))
            torch.testing.assert_close(own, part(gradient, dim, rank, world), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dim", [1, 2])
def test_a_shard_is_the_own_part_and_every_rank_gets_the_whole_gradient(found, dim):
    for rank, of in enumerate(found):
        y, gradient = of[f"shard {dim}"]
        assert torch.equal(y, part(whole(1), dim, rank, len(found)))
        assert torch.equal(gradient, whole(2))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_transposition_exchanges_the_sharded_axis(found, dim):
    for rank, of in enumerate(found):
        y, gradient = of[f"transpose {dim}"]
        assert torch.equal(y, part(whole(1), 3 - dim, rank, len(found)))
        assert torch.equal(gradient, part(whole(2), dim, rank, len(found)))


def test_transfers_under_way_at_once_give_the_same(found):
    world = len(found)
    for rank, of in enumerate(found):
        torch.testing.assert_close(of["overlapped"], part(whole(2), 1, rank, world) + world + 2.0)


def test_ranks_know_their_offset_and_results_are_contiguous(found):
    assert [of["offset"] for of in found] == [rank * 8 // len(found) for rank in range(len(found))]
    assert all(of["contiguous"] for of in found)


def test_a_single_rank_transfers_nothing():
    split, x = AxialSplit.from_layout(Layout()), whole(1)
    pending = split.start_gather(x, 1, summed=True), split.start_transpose(x, 1, 2)
    for result in (split.shard(x, 1), split.gather(x, 1), split.gather_summed(x, 2), split.transpose(x, 1, 2)):
        assert result is x
    assert all(each.wait() is x for each in pending)
    assert split.offset(7) == 0


@pytest.mark.parametrize(("ranks", "index", "message"), [(2, 2, "shard 2 of 2"), (2, 0, "no group")])
def test_a_split_without_sense_is_refused(ranks, index, message):
    with pytest.raises(ValueError, match=message):
        AxialSplit(ranks, index)
