"""The blocks of AlphaFold2's trunk, which update the MSA representation m and the pair representation z
(supplementary information, algorithms 6 to 19).

With dynamic axial parallelism (:mod:`benchmarks.openfold.axial`), a block has rows of m and of z: the sequences and the
first residues of pairs. Where it needs whole columns, ranks exchange parts of both.

Shapes: B micro-batch, S sequences, I, J, N residues, M channels of m, Z channels of z, C channels of a head or factor,
H heads, P = B I J pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.layers import Attention, Chooser, Linear, Masks, Norm, Transition, merged
from benchmarks.openfold.ops.dropout_add import SharedDropout
from common.config.ranges import AtLeast, Share
from common.nn.recomputation import recomputed

SITES = 8
"""Number of dropout sites that are reserved for each block."""

_PAIRS_EPSILON, _MEAN_EPSILON, _LARGE = 1e-3, 1e-10, 1e9


@dataclass(frozen=True)
class PairSizes:
    """Widths of the triangle updates of z.

    Attributes:
        pair: channels of z.
        multiplication: channels of the triangle multiplication.
        pair_head, pair_heads: channels of a head, and heads, of the triangle attention.
        pair_transition: factor of the channels in the transition.
        pair_dropout: probability of dropping an element of an update.
    """

    pair: Annotated[int, AtLeast(1)]
    multiplication: Annotated[int, AtLeast(1)]
    pair_head: Annotated[int, AtLeast(1)]
    pair_heads: Annotated[int, AtLeast(1)]
    pair_transition: Annotated[int, AtLeast(1)]
    pair_dropout: Annotated[float, Share]


@dataclass(frozen=True)
class BlockSizes(PairSizes):
    """Widths of a block on m and z.

    Attributes:
        msa: channels of m.
        msa_head, msa_heads: channels of a head, and heads, of attention over m.
        msa_transition: factor of the channels in the transition.
        msa_dropout: probability of dropping an element of the row attention's update.
        outer: channels of each factor of the outer product mean.
    """

    msa: Annotated[int, AtLeast(1)]
    msa_head: Annotated[int, AtLeast(1)]
    msa_heads: Annotated[int, AtLeast(1)]
    msa_transition: Annotated[int, AtLeast(1)]
    msa_dropout: Annotated[float, Share]
    outer: Annotated[int, AtLeast(1)]


class RowAttention(nn.Module):
    """Attention along the residues of each sequence, with a bias from z (algorithm 7)."""

    def __init__(self, sizes: BlockSizes, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        self._split = split
        self.layer_norm_m = Norm(sizes.msa, choose)
        self.layer_norm_z = Norm(sizes.pair, choose)
        self.linear_z = Linear(sizes.pair, sizes.msa_heads, "normal", bias=False)
        self.mha = Attention(sizes.msa, sizes.msa_head, sizes.msa_heads, choose)

    def forward(self, m_BSNM: Tensor, z_BIJZ: Tensor, mask_BSN: Tensor) -> Tensor:
        """Return the update of m; m and z are sharded by rows."""
        bias_BHIJ = head_first(self.linear_z, self.layer_norm_z(z_BIJZ))
        return self.mha(self.layer_norm_m(m_BSNM), mask_BSN, self._split.start_gather(bias_BHIJ, 2, summed=True))


def head_first(linear: nn.Linear, z_BIJZ: Tensor) -> Tensor:
    """Return the projection of pairs, (B, H, I, J) and contiguous."""
    pairs_BZP = z_BIJZ.flatten(1, 2).transpose(1, 2)
    return (linear.weight @ pairs_BZP).unflatten(2, z_BIJZ.shape[1:3])


class ColumnAttention(nn.Module):
    """Attention along the sequences at each residue (algorithm 8)."""

    def __init__(self, sizes: BlockSizes, choose: Chooser) -> None:
        super().__init__()
        self.layer_norm_m = Norm(sizes.msa, choose)
        self.mha = Attention(sizes.msa, sizes.msa_head, sizes.msa_heads, choose)

    def forward(self, m_BSNM: Tensor, mask_BSN: Tensor) -> Tensor:
        """Return the update of m."""
        return self.mha(self.layer_norm_m(m_BSNM), mask_BSN, transposed=True)


class GlobalAttention(nn.Module):
    """Attention over the sequences with one query for each head and residue, from the mean over the sequences, and one
    key and value for all heads (algorithm 19)."""

    def __init__(self, channels: int, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.linear_q = Linear(channels, width * heads, "glorot", bias=False)
        self.linear_k = Linear(channels, width, "glorot", bias=False)
        self.linear_v = Linear(channels, width, "glorot", bias=False)
        self.linear_g = Linear(channels, width * heads, "gating")
        self.linear_o = Linear(width * heads, channels, "final")

    def forward(self, m_BSNM: Tensor, mask_BSN: Tensor) -> Tensor:
        """Return the update (B, S, N, M)."""
        wide = torch.promote_types(m_BSNM.dtype, torch.float32)
        mask_BSN = mask_BSN.to(wide)
        total_BNM = torch.einsum("bsn,bsnm->bnm", mask_BSN.to(m_BSNM.dtype), m_BSNM).to(wide)
        mean_BNM = (total_BNM / (mask_BSN.sum(1)[..., None] + _MEAN_EPSILON)).to(m_BSNM.dtype)
        q_BNHC = self.linear_q(mean_BNM).unflatten(-1, (self._heads, -1))
        k_BSNC, v_BSNC = merged(m_BSNM, (self.linear_k, self.linear_v), bias=False).chunk(2, -1)
        scores_BNHS = torch.einsum("bnhc,bsnc->bnhs", q_BNHC * q_BNHC.shape[-1] ** -0.5, k_BSNC).to(wide)
        scores_BNHS = scores_BNHS + ((mask_BSN - 1) * _LARGE).transpose(1, 2)[:, :, None]
        o_BNHC = torch.einsum("bnhs,bsnc->bnhc", scores_BNHS.softmax(-1).to(v_BSNC.dtype), v_BSNC)
        return self.linear_o(torch.sigmoid(self.linear_g(m_BSNM)) * o_BNHC.flatten(-2)[:, None])


class GlobalColumnAttention(nn.Module):
    """Global attention along the sequences at each residue."""

    def __init__(self, sizes: BlockSizes, choose: Chooser) -> None:
        super().__init__()
        self.layer_norm_m = Norm(sizes.msa, choose)
        self.global_attention = GlobalAttention(sizes.msa, sizes.msa_head, sizes.msa_heads)

    def forward(self, m_BSNM: Tensor, mask_BSN: Tensor) -> Tensor:
        """Return the update of m."""
        return self.global_attention(self.layer_norm_m(m_BSNM), mask_BSN)


class OuterProductMean(nn.Module):
    """Update of z: the mean over the sequences of an outer product of two residues' channels (algorithm 10)."""

    def __init__(self, sizes: BlockSizes, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        self._split, self._outer_product_mean = split, choose("outer_product_mean", channels=sizes.outer)
        self.layer_norm = Norm(sizes.msa, choose)
        self.linear_1 = Linear(sizes.msa, sizes.outer)
        self.linear_2 = Linear(sizes.msa, sizes.outer)
        self.linear_out = Linear(sizes.outer**2, sizes.pair, "final")

    def forward(self, z_BIJZ: Tensor, m_BSNM: Tensor, mask_BSN: Tensor) -> Tensor:
        """Return z with the update; m is sharded by columns, z by rows, and the mask is whole."""
        split = self._split
        own_BSI = split.shard(mask_BSN, 2)
        ab_BSN2C = merged(self.layer_norm(m_BSNM), (self.linear_1, self.linear_2)) * own_BSI[..., None].to(m_BSNM.dtype)
        a_BSIC, b_BSJC = ab_BSN2C.chunk(2, -1)
        norm_BIJ = torch.einsum("bsi,bsj->bij", own_BSI, mask_BSN) + _PAIRS_EPSILON
        out = self.linear_out
        return self._outer_product_mean(z_BIJZ, a_BSIC, split.gather_summed(b_BSJC, 2), norm_BIJ, out.weight, out.bias)


class TriangleMultiplication(nn.Module):
    """Update of an edge of z from the two other edges of all triangles (algorithms 11 and 12).

    Args:
        outgoing: whether z_ij gets the edges ik and jk; otherwise ki and kj.
    """

    def __init__(self, sizes: PairSizes, outgoing: bool, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        pair, channels = sizes.pair, sizes.multiplication
        self._outgoing, self._split, self._p = outgoing, split, sizes.pair_dropout
        self._gate = choose("triangle_gate")
        self._add = choose("dropout_add", features=pair)
        self.layer_norm_in = Norm(pair, choose)
        self.linear_a_p = Linear(pair, channels)
        self.linear_a_g = Linear(pair, channels, "gating")
        self.linear_b_p = Linear(pair, channels)
        self.linear_b_g = Linear(pair, channels, "gating")
        self.layer_norm_out = Norm(channels, choose)
        self.linear_z = Linear(channels, pair, "final")
        self.linear_g = Linear(pair, pair, "gating")

    def forward(self, z_BIJZ: Tensor, mask_BIJ: Tensor, masks: Masks) -> Tensor:
        """Return z with the update, sharded by rows for outgoing and by columns for incoming edges."""
        split = self._split
        normed_BIJZ = self.layer_norm_in(z_BIJZ)
        layers = (self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g)
        parts = self._gate(merged(normed_BIJZ.flatten(0, 2), layers), mask_BIJ.flatten())
        a_CBIJ, b_CBIJ = (part_CP.unflatten(1, mask_BIJ.shape) for part_CP in parts)
        gathered, dim = (b_CBIJ, 2) if self._outgoing else (a_CBIJ, 3)
        factor = split.start_gather(gathered, dim, summed=True)
        gate_BIJZ = self.linear_g(normed_BIJZ)
        if self._outgoing:
            x_CBIJ = a_CBIJ @ factor.wait().mT
            dropout = dropped(masks, self._p, "rows")
        else:
            x_CBIJ = factor.wait().mT @ b_CBIJ
            whole = x_CBIJ.shape[3] * split.ranks
            dropout = dropped(masks, self._p, "rows", split.offset(whole), whole)
        x_BIJC = self.layer_norm_out(x_CBIJ.flatten(1).t()).unflatten(0, mask_BIJ.shape)
        return self._add(z_BIJZ, self.linear_z(x_BIJC), gate_BIJZ, dropout)


def dropped(
    masks: Masks, p: float, shared: Literal["rows", "columns"], first: int = 0, whole: int = 0
) -> SharedDropout:
    """Return the dropout at the first site of ``masks``; the other arguments are those of :class:`SharedDropout`."""
    return SharedDropout(p if masks.active else 0.0, masks.seed, masks.site, shared, first, whole)


class TriangleAttention(nn.Module):
    """Attention among the edges that start, or end, at one residue, with a bias from the third edge (algorithms 13 and
    14)."""

    def __init__(self, sizes: PairSizes, starting: bool, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        self._starting, self._split, self._p = starting, split, sizes.pair_dropout
        self._add = choose("dropout_add", features=sizes.pair)
        self.layer_norm = Norm(sizes.pair, choose)
        self.linear = Linear(sizes.pair, sizes.pair_heads, "normal", bias=False)
        self.mha = Attention(sizes.pair, sizes.pair_head, sizes.pair_heads, choose)

    def forward(self, z_BIJZ: Tensor, mask_BIJ: Tensor, masks: Masks) -> Tensor:
        """Return z with the update, sharded by rows for starting and by columns for ending edges."""
        normed_BIJZ = self.layer_norm(z_BIJZ)
        bias_BHIJ = head_first(self.linear, normed_BIJZ)
        bias = self._split.start_gather(bias_BHIJ, 2 if self._starting else 3, summed=True)
        update_BIJZ = self.mha(normed_BIJZ, mask_BIJ, bias, transposed=not self._starting)
        return self._add(z_BIJZ, update_BIJZ, None, dropped(masks, self._p, "rows" if self._starting else "columns"))


class EvoformerBlock(nn.Module):
    """One block on m and z (algorithm 6).

    Args:
        extra: whether it is a block of the extra-MSA stack, which has global column attention.
        split: the ranks that share a sample.
    """

    def __init__(self, sizes: BlockSizes, extra: bool, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        self._split, self._p = split, sizes.msa_dropout
        self._add = choose("dropout_add", features=sizes.msa)
        self.msa_att_row = RowAttention(sizes, choose, split)
        self.msa_att_col = (GlobalColumnAttention if extra else ColumnAttention)(sizes, choose)
        self.msa_transition = Transition(sizes.msa, sizes.msa_transition, choose)
        self.outer_product_mean = OuterProductMean(sizes, choose, split)
        self.tri_mul_out = TriangleMultiplication(sizes, True, choose, split)
        self.tri_mul_in = TriangleMultiplication(sizes, False, choose, split)
        self.tri_att_start = TriangleAttention(sizes, True, choose, split)
        self.tri_att_end = TriangleAttention(sizes, False, choose, split)
        self.pair_transition = Transition(sizes.pair, sizes.pair_transition, choose)

    def forward(
        self, m_BSNM: Tensor, z_BIJZ: Tensor, mask_BSN: Tensor, mask_BNN: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Return m and z after the block, both sharded by rows as the inputs are. The masks are whole."""
        split = self._split
        update_BSNM = self.msa_att_row(m_BSNM, z_BIJZ, split.shard(mask_BSN, 1))
        m_BSNM = self._add(m_BSNM, update_BSNM, None, dropped(masks, self._p, "rows"))
        m_BSNM = split.transpose(m_BSNM, 1, 2)
        m_BSNM = m_BSNM + self.msa_att_col(m_BSNM, split.shard(mask_BSN, 2))
        m_BSNM = m_BSNM + self.msa_transition(m_BSNM)
        z_BIJZ = self.outer_product_mean(z_BIJZ, m_BSNM, mask_BSN)
        transposed = split.start_transpose(m_BSNM, 2, 1)  # overlaps with all updates of z
        rows_BIJ, columns_BIJ = split.shard(mask_BNN, 1), split.shard(mask_BNN, 2)
        z_BIJZ = self.tri_mul_out(z_BIJZ, rows_BIJ, masks.skip(1))
        z_BIJZ = self.tri_mul_in(split.transpose(z_BIJZ, 1, 2), columns_BIJ, masks.skip(2))
        z_BIJZ = self.tri_att_start(split.transpose(z_BIJZ, 2, 1), rows_BIJ, masks.skip(3))
        z_BIJZ = self.tri_att_end(split.transpose(z_BIJZ, 1, 2), columns_BIJ, masks.skip(4))
        z_BIJZ = z_BIJZ + self.pair_transition(z_BIJZ)
        return transposed.wait(), split.transpose(z_BIJZ, 2, 1)


class TemplateBlock(nn.Module):
    """One block on the pair representation of a template (algorithm 16)."""

    def __init__(self, sizes: PairSizes, choose: Chooser, split: AxialSplit) -> None:
        super().__init__()
        self._split = split
        self.tri_att_start = TriangleAttention(sizes, True, choose, split)
        self.tri_att_end = TriangleAttention(sizes, False, choose, split)
        self.tri_mul_out = TriangleMultiplication(sizes, True, choose, split)
        self.tri_mul_in = TriangleMultiplication(sizes, False, choose, split)
        self.pair_transition = Transition(sizes.pair, sizes.pair_transition, choose)

    def forward(self, z_BIJZ: Tensor, mask_BNN: Tensor, masks: Masks) -> tuple[Tensor]:
        """Return z after the block, sharded by rows as the input is. The mask is whole."""
        split = self._split
        rows_BIJ, columns_BIJ = split.shard(mask_BNN, 1), split.shard(mask_BNN, 2)
        z_BIJZ = self.tri_att_start(z_BIJZ, rows_BIJ, masks)
        z_BIJZ = self.tri_att_end(split.transpose(z_BIJZ, 1, 2), columns_BIJ, masks.skip(1))
        z_BIJZ = self.tri_mul_out(split.transpose(z_BIJZ, 2, 1), rows_BIJ, masks.skip(2))
        z_BIJZ = self.tri_mul_in(split.transpose(z_BIJZ, 1, 2), columns_BIJ, masks.skip(3))
        z_BIJZ = z_BIJZ + self.pair_transition(z_BIJZ)
        return (split.transpose(z_BIJZ, 2, 1),)


class Stack(nn.Module):
    """Blocks on m and z, one after another.

    Args:
        single: channels of the single representation that the first sequence of m is projected to; 0 for none.
        recompute: whether the backward pass computes each block's activations again.
    """

    def __init__(
        self,
        sizes: BlockSizes,
        blocks: int,
        extra: bool,
        choose: Chooser,
        split: AxialSplit,
        single: int = 0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self._split, self._recompute = split, recompute
        self.blocks = nn.ModuleList(EvoformerBlock(sizes, extra, choose, split) for _ in range(blocks))
        if single:
            self.linear = Linear(sizes.msa, single)

    def forward(
        self, m_BSNM: Tensor, z_BIJZ: Tensor, mask_BSN: Tensor, mask_BNN: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Return m and z after all blocks, sharded by rows as the inputs are. The masks are whole."""
        for number, block in enumerate(self.blocks):
            inputs = mask_BSN, mask_BNN, masks.skip(number * SITES)
            m_BSNM, z_BIJZ = recomputed(block, m_BSNM, z_BIJZ, *inputs, recompute=self._recompute)
        return m_BSNM, z_BIJZ
