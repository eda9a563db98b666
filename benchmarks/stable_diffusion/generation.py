"""Pictures of captions, in batches of one size: captions encoded, latents sampled, latents decoded.

Legend: N captions, B of a batch, T tokens, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.stable_diffusion.decode import pictures_of
from benchmarks.stable_diffusion.diffusion import SamplingTimes
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.sampling import Sampler, initial_noise
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks
from common.evaluation.forward import ForwardPass
from common.evaluation.stage_times import StageTimes

STAGES = ("latents", "decoding")


@dataclass(frozen=True)
class GenerationSettings:
    """How pictures are made.

    Attributes:
        times: of the sampler's steps.
        guidance: weight of the caption against none.
        batch: pictures made together, B.
        decode_batch: of these, decoded together, which bounds the memory that it takes.
    """

    times: SamplingTimes
    guidance: float
    batch: int
    decode_batch: int


class Generator:
    """Makes pictures; a picture depends on weights, seed, and number and text of its caption alone.

    Args:
        model: the U-Net, whose weights an evaluation may replace.
        networks: encode captions and decode latents.
        settings: of the sampler.
        seed: of the noise that pictures start from.
        device: of the networks.
        capture: replay a step of the sampler, and the decoding of a batch, as a CUDA graph each.
        stages: notes the seconds of :data:`STAGES`.
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
        """Record the sampler's step and the decoding."""
        self.sampler.warm_up()
        self._decoding.warm_up()

    def begin(self) -> None:
        """Compute, within ``sampler.evaluating``, what all batches have in common with the same weights."""
        self.sampler.without_caption(self._keys_values(self._empty_1T))

    def pictures(self, prompts_B: Tensor, tokens_BT: Tensor) -> Tensor:
        """Pictures of B captions; waits for nothing.

        Args:
            prompts_B: numbers of the captions, int64, which their noise follows from.
            tokens_BT: their tokens; both on the device.

        Returns:
            (B, 3, H, W) in [0, 1], fp32, or fp64 of networks in fp64; valid until the next call.
        """
        with self._stages("latents"):
            noise_BChw = initial_noise(self._seed, prompts_B, self._shape, self.sampler.dtype)
            latents_BChw = self.sampler.sample(noise_BChw, self._keys_values(tokens_BT))
        with self._stages("decoding"):
            return self._decoding({"latents": latents_BChw})

    def close(self) -> None:
        """Free the graphs."""
        self.sampler.close()
        self._decoding.close()

    def _decoded(self, inputs: dict[str, Tensor]) -> Tensor:
        parts = inputs["latents"].split(self._settings.decode_batch)
        return torch.cat([pictures_of(part, self._networks.vae) for part in parts])

    def _keys_values(self, tokens_BT: Tensor) -> Tensor:
        return self._model.cross_keys_values(self._networks.conditioning.encode(tokens_BT))
