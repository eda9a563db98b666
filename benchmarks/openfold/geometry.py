"""Frames (rotation and translation), torsion angles and atoms of residues, as AlphaFold2 defines them (supplementary
information, algorithms 20 to 25).

A residue has eight rigid groups: backbone, pre-omega, phi, psi and the four chi angles. A group's frame has its x axis
along the bond that the angle turns about. The first two angle groups have no atoms.

Shapes: any leading dimensions, written `_X`; G = 8 groups, 14 and 37 the atom slots of a residue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.openfold import residues
from benchmarks.openfold.residues import CA, CB, CHIS, GROUPS, C, N, O

_EPSILON = 1e-8
"""Added below square roots of squared lengths."""

GLYCINE = residues.RESTYPES.index("G")


class Frames(NamedTuple):
    """Maps from local to global coordinates, x -> R x + t.

    Attributes:
        rotation: (X, 3, 3).
        translation: (X, 3).
    """

    rotation: Tensor
    translation: Tensor

    def apply(self, points_X3: Tensor) -> Tensor:
        """Return global coordinates; dimensions of ``points_X3`` and of the frames broadcast."""
        return rotate(self.rotation, points_X3) + self.translation

    def invert_apply(self, points_X3: Tensor) -> Tensor:
        """Return local coordinates of global points."""
        return rotate(self.rotation.transpose(-1, -2), points_X3 - self.translation)

    def compose(self, inner: Frames) -> Frames:
        """Return the frames that apply ``inner`` first."""
        rotation = (self.rotation[..., :, :, None] * inner.rotation[..., None, :, :]).sum(-2)
        return Frames(rotation, self.apply(inner.translation))


def rotate(rotation_X33: Tensor, points_X3: Tensor) -> Tensor:
    """Return R x. Products are element-wise, because matrix products in TF32 are too coarse for coordinates."""
    return (rotation_X33 * points_X3[..., None, :]).sum(-1)


def identity(shape: tuple[int, ...], like: Tensor) -> Frames:
    """Return identity frames with leading dimensions ``shape``, of the dtype and device of ``like``."""
    rotation = torch.eye(3, dtype=like.dtype, device=like.device).expand(*shape, 3, 3)
    return Frames(rotation, like.new_zeros(*shape, 3))


def frames_from_points(axis_X3: Tensor, origin_X3: Tensor, plane_X3: Tensor) -> Frames:
    """Return frames at ``origin`` by Gram-Schmidt (algorithm 21).

    Args:
        axis_X3: direction of the x axis, of any length.
        plane_X3: a point in the xy plane, with positive y.
    """
    first = _normalised(axis_X3)
    second = plane_X3 - origin_X3
    second = _normalised(second - first * (first * second).sum(-1, keepdim=True))
    return Frames(torch.stack((first, second, torch.linalg.cross(first, second)), -1), origin_X3)


def _normalised(vector_X3: Tensor) -> Tensor:
    return vector_X3 / (vector_X3.square().sum(-1, keepdim=True) + _EPSILON).sqrt()


def rotation_from_update(update_X3: Tensor) -> Tensor:
    """Return the rotation (X, 3, 3) of the quaternion (1, b, c, d), normalised (algorithm 23)."""
    b, c, d = update_X3.unbind(-1)
    norm = 1 + update_X3.square().sum(-1)
    rows = (
        (1 + b * b - c * c - d * d, 2 * (b * c - d), 2 * (b * d + c)),
        (2 * (b * c + d), 1 - b * b + c * c - d * d, 2 * (c * d - b)),
        (2 * (b * d - c), 2 * (c * d + b), 1 - b * b - c * c + d * d),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2) / norm[..., None, None]


class ResidueTables:
    """The constants of :mod:`benchmarks.openfold.residues` as tensors on a device, indexed by the residue type.

    Args:
        like: a tensor of the dtype and on the device.

    Attributes:
        frames: (21, 8, 4, 4), a group's frame relative to the group before it, at an angle of 0.
        group: (21, 14), rigid group of an atom.
        position: (21, 14, 3), position of an atom in the frame of its group.
        exists14, exists37: (21, 14) and (21, 37), 1 for atoms of the residue.
        to14, to37: (21, 14) gathers atom slots of 37 into 14, (21, 37) the inverse.
        chi_mask, periodic: (21, 4), 1 for chi angles that exist, and for those that are equal after half a turn.
        group_atoms: (21, 8, 3), the atoms (of 37) that define a group's frame: two on the axis, one in the plane.
        group_exists: (21, 8), 1 for groups with atoms.
        chi_atoms: (21, 4, 4), the atoms of a chi angle.
        swap14: (21, 14), slots of atoms after the other of two equivalent namings.
        ambiguous14: (21, 14), 1 for atoms with two equivalent names.
        sign: (7,), -1 for psi, which is measured by the residue's own O.
    """

    def __init__(self, like: Tensor) -> None:
        def real(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=like.dtype, device=like.device)

        def whole(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=like.device)

        self.frames = real(residues.DEFAULT_FRAMES)
        self.group, self.position = whole(residues.ATOM14_GROUP), real(residues.ATOM14_POSITION)
        self.exists14, self.exists37 = real(residues.ATOM14_MASK), real(residues.ATOM37_MASK)
        self.to14, self.to37 = whole(residues.ATOM14_TO_ATOM37), whole(residues.ATOM37_TO_ATOM14)
        self.chi_mask, self.periodic = real(residues.CHI_MASK), real(residues.CHI_PI_PERIODIC)
        self.group_exists = real(residues.GROUP_EXISTS)
        self.chi_atoms = whole(_chi_atoms())
        self.group_atoms = whole(_group_atoms())
        swaps = _swaps()
        self.swap14 = whole(swaps)
        self.sign = real([1, 1, -1, 1, 1, 1, 1])
        self.ambiguous14 = real([[slot != own for own, slot in enumerate(row)] for row in swaps])


def _chi_atoms() -> list[list[list[int]]]:
    number = residues.ATOM_TYPES.index
    known = [[[number(atom) for atom in angle] for angle in angles] for angles in residues.CHI_ATOMS]
    return [[*angles, *([[0] * 4] * (CHIS - len(angles)))] for angles in [*known, []]]


def _group_atoms() -> list[list[list[int]]]:
    backbone, none, psi = [CA, C, N], [0, 0, 0], [CA, C, O]
    return [[backbone, none, none, psi, *(angle[1:] for angle in angles)] for angles in _chi_atoms()]


def _swaps() -> list[list[int]]:
    found = [list(range(14)) for _ in range(21)]
    for letter, names in residues.AMBIGUOUS.items():
        kind = residues.RESTYPES.index(letter)
        for name, other in names.items():
            first, second = residues.ATOM14[kind].index(name), residues.ATOM14[kind].index(other)
            found[kind][first], found[kind][second] = second, first
    return found


def take_atoms(atoms_XA: Tensor, index_XK: Tensor, trailing: int = 0) -> Tensor:
    """Return the atoms (X, K, …) of each residue at ``index_XK``; ``atoms`` has ``trailing`` dimensions behind A."""
    index = index_XK.reshape(*index_XK.shape, *([1] * trailing))
    shape = (*index_XK.shape, *atoms_XA.shape[atoms_XA.dim() - trailing :])
    return torch.gather(atoms_XA, index_XK.dim() - 1, index.expand(shape))


def group_frames(tables: ResidueTables, aatype_X: Tensor, backbone: Frames, sincos_X72: Tensor) -> Frames:
    """Return the frames (X, 8) of all groups from the backbone's and the torsion angles (algorithm 24)."""
    default_XG44 = tables.frames[aatype_X]
    base = Frames(default_XG44[..., :3, :3], default_XG44[..., :3, 3])
    straight = torch.stack((torch.zeros_like(sincos_X72[..., :1, 0]), torch.ones_like(sincos_X72[..., :1, 0])), -1)
    sine, cosine = torch.cat((straight, sincos_X72), -2).unbind(-1)
    zero, one = torch.zeros_like(sine), torch.ones_like(sine)
    rows = ((one, zero, zero), (zero, cosine, -sine), (zero, sine, cosine))
    turn_XG33 = torch.stack([torch.stack(row, -1) for row in rows], -2)
    turned = base.compose(Frames(turn_XG33, torch.zeros_like(base.translation)))
    groups = [Frames(turned.rotation[..., group, :, :], turned.translation[..., group, :]) for group in range(GROUPS)]
    for group in range(GROUPS - CHIS + 1, GROUPS):  # a chi group's frame is relative to the one before it
        groups[group] = groups[group - 1].compose(groups[group])
    rotation = torch.stack([frames.rotation for frames in groups], -3)
    translation = torch.stack([frames.translation for frames in groups], -2)
    outer = Frames(backbone.rotation[..., None, :, :], backbone.translation[..., None, :])
    return outer.compose(Frames(rotation, translation))


def atoms14(tables: ResidueTables, aatype_X: Tensor, groups: Frames) -> Tensor:
    """Return the positions (X, 14, 3) of the atoms from their groups' frames; 0 for atoms that do not exist."""
    group_XA = tables.group[aatype_X]
    frames = Frames(take_atoms(groups.rotation, group_XA, 2), take_atoms(groups.translation, group_XA, 1))
    return frames.apply(tables.position[aatype_X]) * tables.exists14[aatype_X][..., None]


def atoms37_of(tables: ResidueTables, aatype_X: Tensor, atoms_X143: Tensor) -> Tensor:
    """Return positions in 37 slots, (X, 37, 3), from those in 14 slots; 0 for atoms that do not exist."""
    return take_atoms(atoms_X143, tables.to37[aatype_X], 1) * tables.exists37[aatype_X][..., None]


def pseudo_beta(aatype_X: Tensor, atoms_X373: Tensor, mask_X37: Tensor) -> tuple[Tensor, Tensor]:
    """Return position and mask of the residue's CB atom, or CA for glycine."""
    is_glycine_X = aatype_X == GLYCINE
    position = torch.where(is_glycine_X[..., None], atoms_X373[..., CA, :], atoms_X373[..., CB, :])
    return position, torch.where(is_glycine_X, mask_X37[..., CA], mask_X37[..., CB])


def backbone_mask(mask_X37: Tensor) -> Tensor:
    """Return 1 for residues whose atoms N, CA and C are known."""
    return mask_X37[..., N] * mask_X37[..., CA] * mask_X37[..., C]


def torsion_angles(
    tables: ResidueTables,
    aatype_BN: Tensor,
    atoms_BN373: Tensor,
    mask_BN37: Tensor,
    previous: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sine and cosine (B, N, 7, 2) of the torsion angles, and their mask (B, N, 7).

    The angles are pre-omega, phi, psi and the chi angles.

    Args:
        previous: atoms (B, 37, 3) and mask (B, 37) of the residue before the first one; None means unknown atoms at 0.
    """
    if previous is None:
        previous = torch.zeros_like(atoms_BN373[..., 0, :, :]), torch.zeros_like(mask_BN37[..., 0, :])
    before = torch.cat((previous[0][..., None, :, :], atoms_BN373[..., :-1, :, :]), -3)
    before_mask = torch.cat((previous[1][..., None, :], mask_BN37[..., :-1, :]), -2)
    own, own_mask, backbone_BN = atoms_BN373, mask_BN37, backbone_mask(mask_BN37)
    quads = [
        torch.stack((before[..., CA, :], before[..., C, :], own[..., N, :], own[..., CA, :]), -2),
        torch.stack((before[..., C, :], own[..., N, :], own[..., CA, :], own[..., C, :]), -2),
        torch.stack([own[..., atom, :] for atom in (N, CA, C, O)], -2),
    ]
    masks = [
        before_mask[..., CA] * before_mask[..., C] * own_mask[..., N] * own_mask[..., CA],
        before_mask[..., C] * backbone_BN,
        backbone_BN * own_mask[..., O],
    ]
    chi_BN16 = tables.chi_atoms[aatype_BN].flatten(-2)
    chi_atoms = take_atoms(own, chi_BN16, 1).unflatten(-2, (CHIS, 4))
    chi_mask = take_atoms(own_mask, chi_BN16).unflatten(-1, (CHIS, 4)).prod(-1) * tables.chi_mask[aatype_BN]
    quad_BN743 = torch.cat((torch.stack(quads, -3), chi_atoms), -3)
    a, b, c, d = quad_BN743.unbind(-2)
    local = frames_from_points(c - b, c, a).invert_apply(d)
    sincos = _unit(torch.stack((local[..., 2], local[..., 1]), -1))
    return sincos * tables.sign[:, None], torch.cat((torch.stack(masks, -1), chi_mask), -1)


def _unit(sincos_X2: Tensor) -> Tensor:
    return sincos_X2 / (sincos_X2.square().sum(-1, keepdim=True) + _EPSILON).sqrt()


def true_group_frames(
    tables: ResidueTables, aatype_X: Tensor, atoms_X373: Tensor, mask_X37: Tensor
) -> tuple[Frames, Tensor]:
    """Return the frames (X, 8) of the groups from atoms, and 1 where all atoms of a group's frame are known."""
    index_XK = tables.group_atoms[aatype_X].flatten(-2)
    points = take_atoms(atoms_X373, index_XK, 1).unflatten(-2, (GROUPS, 3))
    known = take_atoms(mask_X37, index_XK).unflatten(-1, (GROUPS, 3)).prod(-1)
    before, origin, plane = points.unbind(-2)
    frames = frames_from_points(origin - before, origin, plane)
    # The backbone's first two atoms are CA and C: its origin is CA, and its x axis points from there to C.
    backbone = frames_from_points(origin[..., 0, :] - before[..., 0, :], before[..., 0, :], plane[..., 0, :])
    rotation = torch.cat((backbone.rotation[..., None, :, :], frames.rotation[..., 1:, :, :]), -3)
    translation = torch.cat((backbone.translation[..., None, :], frames.translation[..., 1:, :]), -2)
    return Frames(rotation, translation), known * tables.group_exists[aatype_X]
