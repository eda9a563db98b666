"""DimeNet++ against torch_geometric's blocks, basis functions against SciPy, forces, symmetries, padding and dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import special
from torch import Tensor, nn

from benchmarks.oc20 import peer
from benchmarks.oc20.config import Facts
from benchmarks.oc20.model import DimeNetArchitecture, DimeNetPlusPlus, RadialBasis, WideLinear, force_errors
from benchmarks.oc20.ops.edge_basis.reference import (
    edge_basis_reference,
    envelope,
    spherical_bessel_zeros,
    spherical_constants,
    spherical_harmonics,
)
from benchmarks.oc20.ops.triplet_sum import edge_graph, triplet_sum_reference
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.oc20.small_graphs import graph_of, joined, molecule

FULL = DimeNetArchitecture(192, 192, 3, 64, 8, 6, 7, 5, 1, 2, 3)
SMALL = DimeNetArchitecture(8, 6, 2, 4, 3, 3, 4, 5, 1, 2, 2)
CELL = torch.tensor([[4.1, 0.0, 0.0], [0.7, 4.5, 0.0], [0.2, -0.4, 9.0]], dtype=torch.float64)


def network(sizes: DimeNetArchitecture = SMALL, seed: int = 1, dtype: torch.dtype = torch.float64) -> DimeNetPlusPlus:
    """Return a network whose last layers are not 0."""
    generator = torch.Generator().manual_seed(seed)
    model = DimeNetPlusPlus(sizes, generator)
    with torch.no_grad():
        for output in model.outputs:
            output.last.weight.normal_(generator=generator)
    return model.cast(dtype)


def slab() -> dict[str, Tensor]:
    return graph_of(molecule(4, seed=5), CELL)


@pytest.mark.parametrize(
    ("part", "expected"),
    [("", 1_810_182), ("radial", 6), ("embedding", 130_368), ("outputs", 598_272), ("interactions", 1_081_536),
     ("outputs.0", 149_568), ("interactions.2", 360_512)],
)  # fmt: skip
def test_the_rules_network_has_the_parameters_of_the_reference(part: str, expected: int) -> None:
    model = DimeNetPlusPlus(fixed_facts(Facts, "oc20"))
    module = model.get_submodule(part)
    assert sum(parameter.numel() for parameter in module.parameters()) == expected


# --- basis functions ---


def test_zeros_are_those_of_the_spherical_bessel_functions() -> None:
    zeros = spherical_bessel_zeros(7, 6).numpy()
    for order, row in enumerate(zeros):
        grid = torch.linspace(0.5, 40, 40_000, dtype=torch.float64).numpy()
        values = special.spherical_jn(order, grid)
        changes = grid[1:][values[1:] * values[:-1] < 0][:6]
        assert row == pytest.approx(changes, abs=1.5e-3), "not the first zeros"
        assert special.spherical_jn(order, row) == pytest.approx([0] * 6, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_spherical_basis_is_that_of_scipy_down_to_the_shortest_bonds(dtype: torch.dtype) -> None:
    x = torch.linspace(0.12, 0.999, 40, dtype=dtype)
    _, found, _ = edge_basis_reference(x, torch.zeros(40, 3, dtype=dtype), *spherical_constants(7, 6), 5)
    assert found.dtype == dtype
    x = x.double()
    for order in range(7):
        for number, zero in enumerate(spherical_bessel_zeros(7, 6)[order]):
            norm = math.sqrt(2) / abs(special.spherical_jn(order + 1, float(zero)))
            u = 1 / x - 28 * x**5 + 48 * x**6 - 21 * x**7
            expected = u * norm * torch.from_numpy(special.spherical_jn(order, (zero * x).numpy()))
            sign = found.double()[:, order, number], expected
            torch.testing.assert_close(*sign, rtol=1e-6, atol=2e-6)


def test_products_of_spherical_harmonics_add_up_to_legendre_polynomials_of_the_angle() -> None:
    one, other = nn.functional.normalize(torch.randn(2, 30, 3, generator=torch.manual_seed(3)).double(), dim=2)
    one[0], other[0] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    products, cosine = spherical_harmonics(one, 7) * spherical_harmonics(other, 7), (one * other).sum(1)
    for order in range(7):
        found = products[:, order**2 : (order + 1) ** 2].sum(1)
        expected = special.eval_legendre(order, cosine.numpy()) * math.sqrt((2 * order + 1) / (4 * math.pi))
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_the_envelope_and_two_derivatives_vanish_at_the_cutoff() -> None:
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    value = envelope(x, 5)
    assert value.item() == 0, "padding has no effect only if it is exactly 0"
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, x)
    assert (slope.item(), curvature.item()) == pytest.approx((0, 0), abs=1e-12)


def test_the_second_derivatives_of_the_bases_are_right() -> None:
    x = torch.tensor([0.15, 0.4, 0.85], dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 3, generator=torch.manual_seed(1)).double().requires_grad_()
    radial, constants = RadialBasis(3).double(), spherical_constants(4, 3)

    def bases(x_E: Tensor, direction_E3: Tensor, frequencies: Tensor) -> Any:
        envelope_E, *others = edge_basis_reference(x_E, nn.functional.normalize(direction_E3), *constants, 5)
        return torch.func.functional_call(radial, {"frequencies": frequencies}, (x_E, envelope_E)), *others

    inputs = x, direction, radial.frequencies.detach().requires_grad_()
    assert torch.autograd.gradcheck(bases, inputs)
    assert torch.autograd.gradgradcheck(bases, inputs)


def test_the_sum_over_triplets_is_that_of_a_loop_and_has_right_second_derivatives() -> None:
    """Edges 1 and 5 are the reverse of one another; atom 3 has no edge."""
    source, target = [1, 2, 0, 2, 2, 1, 0], [0, 1, 1, 1, 2, 2, 2]
    reverse, orders, channels = [-1, 5, -1, -1, -1, 1, -1], 4, 3
    generator = torch.Generator().manual_seed(6)
    unit = nn.functional.normalize(torch.randn(7, 3, generator=generator).double())
    unit[5] = -unit[1]
    message = torch.randn(7, channels, generator=generator).double().requires_grad_()
    weight = torch.randn(7, orders, channels, generator=generator).double().requires_grad_()
    graph = edge_graph(*(torch.tensor(part, dtype=torch.int32) for part in (source, target, reverse)), 4)
    expected = torch.zeros(7, channels, dtype=torch.float64)
    for ji in range(7):
        for kj in range(7):
            if target[kj] == source[ji] and kj != reverse[ji]:
                for order in range(orders):
                    angular = math.sqrt((2 * order + 1) / (4 * math.pi))
                    angular *= special.eval_legendre(order, float(unit[kj] @ unit[ji]))
                    expected[ji] += angular * (message[kj] * weight[kj, order]).detach()
    harmonics = spherical_harmonics(unit, orders)
    torch.testing.assert_close(triplet_sum_reference(message, weight, harmonics, graph), expected)
    inputs = message, weight, harmonics.requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: triplet_sum_reference(*inputs, graph), inputs)
    assert torch.autograd.gradgradcheck(lambda *inputs: triplet_sum_reference(*inputs, graph), inputs)


# --- the network ---


def torch_geometric_of(model: DimeNetPlusPlus, sizes: DimeNetArchitecture) -> nn.Module:
    """Return torch_geometric's network with the weights of ``model``, whose `up` biases must be 0."""
    other: nn.Module = peer.network_of(sizes).double()
    renamed = {
        "radial.frequencies": "rbf.freq", "embedding.elements": "emb.emb", "embedding.radial": "emb.lin_rbf",
        "embedding.dense": "emb.lin", "interactions.": "interaction_blocks.", "outputs.": "output_blocks.",
        ".radial_": ".lin_rbf", ".spherical_": ".lin_sbf", ".kj.": ".lin_kj.", ".ji.": ".lin_ji.",
        ".down.": ".lin_down.", ".up.": ".lin_up.", ".before.": ".layers_before_skip.",
        ".after.": ".layers_after_skip.", ".first.": ".lin1.", ".second.": ".lin2.", ".last.": ".lin.",
    }  # fmt: skip
    weights = {}
    for name, tensor in model.named_parameters():
        if name.endswith(".up.bias"):
            assert not tensor.any()
            continue
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        if name.startswith("output_blocks"):
            name = name.replace(".radial.", ".lin_rbf.").replace(".dense.", ".lins.")
        else:
            name = name.replace(".dense.", ".lin.")
        weights[name] = tensor
    other.load_state_dict(weights)
    return other


def triplets_of(graph: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the edges k -> j and j -> i of all triplets. An edge and its reverse form none; images of i are atoms."""
    edges = list(enumerate(zip(graph["edge_source"].tolist(), graph["edge_target"].tolist(), strict=True)))
    shift = graph["edge_shift"]
    pairs = [
        (kj, ji)
        for ji, (j, i) in edges
        for kj, (k, centre) in edges
        if centre == j and not (k == i and (shift[kj] + shift[ji]).norm() < 1e-9)
    ]
    kj, ji = torch.tensor(pairs).T
    return kj, ji


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("detached", [False, True])
def test_energy_and_forces_are_those_of_torch_geometric(detached: bool) -> None:
    """Some triplets have an image of i as k."""
    model = network()
    model.detach_angles = detached
    for output in model.outputs:
        nn.init.zeros_(output.up.bias)
    graph = graph_of(molecule(3, seed=2), CELL, padding=(0, 0))
    position = graph["position"].clone().requires_grad_()
    integers = {name: tensor.long() for name, tensor in graph.items() if not tensor.is_floating_point()}
    triplets = triplets_of(graph)
    found = peer.triplets_of(*(integers[f"edge_{name}"] for name in ("source", "target", "reverse")))
    assert all(torch.equal(*pair) for pair in zip(found, triplets, strict=True))
    expected = peer.energy(torch_geometric_of(model, SMALL), position, graph | integers, *triplets, detached)
    (gradient,) = torch.autograd.grad(expected, position)
    # torch_geometric's zeros of the Bessel functions are fp32
    torch.testing.assert_close(model.atom_energies(graph, graph["position"]).sum(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(graph), -gradient, rtol=1e-4, atol=1e-5)
    assert gradient.abs().max() > 0.1


class Energy(nn.Module):
    """The energy of a graph as a function of its positions."""

    def __init__(self, model: DimeNetPlusPlus, graph: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self._graph = model, graph

    def forward(self, position_A3: Tensor) -> Tensor:
        return self.model.atom_energies(self._graph, position_A3).sum()


def test_the_energy_has_right_first_and_second_derivatives_with_angles_attached() -> None:
    model, graph = network(), slab()
    model.detach_angles = False
    energy = Energy(model, graph)

    def function(position: Tensor, frequencies: Tensor) -> Any:
        return torch.func.functional_call(energy, {"model.radial.frequencies": frequencies}, (position,))

    inputs = graph["position"].requires_grad_(), model.radial.frequencies.detach().requires_grad_()
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_the_gradient_of_the_loss_through_the_forces_is_that_of_finite_differences() -> None:
    """The angles are detached, as in training."""
    model, graph = network(), slab()

    def loss() -> Tensor:
        return force_errors(model(graph), graph["force"], graph["free"].double())

    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(), parameters)
    generator = torch.Generator().manual_seed(0)
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        direction, step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64), 1e-6
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
            ends.append(loss().item())
            with torch.no_grad():
                parameter.sub_(direction, alpha=sign * step)
        expected = (ends[0] - ends[1]) / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("detached", [False, True])
def test_forces_rotate_with_the_structure_and_ignore_translations(detached: bool) -> None:
    model, position = network().eval(), molecule(4, seed=5)
    model.detach_angles = detached
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(4)).double()).Q
    shift = torch.tensor([1.5, -2.0, 0.3], dtype=torch.float64)
    before, after = graph_of(position, CELL), graph_of(position @ rotation + shift, CELL @ rotation)
    after["atomic_number"] = before["atomic_number"]
    energies = [model.atom_energies(graph, graph["position"]) for graph in (before, after)]
    torch.testing.assert_close(*energies)
    forces = model(before)
    torch.testing.assert_close(model(after)[:-1], forces[:-1] @ rotation)
    torch.testing.assert_close(forces[:-1].sum(0), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    assert forces.abs().max() > 0.1


def test_padding_changes_neither_forces_nor_gradients() -> None:
    model, position = network(), molecule(4, seed=5)
    found = []
    for padding in ((1, 1), (5, 40)):
        graph = graph_of(position, CELL, padding)
        force = model(graph)
        loss = force_errors(force, graph["force"], graph["free"].double())
        found.append((force[:4], torch.autograd.grad(loss, list(model.parameters()))))
    (force, gradients), (padded_force, padded_gradients) = found
    torch.testing.assert_close(padded_force, force, rtol=1e-11, atol=1e-11)
    for gradient, padded, name in zip(gradients, padded_gradients, dict(model.named_parameters()), strict=True):
        torch.testing.assert_close(padded, gradient, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def test_structures_of_a_micro_batch_do_not_affect_one_another() -> None:
    model, graphs = network().eval(), [slab(), graph_of(molecule(5, seed=8))]
    torch.testing.assert_close(model(joined(graphs)), torch.cat([model(graph) for graph in graphs]))


# --- initial weights and precision ---


def test_a_new_network_has_the_initial_weights_of_the_reference() -> None:
    model, graph = DimeNetPlusPlus(FULL, torch.Generator().manual_seed(3)).eval(), slab()
    assert not model(graph).any()
    assert model.radial.frequencies.tolist() == pytest.approx([math.pi * n for n in range(1, 7)])
    free_A = graph["free"].double()
    expected = sum(float(row.abs().sum()) for row, free in zip(graph["force"], free_A, strict=True) if free)
    assert force_errors(model(graph).double(), graph["force"], free_A).item() == pytest.approx(expected)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name.endswith(".last"):
            continue
        if name.startswith("embedding."):
            assert layer.weight.var().item() == pytest.approx(1 / (3 * layer.in_features), rel=0.15), name
            continue
        assert layer.weight.var().item() == pytest.approx(2 / (layer.in_features + layer.out_features), rel=1e-4), name
        gram = (layer.weight if layer.in_features > layer.out_features else layer.weight.T).double()
        gram = gram @ gram.T
        torch.testing.assert_close(gram, gram[0, 0] * torch.eye(len(gram)).double(), rtol=1e-3, atol=1e-5, msg=name)
        if layer.bias is not None:
            assert bool(layer.bias.any()) == name.endswith(".up"), name
    elements = model.embedding.elements.weight
    assert (elements.min().item(), elements.max().item()) == pytest.approx((-math.sqrt(3), math.sqrt(3)), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_keeps_what_must_be_fp32_and_comes_close(dtype: torch.dtype) -> None:
    exact, model = network(FULL), network(FULL, dtype=dtype)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            kept = isinstance(layer, WideLinear)
            assert kept == name.endswith((".last", ".spherical_1", ".spherical_2"))
            assert layer.weight.dtype == (torch.float32 if kept else dtype), name
    assert model.radial.frequencies.dtype == torch.float32
    graph = slab()
    expected, found = exact(graph), model(graph)
    assert found.dtype == torch.float32
    scale = expected.norm().item()
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}[dtype]
    assert (found.double() - expected).norm().item() < tolerance * scale
