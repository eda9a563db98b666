"""AlphaFold2 without the head of the template modelling score, as the MLPerf HPC rules train it.

A forward pass recycles: passes without gradients, with dropout in training, hand the first sequence of the MSA
representation m, the pair representation z and the predicted positions to the next pass. Only the last one has
gradients. Parameters have the names of the published checkpoint.

The trunk has the dtype of :meth:`AlphaFold.cast`; structure module, heads and all coordinates are at least fp32.

Shapes as in :mod:`benchmarks.openfold.features`; M channels of m, Z channels of z, D channels of the single
representation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.openfold import geometry
from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.embedders import (
    AngleEmbedder,
    ExtraEmbedder,
    InputEmbedder,
    PairEmbedder,
    PointwiseAttention,
    Recycled,
    RecyclingEmbedder,
    TemplateFeatures,
    TemplateStack,
    template_features,
)
from benchmarks.openfold.evoformer import SITES, BlockSizes, PairSizes, Stack
from benchmarks.openfold.features import ATOMS
from benchmarks.openfold.geometry import ResidueTables
from benchmarks.openfold.layers import Chooser, Linear, Masks
from benchmarks.openfold.msa import TOKENS
from benchmarks.openfold.structure import Structure, StructureModule, StructureSizes
from common.config.ranges import AtLeast

CONFIDENCE_BINS, DISTOGRAM_BINS = 50, 64


@dataclass(frozen=True)
class Architecture:
    """Sizes of the network.

    Attributes:
        evoformer_blocks, extra_blocks, template_blocks: blocks of the stacks.
        evoformer, extra, template: widths of their blocks.
        structure: widths of the structure module.
        template_head, template_heads: channels of a head, and heads, of the attention over templates.
        confidence: channels between the layers of the confidence head.
    """

    evoformer_blocks: Annotated[int, AtLeast(1)]
    extra_blocks: Annotated[int, AtLeast(1)]
    template_blocks: Annotated[int, AtLeast(1)]
    evoformer: BlockSizes
    extra: BlockSizes
    template: PairSizes
    structure: StructureSizes
    template_head: Annotated[int, AtLeast(1)]
    template_heads: Annotated[int, AtLeast(1)]
    confidence: Annotated[int, AtLeast(1)]

    @property
    def pass_sites(self) -> int:
        """Number of dropout sites of a pass."""
        parts = self.template_blocks, self.extra_blocks, self.evoformer_blocks, self.structure.iterations
        return SITES * sum(parts)


class Predictions(NamedTuple):
    """The result of the last pass.

    Attributes:
        confidence: (B, N, 50), logits of the bins of a residue's lDDT.
        distogram: (B, N, N, 64), logits of the bins of distances.
        masked_msa: (B, S, N, 23), logits of the residues in the MSA.
        resolved: (B, N, 37), logits of whether an atom is resolved.
    """

    structure: Structure
    confidence: Tensor
    distogram: Tensor
    masked_msa: Tensor
    resolved: Tensor


class ConfidenceHead(nn.Module):
    """Predicts the lDDT of each residue (algorithm 29)."""

    def __init__(self, single: int, width: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(single)
        self.linear_1 = Linear(single, width, "relu")
        self.linear_2 = Linear(width, width, "relu")
        self.linear_3 = Linear(width, CONFIDENCE_BINS, "final")

    def forward(self, s_BND: Tensor) -> Tensor:
        """Return logits (B, N, 50)."""
        return self.linear_3(F.relu(self.linear_2(F.relu(self.linear_1(self.layer_norm(s_BND))))))


class LinearHead(nn.Module):
    """A head of one linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, "final")

    def forward(self, x_XC: Tensor) -> Tensor:
        """Return logits (X, outputs)."""
        return self.linear(x_XC)


class Heads(nn.Module):
    """The heads behind the trunk and the structure module."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        single = sizes.structure.single
        self.plddt = ConfidenceHead(single, sizes.confidence)
        self.distogram = LinearHead(sizes.evoformer.pair, DISTOGRAM_BINS)
        self.masked_msa = LinearHead(sizes.evoformer.msa, TOKENS)
        self.experimentally_resolved = LinearHead(single, ATOMS)

    def forward(self, m_BSNM: Tensor, z_BNNZ: Tensor, single_BND: Tensor, structure: Structure) -> Predictions:
        """Return all predictions; ``m_BSNM`` has no rows of templates."""
        half_BNNF = self.distogram(z_BNNZ)
        return Predictions(
            structure,
            self.plddt(structure.single),
            half_BNNF + half_BNNF.transpose(1, 2),
            self.masked_msa(m_BSNM),
            self.experimentally_resolved(single_BND),
        )


class AlphaFold(nn.Module):
    """The network.

    Args:
        choose: chooses the implementations of the operations.
        split: the ranks that share a sample.
        recompute: whether the backward pass computes the activations of each block again.

    Attributes:
        tables: constants of residues, on the network's device.
    """

    tables: ResidueTables

    def __init__(
        self,
        sizes: Architecture,
        choose: Chooser,
        split: AxialSplit,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._sizes, self._split = sizes, split
        main, extra, single = sizes.evoformer, sizes.extra, sizes.structure.single
        self.input_embedder = InputEmbedder(main.msa, main.pair)
        self.recycling_embedder = RecyclingEmbedder(main.msa, main.pair, choose)
        self.template_angle_embedder = AngleEmbedder(main.msa)
        self.template_pair_embedder = PairEmbedder(sizes.template.pair)
        self.template_pair_stack = TemplateStack(sizes.template, sizes.template_blocks, choose, split, recompute)
        attention = sizes.template.pair, sizes.template_head, sizes.template_heads
        self.template_pointwise_attention = PointwiseAttention(main.pair, *attention)
        self.extra_msa_embedder = ExtraEmbedder(extra.msa)
        self.extra_msa_stack = Stack(extra, sizes.extra_blocks, True, choose, split, recompute=recompute)
        self.evoformer_stack = Stack(main, sizes.evoformer_blocks, False, choose, split, single, recompute)
        self.structure_module = StructureModule(sizes.structure)
        self.auxiliary_heads = Heads(sizes)

    def initialise(self, generator: torch.Generator, final_std: float = 0.0) -> None:
        """Draw the initial weights; the arguments are those of :meth:`benchmarks.openfold.layers.Linear.initialise`."""
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.initialise(generator, final_std)

    def place(self, device: torch.device, dtype: torch.dtype) -> AlphaFold:
        """Move the network to ``device``, the trunk in ``dtype``, structure module and heads in at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        for name, part in self.named_children():
            part.to(device, wide if name in ("structure_module", "auxiliary_heads") else dtype)
        self.tables = ResidueTables(torch.empty(0, dtype=wide, device=device))
        return self

    @property
    def sharded(self) -> tuple[nn.Module, ...]:
        """The modules whose gradients are partial on each of the ranks that share a sample."""
        return self.template_pair_stack.blocks, self.extra_msa_stack.blocks, self.evoformer_stack.blocks

    def forward(self, tensors: dict[str, Tensor]) -> Predictions:
        """Run all passes of a batch (:mod:`benchmarks.openfold.features`); return the predictions of the last one."""
        tables, wide = self.tables, self.tables.position.dtype
        dtype = self.input_embedder.linear_tf_m.weight.dtype
        templates = template_features(tensors, tables, dtype)
        previous = self._nothing(tensors, dtype, wide)
        passes = tensors["msa_feat"].shape[1]
        with torch.no_grad():
            for number in range(passes - 1):
                m_BSNM, z_BNNZ, _, structure = self._pass(tensors, number, previous, templates)
                previous = self._recycled(tensors["aatype"], m_BSNM, z_BNNZ, structure)
        m_BSNM, z_BNNZ, single_BND, structure = self._pass(tensors, passes - 1, previous, templates)
        m_BSNM = m_BSNM[:, : tensors["msa_feat"].shape[2]]
        return self.auxiliary_heads(m_BSNM.to(wide), z_BNNZ.to(wide), single_BND, structure)

    def _nothing(self, tensors: dict[str, Tensor], dtype: torch.dtype, wide: torch.dtype) -> Recycled:
        batch, residues = tensors["aatype"].shape
        sizes, device = self._sizes.evoformer, tensors["aatype"].device
        return Recycled(
            torch.zeros(batch, residues, sizes.msa, dtype=dtype, device=device),
            torch.zeros(batch, residues, residues, sizes.pair, dtype=dtype, device=device),
            torch.zeros(batch, residues, 3, dtype=wide, device=device),
        )

    def _recycled(self, aatype_BN: Tensor, m_BSNM: Tensor, z_BNNZ: Tensor, structure: Structure) -> Recycled:
        atoms_BN373 = geometry.atoms37_of(self.tables, aatype_BN, structure.atoms)
        beta_BN3, _ = geometry.pseudo_beta(aatype_BN, atoms_BN373, self.tables.exists37[aatype_BN])
        return Recycled(m_BSNM[:, 0], z_BNNZ, beta_BN3)

    def _pass(
        self,
        tensors: dict[str, Tensor],
        number: int,
        previous: Recycled,
        templates: TemplateFeatures,
    ) -> tuple[Tensor, Tensor, Tensor, Structure]:
        """Run one pass; return m with the rows of templates, z, the single representation and the structure."""
        sizes, split = self._sizes, self._split
        masks = Masks(tensors["dropout_seed"], number * sizes.pass_sites, self.training)
        chain_BN = tensors["seq_mask"]
        mask_BNN = chain_BN[:, :, None] * chain_BN[:, None]

        m_BSNM, z_BNNZ = self.input_embedder(
            tensors["aatype"], tensors["residue_index"], tensors["msa_feat"][:, number]
        )
        m_BSNM, z_BNNZ = self.recycling_embedder(m_BSNM, z_BNNZ, previous)

        pairs_XNNC = self.template_pair_embedder(templates.pairs_BTNNF).flatten(0, 1)
        template_mask_XNN = mask_BNN.repeat_interleave(templates.angle_mask_BTN.shape[1], 0)
        pairs_XNNC = self.template_pair_stack(pairs_XNNC, template_mask_XNN, masks)
        pairs_BTNNC = pairs_XNNC.unflatten(0, templates.angle_mask_BTN.shape[:2])
        z_BNNZ = z_BNNZ + self.template_pointwise_attention(z_BNNZ, pairs_BTNNC, tensors["template_mask"])
        m_BSNM = torch.cat((m_BSNM, self.template_angle_embedder(templates.angles_BTNF)), 1)
        mask_BSN = torch.cat((tensors["msa_mask"][:, number], templates.angle_mask_BTN.to(chain_BN.dtype)), 1)
        masks = masks.skip(SITES * sizes.template_blocks)

        extra = (tensors[f"extra_{name}"][:, number] for name in ("msa", "has_deletion", "deletion_value"))
        extra_BENM, z_BNNZ = split.shard(self.extra_msa_embedder(*extra), 1), split.shard(z_BNNZ, 1)
        extra_mask_BEN = tensors["extra_msa_mask"][:, number]
        _, z_BNNZ = self.extra_msa_stack(extra_BENM, z_BNNZ, extra_mask_BEN, mask_BNN, masks)
        masks = masks.skip(SITES * sizes.extra_blocks)
        m_BSNM, z_BNNZ = self.evoformer_stack(split.shard(m_BSNM, 1), z_BNNZ, mask_BSN, mask_BNN, masks)
        m_BSNM, z_BNNZ = split.gather(m_BSNM, 1), split.gather(z_BNNZ, 1)
        masks = masks.skip(SITES * sizes.evoformer_blocks)

        wide = self.tables.position.dtype
        single_BND = self.evoformer_stack.linear(m_BSNM[:, 0]).to(wide)
        structure = self.structure_module(
            single_BND, z_BNNZ.to(wide), tensors["aatype"], chain_BN.to(wide), self.tables, masks
        )
        return m_BSNM, z_BNNZ, single_BND, structure
