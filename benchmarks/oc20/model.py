"""The network of OpenCatalyst: DimeNet++ (Gasteiger et al., arXiv:2011.14115), whose forces are minus the gradient of
the energy with respect to the positions.

Messages live on directed edges j -> i from an atom's neighbours, which can be periodic images, to the atom. In every
interaction, an edge j -> i receives the messages of all edges k -> j except its own reverse, weighted by a function of
distance and angle. Output blocks sum messages into atoms. The angles are those of detached positions, as in the MLPerf
HPC reference: only distances contribute to forces.

Distances, basis functions, the sums over triplets and over edges, and the last layers are at least fp32. All other
layers, and their activations, have the dtype of :meth:`DimeNetPlusPlus.cast`.

Padding edges of a micro-batch connect an atom that is padding with itself. Their length is the cutoff, where all basis
functions are 0, and does not depend on a position. So padding affects no real atom and no gradient.

Shapes: A atoms, E edges, H hidden channels, R radial functions, S orders of spherical functions, M = S^2 harmonics, B
channels between the layers of a basis, C channels of the sum over triplets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from benchmarks.oc20.graph import CUTOFF
from benchmarks.oc20.ops.edge_basis import EDGE_BASIS
from benchmarks.oc20.ops.edge_basis.reference import edge_basis_reference, spherical_constants
from benchmarks.oc20.ops.swish import SWISH, swish_reference
from benchmarks.oc20.ops.triplet_sum import TRIPLET_SUM, EdgeGraph, edge_graph, triplet_sum_reference
from common.config.ranges import AtLeast, NotNegative
from common.ops.operation import Operation

OPERATIONS: dict[str, Operation] = {"edge_basis": EDGE_BASIS, "swish": SWISH, "triplet_sum": TRIPLET_SUM}
"""Operations whose implementation can be chosen in ``model.implementations``."""

Swish = Callable[[Tensor], Tensor]

ELEMENTS = 95
"""Rows of the embedding: atomic numbers 0, for padding, to 94."""


@dataclass(frozen=True)
class DimeNetArchitecture:
    """Constants of the network.

    Attributes:
        hidden: H, channels of a message.
        out_embedding: channels of an atom in the output blocks.
        blocks: interaction blocks.
        triplet_embedding: channels of a message in the sum over triplets.
        basis_embedding: channels between the two layers of a basis.
        radial, spherical: R and S.
        envelope_exponent: see :func:`benchmarks.oc20.ops.edge_basis.reference.envelope`.
        before_skip, after_skip: residual layers of an interaction block before and after its skip connection.
        output_layers: layers of an output block behind its first one.
    """

    hidden: Annotated[int, AtLeast(1)]
    out_embedding: Annotated[int, AtLeast(1)]
    blocks: Annotated[int, AtLeast(1)]
    triplet_embedding: Annotated[int, AtLeast(1)]
    basis_embedding: Annotated[int, AtLeast(1)]
    radial: Annotated[int, AtLeast(1)]
    spherical: Annotated[int, AtLeast(2)]
    envelope_exponent: Annotated[int, AtLeast(1)]
    before_skip: Annotated[int, NotNegative]
    after_skip: Annotated[int, NotNegative]
    output_layers: Annotated[int, AtLeast(1)]


class RadialBasis(nn.Module):
    """Radial basis of a distance, u(x) sin(f_n x), with the envelope u and trained frequencies, which start at n pi."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.pi * torch.arange(1, count + 1, dtype=torch.float32))

    def forward(self, x_E: Tensor, envelope_E: Tensor) -> Tensor:
        """Return the functions of every edge, (E, R), in the dtype of the frequencies."""
        return envelope_E[:, None] * torch.sin(self.frequencies * x_E[:, None])


class WideLinear(nn.Linear):
    """A linear layer whose weight is at least fp32 in every precision."""


class Residual(nn.Module):
    """x + swish(W2 swish(W1 x + b1) + b2)."""

    def __init__(self, channels: int, swish: Swish) -> None:
        super().__init__()
        self._swish = swish
        self.first = nn.Linear(channels, channels)
        self.second = nn.Linear(channels, channels)

    def forward(self, x_EH: Tensor) -> Tensor:
        """Return the result, (E, H)."""
        return x_EH + self._swish(self.second(self._swish(self.first(x_EH))))


class EmbeddingBlock(nn.Module):
    """The first message of an edge: from the elements of its atoms and its distance."""

    def __init__(self, sizes: DimeNetArchitecture, swish: Swish) -> None:
        super().__init__()
        self._swish = swish
        self.elements = nn.Embedding(ELEMENTS, sizes.hidden)
        self.radial = nn.Linear(sizes.radial, sizes.hidden)
        self.dense = nn.Linear(3 * sizes.hidden, sizes.hidden)

    def forward(self, number_A: Tensor, radial_ER: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
        """Return messages (E, H)."""
        atoms_AH = self.elements(number_A)
        ends = (atoms_AH.index_select(0, target_E), atoms_AH.index_select(0, source_E))
        return self._swish(self.dense(torch.cat([*ends, self._swish(self.radial(radial_ER))], 1)))


class InteractionBlock(nn.Module):
    """Messages of edges k -> j, summed into those of edges j -> i.

    Args:
        triplet_sum: implementation of :func:`benchmarks.oc20.ops.triplet_sum.triplet_sum_reference`.
    """

    def __init__(self, sizes: DimeNetArchitecture, swish: Swish, triplet_sum: Callable[..., Tensor]) -> None:
        super().__init__()
        self._swish, self._triplet_sum = swish, triplet_sum
        hidden, basis, triplet = sizes.hidden, sizes.basis_embedding, sizes.triplet_embedding
        self.radial_1 = nn.Linear(sizes.radial, basis, bias=False)
        self.radial_2 = nn.Linear(basis, hidden, bias=False)
        self.spherical_1 = WideLinear(sizes.spherical * sizes.radial, basis, bias=False)
        self.spherical_2 = WideLinear(basis, triplet, bias=False)
        self.kj = nn.Linear(hidden, hidden)
        self.ji = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, triplet, bias=False)
        self.up = nn.Linear(triplet, hidden, bias=False)
        self.before = nn.Sequential(*(Residual(hidden, swish) for _ in range(sizes.before_skip)))
        self.dense = nn.Linear(hidden, hidden)
        self.after = nn.Sequential(*(Residual(hidden, swish) for _ in range(sizes.after_skip)))

    def forward(
        self, x_EH: Tensor, radial_ER: Tensor, basis_ESR: Tensor, harmonics_EM: Tensor, graph: EdgeGraph
    ) -> Tensor:
        """Return new messages (E, H); see :mod:`benchmarks.oc20.ops.triplet_sum`."""
        swish = self._swish
        message_EH = swish(self.kj(x_EH)) * self.radial_2(self.radial_1(radial_ER))
        small_EC = swish(self.down(message_EH)).to(basis_ESR.dtype)
        summed_EC = self._triplet_sum(small_EC, self._weights(basis_ESR), harmonics_EM, graph)
        h_EH = swish(self.ji(x_EH)) + swish(self.up(summed_EC.to(x_EH.dtype)))
        return self.after(swish(self.dense(self.before(h_EH))) + x_EH)

    def _weights(self, basis_ESR: Tensor) -> Tensor:
        """Return both layers of the spherical basis without the angle, (E, S, C).

        The first layer is one product with a matrix that has the weights of each order on its diagonal.
        """
        edges, orders, radial = basis_ESR.shape
        first_RBS = self.spherical_1.weight.view(-1, orders, radial).permute(2, 0, 1)
        diagonal_FF = first_RBS.diag_embed().permute(2, 0, 3, 1).reshape(orders * radial, -1)
        between_ESB = (basis_ESR.flatten(1) @ diagonal_FF).view(edges, orders, -1)
        return self.spherical_2(between_ESB)


class OutputBlock(nn.Module):
    """The energy of an atom, from the messages of its edges."""

    def __init__(self, sizes: DimeNetArchitecture, swish: Swish) -> None:
        super().__init__()
        self._swish = swish
        self.radial = nn.Linear(sizes.radial, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.out_embedding)
        self.dense = nn.ModuleList(
            nn.Linear(sizes.out_embedding, sizes.out_embedding) for _ in range(sizes.output_layers)
        )
        self.last = WideLinear(sizes.out_embedding, 1, bias=False)

    def forward(self, x_EH: Tensor, radial_ER: Tensor, target_E: Tensor, atoms: int) -> Tensor:
        """Return the energies of all atoms, (A, 1), at least fp32."""
        wide = self.last.weight.dtype
        message_EH = (self.radial(radial_ER) * x_EH).to(wide)
        summed_AH = message_EH.new_zeros(atoms, message_EH.shape[1]).index_add(0, target_E, message_EH)
        x_AC = self.up(summed_AH.to(x_EH.dtype))
        for layer in self.dense:
            x_AC = self._swish(layer(x_AC))
        return self.last(x_AC.to(wide))


class DimeNetPlusPlus(nn.Module):
    """The network, with the initial weights of the reference. Its last layers are 0, and so are its first forces.

    Args:
        generator: CPU generator that draws the initial weights; None keeps those of PyTorch's layers.
        edge_basis: implementation of :func:`benchmarks.oc20.ops.edge_basis.reference.edge_basis_reference`.
        swish: implementation of :func:`benchmarks.oc20.ops.swish.swish_reference`.
        triplet_sum: implementation of the sum over triplets (:class:`InteractionBlock`).

    Attributes:
        detach_angles: whether angles are constants to the forces, as the rules' network has them.
    """

    detach_angles = True
    zeros: Tensor
    factors: Tensor

    def __init__(
        self,
        sizes: DimeNetArchitecture,
        generator: torch.Generator | None = None,
        edge_basis: Callable[..., tuple[Tensor, Tensor, Tensor]] = edge_basis_reference,
        swish: Swish = swish_reference,
        triplet_sum: Callable[..., Tensor] = triplet_sum_reference,
    ) -> None:
        super().__init__()
        self.radial = RadialBasis(sizes.radial)
        self._edge_basis, self._exponent = edge_basis, sizes.envelope_exponent
        zeros_SR, factors_SR = spherical_constants(sizes.spherical, sizes.radial)
        self.register_buffer("zeros", zeros_SR, persistent=False)
        self.register_buffer("factors", factors_SR, persistent=False)
        self.embedding = EmbeddingBlock(sizes, swish)
        self.interactions = nn.ModuleList(InteractionBlock(sizes, swish, triplet_sum) for _ in range(sizes.blocks))
        self.outputs = nn.ModuleList(OutputBlock(sizes, swish) for _ in range(sizes.blocks + 1))
        if generator is not None:
            self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        self.embedding.elements.weight.uniform_(-(3**0.5), 3**0.5, generator=generator)
        for name, layer in self.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            # layers of the embedding, and one bias of an output block, are PyTorch's: uniform within 1 / sqrt(fan in)
            bound, in_embedding = layer.in_features**-0.5, name.startswith("embedding.")
            if in_embedding:
                layer.weight.uniform_(-bound, bound, generator=generator)
            elif name.endswith(".last"):
                layer.weight.zero_()
            else:
                nn.init.orthogonal_(layer.weight, generator=generator)
                layer.weight.mul_((2 / (sum(layer.weight.shape) * layer.weight.var())).sqrt())
            if layer.bias is not None and (in_embedding or name.endswith(".up")):
                layer.bias.uniform_(-bound, bound, generator=generator)
            elif layer.bias is not None:
                layer.bias.zero_()

    def cast(self, dtype: torch.dtype) -> DimeNetPlusPlus:
        """Convert the dense layers to ``dtype``; frequencies and :class:`WideLinear` layers to at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        self.radial.to(wide)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                layer.to(wide if isinstance(layer, WideLinear) else dtype)
        return self

    def atom_energies(self, tensors: dict[str, Tensor], position_A3: Tensor) -> Tensor:
        """Return the atoms' parts of the energy, (A,), at least fp32, in units of the standard deviation of the data.

        Args:
            tensors: ``atomic_number`` (A,), ``edge_source`` (j), ``edge_target`` (i) and ``edge_shift`` (E, 3) in
                angstrom of the edges, and ``edge_reverse``, see :mod:`benchmarks.oc20.data`.
            position_A3: in angstrom; the vector of an edge is position[j] - position[i] + shift.
        """
        source_E, target_E = tensors["edge_source"], tensors["edge_target"]
        graph = edge_graph(source_E, target_E, tensors["edge_reverse"], len(position_A3))
        vector_E3 = position_A3.index_select(0, source_E) - position_A3.index_select(0, target_E)
        vector_E3 = vector_E3 + tensors["edge_shift"].to(vector_E3.dtype)
        distance_E = torch.linalg.vector_norm(vector_E3, dim=1)

        unit_E3 = vector_E3 / distance_E[:, None]
        if self.detach_angles:
            unit_E3 = unit_E3.detach()
        x_E = distance_E / CUTOFF
        constants = self.zeros, self.factors, self._exponent
        envelope_E, basis_ESR, harmonics_EM = self._edge_basis(x_E, unit_E3, *constants)

        dtype = self.embedding.dense.weight.dtype
        radial_ER = self.radial(x_E, envelope_E).to(dtype)
        x_EH = self.embedding(tensors["atomic_number"], radial_ER, source_E, target_E)
        energy_A1 = self.outputs[0](x_EH, radial_ER, target_E, len(position_A3))
        for interaction, output in zip(self.interactions, list(self.outputs)[1:], strict=True):
            x_EH = interaction(x_EH, radial_ER, basis_ESR, harmonics_EM, graph)
            energy_A1 = energy_A1 + output(x_EH, radial_ER, target_E, len(position_A3))
        return energy_A1[:, 0]

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the forces (A, 3), in units of the standard deviation of the data; see :meth:`atom_energies`.

        In training mode they can be differentiated by the parameters. They exist without the caller's gradients, too.
        """
        with torch.enable_grad():
            position_A3 = tensors["position"].detach().to(self.radial.frequencies.dtype).requires_grad_()
            energy = self.atom_energies(tensors, position_A3).sum()
            (gradient_A3,) = torch.autograd.grad(energy, position_A3, create_graph=self.training)
        return -gradient_A3


def force_errors(force_A3: Tensor, target_A3: Tensor, free_A: Tensor) -> Tensor:
    """Return the sum of the absolute errors of the free atoms' components, 0-d, at least fp32."""
    return ((force_A3 - target_A3).abs().sum(1) * free_A).sum()
