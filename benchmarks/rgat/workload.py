"""R-GAT workload: connects model, stores, sampler, optimizer and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rgat.config import RgatConfig
from benchmarks.rgat.data import NO_LABEL, BlockSource, EvaluationSeeds, GraphData, TrainingSeeds, padded
from benchmarks.rgat.evaluate import NodeClassification
from benchmarks.rgat.feature_store import build_features, open_features
from benchmarks.rgat.graph import BlockShape, SampledBlock
from benchmarks.rgat.graph_store import open_graph
from benchmarks.rgat.model import RGAT
from benchmarks.rgat.ops.sample import SAMPLE
from benchmarks.rgat.prepared import FORMAT, PreparedGraph, open_prepared
from benchmarks.rgat.sampling import BuildSampler
from benchmarks.rgat.sharded import LOCAL, NodePartition
from benchmarks.rgat.synthetic import synthetic_igbh
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch
from common.data.order import MicroBatches
from common.distributed import groups
from common.distributed.layout import Layout
from common.errors import DataError
from common.ops.operation import OperationRequest, select
from common.ops.triton_support import widen
from common.optim.learning_rate import constant
from common.optim.optimizer import ParameterGroup
from common.step.train_step import SAMPLES, Losses, TrainStep


class RgatClassification(Workload):
    """Classification of papers with R-GAT."""

    config_type: ClassVar[type] = RgatConfig
    title = "R-GAT"
    peers = "benchmarks.rgat.peer"
    own: RgatConfig
    model: RGAT

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, facts = self.own, self.own.facts
        self._schema = facts.schema
        generator, names = layout.shared_generator("weights"), own.model.implementations
        self.model = RGAT(
            facts, self._schema, len(facts.fanouts), names, layout.device, self.dtype, cfg.deterministic, generator
        )
        request = OperationRequest(layout.device, self.dtype)
        sample = select(names, "sample", SAMPLE, request)
        self._build_sampler: BuildSampler = sample.function
        self.choices |= {**self.model.choices, "sample": sample.name}
        self._opened: tuple[Path, GraphData] | None = None
        self._captured: list[Batch] = []

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all parameters.

        In the last convolution, relations that reach no seed have zero gradients: without decay their weights stay.
        """
        return [ParameterGroup(dict(self.model.named_parameters()), weight_decay=self.own.hparams.weight_decay)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the run. Each micro-batch stream has its own seeds, so the epoch length depends on their number."""
        own: RgatConfig = cfg.workload
        streams = cfg.global_batch // cfg.micro_batch
        forbidden = []
        if own.reader.features == "local" and cfg.training_ranks > 1:
            forbidden.append(
                "reader.features=local: on several ranks each would hold all features, and none may be cached"
            )
        return Declaration(
            data_format=FORMAT,
            schedule_options={"train_samples": cfg.benchmark.train_samples, "ranks": streams},
            forbidden=forbidden,
        )

    def build_step(self) -> TrainStep:
        """Build a step: accumulated micro-batches, then Adam with a constant learning rate."""
        hparams = self.own.hparams
        return self.step_with(
            hparams.adam(), constant(hparams.base_learning_rate), loss_scale=self.own.model.loss_scale
        )

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean cross-entropy over the real seeds; see :mod:`benchmarks.rgat.data`."""
        tensors, shape = micro_batch.tensors, micro_batch.key
        assert isinstance(shape, BlockShape)
        logits_BC = self.model(tensors["features"], SampledBlock.of(shape, tensors), tensors["seed"])
        label_B = tensors["label"]
        total = torch.nn.functional.cross_entropy(widen(logits_BC), label_B, ignore_index=NO_LABEL)
        real_B = label_B != NO_LABEL
        right = ((logits_BC.detach().argmax(1) == label_B) & real_B).sum() / real_B.sum()
        return Losses(total, {"loss": total.detach(), "accuracy": right, SAMPLES: real_B.sum()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield a micro-batch of a synthetic graph. The captured training step has the capacities of the real data."""
        shape, tensors = self._example(self.cfg.micro_batch)
        yield Batch(tensors, self.nominal_samples, shape)

    def _example(self, seeds: int) -> tuple[BlockShape, dict[str, Tensor]]:
        """Return shape and tensors of a synthetic batch."""
        own, device = self.own, self.layout.device
        graph = synthetic_igbh(max(own.model.example_papers, seeds), 1, device, 0.5, self._schema)
        shards = self.layout, self.layout.world_size
        features = build_features(graph.nodes, own.facts.feature_size, LOCAL, *shards, _example_features)
        sources = GraphData(graph, features, own.facts.fanouts, self._build_sampler)
        nodes = torch.arange(seeds, dtype=torch.int32, device=device)
        labels = torch.randint(own.facts.classes, (seeds,), generator=self.layout.generator("example"))
        batch = padded(nodes, labels.to(device, torch.int16), 0, seeds, self.layout.seed)
        shape = sources.capacities(seeds, [batch[0]] * 2, own.reader.capacity_sigma, None)
        return shape, sources.example(shape, batch)

    def examples_of_data(self) -> Iterable[Batch]:
        """Return a list of the first micro-batch, with the capacities of nearly all others; empty in later calls."""
        captured, self._captured = self._captured, []  # its features take gigabytes
        return captured

    @functools.cached_property
    def _sampling_group(self) -> dist.ProcessGroup | None:
        """Group of all ranks with a separate communicator, so that sampling does not interfere with gradients."""
        ranks = self.layout.world_size
        return groups.make(range(ranks)) if ranks > 1 else None

    def warm_up_reader(self) -> None:
        """Connect the ranks in the communicator of the sampler. Collective."""
        if self._sampling_group is not None:
            dist.all_reduce(torch.zeros(1, device=self.layout.device), group=self._sampling_group)

    def _sources(self, root: Path) -> GraphData:
        """Return graph and features in ``root``, opened once for training and evaluation."""
        if self._opened is None or self._opened[0] != root:
            own, reader, layout = self.own, self.own.reader, self.layout
            prepared = self._prepared(root)
            ranks = layout, self.cfg.ranks_per_node
            graph = open_graph(root, self._schema, prepared.nodes, reader.graph, *ranks)
            features = open_features(
                root, self._schema, prepared.nodes, own.facts.feature_size, reader.features, *ranks
            )
            self._opened = root, GraphData(graph, features, own.facts.fanouts, self._build_sampler)
        return self._opened[1]

    def _prepared(self, root: Path) -> PreparedGraph:
        """Return the data in ``root``, which must match the configured constants."""
        facts, prepared = self.own.facts, open_prepared(root)
        found = (prepared.schema, prepared.settings.feature_size, prepared.settings.classes)
        if found != (self._schema, facts.feature_size, facts.classes):
            raise DataError(
                f"{root} has {found[2]} classes, {found[1]} features and the relations "
                f"{', '.join(prepared.settings.relations)}; the recipe is for {facts.classes}, {facts.feature_size} "
                f"and {', '.join(facts.relations)}: give the data_dir that belongs to it"
            )
        return prepared

    def open_data(self, root: Path) -> BlockSource:
        """Load graph, features and seeds, and estimate the capacities of a block. Collective."""
        cfg, own, layout = self.cfg, self.own, self.layout
        sources, prepared = self._sources(root), self._prepared(root)
        micro_batches = MicroBatches(
            cfg.micro_batch, cfg.grad_accumulation_steps, layout.size("dp"), layout.index("dp")
        )
        seeds = TrainingSeeds(prepared.labelled_seeds("train"), micro_batches, layout.seed, layout.device)
        batches = seeds.capacity_batches(own.reader.capacity_batches)
        shape = sources.capacities(cfg.micro_batch, batches, own.reader.capacity_sigma, layout.group("dp"))
        source = BlockSource(
            sources, seeds, shape, prepared.seeds["eval"], prepared.manifest.synthetic, self._sampling_group
        )
        self._captured = [Batch(sources.example(shape, seeds.batch(0)), self.nominal_samples, shape)]
        return source

    def evaluation(self, layout: Layout) -> NodeClassification:
        """Return the evaluation of accuracy on the ranks of ``layout``."""
        reader = self.own.reader

        def open_sources(root: Path) -> tuple[GraphData, EvaluationSeeds]:
            seeds = EvaluationSeeds(
                self._prepared(root).labelled_seeds("eval"),
                reader.eval_batch,
                self.cfg.global_batch // self.cfg.micro_batch,
                layout.size("dp"),
                layout.index("dp"),
                layout.seed,
                layout.device,
            )
            return self._sources(root), seeds

        return NodeClassification(
            self.model,
            self._example(reader.eval_batch),
            open_sources,
            reader.capacity_batches,
            reader.capacity_sigma,
            layout,
            self.cfg.cuda_graphs,
        )

    def close(self) -> None:
        """Release the stores."""
        if self._opened is not None:
            self._opened[1].features.close()
            self._opened = None


def _example_features(partition: NodePartition, shard: int, own_RF: Tensor) -> None:
    """Fill rows with numbers in [0, 1/16). Rows of 1,024 then have a norm of about 1, like sentence embeddings."""
    sixteenth = 0x18  # the bits of 1/16 in e4m3
    own_RF.view(torch.uint8).random_(0, sixteenth, generator=torch.Generator(own_RF.device).manual_seed(1 + shard))
