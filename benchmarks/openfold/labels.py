"""Labels with which the losses compare predictions, computed on the device from the true coordinates of a batch.

Shapes: B samples, N residues, 8 rigid groups, 14 atom slots of a residue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.openfold import geometry
from benchmarks.openfold.geometry import Frames, ResidueTables
from benchmarks.openfold.residues import CA


class Labels(NamedTuple):
    """Coordinates in angstrom, in the published naming of atoms or in the other one of equivalent atoms.

    Attributes:
        groups: (B, N, 8), true frames of the rigid groups; group 0 is the backbone.
        other_groups: the same in the other naming.
        group_mask: (B, N, 8), 1 where a group's frame is known.
        atoms, atom_mask: (B, N, 14, 3) and (B, N, 14).
        other_atoms, other_atom_mask: the same in the other naming.
        ambiguous: (B, N, 14), 1 for atoms with two names.
        chi, chi_mask: (B, N, 4, 2), sine and cosine, and (B, N, 4).
        chi_sign: (B, N, 4), -1 for angles that half a turn does not change, otherwise 1.
        beta, beta_mask: (B, N, 3) and (B, N), CB, or CA for glycine.
        alpha, alpha_mask: (B, N, 3) and (B, N), CA.
    """

    groups: Frames
    other_groups: Frames
    group_mask: Tensor
    atoms: Tensor
    atom_mask: Tensor
    other_atoms: Tensor
    other_atom_mask: Tensor
    ambiguous: Tensor
    chi: Tensor
    chi_mask: Tensor
    chi_sign: Tensor
    beta: Tensor
    beta_mask: Tensor
    alpha: Tensor
    alpha_mask: Tensor


@torch.no_grad()
def labels_of(tensors: dict[str, Tensor], tables: ResidueTables) -> Labels:
    """Return the labels of a batch (:mod:`benchmarks.openfold.features`), in the dtype of ``tables``."""
    dtype, aatype_BN = tables.position.dtype, tensors["aatype"]
    atoms_BN373, mask_BN37 = tensors["all_atom_positions"].to(dtype), tensors["all_atom_mask"].to(dtype)
    groups, group_mask = geometry.true_group_frames(tables, aatype_BN, atoms_BN373, mask_BN37)
    # In the other naming, the last chi angle's frame is turned by half a turn about its x axis.
    sign_BN4 = 1 - 2 * tables.periodic[aatype_BN]
    turn_BN8 = torch.cat((torch.ones_like(sign_BN4), sign_BN4), -1)
    columns_BN83 = torch.stack((torch.ones_like(turn_BN8), turn_BN8, turn_BN8), -1)
    to14_BNA, swap_BNA = tables.to14[aatype_BN], tables.swap14[aatype_BN]
    exists_BNA = tables.exists14[aatype_BN]
    atoms_BNA3 = geometry.take_atoms(atoms_BN373, to14_BNA, 1) * exists_BNA[..., None]
    atom_mask_BNA = geometry.take_atoms(mask_BN37, to14_BNA) * exists_BNA
    sincos_BN72, torsion_mask_BN7 = geometry.torsion_angles(tables, aatype_BN, atoms_BN373, mask_BN37)
    beta_BN3, beta_mask_BN = geometry.pseudo_beta(aatype_BN, atoms_BN373, mask_BN37)
    return Labels(
        groups,
        Frames(groups.rotation * columns_BN83[..., None, :], groups.translation),
        group_mask,
        atoms_BNA3,
        atom_mask_BNA,
        geometry.take_atoms(atoms_BNA3, swap_BNA, 1),
        geometry.take_atoms(atom_mask_BNA, swap_BNA),
        tables.ambiguous14[aatype_BN],
        sincos_BN72[..., 3:, :],
        torsion_mask_BN7[..., 3:],
        sign_BN4,
        beta_BN3,
        beta_mask_BN,
        atoms_BN373[..., CA, :],
        mask_BN37[..., CA],
    )
