"""Generation of pictures from captions, in batches of a fixed size: encode captions, sample latents, decode latents.

The sampler is deterministic DDIM (Song et al., arXiv:2010.02502) with guidance in velocity space. A step goes from time
t to the next lower one, with ``v_u`` predicted without and ``v_c`` with a caption::

    v = v_u + guidance (v_c - v_u)
    x = sqrt(a_prev) x0(x, v) + sqrt(1 - a_prev) eps(x, v)

``x0`` is not clipped, and the last ``a_prev`` is abar[0], so some noise is left at the end, as in the reference. Both
predictions are one batch; its first half is without captions.

Legend: N captions, B captions of a batch, T tokens of a caption, C channels, h height and w width of latents, H and W
of pictures, M features of the keys and values of all cross-attentions together, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.diffusion import SamplingTimes, eps_of, x0_of
from benchmarks.stable_diffusion.frozen.vae import pictures_of
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks
from common.contract.evaluation import Weights
from common.evaluation.forward import ForwardPass
from common.evaluation.stage_times import StageTimes
from common.ops.random_bits.reference import normal_pairs

STAGES = ("latents", "decoding")


Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of noised latents (2B, C, h, w), times (2B,) int64, and keys and values (2B, T, M) to velocities."""


def initial_noise(seed: Tensor, prompts_N: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return the initial noise of the sampler: normal numbers, as a function of (seed, prompt, element).

    Args:
        seed: int64, 0-d, on the device.
        prompts_N: indices of the prompts, int64, 0 ... 2**32 - 1, on the device.
        shape: (C, h, w) of a latent.
        dtype: fp32 or fp64.

    Returns:
        (N, C, h, w) in channels_last memory; the element number is (c h + y) w + x.
    """
    channels, height, width = shape
    element = torch.arange(channels * height * width, device=prompts_N.device)
    noise, _ = normal_pairs(element, seed, prompts_N.unsqueeze(1), dtype)
    return noise.view(-1, *shape).contiguous(memory_format=torch.channels_last)


class Sampler:
    """Sampler of B latents at a time; on a GPU, every step can be the replay of one CUDA graph.

    Args:
        model: the network, whose weights an evaluation may replace.
        velocity: prediction of ``model``; must be capturable.
        guidance: scale of classifier-free guidance; 1 uses only the prediction with the caption.
        shape: (C, h, w) of a latent.
        keys_values: example for B captions; only shape, dtype and device matter.
        dtype: dtype of the latents between steps, fp32 or fp64.
    """

    def __init__(
        self,
        model: nn.Module,
        velocity: Velocity,
        times: SamplingTimes,
        guidance: float,
        shape: tuple[int, int, int],
        keys_values: Tensor,
        capture: bool,
        dtype: torch.dtype,
    ) -> None:
        device = keys_values.device
        self.batch, self.steps = len(keys_values), len(times.t_S)
        self.dtype = dtype
        self._velocity, self._guidance = velocity, guidance
        self._t_S = times.t_S.to(device)
        self._abar_S, self._previous_S = (values_S.to(device, dtype) for values_S in (times.abar_S, times.previous_S))
        x_BChw = torch.zeros(self.batch, *shape, dtype=dtype, device=device)
        inputs = {
            "x": x_BChw.contiguous(memory_format=torch.channels_last),
            "keys_values": keys_values.new_zeros(2 * self.batch, *keys_values.shape[1:]),
            "step": torch.zeros(1, dtype=torch.int64, device=device),
        }
        self._forward: ForwardPass[Tensor] = ForwardPass(model, self._step, inputs, capture)

    def warm_up(self) -> None:
        """Run steps on latents of zeros; with ``capture``, capture one of them."""
        self._forward.warm_up()

    def evaluating(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context in which the network has ``weights``."""
        return self._forward.evaluating(weights)

    def without_caption(self, keys_values_1TM: Tensor) -> None:
        """Set keys and values of the empty caption; needed once after the weights have changed."""
        self._forward.inputs["keys_values"][: self.batch] = keys_values_1TM

    def sample(self, noise_BChw: Tensor, keys_values_BTM: Tensor) -> Tensor:
        """Sample latents of captions, without waiting for the device.

        Args:
            noise_BChw: result of :func:`initial_noise`.

        Returns:
            (B, C, h, w) in channels_last memory, in the scale of the training latents; valid until the next call.
        """
        inputs = self._forward.inputs
        inputs["x"].copy_(noise_BChw)
        inputs["keys_values"][self.batch :] = keys_values_BTM
        inputs["step"].zero_()
        for _ in range(self.steps):
            self._forward()
        return inputs["x"]

    def close(self) -> None:
        """Free the CUDA graph."""
        self._forward.close()

    def _step(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run one step in place. It increments the step counter, which returns to 0 after the last step."""
        x_BChw, step = inputs["x"], inputs["step"]
        t_1, abar, previous = (table.index_select(0, step) for table in (self._t_S, self._abar_S, self._previous_S))
        both = torch.cat([x_BChw, x_BChw])
        v = self._velocity(both, t_1.expand(len(both)), inputs["keys_values"]).to(self.dtype)
        v_u, v_c = v.chunk(2)
        v = v_u + self._guidance * (v_c - v_u)
        x0, eps = x0_of(x_BChw, v, abar), eps_of(x_BChw, v, abar)
        x_BChw.copy_(previous.sqrt() * x0 + (1 - previous).sqrt() * eps)
        step.add_(1).remainder_(self.steps)
        return x_BChw


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


class PictureGenerator:
    """Generator of pictures. A picture depends only on the weights, the seed, and the index and text of its caption.

    Args:
        model: the U-Net, whose weights an evaluation may replace.
        networks: frozen networks that encode captions and decode latents.
        seed: seed of the initial noise.
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
        dtype = torch.promote_types(keys_values_BTM.dtype, torch.float32)
        self.sampler = Sampler(
            model,
            model.velocity,
            settings.times,
            settings.guidance,
            self._shape,
            keys_values_BTM,
            capture,
            dtype,
        )
        latents_BChw = torch.zeros(settings.batch, *self._shape, dtype=dtype, device=device)
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
