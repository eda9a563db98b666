"""OpenCatalyst as a workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.oc20.config import Oc20Config
from benchmarks.oc20.data import GraphShape, open_eval, open_train, staging_plan
from benchmarks.oc20.evaluate import evaluation_of
from benchmarks.oc20.graph import CUTOFF
from benchmarks.oc20.model import ELEMENTS, OPERATIONS, DimeNetPlusPlus, force_errors
from benchmarks.oc20.samples import FORMAT, mean_counts, read_manifest
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.data.staging import StagingPlan
from common.distributed.layout import Layout
from common.evaluation.counts import CountedEvaluation
from common.ops.operation import OperationRequest, choose
from common.optim.learning_rate import stepwise
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep


class OpenCatalystForces(Workload):
    """Regression of the forces on the atoms of adsorbates and catalysts."""

    config_type: ClassVar[type] = Oc20Config
    title = "OpenCatalyst"
    peers = "benchmarks.oc20.peer"
    own: Oc20Config
    model: DimeNetPlusPlus

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        request = OperationRequest(layout.device, self.dtype)
        chosen = choose(self.own.model.implementations, OPERATIONS, request)
        functions = {name: choice.function for name, choice in chosen.items()}
        network = DimeNetPlusPlus(self.own.facts, layout.shared_generator("weights"), **functions)
        self.model = network.cast(self.dtype).to(layout.device)
        self.choices |= {name: choice.name for name, choice in chosen.items()}
        self._shapes: list[GraphShape] = []
        atoms, edges = self.own.reader.typical
        self._sizes = {"atoms": float(atoms), "edges": float(edges), "triplets": edges**2 / atoms}

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format, and the optimizer's name in the log."""
        own: Oc20Config = cfg.workload
        return Declaration(data_format=FORMAT, derived_values={"optimizer": type(own.hparams.adamw()).__name__})

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group: weight decay is for all parameters, also for biases and frequencies."""
        return [ParameterGroup(dict(self.model.named_parameters()), weight_decay=self.own.hparams.weight_decay)]

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then AdamW."""
        own, hparams = self.own, self.own.hparams
        boundaries = hparams.decay_boundary_steps
        schedule = stepwise(
            hparams.base_learning_rate,
            hparams.base_learning_rate * hparams.warmup_factor,
            hparams.warmup_steps,
            boundaries,
            [hparams.decay_factor**number for number in range(1, len(boundaries) + 1)],
            steps_per_epoch=1,  # the rate changes at every step
        )
        step = self.step_with(hparams.adamw(), schedule, loss_scale=own.model.loss_scale)
        step.one_key = True
        return step

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the micro-batch's part of the loss of the global batch, times the number of micro-batches.

        The loss of the global batch is ``force_weight`` times the mean over all its free atoms of the L1 norm of the
        error. It does not depend on the micro-batch that a structure is in: ``global_free`` counts the free atoms of
        all. :mod:`benchmarks.oc20.data` describes the tensors.
        """
        tensors, facts = micro_batch.tensors, self.own.facts
        force_A3 = self.model(tensors)
        target_A3 = tensors["force"].to(force_A3.dtype) / facts.force_std
        error = force_errors(force_A3, target_A3, tensors["free"].to(force_A3.dtype))
        micro_batches = self.cfg.grad_accumulation_steps * self.layout.size("dp")
        total = error * (micro_batches * facts.force_weight) / tensors["global_free"].to(force_A3.dtype)
        return Losses(total, {"loss": total.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield a micro-batch of noise with the sizes of typical structures; the data have other shapes."""
        yield self._example(self.own.reader.typical_shape(self.cfg.micro_batch))

    def examples_of_data(self) -> Iterable[Batch]:
        """Yield a micro-batch of noise for each shape of the data."""
        return map(self._example, self._shapes)

    def _example(self, shape: GraphShape) -> Batch:
        """Return a micro-batch of noise."""
        tensors = {**self._noise(shape), "global_free": torch.tensor(float(shape.atoms), device=self.layout.device)}
        return Batch(tensors, self.nominal_samples, shape)

    def _noise(self, shape: GraphShape) -> dict[str, Tensor]:
        """Return random tensors of a batch; all atoms are free, and edges have random directions and lengths."""
        generator = self.layout.generator("example")

        def indices(limit: int, count: int) -> Tensor:
            return torch.randint(limit, (count,), generator=generator, dtype=torch.int32)

        length_E1 = CUTOFF * (1 + 2 * torch.rand(shape.edges, 1, generator=generator)) / 3
        shift_E3 = torch.nn.functional.normalize(torch.randn(shape.edges, 3, generator=generator)) * length_E1
        made = {
            "atomic_number": indices(ELEMENTS, shape.atoms),
            "position": torch.zeros(shape.atoms, 3),
            "force": torch.randn(shape.atoms, 3, generator=generator),
            "free": torch.ones(shape.atoms),
            "edge_source": indices(shape.atoms, shape.edges),
            "edge_target": indices(shape.atoms, shape.edges).sort().values,
            "edge_shift": shift_E3,
            "edge_reverse": indices(shape.edges, shape.edges),
            "samples": torch.ones(()),
        }
        return {name: tensor.to(self.layout.device) for name, tensor in made.items()}

    def sample_sizes(self) -> dict[str, float]:
        """Return the mean counts of a structure. An edge of noise is in as many triplets as an atom has edges."""
        return self._sizes

    def staging(self, root: Path) -> StagingPlan:
        """Return all prepared files, for every node."""
        return staging_plan(root)

    def open_data(self, root: Path) -> DataSource:
        """Open the training structures."""
        cfg = self.cfg
        self._sizes = mean_counts(read_manifest(root))
        source, self._shapes = open_train(
            root, self.own.reader, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps
        )
        return source

    def evaluation(self, layout: Layout) -> CountedEvaluation:
        """Return the evaluation of the forces on the ranks of ``layout``."""
        reader = self.own.reader
        example = self._noise(reader.typical_shape(reader.eval_batch))
        return evaluation_of(
            self.model, self.own.facts.force_std, example, lambda root: open_eval(root, reader, layout), layout,
            self.cfg.cuda_graphs,
        )  # fmt: skip
