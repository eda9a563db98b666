"""Tables of the amino acids, against the independent ones of transformers."""

from __future__ import annotations

import numpy as np
from transformers.models.esm.openfold_utils import residue_constants as known

from benchmarks.openfold import residues


def test_tables_are_those_of_transformers() -> None:
    assert list(residues.RESTYPES) == known.restypes
    assert list(residues.ATOM_TYPES) == known.atom_types
    assert known.restype_1to3 == residues.THREE
    assert residues.ATOM14[:20] == [known.restype_name_to_atom14_names[known.restype_1to3[r]] for r in known.restypes]
    assert residues.CHI_ATOMS[:20] == [known.chi_angles_atoms[known.restype_1to3[r]] for r in known.restypes]
    swaps = {known.restype_3to1[three]: pairs for three, pairs in known.residue_atom_renaming_swaps.items()}
    assert swaps == residues.AMBIGUOUS
    assert np.array_equal(residues.ATOM14_MASK, known.restype_atom14_mask)
    assert np.array_equal(residues.ATOM37_MASK[:20], known.STANDARD_ATOM_MASK[:20])
    assert np.array_equal(residues.ATOM14_GROUP, known.restype_atom14_to_rigid_group)
    assert np.array_equal(residues.ATOM14_POSITION, known.restype_atom14_rigid_group_positions)
    assert np.array_equal(residues.CHI_MASK[:20], known.chi_angles_mask)
    assert np.array_equal(residues.CHI_PI_PERIODIC, known.chi_pi_periodic)
    exists = residues.GROUP_EXISTS[:20, :, None, None]
    assert np.allclose(
        residues.DEFAULT_FRAMES[:20] * exists, known.restype_rigid_group_default_frame[:20] * exists, atol=1e-6
    )
    assert np.allclose(residues.DEFAULT_FRAMES[:20, 2], known.restype_rigid_group_default_frame[:20, 2], atol=1e-6)
