"""The Stable Diffusion workload: combines model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.data import open_train
from benchmarks.stable_diffusion.diffusion import abar, noised, velocity_loss
from benchmarks.stable_diffusion.encoders import TokenEncoder
from benchmarks.stable_diffusion.evaluate import PicturesOfCaptions, generation_settings
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.prepared import FORMAT, read_prompts, read_reference
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks, published_networks, synthetic_networks
from benchmarks.stable_diffusion.unet_architecture import training_flops
from common.config.schema import Declaration, RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.learning_rate import Schedule, warmup_then_constant
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep

REFERENCE_START = 1e-6
"""Initial learning rate of the reference's warm-up, as a fraction of the full rate."""
PUBLISHED_SIZES = {"vae": VaeSizes(), "text": TextSizes(), "vision": VisionSizes(), "inception": InceptionSizes()}


class StableDiffusion(Workload):
    """Text to image with the U-Net of Stable Diffusion v2."""

    config_type: ClassVar[type] = StableDiffusionConfig
    title = "Stable Diffusion"
    peers = "benchmarks.stable_diffusion.peer"
    own: StableDiffusionConfig
    model: UNet

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own, facts, device = self.own, self.own.facts, layout.device
        drawn = layout.shared_generator("weights", device)
        self.model = UNet(facts, own.model.implementations, drawn, device, self.dtype, own.model.zero_std)
        self.choices |= self.model.chosen
        self._abar_T = abar(facts.times, facts.first_beta, facts.last_beta).to(device)
        self._seed = torch.tensor(layout.seed, dtype=torch.int64, device=device)
        self._captions = self._token_encoder() if self._encodes else None

    @property
    def _encodes(self) -> bool:
        """Return whether this rank trains and must encode captions that arrive as tokens."""
        return self.own.reader.captions == "tokens" and self.layout.role == "train"

    def _token_encoder(self) -> TokenEncoder:
        own, assets, folder = self.own, self.own.assets, self.cfg.assets_dir
        if folder is None:
            raise ConfigError(
                f"assets_dir=null: reader.captions=tokens encodes them with the text tower of {assets.checkpoint} in "
                "it; or use data with encoded captions"
            )
        checkpoint, digest = folder / assets.checkpoint, assets.checkpoint_digest
        return TokenEncoder(own.text, checkpoint, digest, self.layout.device, self.dtype)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return one group with all parameters: biases and norms have weight decay, too."""
        return [ParameterGroup(dict(self.model.named_parameters()), weight_decay=self.own.hparams.weight_decay)]

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare learning rate, order of data, and violations of the closed division that the log does not show."""
        own: StableDiffusionConfig = cfg.workload
        broken = []
        if own.model.zero_std:
            broken.append(f"model.zero_std={own.model.zero_std}: the last layer of a residual branch starts from zero")
        for name, published in PUBLISHED_SIZES.items():
            if getattr(own, name) != published:
                broken.append(f"{name}={getattr(own, name)}: the frozen networks are the published ones")
        for name in ("checkpoint", "clip", "inception"):
            if getattr(own.assets, f"{name}_digest") is None:
                broken.append(f"assets.{name}_digest=null: the frozen networks are the published files")
        if cfg.assets_dir is None:
            broken.append("assets_dir=null: pictures are generated and scored by the published networks in it")
        reader = own.reader
        return Declaration(
            data_format=FORMAT,
            derived_values={"scaled_learning_rate": own.hparams.learning_rate},
            largest_micro_batch=128,
            forbidden=broken,
            order_of_data=lambda: f"shards with replacement, buffer of {reader.shuffle_buffer}",
        )

    def learning_rate(self) -> Schedule:
        """Return a schedule: warm-up, then constant."""
        hparams, rate = self.own.hparams, self.own.hparams.learning_rate
        if hparams.variant == "nvidia":
            return warmup_then_constant(rate, 0.0, hparams.warmup_steps + 1, first_step=1)
        return warmup_then_constant(rate, REFERENCE_START * rate, hparams.warmup_steps, first_step=0)

    def build_step(self) -> TrainStep:
        """Return the step: accumulated micro-batches, then AdamW; the gradient is the mean over the global batch."""
        model = self.own.model
        scale = self.scaled(
            model.loss_scale,
            growth_interval=model.loss_scale_interval,
            hysteresis=model.loss_scale_hysteresis,
        )
        return self.step_with(
            self.own.hparams.adamw(), self.learning_rate(), blocks=self.model.blocks, loss_scale=scale
        )

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the mean squared error of the predicted velocity.

        ``micro_batch`` has ``moments`` (N, 2C, H, W), ``context`` (N, T, K) and ``sample_ids`` (N,) int64. The ids
        and the seed of the run determine noise and times.
        """
        tensors = micro_batch.tensors
        x_t_NCHW, v_NCHW, t_N = noised(
            tensors["moments"], self._seed, tensors["sample_ids"], self._abar_T, self.own.vae.scale, self.dtype
        )
        total = velocity_loss(self.model(x_t_NCHW, t_N, tensors["context"]), v_NCHW)
        return Losses(total, {"loss": total.detach()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one micro-batch of synthetic latents, scaled like real ones, and random captions."""
        facts, count = self.own.facts, self.cfg.micro_batch
        generator = self.layout.generator("example")
        maps = (count, facts.latent_channels, facts.latent_size, facts.latent_size)
        mean = torch.randn(maps, generator=generator) / self.own.vae.scale
        context = torch.randn((count, facts.context_length, facts.context_width), generator=generator)
        tensors = {
            "moments": torch.cat([mean, torch.full(maps, -10.0)], 1),
            "context": context,
            "sample_ids": torch.arange(count),
        }
        yield Batch(self.finished(self.to_device(tensors)), self.nominal_samples)

    def finished(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the dtypes of the captured step, for any dtype of the data; encode tokens."""
        if self._captions is not None and "tokens" in tensors:
            tensors = {**tensors, "context": self._captions(tensors["tokens"])}
        return {
            "moments": tensors["moments"].to(torch.promote_types(self.dtype, torch.float32)),
            "context": tensors["context"].to(self.dtype),
            "sample_ids": tensors["sample_ids"],
        }

    def warm_up_reader(self) -> None:
        """Run the text tower once, if it encodes captions during training."""
        if self._captions is not None:
            shape = (self.cfg.micro_batch, self.own.facts.context_length)
            self._captions(torch.zeros(shape, dtype=torch.int64, device=self.layout.device))

    def open_data(self, root: Path) -> DataSource:
        """Open the tars of moments and captions."""
        cfg = self.cfg
        return open_train(root, self.own, self.layout, cfg.micro_batch, cfg.grad_accumulation_steps, cfg.assets_dir)

    def evaluation(self, layout: Layout) -> PicturesOfCaptions:
        """Return the evaluation by FID and CLIP score, on the ranks of ``layout``."""
        networks = published_networks(self.own, self.cfg.assets_dir, layout.device, self.dtype)
        return self._evaluation(networks, read_prompts, layout)

    def synthetic_evaluation(self, layout: Layout) -> PicturesOfCaptions:
        """Return an evaluation of random captions by frozen networks with random weights."""
        captions = [""] * self.cfg.benchmark.eval_samples
        networks = synthetic_networks(self.own, layout.device, self.dtype)
        return self._evaluation(networks, lambda root: captions, layout)

    def _evaluation(
        self, networks: ScoringNetworks, read_prompts: Callable[[Path], Sequence[str]], layout: Layout
    ) -> PicturesOfCaptions:
        return PicturesOfCaptions(
            self.model,
            networks,
            generation_settings(self.own),
            self.cfg.benchmark.eval_samples,
            read_prompts,
            read_reference,
            layout,
            self.cfg.cuda_graphs,
            score_on_device=self.cfg.evaluation.scoring != "background",
        )

    def sample_flops(self) -> float:
        """Return the FLOPs of training the U-Net on one sample; frozen networks are excluded."""
        return training_flops(self.own.facts)
