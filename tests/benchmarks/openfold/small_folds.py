"""A small network and small batches, for the tests of OpenFold."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.evoformer import BlockSizes, PairSizes
from benchmarks.openfold.features import FeatureSizes, random_features
from benchmarks.openfold.layers import Chooser
from benchmarks.openfold.losses import LossWeights
from benchmarks.openfold.model import AlphaFold, Architecture
from benchmarks.openfold.structure import StructureSizes

PAIR = {"pair": 8, "multiplication": 6, "pair_head": 4, "pair_heads": 2, "pair_transition": 2, "pair_dropout": 0.25}
MAIN = BlockSizes(**PAIR, msa=12, msa_head=4, msa_heads=3, msa_transition=2, msa_dropout=0.15, outer=5)
EXTRA = BlockSizes(**PAIR, msa=6, msa_head=2, msa_heads=3, msa_transition=2, msa_dropout=0.15, outer=5)
TEMPLATE = PairSizes(pair=6, multiplication=6, pair_head=3, pair_heads=2, pair_transition=2, pair_dropout=0.25)
STRUCTURE = StructureSizes(
    single=16, pair=8, head=4, heads=3, query_points=2, value_points=3, angle=8, angle_blocks=2, iterations=2,
    dropout=0.1, position_scale=10.0,
)  # fmt: skip
SIZES = Architecture(
    evoformer_blocks=2, extra_blocks=1, template_blocks=1, evoformer=MAIN, extra=EXTRA, template=TEMPLATE,
    structure=STRUCTURE, template_head=3, template_heads=2, confidence=8,
)  # fmt: skip
FEATURES = FeatureSizes(crop_size=10, msa_clusters=4, extra_msa=5, templates=2, recycling_iters=3)
WEIGHTS = LossWeights(
    fape=1.0, fape_backbone=0.5, fape_sidechain=0.5, supervised_chi=1.0, distogram=0.3, masked_msa=2.0, plddt=0.01
)
CPU = torch.device("cpu")
SPLIT = AxialSplit()


def chooser(dtype: torch.dtype = torch.float64) -> Chooser:
    """Return a chooser of references."""
    return Chooser({}, CPU, dtype)


def generator(seed: int = 0) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


def randomised(module: torch.nn.Module, seed: int = 1) -> torch.nn.Module:
    """Return ``module`` in float64 with noise on all parameters, so that no layer gives 0."""
    drawn = generator(seed)
    module.to(torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64))
    return module


def network(dtype: torch.dtype = torch.float64, recompute: bool = False) -> AlphaFold:
    """Return the small network with noise on all parameters."""
    made = AlphaFold(SIZES, chooser(dtype), SPLIT, recompute)
    made.initialise(generator())
    randomised(made)
    return made.place(CPU, dtype)


def batch(passes: int = 2, samples: int = 1) -> dict[str, Tensor]:
    """Return a batch of noise."""
    return random_features(FEATURES, samples, passes, FEATURES.crop_size, generator(3))
