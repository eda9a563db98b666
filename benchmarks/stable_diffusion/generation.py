"""Generation of pictures from captions, in batches of a fixed size: encode captions, sample latents, decode latents.

Legend: N captions, B captions of a batch, T tokens, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.stable_diffusion.diffusion import SamplingTimes
from benchmarks.stable_diffusion.frozen.vae import pictures_of
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.sampler import Sampler, initial_noise
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks
from common.evaluation.forward import ForwardPass
from common.evaluation.stage_times import StageTimes

STAGES = ("latents", "decoding")


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the picture generation.

    Attributes:
        times: times of the sampler's steps.
        guidance: scale of classifier-free guidance.
        batch: pictures generated together, B.
        decode_batch: pictures decoded together; smaller than B to limit memory.
    """

    times: SamplingTimes
    guidance: float
    batch: int
    decode_batch: int


class Generator:
    """Generator of pictures. A picture depends only on the weights, the seed, and the index and text of its caption.

    Args:
        model: the U-Net, whose weights an evaluation may replace.
        networks: frozen networks that encode captions and decode latents.
        settings: settings of the sampler.
        seed: seed of the initial noise.
        device: device of the networks.
        capture: replay a sampler step, and the decoding of a batch, as one CUDA graph each.
        stages: records the seconds of :data:`STAGES`.
    """

    def __init__(
        self,
        model: UNet,
        networks: ScoringNetworks,
        settings: GenerationSettings,
        seed: int,
        device: torch.device,
        capture: bool,
        stages: StageTimes,
    ) -> None:
        self.batch = settings.batch
        self._model, self._networks, self._settings, self._stages = model, networks, settings, stages
        shape = model.architecture
        self._shape = (shape.latent_channels, shape.latent_size, shape.latent_size)
        self._seed = torch.tensor(seed, dtype=torch.int64, device=device)
        self._empty_1T = networks.tokenize([""]).to(device)
        with torch.no_grad():
            keys_values_BTM = self._keys_values(self._empty_1T.expand(settings.batch, -1))
        wide = torch.promote_types(keys_values_BTM.dtype, torch.float32)
        self.sampler = Sampler(
            model,
            lambda x_NChw, t_N, keys_values: model(x_NChw, t_N, keys_values=keys_values),
            settings.times,
            settings.guidance,
            self._shape,
            keys_values_BTM,
            capture,
            wide,
        )
        latents_BChw = torch.zeros(settings.batch, *self._shape, dtype=wide, device=device)
        inputs = {"latents": latents_BChw.contiguous(memory_format=torch.channels_last)}
        self._decoding: ForwardPass[Tensor] = ForwardPass(networks.vae, self._decoded, inputs, capture)

    def warm_up(self) -> None:
        """Run and, if requested, capture a sampler step and the decoding."""
        self.sampler.warm_up()
        self._decoding.warm_up()

    def begin(self) -> None:
        """Compute what all batches share; call it within ``sampler.evaluating``, after the weights have changed."""
        self.sampler.without_caption(self._keys_values(self._empty_1T))

    def pictures(self, prompts_B: Tensor, tokens_BT: Tensor) -> Tensor:
        """Generate pictures of B captions, without waiting for the device.

        Args:
            prompts_B: indices of the captions, int64, on the device; they determine the noise.
            tokens_BT: tokens of the captions, on the device.

        Returns:
            (B, 3, H, W) in [0, 1], fp32, or fp64 for fp64 networks; valid until the next call.
        """
        with self._stages("latents"):
            noise_BChw = initial_noise(self._seed, prompts_B, self._shape, self.sampler.dtype)
            latents_BChw = self.sampler.sample(noise_BChw, self._keys_values(tokens_BT))
        with self._stages("decoding"):
            return self._decoding({"latents": latents_BChw})

    def close(self) -> None:
        """Free the CUDA graphs."""
        self.sampler.close()
        self._decoding.close()

    def _decoded(self, inputs: dict[str, Tensor]) -> Tensor:
        parts = inputs["latents"].split(self._settings.decode_batch)
        return torch.cat([pictures_of(part, self._networks.vae) for part in parts])

    def _keys_values(self, tokens_BT: Tensor) -> Tensor:
        return self._model.cross_keys_values(self._networks.conditioning.encode(tokens_BT))
