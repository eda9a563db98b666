"""Configuration keys of OpenFold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from benchmarks.openfold.data import OpenFoldReaderConfig
from benchmarks.openfold.features import FeatureSizes
from benchmarks.openfold.layers import OPERATIONS
from benchmarks.openfold.losses import LossWeights
from benchmarks.openfold.model import Architecture
from common.config.ranges import AtLeast, Decay, NotNegative, Positive
from common.ops.operation import all_implementations
from common.optim.hparams import AdamHparams


@dataclass(frozen=True)
class Facts(Architecture, FeatureSizes):
    """Constants of the rules: sizes of samples and network, the loss, the data, and fixed hyperparameters.

    Attributes:
        loss: factors of the losses.
        max_grad_norm: norm to which the gradient over all parameters is clipped.
        average_decay: decay of the averaged weights, which are evaluated.
        checkpoint_sha256: digest of the checkpoint that training continues.
        train_released_until: last release date of a structure in the training set.
        eval_submitted_from, eval_submitted_until: submission dates of the evaluation set's chains.
        eval_longest: most residues of a chain in the evaluation set.
    """

    loss: LossWeights
    max_grad_norm: Annotated[float, Positive]
    average_decay: Annotated[float, Decay]
    checkpoint_sha256: str
    train_released_until: str
    eval_submitted_from: str
    eval_submitted_until: str
    eval_longest: Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class Hparams(AdamHparams):
    """The tunable hyperparameters: the rows for ``openfold`` in the table of the HPC rules.

    Attributes:
        warmup_init: learning rate at the start of the warm-up.
        warmup_steps: optimizer steps in which the learning rate rises to ``base_learning_rate``.
    """

    optimizer: Literal["adam"]
    warmup_init: Annotated[float, NotNegative]
    warmup_steps: Annotated[int, NotNegative]


@dataclass(frozen=True)
class ModelConfig:
    """Options of the network.

    Attributes:
        recompute: compute the activations of each block again in the backward pass, to save memory.
        final_std: standard deviation of the initial weights of layers whose outputs are added to others, or are
            predictions; 0 in the published network.
        initial_checkpoint: file in ``assets_dir`` with weights and the state of Adam. Without ``assets_dir`` training
            starts from random weights.
        implementations: implementation by operation name; ``auto`` for operations that are not listed.
    """

    recompute: bool
    final_std: Annotated[float, NotNegative]
    initial_checkpoint: str
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementations", all_implementations(self.implementations, OPERATIONS))


@dataclass(frozen=True)
class OpenFoldConfig:
    """OpenFold's own part of the configuration: ``workload`` of :class:`common.config.schema.RunConfig`."""

    facts: Facts
    hparams: Hparams
    model: ModelConfig
    reader: OpenFoldReaderConfig
