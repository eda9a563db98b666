"""The contract between the trainer and a workload: what to train.

A workload is built before ``run_start`` and reaches data only through :meth:`Workload.open_data`, whose
argument is the only place where the path of the data appears.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from common.data.source import Batch, DataSource, HostBatch
from common.distributed.layout import Layout
from common.evaluation.base import Evaluation, Weights

if TYPE_CHECKING:
    from common.config import RunConfig
    from common.optim.optimizer import ParameterGroup
    from common.step import TrainStep


@dataclass(frozen=True)
class Losses:
    """What one micro-batch yields.

    Attributes:
        total: 0-d tensor that is differentiated. The gradients are summed over micro-batches and ranks; divided by the
            optimizer's ``grad_divisor`` they are the mean over the global batch.
        metrics: name to 0-d device tensor, reported as means over micro-batches and ranks.
    """

    total: Tensor
    metrics: dict[str, Tensor]


class Workload(ABC):
    """What to train: model, parameter groups, loss, data and evaluation of one benchmark."""

    config_type: ClassVar[type[Any]]
    """Frozen dataclass of the workload's configuration: ``facts`` of the benchmark, and sections of the recipe."""

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        self.cfg = cfg
        self.layout = layout

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The network; its buffers are restored after warm-up and its tensors go into checkpoints."""

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """The parameters by how they are updated."""

    @abstractmethod
    def loss(self, micro_batch: Batch) -> Losses:
        """Forward pass and loss of one micro-batch; capturable in a CUDA graph."""

    @abstractmethod
    def example_batches(self) -> Iterable[Batch]:
        """Synthetic micro-batches on the device, one for each key that training meets."""

    def warm_up_reader(self) -> None:
        """Load what reads data and run it on made-up data, before ``run_start``. Default: nothing."""

    @abstractmethod
    def open_data(self, root: Path) -> DataSource:
        """Open the training data under ``root``; the first touch of them. After ``run_start``."""

    @abstractmethod
    def prepare(self, batch: HostBatch) -> Batch:
        """Bring a reader's batch to the device and finish it there; runs on the side stream."""

    @abstractmethod
    def weights(self) -> Weights:
        """What evaluation uses now; collective (batch-norm statistics are averaged over replicas)."""

    @abstractmethod
    def evaluation(self, layout: Layout) -> Evaluation:
        """The evaluation of this workload on the ranks of ``layout``."""

    @abstractmethod
    def build_step(self) -> TrainStep:
        """The training step: usually ``accumulate(self.loss, ...)`` and one Optimizer."""

    @classmethod
    def schedule_options(cls, cfg: RunConfig) -> dict[str, Any]:
        """Options of the benchmark's evaluation schedule. Default: those of ``benchmark.schedule``."""
        return dict(cfg.benchmark.schedule)

    @classmethod
    def micro_batch_multiple(cls, cfg: RunConfig) -> int:
        """What ``micro_batch`` is a multiple of: samples that cannot be separated. Default: 1."""
        return 1

    @classmethod
    def initialised_tensors(cls, cfg: RunConfig) -> list[str]:
        """Names under which the log says that weights were initialised, for rounds that ask for it. Default: none."""
        return []

    @classmethod
    def derived_values(cls, cfg: RunConfig) -> dict[str, object]:
        """Values that the benchmark's table of log keys needs beyond the configuration. Default: none."""
        return {}

    @classmethod
    def order_of_data(cls, cfg: RunConfig) -> str:
        """What decides the order of samples beyond seed and batch sizes, such as the reader; for checkpoints."""
        return ""

    @classmethod
    def closed_division(cls, cfg: RunConfig) -> list[str]:
        """What the closed division forbids on real data beyond the logged hyperparameters. Default: nothing.

        Returns:
            Plain sentences, one for each forbidden value: ``key=value: the rule``.
        """
        return []

    def sample_flops(self) -> float:
        """Model FLOPs of one training sample, forward and backward, for MFU. Default: unknown (0)."""
        return 0.0

    def implementations(self) -> dict[str, str]:
        """Operation to the implementation chosen for it, for the log and ``bench``. Default: none."""
        return {}

    def close(self) -> None:
        """Release what the workload holds. Default: nothing."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """All persistent tensors of the model: parameters and buffers."""
        return [*self.model.named_parameters(), *self.model.named_buffers()]
