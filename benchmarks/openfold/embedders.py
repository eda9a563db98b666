"""The network's inputs: embeddings of the sequence, the MSA, templates and the previous pass (supplementary
information, algorithms 3, 16, 17 and 32).

Shapes as in :mod:`benchmarks.openfold.features`; M channels of m, Z channels of z, C channels of a template's pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.openfold import geometry
from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.evoformer import SITES, PairSizes, TemplateBlock
from benchmarks.openfold.features import EXTRA_FEATURES, TARGET_FEATURES
from benchmarks.openfold.geometry import ResidueTables
from benchmarks.openfold.layers import Chooser, Linear, Masks, Norm
from benchmarks.openfold.msa import FEATURES, TOKENS
from common.nn.recomputation import recomputed

LARGEST_OFFSET = 32
"""Distances along the chain are clipped to this number of residues."""

TEMPLATE_BINS, PREVIOUS_BINS = (3.25, 50.75, 39), (3.25, 20.75, 15)
"""First and last lower boundary, in angstrom, and number of the bins of distances in templates and in the last pass."""

_ANGLE_FEATURES, _PAIR_FEATURES = 57, 88
_RESIDUES = 22
_LARGE = 1e9


class Recycled(NamedTuple):
    """Result of a pass that the next pass reads.

    Attributes:
        first_BNM: the first sequence of m.
        pair_BNNZ: z.
        beta_BN3: predicted position of CB, or CA for glycine.
    """

    first_BNM: Tensor
    pair_BNNZ: Tensor
    beta_BN3: Tensor


def distance_bins(points_BN3: Tensor, bins: tuple[float, float, int]) -> Tensor:
    """Return the one-hot bin of each distance, (B, N, N, number of bins), float; the last bin has no upper boundary."""
    first, last, number = bins
    lower = torch.linspace(first, last, number, dtype=points_BN3.dtype, device=points_BN3.device).square()
    upper = torch.cat((lower[1:], lower.new_full((1,), 1e8)))
    squared_BNN1 = (points_BN3[:, :, None] - points_BN3[:, None]).square().sum(-1, keepdim=True)
    return ((squared_BNN1 > lower) & (squared_BNN1 < upper)).to(points_BN3.dtype)


class InputEmbedder(nn.Module):
    """Initial m and z from the sequence and the MSA (algorithms 3 and 4)."""

    def __init__(self, msa: int, pair: int) -> None:
        super().__init__()
        self.linear_tf_z_i = Linear(TARGET_FEATURES, pair)
        self.linear_tf_z_j = Linear(TARGET_FEATURES, pair)
        self.linear_tf_m = Linear(TARGET_FEATURES, msa)
        self.linear_msa_m = Linear(FEATURES, msa)
        self.linear_relpos = Linear(2 * LARGEST_OFFSET + 1, pair)

    def forward(self, aatype_BN: Tensor, index_BN: Tensor, msa_BSNF: Tensor) -> tuple[Tensor, Tensor]:
        """Return m and z. The first of the sequence's features would mark gaps between segments, and is always 0."""
        dtype = self.linear_tf_m.weight.dtype
        target_BNF = F.pad(F.one_hot(aatype_BN, TARGET_FEATURES - 1), (1, 0)).to(dtype)
        offset_BNN = (index_BN[:, :, None] - index_BN[:, None]).clamp(-LARGEST_OFFSET, LARGEST_OFFSET)
        position_BNNF = F.one_hot(offset_BNN + LARGEST_OFFSET, 2 * LARGEST_OFFSET + 1).to(dtype)
        z_BNNZ = self.linear_tf_z_i(target_BNF)[:, :, None] + self.linear_tf_z_j(target_BNF)[:, None]
        m_BSNM = self.linear_msa_m(msa_BSNF.to(dtype)) + self.linear_tf_m(target_BNF)[:, None]
        return m_BSNM, z_BNNZ + self.linear_relpos(position_BNNF)


class RecyclingEmbedder(nn.Module):
    """Adds the result of the previous pass (algorithm 32)."""

    def __init__(self, msa: int, pair: int, choose: Chooser) -> None:
        super().__init__()
        self.linear = Linear(PREVIOUS_BINS[2], pair)
        self.layer_norm_m = Norm(msa, choose)
        self.layer_norm_z = Norm(pair, choose)

    def forward(self, m_BSNM: Tensor, z_BNNZ: Tensor, previous: Recycled) -> tuple[Tensor, Tensor]:
        """Return m and z."""
        first_BNM = m_BSNM[:, 0] + self.layer_norm_m(previous.first_BNM)
        bins_BNNF = distance_bins(previous.beta_BN3, PREVIOUS_BINS).to(z_BNNZ.dtype)
        z_BNNZ = z_BNNZ + self.layer_norm_z(previous.pair_BNNZ) + self.linear(bins_BNNF)
        return torch.cat((first_BNM[:, None], m_BSNM[:, 1:]), 1), z_BNNZ


class ExtraEmbedder(nn.Module):
    """Embeds the extra sequences."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = Linear(EXTRA_FEATURES, channels)

    def forward(self, msa_BEN: Tensor, has_deletion_BEN: Tensor, deletion_BEN: Tensor) -> Tensor:
        """Return the representation (B, E, N, channels)."""
        dtype = self.linear.weight.dtype
        flags = (has_deletion_BEN.to(dtype)[..., None], deletion_BEN.to(dtype)[..., None])
        return self.linear(torch.cat((F.one_hot(msa_BEN.long(), TOKENS).to(dtype), *flags), -1))


class AngleEmbedder(nn.Module):
    """Embeds the torsion angles of templates, as further sequences of m (algorithm 2, lines 7 and 8)."""

    def __init__(self, msa: int) -> None:
        super().__init__()
        self.linear_1 = Linear(_ANGLE_FEATURES, msa, "relu")
        self.linear_2 = Linear(msa, msa, "relu")

    def forward(self, features_BTNF: Tensor) -> Tensor:
        """Return the sequences (B, T, N, M)."""
        return self.linear_2(F.relu(self.linear_1(features_BTNF)))


class PairEmbedder(nn.Module):
    """Embeds the pairs of residues of templates."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = Linear(_PAIR_FEATURES, channels, "relu")

    def forward(self, features_XNNF: Tensor) -> Tensor:
        """Return the pairs (X, N, N, C)."""
        return self.linear(features_XNNF)


class TemplateStack(nn.Module):
    """Blocks on the pairs of each template (algorithm 16)."""

    def __init__(self, sizes: PairSizes, blocks: int, choose: Chooser, split: AxialSplit, recompute: bool) -> None:
        super().__init__()
        self._split, self._recompute = split, recompute
        self.blocks = nn.ModuleList(TemplateBlock(sizes, choose, split) for _ in range(blocks))
        self.layer_norm = Norm(sizes.pair, choose)

    def forward(self, pairs_XNNC: Tensor, mask_XNN: Tensor, masks: Masks) -> Tensor:
        """Return the pairs of X = B T templates after all blocks, whole on all ranks."""
        pairs_XNNC = self._split.shard(pairs_XNNC, 1)
        for number, block in enumerate(self.blocks):
            (pairs_XNNC,) = recomputed(
                block, pairs_XNNC, mask_XNN, masks.skip(number * SITES), recompute=self._recompute
            )
        return self.layer_norm(self._split.gather(pairs_XNNC, 1))


class PointwiseAttention(nn.Module):
    """Attention of a pair of z over the same pair of all templates (algorithm 17)."""

    def __init__(self, pair: int, template: int, width: int, heads: int) -> None:
        super().__init__()
        self.mha = _TemplateAttention(pair, template, width, heads)

    def forward(self, z_BNNZ: Tensor, pairs_BTNNC: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the update of z; 0 for samples without templates."""
        update_BNNZ = self.mha(z_BNNZ, pairs_BTNNC, mask_BT)
        return update_BNNZ * (mask_BT.sum(1) > 0).to(update_BNNZ.dtype)[:, None, None, None]


class _TemplateAttention(nn.Module):
    def __init__(self, pair: int, template: int, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.linear_q = Linear(pair, width * heads, "glorot", bias=False)
        self.linear_k = Linear(template, width * heads, "glorot", bias=False)
        self.linear_v = Linear(template, width * heads, "glorot", bias=False)
        self.linear_o = Linear(width * heads, pair, "final")

    def forward(self, z_BNNZ: Tensor, pairs_BTNNC: Tensor, mask_BT: Tensor) -> Tensor:
        q_BNNHC = self.linear_q(z_BNNZ).unflatten(-1, (self._heads, -1))
        k_BTNNHC, v_BTNNHC = (
            layer(pairs_BTNNC).unflatten(-1, (self._heads, -1)) for layer in (self.linear_k, self.linear_v)
        )
        wide = torch.promote_types(q_BNNHC.dtype, torch.float32)
        scores_BTNNH = (q_BNNHC[:, None] * k_BTNNHC).sum(-1, dtype=wide) * q_BNNHC.shape[-1] ** -0.5
        scores_BTNNH = scores_BTNNH + ((mask_BT.to(wide) - 1) * _LARGE)[:, :, None, None, None]
        weight_BTNNH1 = scores_BTNNH.softmax(1).to(v_BTNNHC.dtype)[..., None]
        return self.linear_o((weight_BTNNH1 * v_BTNNHC).sum(1).flatten(-2))


class TemplateFeatures(NamedTuple):
    """Features of templates in the network's dtype.

    Attributes:
        angles_BTNF: residue type, torsion angles in both namings, and their masks.
        angle_mask_BTN: 1 where psi is known.
        pairs_BTNNF: distances, residue types and masks.
    """

    angles_BTNF: Tensor
    angle_mask_BTN: Tensor
    pairs_BTNNF: Tensor


def template_features(tensors: dict[str, Tensor], tables: ResidueTables, dtype: torch.dtype) -> TemplateFeatures:
    """Compute the features of a batch's templates, which are the same in all passes.

    The rules' network has zeros in place of the unit vectors between residues.
    """
    aatype_BTN = tensors["template_aatype"]
    wide = tables.position.dtype
    atoms, mask = tensors["template_all_atom_positions"].to(wide), tensors["template_all_atom_mask"].to(wide)
    type_BTNF = F.one_hot(aatype_BTN, _RESIDUES).to(wide)
    known_BTN = aatype_BTN.clamp(max=20)
    previous = tensors["template_previous_positions"].to(wide), tensors["template_previous_mask"].to(wide)
    sincos_BTN72, mask_BTN7 = geometry.torsion_angles(tables, known_BTN, atoms, mask, previous)
    mirrored = torch.cat((torch.zeros_like(mask_BTN7[..., :3]), tables.periodic[known_BTN]), -1)
    other_BTN72 = sincos_BTN72 * (1 - 2 * mirrored)[..., None]
    angles = torch.cat((type_BTNF, sincos_BTN72.flatten(-2), other_BTN72.flatten(-2), mask_BTN7), -1)

    beta_BTN3, beta_mask_BTN = geometry.pseudo_beta(known_BTN, atoms, mask)
    bins = distance_bins(beta_BTN3.flatten(0, 1), TEMPLATE_BINS).unflatten(0, aatype_BTN.shape[:2])
    shape = bins.shape[:-1]
    beta_pairs = (beta_mask_BTN[..., :, None] * beta_mask_BTN[..., None, :])[..., None]
    backbone_BTN = geometry.backbone_mask(mask)
    backbone_pairs = (backbone_BTN[..., :, None] * backbone_BTN[..., None, :])[..., None]
    columns, rows = type_BTNF[..., None, :, :].expand(*shape, -1), type_BTNF[..., None, :].expand(*shape, -1)
    pairs = torch.cat((bins, beta_pairs, columns, rows, bins.new_zeros(*shape, 3), backbone_pairs), -1)
    return TemplateFeatures(angles.to(dtype), mask_BTN7[..., 2], (pairs * backbone_pairs).to(dtype))
