"""The FLUX.1 workload: combines network, data, optimizer and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.flux1.config import BLOCKS, FluxConfig
from benchmarks.flux1.data import open_eval, open_train
from benchmarks.flux1.encodings import FORMAT, EncodingSizes
from benchmarks.flux1.evaluate import ValidationLoss, with_updates
from benchmarks.flux1.flow import LatentScale, noised, sample_losses
from benchmarks.flux1.memory import FluxMemory
from benchmarks.flux1.model import Flux, parameter_count
from common.config.schema import Declaration, RunConfig
from common.config.sections import unused_layers
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import tensor_splits
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import TensorSplit
from common.errors import ConfigError
from common.ops.linear import IN_FP8
from common.ops.linear.fp8 import same_weights
from common.optim.block_memory import asked_levels
from common.optim.learning_rate import Schedule, warmup_then_constant
from common.optim.memory_plan import capacity_of, plan, trained_weights
from common.optim.optimizer import ClipNorm, ParameterGroup
from common.step.train_step import Losses, TrainStep, accumulate


class FluxTraining(Workload):
    """Text to image with the transformer of FLUX.1-schnell.

    Attributes:
        architecture: the part of the network that ``model.double_blocks`` and ``model.single_blocks`` select.
    """

    config_type: ClassVar[type] = FluxConfig
    title = "FLUX.1"
    peers = "benchmarks.flux1.peer"
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other samples", "tp": "share layers"}
    own: FluxConfig
    model: Flux

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, facts, device = self.own, self.own.facts, layout.device
        self.architecture = own.architecture
        self.parallel = TensorParallel.from_layout(layout)
        if own.reader.eval_batch % self.parallel.size:
            raise ConfigError(
                f"reader.eval_batch={own.reader.eval_batch}: a multiple of layout.tp={self.parallel.size}, whose ranks "
                "have whole samples"
            )
        sizes = self.memory_sizes()
        if device.type == "cuda":
            self.memory = plan(sizes, capacity_of(device), None, 0)
        blocks, operations = sizes.levels(0 if self.memory is None else self.memory.recomputed)
        self.model = Flux(
            self.architecture,
            own.model.implementations,
            lambda name: layout.shared_generator(f"weights/{name}", device),
            device,
            self.dtype,
            self.parallel,
            recomputed_blocks=blocks,
            recomputed_operations=operations,
            zero_std=own.model.zero_std,
        )
        self.choices |= self.model.chosen
        self._latents = LatentScale(facts.latent_shift, facts.latent_scale)
        self._seed = torch.tensor(layout.seed, dtype=torch.int64, device=device)

    def memory_sizes(self) -> FluxMemory:
        """Return the sizes that determine the memory of this rank."""
        cfg, own, layout = self.cfg, self.own, self.layout
        trains, linear = layout.role == "train", own.model.implementations.get("linear")
        # else some products are no operators in common.nn.recomputation.PRODUCTS
        can_keep_products = self.parallel.size == 1 and linear != "te"
        return FluxMemory(
            architecture=self.architecture,
            samples=cfg.micro_batch if trains else 0,
            micro_batches=cfg.grad_accumulation_steps,
            eval_samples=0 if trains and cfg.evaluation.ranks else own.reader.eval_batch,
            parameters=parameter_count(self.architecture, self.parallel),
            ranks=self.parallel.size,
            fp8=linear in IN_FP8,
            alone=layout.world_size == 1,
            can_keep_products=can_keep_products,
            asked=asked_levels(own.model, can_keep_products),
            **trained_weights(cfg, layout, self.dtype),
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the parameters that are split over the ranks of tp, and those that each of these ranks has whole.

        All have weight decay, even biases. A rank computes only the part of a whole parameter's gradient that comes
        from its own samples or heads, so the parts are summed.
        """
        decay, splits = self.own.hparams.weight_decay, self.tensor_splits()
        parameters = dict(self.model.named_parameters())
        if not splits:
            return [ParameterGroup(parameters, weight_decay=decay)]
        shared = {name: parameter for name, parameter in parameters.items() if name not in splits}
        split = {name: parameter for name, parameter in parameters.items() if name in splits}
        return [
            ParameterGroup(split, weight_decay=decay),
            ParameterGroup(shared, weight_decay=decay, summed_over=("tp",)),
        ]

    def tensor_splits(self) -> Mapping[str, TensorSplit]:
        """Return how the ranks of tp split parameters, by name."""
        return tensor_splits(self.model)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare the data format, and violations of the closed division that the log does not show."""
        own: FluxConfig = cfg.workload
        broken = []
        if own.model.zero_std:
            broken.append(f"model.zero_std={own.model.zero_std}: modulations and output start from zero")
        in_fp8 = own.model.implementations.get("linear") in IN_FP8
        return Declaration(
            data_format=FORMAT,
            forbidden=[*broken, *unused_layers(own, "network", *BLOCKS)],
            micro_batch_multiple=cfg.layout["tp"],
            lowest_precision={"linear": "fp8"} if in_fp8 else {},
        )

    def learning_rate(self) -> Schedule:
        """Return a schedule: warm-up, in which update s, counted from 0, has (s + 1) / W of the rate; then constant."""
        hparams = self.own.hparams
        return warmup_then_constant(hparams.base_learning_rate, 0.0, hparams.warmup_steps, first_step=1)

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, clipping of the mean gradient, then AdamW.

        FP8 products cast their weights in the first micro-batch.
        """
        return self.step_with(
            self.own.hparams.adamw(),
            self.learning_rate(),
            blocks=self.model.blocks,
            clip=ClipNorm(self.own.facts.max_grad_norm, "after_reduction"),
            loss_scale=self.own.model.loss_scale,
            passes=functools.partial(accumulate, self.loss, again=functools.partial(same_weights, self.model)),
        )

    def sample_losses(self, tensors: dict[str, Tensor], seed: Tensor, t_N: Tensor | None = None) -> Tensor:
        """Return the mean squared error of the velocity of every sample, (N,) fp32, or fp64 for an fp64 network.

        Args:
            tensors: ``t5`` (N, T, K), ``clip`` (N, K), ``mean`` and ``logvar`` (N, A, H, W), and ``sample_ids`` (N,)
                int64. Seed and ids determine the noise and, in training, the times.
            seed: int64, 0-d, on the device.
            t_N: times from 0 to 1; None draws them.
        """
        tensors = {name: self.parallel.own_tokens(tensor) for name, tensor in tensors.items()}
        t_N = None if t_N is None else self.parallel.own_tokens(t_N)
        noise = noised(
            tensors["mean"], tensors["logvar"], seed, tensors["sample_ids"], self._latents, self.own.facts.patch,
            self.dtype, t_N,
        )  # fmt: skip
        velocity_NLP = self.model(noise.x_t_NLP, tensors["t5"], tensors["clip"], noise.t_N)
        return self.parallel.gather_copies(sample_losses(velocity_NLP, noise.v_NLP))

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean squared error of the velocity; the tensors are those of :meth:`sample_losses`."""
        total = self.sample_losses(micro_batch.tensors, self._seed).mean()
        return Losses(total, {"loss": total.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of synthetic encodings; all training batches have the same shape."""
        yield Batch(self._example(self.cfg.micro_batch), self.nominal_samples)

    def _example(self, count: int) -> dict[str, Tensor]:
        facts, generator = self.own.facts, self.layout.generator("example")
        shapes = {name: (count, *shape) for name, shape in EncodingSizes.of(facts).shapes.items()}
        tensors = {name: torch.randn(shapes[name], generator=generator) for name in ("t5", "clip", "mean")}
        tensors["mean"] = tensors["mean"] / facts.latent_scale + facts.latent_shift
        tensors |= {"logvar": torch.full(shapes["logvar"], -10.0), "sample_ids": torch.arange(count)}
        return self.finished(self.to_device(tensors))

    def finished(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the dtypes of the captured step: that of the weights; with fp16, moments in bf16."""
        moments = torch.bfloat16 if self.dtype == torch.float16 else self.dtype
        dtypes = {"t5": self.dtype, "clip": self.dtype, "mean": moments, "logvar": moments}
        return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}

    def open_data(self, root: Path) -> DataSource:
        """Open the encodings of the training set."""
        cfg, own = self.cfg, self.own
        return open_train(root, own, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps)

    def weights(self) -> Weights:
        """Return the current weights and the number of updates, which determines the noise of an evaluation."""
        weights = super().weights()
        updates = torch.zeros_like(self._seed) if self._optimizer is None else self._optimizer.updates
        return with_updates(weights, updates)

    def evaluation(self, layout: Layout) -> ValidationLoss:
        """Return the evaluation of the validation loss on the ranks of ``layout``."""
        own, count = self.own, self.own.reader.eval_batch
        timesteps = torch.arange(count, device=layout.device) % own.facts.eval_timesteps
        present = torch.ones(count, dtype=torch.bool, device=layout.device)
        return ValidationLoss(
            self.model,
            self.sample_losses,
            {**self._example(count), "timesteps": timesteps, "present": present},
            layout,
            lambda root: open_eval(root, own, layout),
            self.cfg.cuda_graphs,
            own.facts.eval_timesteps,
        )

    def sample_flops(self) -> float:
        """Return the FLOPs of training on one sample."""
        return self.architecture.training_flops()
