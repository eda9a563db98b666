"""OpenFold as a workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.openfold.axial import AxialSplit
from benchmarks.openfold.checkpoint import StartingPoint, load, read_checkpoint
from benchmarks.openfold.config import Facts, OpenFoldConfig
from benchmarks.openfold.data import open_eval, open_train, staging_plan
from benchmarks.openfold.evaluate import ChainEvaluation
from benchmarks.openfold.features import feature_shapes, random_features
from benchmarks.openfold.labels import labels_of
from benchmarks.openfold.layers import Chooser
from benchmarks.openfold.losses import PARTS, all_losses
from benchmarks.openfold.model import AlphaFold
from benchmarks.openfold.samples import FORMAT
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, HostBatch
from common.data.staging import StagingPlan
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.errors import ConfigError
from common.mlperf.schedules import SCHEDULES
from common.optim.learning_rate import warmup_then_constant
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.optim.precision import LossScale
from common.step.chunk_graphs import ChunkGraphs
from common.step.passes import Chunk
from common.step.pipeline import Pipeline
from common.step.train_step import ForwardBackward, Losses, TrainStep


def without_values(facts: Facts) -> AlphaFold:
    """Return the network on the meta device, where tensors have shapes only."""
    meta = torch.device("meta")
    with meta:
        network = AlphaFold(facts, Chooser({}, torch.device("cpu"), torch.float32), AxialSplit())
    return network.place(meta, torch.float32)


@functools.cache
def parameter_count(facts: Facts) -> int:
    """Return the number of parameters of the network."""
    return sum(parameter.numel() for parameter in without_values(facts).parameters())


def forward_flops(facts: Facts) -> dict[str, float]:
    """Return the FLOPs of the matrix products of a pass over one crop: of all, under ``""``, and of each part."""
    network = without_values(facts).eval()
    shapes = feature_shapes(facts, 1, 1, facts.crop_size)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(tensors)
    counted = counter.get_flop_counts()
    parts = {name: sum(counted.get(f"AlphaFold.{name}", {}).values()) for name, _ in network.named_children()}
    return {"": counter.get_total_flops(), **parts}


def check_split(own: OpenFoldConfig, ranks: int) -> None:
    """Check that ``ranks`` ranks can share a sample.

    Raises:
        ConfigError: they do not divide the sequences or the residues of a sample.
    """
    facts = own.facts
    divided = {
        "facts.crop_size": facts.crop_size,
        "facts.msa_clusters + facts.templates": facts.msa_clusters + facts.templates,
        "facts.extra_msa": facts.extra_msa,
        "reader.eval_multiple": own.reader.eval_multiple,
    }
    for name, size in divided.items():
        if size % ranks:
            raise ConfigError(f"layout.cp={ranks}: does not divide {name}={size}")


class OpenFold(Workload):
    """Prediction of the structures of proteins."""

    config_type: ClassVar[type] = OpenFoldConfig
    title = "OpenFold"
    peers = "benchmarks.openfold.peer"
    axes: ClassVar = {"dp": "are data-parallel", "cp": "share a sample"}
    own: OpenFoldConfig
    model: AlphaFold

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        choose = Chooser(own.model.implementations, layout.device, self.dtype)
        check_split(own, layout.size("cp"))
        split, generator = AxialSplit.from_layout(layout), layout.shared_generator("weights")
        network = AlphaFold(own.facts, choose, split, own.model.recompute)
        network.initialise(generator, own.model.final_std)
        self.model = network.place(layout.device, self.dtype)
        self.choices |= choose.chosen
        self._receivers = layout.group("cp", purpose="batches")
        self._start: StartingPoint | None = None
        if cfg.assets_dir is not None:
            path = cfg.assets_dir / own.model.initial_checkpoint
            self._start = read_checkpoint(path, own.facts.checkpoint_sha256, self.model)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format and the values of the log that follow from the settings."""
        own: OpenFoldConfig = cfg.workload
        checkpoint, broken = own.facts.checkpoint_sha256, []
        if cfg.assets_dir is None:
            name, checkpoint = own.model.initial_checkpoint, "none"
            broken.append(f"assets_dir=null: training continues the rules' checkpoint ({name} in assets_dir)")
        derived = {
            "checkpoint": checkpoint,
            "eval_every": SCHEDULES["openfold"](1).interval,
            "optimizer": type(own.hparams.adam()).__name__,
            "target": cfg.benchmark.targets["lddt_ca"].value,
            "model_parameters": parameter_count(own.facts),
            "enabled": True,
            "disabled": False,
            "loader": f"InitialTrainingDataloader{'PT' if cfg.deterministic else 'PQ'}",
        }
        return Declaration(
            data_format=FORMAT, derived_values=derived, forbidden=broken, largest_micro_batch=1, chunk_graphs=True
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the blocks that ranks share a sample in, whose gradients are partial, and all other parameters."""
        partial = {id(parameter) for part in self.model.sharded for parameter in part.parameters()}
        named = dict(self.model.named_parameters())
        blocks = {name: parameter for name, parameter in named.items() if id(parameter) in partial}
        others = {name: parameter for name, parameter in named.items() if id(parameter) not in partial}
        decay = self.own.hparams.weight_decay
        return [
            ParameterGroup(blocks, weight_decay=decay),
            ParameterGroup(others, weight_decay=decay, replicated_over=("cp",)),
        ]

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then Adam on the clipped mean gradient, and averaged weights.

        With ``cuda_graphs=chunks``, each number of passes has one graph of the forward and one of the backward pass
        over a micro-batch.
        """
        hparams, facts = self.own.hparams, self.own.facts
        graphs = ChunkGraphs() if self.cfg.chunk_graphs else None
        # As in the reference, the first update has warmup_init and the last one of the warm-up the base rate.
        rising = max(hparams.warmup_steps - 1, 1) if hparams.warmup_steps else 0
        schedule = warmup_then_constant(hparams.base_learning_rate, hparams.warmup_init, rising, first_step=0)
        before = 0 if self._start is None else self._start.steps  # the warm-up counts from the start of this run
        step = self.step_with(
            hparams.adam(),
            lambda step: schedule(step - before),
            clip=ClipNorm(facts.max_grad_norm, "after_reduction"),
            average_decay=facts.average_decay,
            average_copies_first=True,
            passes=None if graphs is None else functools.partial(self._passes, graphs),
        )
        step.chunk_graphs = graphs
        return step

    def _passes(self, graphs: ChunkGraphs, loss_scale: LossScale | None) -> ForwardBackward:
        """Return the passes of a step as graphs, with the whole network as one chunk."""
        chunk = Chunk(self.model, lambda _, micro_batch: self.loss(micro_batch))
        # A single stage sends nothing, so the announced shape is not used.
        pipeline = Pipeline(self.layout, 1, self.cfg.grad_accumulation_steps, lambda _: Handed((), torch.float32))
        return pipeline.forward_backward([chunk], ["loss", *PARTS], loss_scale, graphs)

    def load_start(self) -> None:
        """Load the checkpoint of ``assets_dir``, with the state of Adam."""
        if self._start is not None:
            assert self._optimizer is not None, "the step comes first"
            load(self._start, self._optimizer)
            self._start = None  # three times the weights in host memory

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean loss of the micro-batch; :mod:`benchmarks.openfold.features` describes its tensors."""
        tensors, facts = micro_batch.tensors, self.own.facts
        labels = labels_of(tensors, self.model.tables)
        total, parts = all_losses(self.model(tensors), labels, tensors, facts.loss, facts.crop_size)
        return Losses(total, {"loss": total.detach(), **parts})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of noise for each number of passes; the first one, which ``bench`` times, has most."""
        facts = self.own.facts
        for passes in range(facts.recycling_iters + 1, 0, -1):
            yield Batch(self._noise(self.cfg.micro_batch, passes, facts.crop_size), self.nominal_samples, passes)

    def _noise(self, samples: int, passes: int, residues: int) -> dict[str, Tensor]:
        generator = self.layout.shared_generator("example")
        return self.to_device(random_features(self.own.facts, samples, passes, residues, generator))

    def warm_up_reader(self) -> None:
        """Connect the ranks that share a sample for the transfer of batches."""
        self.prepare(HostBatch({"samples": torch.zeros(1)}, 1, 0))

    def finished(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch's tensors. Of the ranks that share a sample, the first one sends them to the others."""
        if self._receivers is not None:
            for _, tensor in sorted(tensors.items()):  # readers need not have one order
                dist.broadcast(tensor, dist.get_global_rank(self._receivers, 0), group=self._receivers)
        return tensors

    def staging(self, root: Path) -> StagingPlan:
        """Return all prepared files, for every node."""
        return staging_plan(root)

    def open_data(self, root: Path) -> DataSource:
        """Open the training chains."""
        cfg, own = self.cfg, self.own
        sizes = cfg.micro_batch, cfg.grad_accumulation_steps
        return open_train(root, own.reader, own.facts, self.layout, *sizes, deterministic=cfg.deterministic)

    def evaluation(self, layout: Layout) -> ChainEvaluation:
        """Return the evaluation of the lDDT on the ranks of ``layout``."""
        own = self.own
        example = self._noise(1, own.facts.recycling_iters + 1, own.facts.crop_size)
        return ChainEvaluation(self.model, example, lambda root: open_eval(root, own.reader, own.facts, layout), layout)

    def sample_flops(self) -> float:
        """Return the FLOPs of a sample with all recycling iterations, without computing activations again."""
        facts = self.own.facts
        return (facts.recycling_iters + 3) * forward_flops(facts)[""]
