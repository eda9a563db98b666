"""The published files' names and shapes, and the towers, against libraries that read these files (where installed)."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stable_diffusion.frozen import published
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from common.untrusted.tensor_file import read_state
from tests.benchmarks.stable_diffusion.frozen_names import randomized, vae_of_diffusers

TEXT = TextSizes(vocabulary=600, context=11, width=24, layers=3, heads=3, mlp=96, embedding=16)
VISION = VisionSizes(resolution=24, patch=8, width=24, layers=3, heads=3, mlp=96, embedding=16)


def open_clips(text, vision):
    """OpenCLIP's model of these sizes."""
    open_clip = pytest.importorskip("open_clip")
    return open_clip.CLIP(
        text.embedding,
        open_clip.CLIPVisionCfg(
            layers=vision.layers, width=vision.width, head_width=vision.width // vision.heads,
            patch_size=vision.patch, image_size=vision.resolution,
        ),
        open_clip.CLIPTextCfg(
            context_length=text.context, vocab_size=text.vocabulary, width=text.width, heads=text.heads,
            layers=text.layers,
        ),
    ).eval()  # fmt: skip


def test_names_and_shapes_of_the_whole_are_open_clips():
    with torch.device("meta"):
        theirs = open_clips(TextSizes(), VisionSizes()).state_dict()
        ours = TextTower(TextSizes()).state_dict()
        ours |= {f"visual.{name}": tensor for name, tensor in VisionTower(VisionSizes()).state_dict().items()}
    del theirs[published.TEMPERATURE]

    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}


def test_open_clip_computes_the_same_from_our_file(tmp_path):
    text, vision = TextTower(TEXT), VisionTower(VISION)
    randomized(text)
    randomized(vision)
    path = tmp_path / "open_clip_pytorch_model.bin"
    published.save_clip(path, text, vision)
    theirs = open_clips(TEXT, VISION)
    theirs.load_state_dict(torch.load(path, weights_only=True))
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[598, 4, 70, 599, 0, 0, 0, 0, 0, 0, 0], [598, *range(30, 39), 599]])

    with torch.no_grad():
        images, texts = theirs.encode_image(pixels), theirs.encode_text(tokens)

    torch.testing.assert_close(vision.project(pixels), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text.project(tokens), texts, rtol=1e-4, atol=1e-5)


def test_diffusers_reads_the_autoencoder_of_our_checkpoint(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    converters = pytest.importorskip("diffusers.loaders.single_file_utils")
    sizes = VaeSizes(channels=8, multipliers=(1, 2, 4, 4), groups=4)
    vae, text = AutoencoderKL(sizes), TextTower(TEXT)
    randomized(vae)
    published.save_stable_diffusion(tmp_path / "512-base-ema.ckpt", vae, text)
    theirs = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 32),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=4,
    )
    converted = converters.convert_ldm_vae_checkpoint(read_state(tmp_path / "512-base-ema.ckpt"), theirs.config)

    mapped = vae_of_diffusers(vae.state_dict(), 4)

    assert set(converted) == set(theirs.state_dict()) == set(mapped)
    assert all(torch.equal(converted[name], mapped[name]) for name in mapped)
