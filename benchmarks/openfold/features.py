"""The tensors of a batch in training and evaluation. The reader delivers them, and the network reads them.

B samples of a micro-batch, R passes (recycling iterations plus 1), S sequences that represent clusters, E extra
sequences, T templates, N residues. Only features of the MSA differ from pass to pass; the labels of the masked MSA are
those of the last pass.

| name | shape and dtype | meaning |
|---|---|---|
| `msa_feat` | (B, R, S, N, 49) float32 | one-hot 23, deletion flag and value, cluster profile 23, mean deletion value |
| `msa_mask`, `bert_mask` | (B, R, S, N) float32 | 1 where a sequence exists; 1 where the masked-MSA loss counts |
| `true_msa` | (B, R, S, N) uint8 | residues before masking |
| `extra_msa` | (B, R, E, N) uint8 | residues 0 … 22 |
| `extra_has_deletion`, `extra_deletion_value`, `extra_msa_mask` | (B, R, E, N) float32 | |
| `aatype`, `residue_index` | (B, N) int64 | type 0 … 20; position in the chain |
| `seq_mask` | (B, N) float32 | 1 for residues, 0 for padding |
| `template_aatype` | (B, T, N) int64 | |
| `template_all_atom_positions`, `template_all_atom_mask` | (B, T, N, 37, 3), (B, T, N, 37) float32 | |
| `template_previous_positions`, `template_previous_mask` | (B, T, 37, 3), (B, T, 37) float32 | residue before a crop |
| `template_mask` | (B, T) float32 | 1 for templates that exist |
| `all_atom_positions`, `all_atom_mask` | (B, N, 37, 3), (B, N, 37) float32 | true ones in angstrom; 1 if known |
| `resolution` | (B,) float32 | in angstrom; 0 if unknown |
| `use_clamped_fape` | (B,) float32 | 1 if the backbone's FAPE is clamped |
| `seq_length` | (B,) float32 | residues of the chain before it was cropped |
| `samples` | (B,) float32 | 1, or 0 for padding of the evaluation set |
| `dropout_seed` | () int64 | |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.openfold.msa import FEATURES, TOKENS
from benchmarks.openfold.residues import ATOM_TYPES
from common.config.ranges import AtLeast, NotNegative

ATOMS, EXTRA_FEATURES, TARGET_FEATURES = len(ATOM_TYPES), TOKENS + 2, 22
"""Atoms of a residue, and channels of the extra MSA and of the sequence."""


@dataclass(frozen=True)
class FeatureSizes:
    """Sizes of a sample.

    Attributes:
        crop_size: N in training.
        msa_clusters, extra_msa, templates: S, E and T.
        recycling_iters: most recycling iterations. Training draws 0 to this number, evaluation uses all.
    """

    crop_size: Annotated[int, AtLeast(1)]
    msa_clusters: Annotated[int, AtLeast(1)]
    extra_msa: Annotated[int, AtLeast(1)]
    templates: Annotated[int, AtLeast(1)]
    recycling_iters: Annotated[int, NotNegative]


def feature_shapes(
    sizes: FeatureSizes, batch: int, passes: int, residues: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of a batch by its name."""
    msa, extra = (batch, passes, sizes.msa_clusters, residues), (batch, passes, sizes.extra_msa, residues)
    chain, template = (batch, residues), (batch, sizes.templates, residues)
    real, whole, small = torch.float32, torch.int64, torch.uint8
    return {
        "msa_feat": ((*msa, FEATURES), real),
        "msa_mask": (msa, real),
        "true_msa": (msa, small),
        "bert_mask": (msa, real),
        "extra_msa": (extra, small),
        "extra_has_deletion": (extra, real),
        "extra_deletion_value": (extra, real),
        "extra_msa_mask": (extra, real),
        "aatype": (chain, whole),
        "residue_index": (chain, whole),
        "seq_mask": (chain, real),
        "template_aatype": (template, whole),
        "template_all_atom_positions": ((*template, ATOMS, 3), real),
        "template_all_atom_mask": ((*template, ATOMS), real),
        "template_previous_positions": ((batch, sizes.templates, ATOMS, 3), real),
        "template_previous_mask": ((batch, sizes.templates, ATOMS), real),
        "template_mask": ((batch, sizes.templates), real),
        "all_atom_positions": ((*chain, ATOMS, 3), real),
        "all_atom_mask": ((*chain, ATOMS), real),
        "resolution": ((batch,), real),
        "use_clamped_fape": ((batch,), real),
        "seq_length": ((batch,), real),
        "samples": ((batch,), real),
        "dropout_seed": ((), whole),
    }


def random_features(
    sizes: FeatureSizes, batch: int, passes: int, residues: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return a batch of noise, on the CPU. All residues exist, and their atoms are a random walk."""
    made: dict[str, Tensor] = {}
    for name, (shape, dtype) in feature_shapes(sizes, batch, passes, residues).items():
        if dtype == torch.float32:
            made[name] = torch.ones(shape)
        else:
            made[name] = torch.randint(20, shape, generator=generator).to(dtype)

    def noise(name: str) -> Tensor:
        return torch.rand(made[name].shape, generator=generator)

    for name in ("msa_feat", "extra_deletion_value"):
        made[name] = noise(name)
    for name in ("bert_mask", "extra_has_deletion"):
        made[name] = (noise(name) < 0.15).to(torch.float32)
    for name in ("all_atom_positions", "template_all_atom_positions"):
        steps = torch.randn(*made[name].shape[:-2], 1, 3, generator=generator)
        made[name] = 2.2 * steps.cumsum(-3) + torch.randn(made[name].shape, generator=generator)
    made["residue_index"] = torch.arange(residues).expand(batch, residues).clone()
    made["resolution"] *= 2.0
    made["seq_length"] *= residues
    return made
