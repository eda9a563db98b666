"""MiniGo as a workload: connects network, self-play, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from benchmarks.minigo.channel import SLOTS
from benchmarks.minigo.config import MiniGoConfig
from benchmarks.minigo.data import BOOTSTRAP, FORMAT, PREPARE_COMMAND, START, SelfPlayParts, SelfPlaySource, Spectator
from benchmarks.minigo.evaluate import TARGET, GamesAgainstTarget, read_target
from benchmarks.minigo.features import SYMMETRIES, FeatureBits
from benchmarks.minigo.inference import SIZES, BatchedInference, InferenceServer, sizes_up_to
from benchmarks.minigo.model import HeadNorm, InferenceNetwork, MiniGo, check_weights, decayed, losses
from benchmarks.minigo.records import Games
from benchmarks.minigo.run_folder import RunFolder
from benchmarks.minigo.selfplay import SelfPlay
from benchmarks.minigo.workers import SelfPlayTask, SelfPlayWorkers
from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data import manifest
from common.data.batches import Batch, DataSource, Player
from common.data.order import MicroBatches, sample_generator
from common.distributed.layout import Layout
from common.distributed.rank_info import ROLES
from common.errors import CheckpointError
from common.formats.safetensors_file import read_tensors
from common.nn.batch_norm import BatchNorm2d, averaged_statistics
from common.optim.optimizer import ParameterGroup
from common.optim.precision import DTYPES
from common.step.train_step import Losses, TrainStep


class MiniGoWorkload(Workload):
    """Go by self-play. Blocks of training are generations: see :mod:`benchmarks.minigo.data`."""

    config_type: ClassVar[type] = MiniGoConfig
    title = "MiniGo"
    own: MiniGoConfig
    model: MiniGo

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        facts, implementations = self.own.facts, self.own.model.implementations
        generator = layout.shared_generator("weights")
        self.model = MiniGo(facts.architecture, implementations, generator, device=layout.device, dtype=self.dtype)
        self.choices |= self.model.chosen
        if cfg.assets_dir is not None:
            self._load(cfg.assets_dir / START)
        self._features = FeatureBits(facts.search.board, layout.device)
        self._folder: RunFolder | None = None
        self._player: Player | None = None

    def _load(self, path: Path) -> None:
        """Start training from the weights and statistics in a file."""
        weights = read_tensors(path, torch.device("cpu"))
        try:
            check_weights(self.model.architecture, weights)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is {error}; give the assets_dir that belongs to this recipe") from error
        self.model.load_state_dict(weights)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format."""
        return Declaration(data_format=FORMAT)

    @property
    def first(self) -> int:
        """Generation that the first block is trained on: the newest one that ``prepare`` has made."""
        return self.own.facts.window - 1

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the weights and scales, which decay, and the biases."""
        named, decay = dict(self.model.named_parameters()), self.own.hparams.weight_decay
        return [
            ParameterGroup({name: tensor for name, tensor in named.items() if decayed(name)}, weight_decay=decay),
            ParameterGroup({name: tensor for name, tensor in named.items() if not decayed(name)}),
        ]

    def build_step(self) -> TrainStep:
        """Build the step: accumulated micro-batches, then SGD."""
        hparams = self.own.hparams
        return self.step_with(hparams.sgd(), hparams.schedule(), loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the loss of a micro-batch: cross entropy of the policy, and half the squared error of the value.

        :class:`benchmarks.minigo.data.SelfPlaySource` describes the tensors.
        """
        tensors = micro_batch.tensors
        planes_BCHW = self._features.planes(tensors["bits"], self.dtype, tensors["symmetry"])
        pi_BA = self._features.apply(tensors["pi"], tensors["symmetry"])
        logits_BA, value_B = self.model(planes_BCHW)
        cross_entropy, squared_error = losses(logits_BA, value_B, pi_BA, tensors["outcome"])
        metrics = {"policy_loss": cross_entropy.detach(), "value_loss": squared_error.detach()}
        total = cross_entropy + 0.5 * squared_error
        return Losses(total, {"loss": total.detach(), **metrics})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch, which has the shape of every training micro-batch."""
        architecture, count = self.model.architecture, self.cfg.micro_batch
        generator = self.layout.generator("example")
        outcome_B = 2.0 * torch.randint(2, (count,), generator=generator) - 1.0
        tensors = {
            "bits": torch.randint(256, (count, architecture.position_bytes), generator=generator, dtype=torch.uint8),
            "pi": torch.rand(count, architecture.moves, generator=generator).softmax(1),
            "outcome": outcome_B,
            "symmetry": torch.randint(SYMMETRIES, (count,), generator=generator, dtype=torch.uint8),
        }
        yield Batch(self.to_device(tensors), self.nominal_samples)

    def warm_up_reader(self) -> None:
        """Compile the search, or load it from numba's cache: finish one game with the smallest search."""
        architecture = self.model.architecture
        play = SelfPlay(self.own.facts.shortest_search, 1, seed=0, total=1)
        while positions := len(play.leaves()):
            policy_BA = np.full((positions, architecture.moves), 1 / architecture.moves, np.float32)
            play.answer(policy_BA, np.zeros(positions, np.float32))

    def scratch(self, folder: Path, resumed_block: int | None) -> None:
        """Prepare the folder of self-play, and start the workers, which wait for the first games."""
        self._folder, own, layout = RunFolder.below(folder), self.own, self.layout
        trains, start = layout.role == "train", ""
        if trains and resumed_block is None:
            weights = self.weights()
            start = self._folder.begin(self.first, weights.tensors) if layout.rank == 0 else ""
        elif resumed_block is not None:
            start = self._folder.resume(self.first + resumed_block) if layout.rank == 0 else ""
        token = self._folder.started(start)
        if trains and not self.cfg.selfplay.training_ranks_play:
            self._player = Spectator()
            return
        network = InferenceNetwork(
            own.facts.architecture,
            own.model.implementations,
            device=layout.device,
            dtype=DTYPES[own.player.precision],
        )
        self.choices |= network.chosen
        task = SelfPlayTask(
            own.facts.search,
            own.player.concurrent,
            own.player.shard_games,
            self._folder.games,
            f"{layout.role}{layout.rank}",
            int(sample_generator(layout.seed, ROLES.index(layout.role), layout.rank).integers(2**63)),
            own.player.cache_mb << 20,
        )
        in_flight = SLOTS * own.player.workers * task.ring.capacity
        inference = BatchedInference(network, sizes_up_to(min(in_flight, SIZES[-1])), self.cfg.cuda_graphs)
        server = InferenceServer(inference, self._folder.models)
        self._player = SelfPlayWorkers(server, own.player.workers, task, token)

    def player(self) -> Player:
        """Return the workers of this rank."""
        assert self._player is not None, "the workers have started"
        return self._player

    def open_data(self, root: Path) -> DataSource:
        """Open the games of the bootstrap, and begin self-play.

        Raises:
            DataError: a file of the bootstrap is missing, or the target is damaged, of another network, or not that
                of the run that is resumed. Training would otherwise end before its evaluation finds this.
        """
        assert self._folder is not None, "the run has a folder for self-play"
        cfg, facts, layout = self.cfg, self.own.facts, self.layout
        found = manifest.read(root, FORMAT, PREPARE_COMMAND)
        read_target(root, facts.architecture, torch.device("cpu"))
        if layout.rank == 0:
            self._folder.use_target(root, found.files[TARGET].sha256)
        games = Games(self._folder.games, facts.search.board, root / BOOTSTRAP, self.first + 1)
        parts = SelfPlayParts(games, self._folder.models, self.player(), facts.sampling, self.first)
        mine = MicroBatches(cfg.micro_batch, cfg.grad_accumulation_steps, layout.size("dp"), layout.index("dp"))
        pinned, counted = layout.device.type == "cuda", found.counts["train_samples"]
        return SelfPlaySource(parts, mine, layout.seed, pinned, counted, cfg.benchmark.eval_samples, found.synthetic)

    @classmethod
    def require_data_of(cls, output_dir: Path, data_dir: Path) -> None:
        """Refuse another target than that of the run."""
        found = manifest.read(data_dir, FORMAT, PREPARE_COMMAND)
        RunFolder.below(output_dir).require_target(data_dir, found.files[TARGET].sha256)

    def weights(self) -> Weights:
        """Return parameters, and batch-norm statistics averaged over the replicas."""
        statistics = averaged_statistics(self.model, self.layout, (BatchNorm2d, HeadNorm))
        return Weights({**super().weights().tensors, **statistics})

    def evaluation(self, layout: Layout) -> GamesAgainstTarget:
        """Return the games against the target on the ranks of ``layout``."""
        own, facts = self.own, self.own.facts
        return GamesAgainstTarget(
            facts.architecture,
            facts.evaluation,
            self.cfg.benchmark.eval_samples,
            layout,
            DTYPES[own.player.evaluation_precision],
            layout.seed,
            own.model.implementations,
            self.cfg.cuda_graphs,
        )

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one example."""
        return self.model.architecture.training_flops()

    def close(self) -> None:
        """End the workers."""
        if self._player is not None:
            self._player.close()
