"""The losses of AlphaFold2's initial training (supplementary information, section 1.9), as the rules fix them.

Each function returns one value for each sample, (B,). Lengths are in angstrom.

Shapes: B samples, N residues, S sequences, L iterations of the structure module, F frames, P points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.openfold.geometry import Frames
from benchmarks.openfold.labels import Labels
from benchmarks.openfold.model import CONFIDENCE_BINS, DISTOGRAM_BINS, Predictions
from benchmarks.openfold.residues import CA
from benchmarks.openfold.structure import Structure
from common.config.ranges import NotNegative

LENGTH_SCALE, CLAMP = 10.0, 10.0
"""Unit of the FAPE, and its largest distance."""

LDDT_CUTOFF, LDDT_THRESHOLDS = 15.0, (0.5, 1.0, 2.0, 4.0)
"""Distances below the cutoff count, as kept if the error is below a threshold."""

RESOLUTIONS = (0.1, 3.0)
"""Resolutions of structures that teach the confidence head."""

PARTS = ("fape", "supervised_chi", "distogram", "masked_msa", "plddt")
"""Parts of the loss, in the order of :func:`all_losses`; their weights have the same names."""

FIRST_BOUNDARY, LAST_BOUNDARY = 2.3125, 21.6875
"""First and last boundary, in angstrom, between the bins of the distogram."""

_FAPE_EPSILON, _MEAN_EPSILON, _SQUARED_EPSILON, _CHI_NORM_WEIGHT, _CHI_WEIGHT = 1e-4, 1e-4, 1e-6, 0.01, 0.5


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses. The FAPE is itself a weighted sum, of a backbone part and a side-chain part."""

    fape: Annotated[float, NotNegative]
    fape_backbone: Annotated[float, NotNegative]
    fape_sidechain: Annotated[float, NotNegative]
    supervised_chi: Annotated[float, NotNegative]
    distogram: Annotated[float, NotNegative]
    masked_msa: Annotated[float, NotNegative]
    plddt: Annotated[float, NotNegative]


def fape(
    frames: Frames,
    points_XP3: Tensor,
    true_frames: Frames,
    true_points_XP3: Tensor,
    frame_mask_XF: Tensor,
    point_mask_XP: Tensor,
    clamp: float | None,
) -> Tensor:
    """Return the frame-aligned point error (X,): the mean distance of points in all frames (algorithm 28).

    Args:
        frames: (X, F), as ``true_frames``.
        clamp: largest distance; None for no limit.
    """
    # The difference of local coordinates is one product: [R^T, -S^T] [x, y] - (R^T r - S^T s).
    inverse_XF36 = torch.cat((frames.rotation.mT, -true_frames.rotation.mT.expand_as(frames.rotation)), -1)
    both_X6P = torch.cat((points_XP3, true_points_XP3.expand_as(points_XP3)), -1).mT
    origin_XF6 = torch.cat((frames.translation, true_frames.translation.expand_as(frames.translation)), -1)
    shift_XF3 = (inverse_XF36 * origin_XF6[..., None, :]).sum(-1)
    difference_XFP = inverse_XF36.flatten(-3, -2) @ both_X6P - shift_XF3.flatten(-2)[..., None]
    squared_XFP = difference_XFP.square().unflatten(-2, (-1, 3)).sum(-2)
    distance_XFP = (squared_XFP + _FAPE_EPSILON).sqrt()
    if clamp is not None:
        distance_XFP = distance_XFP.clamp(max=clamp)
    total = torch.einsum("...fp,...f,...p->...", distance_XFP / LENGTH_SCALE, frame_mask_XF, point_mask_XP)
    return total / (_FAPE_EPSILON + frame_mask_XF.sum(-1)) / (_FAPE_EPSILON + point_mask_XP.sum(-1))


def backbone_fape(backbone: Frames, labels: Labels, clamped_B: Tensor) -> Tensor:
    """Return the FAPE of the CA atoms in the residues' frames, the mean over the iterations.

    Args:
        backbone: (L, B, N).
        clamped_B: 1 for samples whose distances are clamped.
    """
    true = Frames(labels.groups.rotation[:, :, 0], labels.groups.translation[:, :, 0])
    mask_BN = labels.group_mask[..., 0]
    iterations = len(backbone.translation)
    masks_LBN = mask_BN.expand(iterations, -1, -1)

    def mean(clamp: float | None) -> Tensor:
        arguments = (backbone, backbone.translation, true, true.translation, masks_LBN, masks_LBN, clamp)
        return fape(*arguments).mean(0)

    return clamped_B * mean(CLAMP) + (1 - clamped_B) * mean(None)


@torch.no_grad()
def other_naming_is_better(atoms_BNA3: Tensor, labels: Labels) -> Tensor:
    """Return 1 for residues whose equivalent atoms fit better in the other naming, (B, N) (algorithm 26).

    The fit compares distances from the ambiguous atoms of a residue to all atoms with one name.
    """
    ambiguous_BNA, exists_BNA = labels.ambiguous, labels.atom_mask
    fixed_BQ = (exists_BNA * (1 - ambiguous_BNA)).flatten(1)

    def error(atoms: Tensor) -> Tensor:
        difference_BPQ = (predicted_BPQ - _distances(atoms.flatten(1, 2), labels.atoms.flatten(1, 2))).abs()
        weight_BP = (exists_BNA * ambiguous_BNA).flatten(1)
        return torch.einsum("bpq,bp,bq->bp", difference_BPQ, weight_BP, fixed_BQ).unflatten(1, (-1, 14)).sum(-1)

    flat = atoms_BNA3.flatten(1, 2)
    predicted_BPQ = _distances(flat, flat)
    return (error(labels.other_atoms) < error(labels.atoms)).to(atoms_BNA3.dtype)


def _distances(first_BP3: Tensor, second_BQ3: Tensor) -> Tensor:
    # Never differentiated: the gradient at distance 0 is not finite. torch.cdist takes 10 ms for a crop on an H200.
    pairs = zip(first_BP3.unbind(-1), second_BQ3.unbind(-1), strict=True)
    squared_BPQ = sum((first_BP[:, :, None] - second_BQ[:, None]).square() for first_BP, second_BQ in pairs)
    assert isinstance(squared_BPQ, Tensor)
    return squared_BPQ.sqrt()


def sidechain_fape(structure: Structure, labels: Labels) -> Tensor:
    """Return the clamped FAPE of all atoms in the frames of all groups, in the better naming of each residue."""
    other_BN = other_naming_is_better(structure.atoms, labels)

    def better(first: Tensor, other: Tensor) -> Tensor:
        return torch.where(other_BN.bool().view(*other_BN.shape, *[1] * (first.dim() - 2)), other, first)

    frames, other_frames = labels.groups, labels.other_groups
    true = Frames(better(frames.rotation, other_frames.rotation).flatten(1, 2), frames.translation.flatten(1, 2))
    return fape(
        Frames(structure.groups.rotation.flatten(1, 2), structure.groups.translation.flatten(1, 2)),
        structure.atoms.flatten(1, 2),
        true,
        better(labels.atoms, labels.other_atoms).flatten(1, 2),
        labels.group_mask.flatten(1),
        better(labels.atom_mask, labels.other_atom_mask).flatten(1),
        CLAMP,
    )


def chi_loss(structure: Structure, labels: Labels, chain_mask_BN: Tensor) -> Tensor:
    """Return the loss of the chi angles, and of the length of all angles' vectors (algorithm 27)."""
    chi_LBN42 = structure.angles[..., 3:, :]
    error_LBN4 = (chi_LBN42 - labels.chi).square().sum(-1)
    other_LBN4 = (chi_LBN42 - labels.chi * labels.chi_sign[..., None]).square().sum(-1)
    chi_B = _masked_mean(torch.minimum(error_LBN4, other_LBN4), labels.chi_mask.expand_as(error_LBN4))
    length_LBN7 = (structure.raw_angles.square().sum(-1) + _SQUARED_EPSILON).sqrt()
    norm_B = _masked_mean((length_LBN7 - 1).abs(), chain_mask_BN[..., None].expand_as(length_LBN7))
    return _CHI_WEIGHT * chi_B + _CHI_NORM_WEIGHT * norm_B


def _masked_mean(value_LBNT: Tensor, mask_LBNT: Tensor) -> Tensor:
    kept = (0, 2, 3)
    return (value_LBNT * mask_LBNT).sum(kept) / (_MEAN_EPSILON + mask_LBNT.sum(kept))


def _cross_entropy(logits_XK: Tensor, class_X: Tensor) -> Tensor:
    """Return the cross entropy of each position; rows, because PyTorch's other form is not deterministic on a GPU."""
    return F.cross_entropy(logits_XK.flatten(0, -2), class_X.flatten(), reduction="none").view(class_X.shape)


def distogram_loss(logits_BNNK: Tensor, labels: Labels) -> Tensor:
    """Return the cross entropy of the bins of the distances between CB atoms."""
    boundaries = torch.linspace(
        FIRST_BOUNDARY, LAST_BOUNDARY, DISTOGRAM_BINS - 1, dtype=logits_BNNK.dtype, device=logits_BNNK.device
    )
    squared_BNN1 = (labels.beta[:, :, None] - labels.beta[:, None]).square().sum(-1, keepdim=True)
    bin_BNN = (squared_BNN1 > boundaries.square()).sum(-1)
    errors_BNN = _cross_entropy(logits_BNNK, bin_BNN)
    mask_BNN = labels.beta_mask[:, :, None] * labels.beta_mask[:, None]
    return (errors_BNN * mask_BNN).sum((1, 2)) / (_SQUARED_EPSILON + mask_BNN.sum((1, 2)))


def masked_msa_loss(logits_BSNK: Tensor, true_BSN: Tensor, mask_BSN: Tensor) -> Tensor:
    """Return the cross entropy of the residues at the masked positions of the MSA."""
    errors_BSN = _cross_entropy(logits_BSNK, true_BSN.long())
    mask_BSN = mask_BSN.to(errors_BSN.dtype)
    return (errors_BSN * mask_BSN).sum((1, 2)) / (1e-8 + mask_BSN.sum((1, 2)))


def lddt_sums(points_BN3: Tensor, true_BN3: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many distances of each residue are kept, as a mean over the thresholds, and how many count: (B, N)."""
    true_BNN, found_BNN = _distances(true_BN3, true_BN3), _distances(points_BN3, points_BN3)
    self_NN = torch.eye(mask_BN.shape[1], dtype=mask_BN.dtype, device=mask_BN.device)
    counted_BNN = (true_BNN < LDDT_CUTOFF) * mask_BN[:, :, None] * mask_BN[:, None] * (1 - self_NN)
    error_BNN = (true_BNN - found_BNN).abs()
    kept_BNN = sum((error_BNN < threshold).to(mask_BN.dtype) for threshold in LDDT_THRESHOLDS) / len(LDDT_THRESHOLDS)
    return (kept_BNN * counted_BNN).sum(-1), counted_BNN.sum(-1)


def alpha_atoms(structure: Structure) -> Tensor:
    """Return the predicted CA atoms (B, N, 3). Unknown residues have theirs at the origin, as in the reference."""
    return structure.atoms[..., CA, :]  # N, CA and C have the same slots of 14 and of 37


def confidence_loss(logits_BNK: Tensor, alpha_BN3: Tensor, labels: Labels, resolution_B: Tensor) -> Tensor:
    """Return the cross entropy of the bins of the residues' lDDT; 0 for structures of low resolution (algorithm 29)."""
    kept_BN, counted_BN = lddt_sums(alpha_BN3.detach(), labels.alpha, labels.alpha_mask)
    score_BN = (kept_BN + 1e-10) / (counted_BN + 1e-10)
    bin_BN = (score_BN * CONFIDENCE_BINS).floor().clamp(max=CONFIDENCE_BINS - 1).long()
    errors_BN = _cross_entropy(logits_BNK, bin_BN)
    mean_B = (errors_BN * labels.alpha_mask).sum(1) / (1e-10 + labels.alpha_mask.sum(1))
    low, high = RESOLUTIONS
    return mean_B * ((resolution_B >= low) & (resolution_B <= high)).to(mean_B.dtype)


def all_losses(
    predictions: Predictions, labels: Labels, tensors: dict[str, Tensor], weights: LossWeights, crop_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, the mean over the samples, and its parts before weights and lengths.

    A sample's loss is multiplied by the square root of its chain's length, at most of ``crop_size``. A part that is
    not finite counts as 0. The losses of experimentally resolved atoms and of violations have weight 0 in the rules,
    and are not computed.
    """
    structure, dtype = predictions.structure, predictions.confidence.dtype
    real = {name: tensors[name].to(dtype) for name in ("use_clamped_fape", "seq_mask", "resolution", "seq_length")}
    backbone_B = backbone_fape(structure.backbone, labels, real["use_clamped_fape"])
    parts = {
        "fape": weights.fape_backbone * backbone_B + weights.fape_sidechain * sidechain_fape(structure, labels),
        "supervised_chi": chi_loss(structure, labels, real["seq_mask"]),
        "distogram": distogram_loss(predictions.distogram, labels),
        "masked_msa": masked_msa_loss(predictions.masked_msa, tensors["true_msa"][:, -1], tensors["bert_mask"][:, -1]),
        "plddt": confidence_loss(predictions.confidence, alpha_atoms(structure), labels, real["resolution"]),
    }
    parts = {name: part_B.nan_to_num(0.0, 0.0, 0.0) for name, part_B in parts.items()}
    total_B = sum(getattr(weights, name) * part_B for name, part_B in parts.items())
    length_B = real["seq_length"].clamp(max=crop_size).sqrt()
    return (total_B * length_B).mean(), {name: part_B.detach().mean() for name, part_B in parts.items()}
