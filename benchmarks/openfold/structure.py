"""The structure module of AlphaFold2: frames and torsion angles of all residues, by invariant point attention
(supplementary information, algorithms 20 to 23).

All of it is at least fp32. Lengths inside are in units of ``position_scale`` angstrom.

Shapes: B micro-batch, N residues, D single channels, Z pair channels, H heads, C channels of a head, P points, L
iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.openfold import geometry
from benchmarks.openfold.evoformer import SITES
from benchmarks.openfold.geometry import Frames, ResidueTables
from benchmarks.openfold.layers import Linear, Masks
from benchmarks.openfold.residues import TORSIONS
from common.config.ranges import AtLeast, Positive, Share
from common.ops.dropout.reference import dropout_reference

_LARGE, _EPSILON = 1e5, 1e-8

HEAD_WEIGHT = 0.541324854612918
"""Initial weight of a head's points; its softplus is 1."""


@dataclass(frozen=True)
class StructureSizes:
    """Widths of the structure module.

    Attributes:
        single, pair: D and Z.
        head, heads: C and H of invariant point attention.
        query_points, value_points: P of queries and keys, and of values.
        angle: channels of the network of the angles.
        angle_blocks: residual blocks of that network.
        iterations: L.
        dropout: probability of dropping an element.
        position_scale: unit of length, in angstrom.
    """

    single: Annotated[int, AtLeast(1)]
    pair: Annotated[int, AtLeast(1)]
    head: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    query_points: Annotated[int, AtLeast(1)]
    value_points: Annotated[int, AtLeast(1)]
    angle: Annotated[int, AtLeast(1)]
    angle_blocks: Annotated[int, AtLeast(1)]
    iterations: Annotated[int, AtLeast(1)]
    dropout: Annotated[float, Share]
    position_scale: Annotated[float, Positive]


class Structure(NamedTuple):
    """The result of all iterations; lengths in angstrom.

    Attributes:
        backbone: frames (L, B, N).
        groups: frames (B, N, 8) of the last iteration.
        raw_angles, angles: (L, B, N, 7, 2), sine and cosine, before and after normalization.
        atoms: (B, N, 14, 3), positions of the last iteration.
        single: (B, N, D), the last iteration's representation.
    """

    backbone: Frames
    groups: Frames
    raw_angles: Tensor
    angles: Tensor
    atoms: Tensor
    single: Tensor


class InvariantPointAttention(nn.Module):
    """Attention over residues by channels, pairs, and distances of points in the residues' frames (algorithm 22).

    As in the published weights, all linear layers have a bias.
    """

    def __init__(self, sizes: StructureSizes) -> None:
        super().__init__()
        self._sizes = sizes
        heads, width = sizes.heads, sizes.head
        points = sizes.query_points + sizes.value_points
        self.linear_q = Linear(sizes.single, heads * width)
        self.linear_kv = Linear(sizes.single, 2 * heads * width)
        self.linear_q_points = Linear(sizes.single, heads * sizes.query_points * 3)
        self.linear_kv_points = Linear(sizes.single, heads * points * 3)
        self.linear_b = Linear(sizes.pair, heads)
        self.head_weights = nn.Parameter(torch.full((heads,), HEAD_WEIGHT))
        self.linear_out = Linear(heads * (sizes.pair + width + 4 * sizes.value_points), sizes.single, "final")

    def forward(self, s_BND: Tensor, z_BNNZ: Tensor, frames: Frames, mask_BN: Tensor) -> Tensor:
        """Return the update of the single representation."""
        sizes, heads = self._sizes, self._sizes.heads
        q_BNHC = self.linear_q(s_BND).unflatten(-1, (heads, -1))
        k_BNHC, v_BNHC = self.linear_kv(s_BND).unflatten(-1, (heads, -1)).chunk(2, -1)
        q_BNHP3 = self._points(self.linear_q_points(s_BND), frames)
        kv_BNHP3 = self._points(self.linear_kv_points(s_BND), frames)
        k_BNHP3, v_BNHP3 = kv_BNHP3.split([sizes.query_points, sizes.value_points], 3)

        scores_BHNN = torch.einsum("bihc,bjhc->bhij", q_BNHC, k_BNHC) * (3 * sizes.head) ** -0.5
        scores_BHNN = scores_BHNN + self.linear_b(z_BNNZ).permute(0, 3, 1, 2) * 3**-0.5
        distance_BNNH = (q_BNHP3[:, :, None] - k_BNHP3[:, None]).square().sum((-1, -2))
        weight_H = F.softplus(self.head_weights) * (3 * sizes.query_points * 9 / 2) ** -0.5
        scores_BHNN = scores_BHNN - 0.5 * (weight_H * distance_BNNH).permute(0, 3, 1, 2)
        pairs_BNN = mask_BN[:, :, None] * mask_BN[:, None]
        weights_BHNN = (scores_BHNN + _LARGE * (pairs_BNN - 1)[:, None]).softmax(-1)

        o_BNHC = torch.einsum("bhij,bjhc->bihc", weights_BHNN, v_BNHC)
        global_BNHP3 = torch.einsum("bhij,bjhpx->bihpx", weights_BHNN, v_BNHP3)
        points_BNHP3 = _per_point(frames).invert_apply(global_BNHP3)
        norm_BNHP = (points_BNHP3.square().sum(-1) + _EPSILON).sqrt()
        pair_BNHZ = torch.einsum("bhij,bijz->bihz", weights_BHNN, z_BNNZ)
        coordinates = [axis.flatten(-2) for axis in points_BNHP3.unbind(-1)]
        parts = (o_BNHC.flatten(-2), *coordinates, norm_BNHP.flatten(-2), pair_BNHZ.flatten(-2))
        return self.linear_out(torch.cat(parts, -1))

    def _points(self, values_BNF: Tensor, frames: Frames) -> Tensor:
        """Return points (B, N, H, P, 3) in global coordinates; the layer's outputs are all x, then all y and all z."""
        local_BNHP3 = values_BNF.unflatten(-1, (3, self._sizes.heads, -1)).permute(0, 1, 3, 4, 2)
        return _per_point(frames).apply(local_BNHP3)


def _per_point(frames: Frames) -> Frames:
    """Return frames (B, N) that broadcast over heads and points."""
    return Frames(frames.rotation[:, :, None, None], frames.translation[:, :, None, None])


class TransitionLayer(nn.Module):
    """Residual block of three linear layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear_1 = Linear(channels, channels, "relu")
        self.linear_2 = Linear(channels, channels, "relu")
        self.linear_3 = Linear(channels, channels, "final")

    def forward(self, s_BND: Tensor) -> Tensor:
        """Return the result, of the shape of ``s``."""
        return s_BND + self.linear_3(F.relu(self.linear_2(F.relu(self.linear_1(s_BND)))))


class StructureTransition(nn.Module):
    """The transition of an iteration (algorithm 20, line 9)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TransitionLayer(channels)])
        self.layer_norm = nn.LayerNorm(channels)

    def forward(self, s_BND: Tensor, p: float, masks: Masks) -> Tensor:
        """Return the result; its dropout has the first site of ``masks``."""
        for layer in self.layers:
            s_BND = layer(s_BND)
        return self.layer_norm(_dropped(s_BND, p, masks))


def _dropped(s_BND: Tensor, p: float, masks: Masks) -> Tensor:
    return dropout_reference(s_BND, p if masks.active else 0.0, masks.seed, masks.site)


class BackboneUpdate(nn.Module):
    """The frames' update: a quaternion's vector part and a translation (algorithm 23)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = Linear(channels, 6, "final")

    def forward(self, s_BND: Tensor) -> Frames:
        """Return the update, in the residues' frames."""
        turn_BN3, shift_BN3 = self.linear(s_BND).split(3, -1)
        return Frames(geometry.rotation_from_update(turn_BN3), shift_BN3)


class AngleBlock(nn.Module):
    """Residual block of the network of the angles."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear_1 = Linear(channels, channels, "relu")
        self.linear_2 = Linear(channels, channels, "final")

    def forward(self, a_BNF: Tensor) -> Tensor:
        """Return the result, of the shape of ``a``."""
        return a_BNF + self.linear_2(F.relu(self.linear_1(F.relu(a_BNF))))


class AngleNetwork(nn.Module):
    """Torsion angles of all residues (algorithm 20, lines 11 to 14)."""

    def __init__(self, sizes: StructureSizes) -> None:
        super().__init__()
        self.linear_in = Linear(sizes.single, sizes.angle)
        self.linear_initial = Linear(sizes.single, sizes.angle)
        self.layers = nn.ModuleList(AngleBlock(sizes.angle) for _ in range(sizes.angle_blocks))
        self.linear_out = Linear(sizes.angle, TORSIONS * 2)

    def forward(self, s_BND: Tensor, initial_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Return sine and cosine (B, N, 7, 2), before and after normalization."""
        a_BNF = self.linear_in(F.relu(s_BND)) + self.linear_initial(F.relu(initial_BND))
        for layer in self.layers:
            a_BNF = layer(a_BNF)
        raw_BN72 = self.linear_out(F.relu(a_BNF)).unflatten(-1, (TORSIONS, 2))
        return raw_BN72, raw_BN72 / raw_BN72.square().sum(-1, keepdim=True).clamp(min=_EPSILON).sqrt()


class StructureModule(nn.Module):
    """The structure from single and pair representation; all iterations have the same weights (algorithm 20)."""

    def __init__(self, sizes: StructureSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.layer_norm_s = nn.LayerNorm(sizes.single)
        self.layer_norm_z = nn.LayerNorm(sizes.pair)
        self.linear_in = Linear(sizes.single, sizes.single)
        self.ipa = InvariantPointAttention(sizes)
        self.layer_norm_ipa = nn.LayerNorm(sizes.single)
        self.transition = StructureTransition(sizes.single)
        self.bb_update = BackboneUpdate(sizes.single)
        self.angle_resnet = AngleNetwork(sizes)

    def forward(
        self,
        single_BND: Tensor,
        z_BNNZ: Tensor,
        aatype_BN: Tensor,
        mask_BN: Tensor,
        tables: ResidueTables,
        masks: Masks,
    ) -> Structure:
        """Return frames, angles and atoms. Rotations are constants to the gradient of the iterations after them."""
        sizes = self._sizes
        initial_BND, z_BNNZ = self.layer_norm_s(single_BND), self.layer_norm_z(z_BNNZ)
        s_BND = self.linear_in(initial_BND)
        frames = geometry.identity(tuple(aatype_BN.shape), s_BND)
        rotations, translations, raw_angles, angles = [], [], [], []
        for iteration in range(sizes.iterations):
            mine = masks.skip(iteration * SITES)
            s_BND = s_BND + self.ipa(s_BND, z_BNNZ, frames, mask_BN)
            s_BND = self.layer_norm_ipa(_dropped(s_BND, sizes.dropout, mine))
            s_BND = self.transition(s_BND, sizes.dropout, mine.skip(1))
            frames = frames.compose(self.bb_update(s_BND))
            raw_BN72, sincos_BN72 = self.angle_resnet(s_BND, initial_BND)
            rotations.append(frames.rotation)
            translations.append(frames.translation * sizes.position_scale)
            raw_angles.append(raw_BN72)
            angles.append(sincos_BN72)
            frames = Frames(frames.rotation.detach(), frames.translation)
        backbone = Frames(torch.stack(rotations), torch.stack(translations))
        groups = geometry.group_frames(tables, aatype_BN, Frames(rotations[-1], translations[-1]), angles[-1])
        atoms = geometry.atoms14(tables, aatype_BN, groups)
        return Structure(backbone, groups, torch.stack(raw_angles), torch.stack(angles), atoms, s_BND)
