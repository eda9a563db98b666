"""The contract between the trainer and a workload: what to train.

A workload is built before ``run_start`` and reaches data only through :meth:`Workload.open_data`, whose
argument is the only place where the path of the data appears.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Evaluation, Weights
from common.data.batches import Batch, DataSource, HostBatch
from common.distributed.layout import AXES, Layout
from common.distributed.tensor_split import Split
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from common.optim.ema import WeightAverage
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import DTYPES, LossScale
from common.optim.rules import Rule
from common.optim.updater import Updater
from common.step.train_step import ForwardBackward, Losses, TrainStep, accumulate


class Workload(ABC):
    """What to train: model, parameter groups, loss, data and evaluation of one benchmark.

    Args:
        cfg: the configuration.
        layout: the ranks that this one is among.

    Attributes:
        own: the workload's own configuration, of its ``config_type``.
        dtype: of weights, activations and gradients.
        choices: operation to the implementation chosen for it; the constructor fills it.

    Raises:
        ConfigError: the layout has ranks along an axis that the workload does not use.
    """

    config_type: ClassVar[type[Any]]
    """Frozen dataclass of the workload's configuration: ``facts`` of the benchmark, and sections of the recipe."""
    title: ClassVar[str]
    """The model's name in messages."""
    axes: ClassVar[Mapping[str, str]] = {"dp": "are data-parallel"}
    """The axes of the layout that may have several ranks, and what these ranks are or do."""
    peers: ClassVar[str] = ""
    """Module that defines ``PEERS`` (:class:`common.contract.peer.Peer`): software that ``bench.only=peer`` times."""

    model: nn.Module
    """The network, which the constructor builds; its buffers are restored after warm-up and its tensors go into
    checkpoints, but for frozen ones (:mod:`common.nn.frozen`)."""

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
        self._loss_scale: LossScale | None = None
        self._optimizer: Optimizer | None = None
        self._average: WeightAverage | None = None

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """What follows from a configuration; ``cfg`` has no declaration yet. Default: nothing."""
        return Declaration()

    @classmethod
    def probe(cls, cfg: RunConfig, layout: Layout) -> Workload:
        """A workload whose iteration needs of one device what this one's does, to measure ``micro_batch=auto`` with.

        Default: itself. Override it where a single device cannot hold what the ranks hold together.
        """
        return cls(cfg, layout)

    @classmethod
    def unprobed_bytes(cls, cfg: RunConfig) -> float:
        """Bytes that a rank needs beyond those of a :meth:`probe`, whatever the micro-batch. Default: none."""
        return 0.0

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """The parameters by how they are updated."""

    @abstractmethod
    def loss(self, micro_batch: Batch) -> Losses:
        """Forward pass and loss of one micro-batch; capturable in a CUDA graph."""

    @abstractmethod
    def example_batches(self) -> Iterable[Batch]:
        """Synthetic micro-batches on the device, one for each key that training meets."""

    def examples_of_data(self) -> Iterable[Batch]:
        """Micro-batches, one for each key, whose shapes only the data tell; asked once after :meth:`open_data`.

        What can be warmed up without data belongs into :meth:`example_batches`: the clock runs while these are
        captured. Default: none.
        """
        return ()

    @abstractmethod
    def build_step(self) -> TrainStep:
        """The training step: usually what :meth:`step_with` returns."""

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
        beside: Sequence[Updater] = (),
        passes: Callable[[LossScale | None], ForwardBackward] | None = None,
    ) -> TrainStep:
        """Accumulated micro-batches, then one Optimizer over all groups of parameters.

        Args:
            rule, schedule, blocks, clip: see :class:`common.optim.optimizer.Optimizer`.
            grad_divisor: of the gradients summed over micro-batches and ranks; None for their number, which suits a
                loss that is the mean over a micro-batch.
            loss_scale: the first scale of a loss in fp16, or what :meth:`scaled` returned; None does not scale.
            average_decay: of averages of the weights (:mod:`common.optim.ema`), which are then what is evaluated; None
                for none.
            beside: updaters of what is no parameter; they write after the Optimizer, or nothing is written.
            passes: what makes the forward and backward passes over the micro-batches of a step, given what scales the
                loss, such as a pipeline's; None accumulates :meth:`loss`.

        Raises:
            ConfigError: micro-batches of a pipeline are to be clipped one by one, or ``optimizer.grad_predivide`` has
                no loss scale to divide.
            ValueError: a group has a frozen parameter, or calls one that is split otherwise than the model does.
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
            ranks_per_node=cfg.scale.gpus_per_node,
            **cfg.optimizer.arguments(),
            blocks=blocks,
            clip=clip,
            micro_batches=cfg.grad_accumulation_steps,
            loss_scale=scale,
        )
        updaters: list[Updater] = [self._optimizer]
        if average_decay is not None:
            self._average = WeightAverage(self._optimizer, average_decay)
            updaters.append(self._average)
        forward_backward = accumulate(self.loss, scale) if passes is None else passes(scale)
        return TrainStep(forward_backward, [*updaters, *beside], self.layout)

    def scaled(self, first: float, **adaptation: Any) -> LossScale:
        """A loss scale for this workload's precision, divided by the recipe's ``optimizer.grad_predivide``.

        Args:
            first: its first value.
            adaptation: further arguments of :class:`common.optim.precision.LossScale`.
        """
        return LossScale(self.layout.device, self.dtype, first, predivide=self._predivide(), **adaptation)

    @property
    def loss_scale(self) -> Tensor:
        """What the loss is multiplied by before the backward pass, 0-d float32 on the device."""
        if self._loss_scale is None:
            return torch.ones((), device=self.layout.device)
        return self._loss_scale.applied

    def _predivide(self) -> float:
        """What the loss scale is divided by; 1 where no sum of gradients can leave its range."""
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
        """What a run begins with that resumes none: weights and state of a training before it. Collective.

        Called after :meth:`build_step`, before ``run_start``. Default: nothing, what the constructor has drawn.
        """

    def warm_up_reader(self) -> None:
        """Load what reads data and run it on made-up data, before ``run_start``. Default: nothing."""

    @abstractmethod
    def open_data(self, root: Path) -> DataSource:
        """Open the training data under ``root``; the first touch of them. After ``run_start``."""

    def prepare(self, batch: HostBatch) -> Batch:
        """Bring a reader's batch to the device and finish it there; runs on the side stream. Default: copy it."""
        return Batch(self.to_device(batch.tensors), batch.samples, batch.key)

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of ``tensors`` on the device, or those themselves that are there; the host does not wait."""
        return {name: tensor.to(self.layout.device, non_blocking=True) for name, tensor in tensors.items()}

    @property
    def nominal_samples(self) -> int:
        """Samples of a micro-batch over all ranks, as the rules count them."""
        return self.cfg.micro_batch * self.layout.size("dp")

    def weights(self) -> Weights:
        """What evaluation uses now; collective. Default: the network's own parameters, with the last update.

        Where the step averages weights it is the averages, in memory of their own. Frozen parameters are not among
        them: whoever evaluates has them.
        """
        if self._average is not None:
            return Weights(self._average.weights())
        if self._optimizer is not None:
            self._optimizer.materialize()
        frozen = self.frozen()
        return Weights({name: tensor for name, tensor in self.model.named_parameters() if name not in frozen})

    def frozen(self) -> frozenset[str]:
        """Names of the model's tensors that no optimizer, checkpoint, transfer or buffer restore touches.

        It is what the model's modules have marked (:func:`common.nn.frozen.mark_frozen`), not to be overridden.
        """
        return frozen_names(self.model)

    def base_digest(self) -> str | None:
        """Identity of the frozen tensors, which a checkpoint stores in their place; None where there are none."""
        return None

    def tensor_splits(self) -> Mapping[str, Split]:
        """How tensors of the model are split over ``tp``, by their names, for checkpoints and evaluation ranks.

        All others that are not frozen are the same on the ranks of ``tp``; their names in ``parameter_groups`` are the
        model's. Default: none is split.
        """
        return {}

    @abstractmethod
    def evaluation(self, layout: Layout) -> Evaluation:
        """The evaluation of this workload on the ranks of ``layout``."""

    def synthetic_evaluation(self, layout: Layout) -> Evaluation | None:
        """Return an evaluation of ``benchmark.eval_samples`` synthetic samples on the device, for ``bench``.

        Its ``open_data`` reads no folder. It may change the network's weights, so that predicting takes as long as with
        trained ones. The predictions are not scored. Default: None, there are no synthetic samples.
        """
        return None

    def sample_flops(self) -> float:
        """Model FLOPs of one training sample, forward and backward, for MFU. Default: unknown (0)."""
        return 0.0

    def memory_plan(self) -> str:
        """What the step was expected to need of the device's memory, for ``bench``. Default: nobody planned ("")."""
        return ""

    def implementations(self) -> dict[str, str]:
        """Operation to the implementation chosen for it, for the log and ``bench``: model, optimizer, communicators."""
        optimizer = self._optimizer.choices if self._optimizer is not None else {}
        return {**self.choices, **optimizer, **self.layout.network_choices()}

    def close(self) -> None:
        """Release what the workload holds. Default: nothing."""

    def named_state(self) -> Sequence[tuple[str, Tensor]]:
        """All tensors of the model that may change: parameters and buffers, but for frozen ones."""
        frozen = self.frozen()
        every = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(name, tensor) for name, tensor in every if name not in frozen]
