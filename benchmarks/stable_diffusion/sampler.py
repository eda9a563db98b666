"""The sampler: deterministic DDIM (Song et al., arXiv:2010.02502), with guidance in velocity space.

A step goes from time t to the next lower one, with ``v_u`` predicted without and ``v_c`` with a caption::

    v = v_u + guidance (v_c - v_u)
    x = sqrt(a_prev) x0(x, v) + sqrt(1 - a_prev) eps(x, v)

``x0`` is not clipped, and the last ``a_prev`` is abar[0], so some noise is left at the end, as in the reference. Both
predictions are one batch; its first half is without captions.

Legend: B latents sampled together, C channels, h height, w width, T tokens of a caption, M features of the keys and
values of all cross-attentions together, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.diffusion import SamplingTimes, eps_of, x0_of
from common.contract.evaluation import Weights
from common.evaluation.forward import ForwardPass
from common.ops.random_bits.reference import normal_pairs

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of noised latents (2B, C, h, w), times (2B,) int64, and keys and values (2B, T, M) to velocities."""


def initial_noise(seed: Tensor, prompts_N: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return the initial noise of the sampler: normal numbers, as a function of (seed, prompt, element).

    Args:
        seed: int64, 0-d, on the device.
        prompts_N: indices of the prompts, int64, 0 ... 2**32 - 1, on the device.
        shape: C, h, w.
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
        times: times of the steps.
        guidance: scale of classifier-free guidance; 1 uses only the prediction with the caption.
        shape: C, h, w.
        keys_values: example for B captions; only shape, dtype and device matter.
        capture: replay a step as a CUDA graph.
        dtype: dtype of the latents between steps, fp32 or fp64.

    Raises:
        ValueError: another dtype.
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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"latents in {dtype} between steps: fp32 or fp64")
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
        """Run steps on latents of zeros; with ``capture``, record one of them."""
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
            keys_values_BTM: keys and values of the captions.

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
