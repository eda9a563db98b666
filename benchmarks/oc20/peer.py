"""Peers: the same training with the blocks of torch_geometric's DimeNet++, eager and compiled.

The blocks run in bf16 without fp32 master weights, or in fp32, whose matrix products use TF32. Distances, angles, basis
functions and energies are fp32. The optimizer is fused AdamW. Edges and triplets of our own example batch are already
on the device, because torch_geometric's search for neighbours knows no periodic images. A compiled function has no
double backward pass, so the compiled peer computes the forces inside of it, by ``torch.func.grad``. It uses
``max-autotune``, which also captures CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.oc20.graph import CUTOFF
from benchmarks.oc20.model import DimeNetArchitecture, force_errors
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.nn.tf32 import tf32_products
from common.step.plain_step import plain_step


def network_of(sizes: DimeNetArchitecture) -> Any:
    """Return torch_geometric's network."""
    from torch_geometric.nn.models.dimenet import DimeNetPlusPlus

    return DimeNetPlusPlus(
        sizes.hidden, 1, sizes.blocks, sizes.triplet_embedding, sizes.basis_embedding, sizes.out_embedding,
        sizes.spherical, sizes.radial, CUTOFF, envelope_exponent=sizes.envelope_exponent,
        num_before_skip=sizes.before_skip, num_after_skip=sizes.after_skip, num_output_layers=sizes.output_layers,
    )  # fmt: skip


def triplets_of(source_E: Tensor, target_E: Tensor, reverse_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges k -> j and j -> i of all triplets, int64 (T,); the edges are sorted by target."""
    into_N = torch.bincount(target_E, minlength=int(source_E.max()) + 1)
    count_E = into_N[source_E]
    ji_T = torch.arange(len(source_E), device=source_E.device).repeat_interleave(count_E)
    shift_E = (into_N.cumsum(0) - into_N)[source_E] - (count_E.cumsum(0) - count_E)
    kj_T = torch.arange(len(ji_T), device=source_E.device) + shift_E[ji_T]
    kept_T = kj_T != reverse_E[ji_T]
    return kj_T[kept_T], ji_T[kept_T]


def energy(
    network: Any, position_A3: Tensor, tensors: dict[str, Tensor], kj_T: Tensor, ji_T: Tensor, detached: bool = True
) -> Tensor:
    """Return the energy of all structures of a batch, 0-d.

    Args:
        tensors: a batch as :mod:`benchmarks.oc20.data` describes it, with integers of 64 bits.
        detached: whether angles are constants to the forces.
    """
    j, i, atoms = tensors["edge_source"], tensors["edge_target"], len(position_A3)
    vector_E3 = position_A3[j] - position_A3[i] + tensors["edge_shift"]
    fixed_E3 = vector_E3.detach() if detached else vector_E3
    a_T3, b_T3 = fixed_E3[ji_T], fixed_E3[kj_T]
    angle_T = torch.atan2(torch.linalg.cross(a_T3, b_T3).norm(dim=1), (a_T3 * b_T3).sum(1))
    distance_E, dtype = vector_E3.norm(dim=1), network.emb.lin.weight.dtype
    radial_ER = network.rbf(distance_E).to(dtype)
    spherical_TF = network.sbf(distance_E, angle_T, kj_T).to(dtype)
    x_EH = network.emb(tensors["atomic_number"], radial_ER, i, j)
    total: Tensor = network.output_blocks[0](x_EH, radial_ER, i, num_nodes=atoms).to(position_A3.dtype).sum()
    for interaction, output in zip(network.interaction_blocks, network.output_blocks[1:], strict=True):
        x_EH = interaction(x_EH, radial_ER, spherical_TF, kj_T, ji_T)
        total = total + output(x_EH, radial_ER, i, num_nodes=atoms).to(position_A3.dtype).sum()
    return total


def start(
    run: RunConfig, example: Batch, device: torch.device, compiled: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    facts, hparams = run.workload.facts, run.workload.hparams
    network = network_of(facts).to(device)
    for blocks in (network.emb, network.interaction_blocks, network.output_blocks):
        blocks.to(dtype)
    rates = hparams.base_learning_rate, (hparams.beta_1, hparams.beta_2), hparams.epsilon, hparams.weight_decay
    optimizer = torch.optim.AdamW(network.parameters(), *rates, fused=device.type == "cuda")
    tensors = {name: x if x.is_floating_point() else x.long() for name, x in example.tensors.items()}
    kj_T, ji_T = triplets_of(tensors["edge_source"], tensors["edge_target"], tensors["edge_reverse"])

    def energy_of(position_A3: Tensor) -> Tensor:
        return energy(network, position_A3, tensors, kj_T, ji_T)

    def loss_of(position_A3: Tensor) -> Tensor:
        if compiled:
            gradient_A3 = torch.func.grad(energy_of)(position_A3)
        else:
            position_A3 = position_A3.detach().requires_grad_()
            (gradient_A3,) = torch.autograd.grad(energy_of(position_A3), position_A3, create_graph=True)
        error = force_errors(-gradient_A3, tensors["force"] / facts.force_std, tensors["free"])
        return error * facts.force_weight / tensors["global_free"]

    return tf32_products()(plain_step(loss_of, (tensors["position"],), optimizer, compiled))


BF16, COMPILED = "torch_geometric in bf16 without masters", "compiled with max-autotune"
PEERS = (
    Peer(BF16, start),
    Peer(f"{BF16}, {COMPILED}", functools.partial(start, compiled=True)),
    Peer(f"torch_geometric in TF32, {COMPILED}", functools.partial(start, compiled=True, dtype=torch.float32)),
)
