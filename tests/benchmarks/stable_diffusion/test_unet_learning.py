"""A small U-Net learns the latents of four captions, and the sampler reproduces them."""

import pytest
import torch

from benchmarks.stable_diffusion.diffusion import eps_of, noised, sampling_times, velocity_loss, x0_of
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.unet_architecture import UNetArchitecture
from tests.benchmarks.stable_diffusion.small_unet import ABAR

ARCHITECTURE = UNetArchitecture(
    latent_channels=4,
    latent_size=8,
    model_channels=32,
    channel_multipliers=(1, 2),
    residual_blocks=1,
    attention_levels=(0, 1),
    head_channels=8,
    context_width=16,
    context_length=4,
    norm_groups=16,
    norm_epsilon=1e-5,
    transformer_norm_groups=32,
    transformer_norm_epsilon=1e-6,
)
BATCH, STEPS, LAST = 16, 300, 50


@pytest.mark.demo
def test_sampling_reproduces_the_learned_latents():
    model, generator = UNet(ARCHITECTURE, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    latents_4CHW = torch.randn((4, 4, 8, 8), generator=generator)
    captions_4TK = torch.randn((4, 4, 16), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        drawn_N = torch.randint(4, (BATCH,), generator=generator)
        moments = torch.cat([latents_4CHW[drawn_N], torch.full((BATCH, 4, 8, 8), -6.0)], 1)
        ids_N = torch.arange(step * BATCH, (step + 1) * BATCH)
        x_t, v, t_N = noised(moments, torch.tensor(5), ids_N, ABAR, 1.0, torch.float32)
        loss = velocity_loss(model(x_t, t_N, captions_4TK[drawn_N]), v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(1.0, abs=0.15)
    assert sum(losses[-LAST:]) / LAST < 0.2

    wanted_N = torch.arange(32) % 4
    with torch.no_grad():
        keys_values = model.cross_keys_values(captions_4TK[wanted_N])
        x = torch.randn((32, 4, 8, 8), generator=generator)
        for t, signal, before in zip(*sampling_times(ABAR, 50), strict=True):
            v = model.velocity(x, t.expand(32), keys_values)
            x = before.sqrt().float() * x0_of(x, v, signal.float()) + (1 - before).sqrt().float() * eps_of(
                x, v, signal.float()
            )
    distances_N4 = (x.unsqueeze(1) - latents_4CHW).flatten(2).norm(dim=2)
    assert (distances_N4.argmin(1) == wanted_N).float().mean() >= 0.9
