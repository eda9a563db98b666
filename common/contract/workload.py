"""The contract between the trainer and a workload: what to train.

A workload is built before ``run_start`` and reads data only after :meth:`Workload.open_data`. The path of the data
appears only as argument of ``open_data``, and of :meth:`Workload.staging` in a run that copies the data first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Evaluation, Weights
from common.data.batches import Batch, DataSource, HostBatch, Player
from common.data.staging import StagingPlan
from common.distributed.layout import AXES, Layout
from common.distributed.tensor_split import TensorSplit
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from common.optim.ema import WeightAverage
from common.optim.memory_plan import MemoryPlan
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import DTYPES, LossScale
from common.optim.rules import Rule
from common.optim.updater import Updater
from common.step.train_step import ForwardBackward, Losses, TrainStep, accumulate


@dataclass(frozen=True)
class Peer:
    """The same training in other software, at the recipe's batch size on one device; ``bench.only=peer`` times it.

    Only ``start`` may import packages that the suite does not depend on.

    Attributes:
        start: builds the training for a recipe, a micro-batch of the workload and a device. It returns a function that
            runs one iteration over ``run.micro_batch`` samples.
    """

    name: str
    start: Callable[[RunConfig, Batch, torch.device], Callable[[], object]]


class Workload(ABC):
    """A benchmark's model, parameter groups, loss, data and evaluation.

    Args:
        layout: the ranks that share this workload: all training ranks, or all evaluation ranks.

    Attributes:
        own: the workload's own configuration, an object of ``config_type``.
        dtype: dtype of weights, activations and gradients.
        choices: operation name to the chosen implementation; subclasses fill it in the constructor.
        memory: plan of the memory of the device, which subclasses may make in the constructor.

    Raises:
        ConfigError: the layout has several ranks along an axis that the workload does not use.
    """

    config_type: ClassVar[type[Any]]
    """Frozen dataclass of the workload's configuration: ``facts`` (dataset constants) and sections of the recipe."""
    title: ClassVar[str]
    """The model's name in messages."""
    axes: ClassVar[Mapping[str, str]] = {"dp": "are data-parallel"}
    """Layout axes that may have several ranks, each with the verb phrase that an error message uses for these ranks."""
    peers: ClassVar[str] = ""
    """Name of the module that defines ``PEERS``, a sequence of :class:`Peer`; empty without peers."""

    model: nn.Module
    """The network, built by the constructor. Its buffers are restored after warm-up. Checkpoints hold its tensors,
    except frozen ones (:mod:`common.nn.frozen`)."""

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        for axis in AXES:
            if axis not in self.axes and layout.size(axis) != 1:
                used = " or ".join(self.axes.values())
                raise ConfigError(f"layout.{axis}={layout.size(axis)}: {self.title}'s ranks {used}, use 1")
        self.cfg = cfg
        self.own: Any = cfg.workload
        self.layout = layout
        self.dtype = DTYPES[cfg.precision]
        self.choices: dict[str, str] = {}
        self.memory: MemoryPlan | None = None
        self._loss_scale: LossScale | None = None
        self._unscaled = torch.ones((), device=layout.device)
        self._optimizer: Optimizer | None = None
        self._average: WeightAverage | None = None

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Return settings that follow from ``cfg``, which has no declaration yet. Default: an empty declaration."""
        return Declaration()

    @classmethod
    def probe(cls, cfg: RunConfig, layout: Layout) -> Workload:
        """Return a workload whose iteration needs as much device memory as this one, to measure ``micro_batch=auto``.

        Default: the same workload. Override it if the model is sharded and does not fit on the probing device.
        """
        return cls(cfg, layout)

    @classmethod
    def unprobed_bytes(cls, cfg: RunConfig) -> float:
        """Return the bytes a rank needs in addition to :meth:`probe`, independent of the micro-batch. Default: 0."""
        return 0.0

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all trained parameters, grouped by how they are updated."""

    @abstractmethod
    def loss(self, micro_batch: Batch) -> Losses:
        """Run the forward pass and the loss of one micro-batch. Must be capturable in a CUDA graph."""

    @abstractmethod
    def example_batches(self) -> Iterable[Batch]:
        """Return synthetic micro-batches on the device, one for each batch key that is known without the data.

        If the data determine all keys (:meth:`examples_of_data`), return one of a typical size: it warms the step up,
        and ``bench`` times it.
        """

    def examples_of_data(self) -> Iterable[Batch]:
        """Return micro-batches, one per batch key, whose shapes depend on the data.

        Called once after :meth:`open_data`; their capture is part of the measured time. Default: none.
        """
        return ()

    @abstractmethod
    def build_step(self) -> TrainStep:
        """Build the training step, usually by :meth:`step_with`."""

    def step_with(
        self,
        rule: Rule,
        schedule: Callable[[Tensor], Tensor],
        *,
        grad_divisor: float | None = None,
        blocks: Sequence[tuple[str, nn.Module]] = (),
        clip: ClipNorm | None = None,
        loss_scale: LossScale | float | None = None,
        average_decay: float | None = None,
        average_copies_first: bool = False,
        beside: Sequence[Updater] = (),
        passes: Callable[[LossScale | None], ForwardBackward] | None = None,
    ) -> TrainStep:
        """Build a step that accumulates micro-batches and updates all parameter groups with one Optimizer.

        Arguments that are not listed are those of :class:`common.optim.optimizer.Optimizer`.

        Args:
            grad_divisor: divides gradients summed over micro-batches and ranks. None: the number of micro-batches over
                all data-parallel ranks, correct for a loss that is the mean over a micro-batch.
            loss_scale: initial loss scale for fp16, or the result of :meth:`scaled`; None does not scale.
            average_decay: decay of a moving average of the weights (:mod:`common.optim.ema`), which evaluation then
                uses; None keeps no average.
            average_copies_first: the first update copies the weights into the average.
            beside: updaters of non-parameter state. They write after the Optimizer, and only if it writes.
            passes: builds the forward and backward passes of a step, such as a pipeline's, from the loss scale. None
                accumulates :meth:`loss`.

        Raises:
            ConfigError: a pipeline would have to clip each micro-batch, or ``optimizer.grad_predivide`` is set without
                a loss scale.
            ValueError: a group has a frozen parameter, or a sharded parameter under another name than the model's.
        """
        cfg, groups = self.cfg, self.parameter_groups()
        self._check_groups(groups)
        if clip is not None and clip.when == "before_reduction" and self.layout.size("pp") > 1:
            raise ConfigError(
                f"layout.pp={self.layout.size('pp')}: a pipeline has several micro-batches under way at once, whose "
                "gradients cannot be clipped one by one before the reduction; clip after it"
            )
        if grad_divisor is None:
            grad_divisor = cfg.grad_accumulation_steps * self.layout.size("dp")
        scale = self._loss_scale = self.scaled(loss_scale) if isinstance(loss_scale, int | float) else loss_scale
        if scale is None and self._predivide() != 1.0:
            raise ConfigError(
                f"optimizer.grad_predivide={cfg.optimizer.grad_predivide}: it divides the loss scale, and "
                f"{self.title}'s loss has none; use 1"
            )
        self._optimizer = Optimizer(
            groups,
            rule,
            schedule,
            self.layout,
            grad_divisor=grad_divisor,
            ranks_per_node=cfg.ranks_per_node,
            **cfg.optimizer.arguments(),
            blocks=blocks,
            clip=clip,
            micro_batches=cfg.grad_accumulation_steps,
            loss_scale=scale,
        )
        updaters: list[Updater] = [self._optimizer]
        if average_decay is not None:
            self._average = WeightAverage(self._optimizer, average_decay, copies_first=average_copies_first)
            updaters.append(self._average)
        forward_backward = accumulate(self.loss, scale) if passes is None else passes(scale)
        return TrainStep(forward_backward, [*updaters, *beside], self.layout)

    def scaled(self, first: float, **adaptation: Any) -> LossScale | None:
        """Return a loss scale that starts at ``first``, divided by ``optimizer.grad_predivide``; None without fp16.

        ``adaptation``: further arguments of :class:`common.optim.precision.LossScale`.
        """
        if self.dtype != torch.float16:
            return None
        return LossScale(self.layout.device, first, predivide=self._predivide(), **adaptation)

    @property
    def loss_scale(self) -> Tensor:
        """Factor on the loss before the backward pass, 0-d float32 on the device."""
        return self._unscaled if self._loss_scale is None else self._loss_scale.applied

    def _predivide(self) -> float:
        """Return the divisor of the loss scale; 1 where summed gradients cannot overflow fp16."""
        optimizer = self.cfg.optimizer
        summed_in_half = self.dtype == torch.float16 and optimizer.gradients == "same" and self.layout.world_size > 1
        return optimizer.grad_predivide if summed_in_half else 1.0

    def _check_groups(self, groups: Sequence[ParameterGroup]) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        frozen, splits = {id(parameters[name]) for name in self.frozen() if name in parameters}, self.tensor_splits()
        split = {id(parameters[name]): name for name in splits if name in parameters}
        for group in groups:
            for name, parameter in group.parameters.items():
                if id(parameter) in frozen:
                    raise ValueError(f"parameter {name!r} is frozen: leave it out of the parameter groups")
                if split.get(id(parameter), name) != name:
                    raise ValueError(
                        f"parameter {name!r} is split over tp under another name, {split[id(parameter)]!r}"
                    )

    def load_start(self) -> None:
        """Load initial weights and state, such as pre-trained weights, unless the run resumes a checkpoint. Collective.

        Called after :meth:`build_step`, before ``run_start``. Default: keep the constructor's initialization.
        """

    def warm_up_reader(self) -> None:
        """Load the reader's code and run it on synthetic data, before ``run_start``. Default: do nothing."""

    def scratch(self, folder: Path, resumed_block: int | None) -> None:
        """Prepare files that the run writes below ``folder``, its output folder, before ``run_start``. Collective.

        Called with the weights from which training starts or continues. Ranks that only play call it, too. Default: do
        nothing.

        Args:
            resumed_block: index of the block in which a resumed run continues; None in a new run, and on ranks that
                only play.
        """

    @classmethod
    def require_data_of(cls, output_dir: Path, data_dir: Path) -> None:
        """Check that the run in ``output_dir`` may be scored with the prepared data in ``data_dir``. Default: it may.

        Raises:
            DataError: its scores would not be comparable.
        """

    def player(self) -> Player:
        """Return the player of this rank, which only plays. Called after :meth:`scratch`. Default: there is none."""
        raise ConfigError(f"selfplay.ranks={self.cfg.selfplay.ranks}: {self.title} does not learn by self-play; use 0")

    def staging(self, root: Path) -> StagingPlan | None:
        """Return the files under ``root`` that a run with ``staging_dir`` copies to local disks. May read their list.

        Afterwards :meth:`open_data` gets the folder of this node's files (:func:`common.data.staging.open_split`).
        Default: None, the data cannot be staged.
        """
        return None

    @abstractmethod
    def open_data(self, root: Path) -> DataSource:
        """Open the training data under ``root``, after ``run_start``. Nothing may read the data earlier."""

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy a reader's batch to the device and finish it there, on the side stream."""
        return Batch(self.finished(self.to_device(batch.tensors)), batch.samples, batch.key)

    def finished(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch's tensors as the step reads them; they are on the device. Default: unchanged."""
        return tensors

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` on the device; those already there are not copied. The host does not wait."""
        return {name: tensor.to(self.layout.device, non_blocking=True) for name, tensor in tensors.items()}

    @property
    def nominal_samples(self) -> int:
        """Samples of one micro-batch over all data-parallel ranks, as the rules count them."""
        return self.cfg.micro_batch * self.layout.size("dp")

    def weights(self) -> Weights:
        """Return the current weights for evaluation: the model's own parameters, after the last update. Collective.

        If the step averages weights, return the averages, which have their own memory. Frozen parameters are not
        included, because evaluation ranks load them themselves.
        """
        if self._average is not None:
            return Weights(self._average.weights())
        if self._optimizer is not None:
            self._optimizer.materialize()
        frozen = self.frozen()
        return Weights({name: tensor for name, tensor in self.model.named_parameters() if name not in frozen})

    def frozen(self) -> frozenset[str]:
        """Return the names of frozen tensors, excluded from optimizer, checkpoint, transfer and buffer restore.

        The modules mark them (:func:`common.nn.frozen.mark_frozen`); do not override this method.
        """
        return frozen_names(self.model)

    def base_digest(self) -> str | None:
        """Return the digest of the frozen tensors, which checkpoints store instead of them; None if there are none."""
        return None

    def tensor_splits(self) -> Mapping[str, TensorSplit]:
        """Return how tensors are sharded over ``tp``, by tensor name, for checkpoints and evaluation ranks.

        All other tensors that are not frozen are equal on the ranks of ``tp``. ``parameter_groups`` must use the
        model's names for sharded parameters. Default: none is sharded.
        """
        return {}

    @abstractmethod
    def evaluation(self, layout: Layout) -> Evaluation:
        """Build the evaluation of this workload on the ranks of ``layout``."""

    def synthetic_evaluation(self, layout: Layout) -> Evaluation | None:
        """Return an evaluation of ``benchmark.eval_samples`` synthetic samples on the device, for ``bench``.

        Its ``open_data`` reads no folder. It may change the network's weights, so that prediction takes as long as with
        trained ones. The predictions are not scored. Default: None, there are no synthetic samples.
        """
        return None

    def sample_flops(self) -> float:
        """Return model FLOPs of one training sample, forward and backward, for MFU. Default: 0, which means unknown."""
        return 0.0

    def sample_sizes(self) -> Mapping[str, float]:
        """Return mean sizes of a training sample by name, for ``bench``: those that its cost depends on. Default: none.

        They are the sizes in :meth:`example_batches` or, after :meth:`open_data`, in the data.
        """
        return {}

    def memory_plan(self) -> str:
        """Return a description of the planned memory by category, for ``bench``; empty without a plan."""
        return "" if self.memory is None else self.memory.in_words()

    def implementations(self) -> dict[str, str]:
        """Return the chosen implementation of each operation (model, optimizer, communicators), for log and bench."""
        optimizer = self._optimizer.choices if self._optimizer is not None else {}
        return {**self.choices, **optimizer, **self.layout.network_choices()}

    def close(self) -> None:
        """Release the workload's resources. Default: do nothing."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """Return all parameters and buffers of the model by name, except frozen ones."""
        frozen = self.frozen()
        every = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(name, tensor) for name, tensor in every if name not in frozen]
