"""Test reading and writing of the frozen networks' published files, also against libraries that read them."""

import hashlib

import pytest
import safetensors.torch
import torch

from benchmarks.stable_diffusion.frozen import published
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from common.errors import CheckpointError
from common.untrusted.tensor_file import read_state
from tests.benchmarks.stable_diffusion.public_names import randomized, vae_of_diffusers

VAE = VaeSizes(channels=4, multipliers=(1, 2), blocks=1, groups=2)
TEXT = TextSizes(vocabulary=514, context=8, width=8, layers=2, heads=2, mlp=16, embedding=6)
VISION = VisionSizes(resolution=16, patch=8, width=8, layers=2, heads=2, mlp=16, embedding=6)
WIDTH = 1 / 32


def networks():
    return {
        "vae": AutoencoderKL(VAE),
        "text": TextTower(TEXT),
        "vision": VisionTower(VISION),
        "inception": Inception(WIDTH, 75),
    }


LOAD = {
    "vae": published.load_vae,
    "text": published.load_text,
    "vision": published.load_vision,
    "inception": published.load_inception,
}
FILES = {"vae": "sd", "text": "sd", "text of CLIP": "clip", "vision": "clip", "inception": "inception"}


@pytest.fixture(scope="module")
def given():
    made = networks()
    for seed, network in enumerate(made.values()):
        randomized(network, seed)
    return made


@pytest.fixture(scope="module", params=["torch", "safetensors"])
def files(request, given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    names = {"sd": "512-base-ema.ckpt", "clip": "open_clip_pytorch_model.bin", "inception": "pt_inception.pth"}
    if request.param == "safetensors":
        names = {kind: f"{kind}.safetensors" for kind in names}
    paths = {kind: folder / name for kind, name in names.items()}
    published.save_stable_diffusion(paths["sd"], given["vae"], given["text"])
    published.save_clip(paths["clip"], given["text"], given["vision"])
    published.save_inception(paths["inception"], given["inception"])
    assert sorted(path.name for path in folder.iterdir()) == sorted(names.values())
    return paths


@pytest.mark.parametrize("case", FILES)
def test_written_networks_are_read_back(case, files, given):
    name, path = case.split()[0], files[FILES[case]]
    network = networks()[name]

    LOAD[name](path, hashlib.sha256(path.read_bytes()).hexdigest(), network)

    for tensor_name, tensor in given[name].state_dict().items():
        assert torch.equal(network.state_dict()[tensor_name], tensor), tensor_name
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_written_files_have_the_published_names(files):
    """The expected names and shapes come from the published files."""
    wanted = {
        "sd": {
            "first_stage_model.encoder.down.0.block.0.norm1.weight": (4,),
            "first_stage_model.encoder.down.0.downsample.conv.bias": (4,),
            "first_stage_model.encoder.down.1.block.0.nin_shortcut.weight": (8, 4, 1, 1),
            "first_stage_model.encoder.mid.attn_1.proj_out.weight": (8, 8, 1, 1),
            "first_stage_model.decoder.up.1.upsample.conv.weight": (8, 8, 3, 3),
            "first_stage_model.decoder.up.0.block.1.conv2.weight": (4, 4, 3, 3),
            "first_stage_model.post_quant_conv.weight": (4, 4, 1, 1),
            "cond_stage_model.model.token_embedding.weight": (514, 8),
            "cond_stage_model.model.positional_embedding": (8, 8),
            "cond_stage_model.model.transformer.resblocks.1.attn.in_proj_weight": (24, 8),
            "cond_stage_model.model.transformer.resblocks.1.mlp.c_fc.bias": (16,),
            "cond_stage_model.model.ln_final.weight": (8,),
            "cond_stage_model.model.text_projection": (8, 6),
            "cond_stage_model.model.logit_scale": (),
        },
        "clip": {
            "transformer.resblocks.0.ln_1.weight": (8,),
            "transformer.resblocks.0.attn.out_proj.bias": (8,),
            "visual.class_embedding": (8,),
            "visual.conv1.weight": (8, 3, 8, 8),
            "visual.ln_pre.bias": (8,),
            "visual.transformer.resblocks.1.mlp.c_proj.weight": (8, 16),
            "visual.proj": (8, 6),
            "logit_scale": (),
        },
        "inception": {
            "Conv2d_1a_3x3.bn.running_mean": (1,),
            "Mixed_5b.branch5x5_2.conv.weight": (2, 2, 5, 5),
            "Mixed_6b.branch7x7dbl_5.conv.weight": (6, 4, 1, 7),
            "Mixed_7a.branch7x7x3_4.conv.weight": (6, 6, 3, 3),
            "Mixed_7c.branch3x3dbl_3b.conv.weight": (12, 12, 3, 1),
            "fc.bias": (1008,),
        },
    }
    for kind, names in wanted.items():
        state = published.read_state(files[kind])
        for name, shape in names.items():
            assert tuple(state[name].shape) == shape, name


@pytest.mark.parametrize("legacy", [False, True])
def test_other_tensors_of_a_checkpoint_are_ignored(tmp_path, given, legacy):
    path = tmp_path / "512-base-ema.ckpt"
    state = {f"first_stage_model.{name}": tensor.half() for name, tensor in given["vae"].state_dict().items()}
    state |= {f"cond_stage_model.model.{name}": tensor for name, tensor in given["text"].state_dict().items()}
    state |= {"model.diffusion_model.out.2.weight": torch.ones(3), "model_ema.num_updates": torch.tensor(4)}
    state |= {"cond_stage_model.model.attn_mask": torch.ones(8, 8), "first_stage_model.loss.logvar": torch.ones(())}
    state |= {"betas": torch.ones(4)}
    torch.save({"state_dict": state, "global_step": 875000}, path, _use_new_zipfile_serialization=not legacy)
    found = networks()

    published.load_vae(path, None, found["vae"])
    published.load_text(path, None, found["text"])

    expected = given["vae"].state_dict()["encoder.conv_in.weight"].half().float()
    assert torch.equal(found["vae"].encoder.conv_in.weight, expected)
    assert torch.equal(found["text"].text_projection, given["text"].text_projection)


@pytest.mark.parametrize("legacy", [False, True])
def test_counters_and_classifier_of_inception_are_ignored(tmp_path, given, legacy):
    path = tmp_path / "pt_inception.pth"
    state = {name: tensor for name, tensor in given["inception"].state_dict().items() if "num_batches" not in name}
    state |= {"fc.weight": torch.ones(1008, 64), "fc.bias": torch.ones(1008)}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    network = networks()["inception"]

    published.load_inception(path, None, network)

    name = "Mixed_7c.branch_pool.bn.running_var"
    assert torch.equal(network.state_dict()[name], state[name])


def test_values_are_converted_to_the_networks_dtype(tmp_path, given):
    published.save_clip(tmp_path / "clip.bin", given["text"], given["vision"])
    network = networks()["vision"].bfloat16()

    published.load_vision(tmp_path / "clip.bin", None, network)

    assert network.proj.dtype == torch.bfloat16
    assert torch.equal(network.proj, given["vision"].proj.bfloat16())


def changed(state, case):
    name = "first_stage_model.encoder.mid.block_1.norm1.weight"
    tensor = state[name]
    return {
        "missing": (
            {key: value for key, value in state.items() if key != name},
            f"tensor {name} is missing, with 0 others",
        ),
        "shape": ({**state, name: torch.ones(5)}, rf"tensor {name} is \(5,\), the configured autoencoder has \(8,\)"),
        "unknown": (
            {**state, "first_stage_model.encoder.mid.attn_2.q.bias": tensor},
            r"the configured autoencoder has no tensor first_stage_model\.encoder\.mid\.attn_2\.q\.bias",
        ),
        "integers": ({**state, name: tensor.long()}, rf"tensor {name} is torch\.int64"),
        "not finite": ({**state, name: tensor / 0}, rf"tensor {name} has 8 of 8 values that are not finite"),
        "no VAE": (
            {key: value for key, value in state.items() if not key.startswith("first")},
            r"holds no autoencoder: no tensor is named as its first_stage_model\.",
        ),
    }[case]


@pytest.mark.parametrize("case", ["missing", "shape", "unknown", "integers", "not finite", "no VAE"])
def test_wrong_tensors_are_errors_with_file_and_tensor(tmp_path, given, case):
    path = tmp_path / "512-base-ema.ckpt"
    published.save_stable_diffusion(path, given["vae"], given["text"])
    state, message = changed(published.read_state(path), case)
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": state}, other)

    with pytest.raises(CheckpointError, match=message) as raised:
        published.load_vae(other, None, networks()["vae"])

    assert str(raised.value).startswith(str(other))


@pytest.mark.parametrize("name", LOAD)
def test_a_file_without_the_network_is_an_error(tmp_path, name):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(1)}, path)

    with pytest.raises(CheckpointError, match=r"other\.safetensors: holds no "):
        LOAD[name](path, None, networks()[name])


@pytest.mark.parametrize("name", LOAD)
def test_another_digest_is_refused_before_reading(files, name):
    path = files[FILES[name]]
    network = networks()[name]
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}

    with pytest.raises(CheckpointError, match=r"and 0000.* is expected"):
        LOAD[name](path, "0" * 64, network)

    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


def test_a_value_outside_of_fp16_is_refused(tmp_path, given):
    given["vision"].proj[0, 0] = 1e6
    published.save_clip(tmp_path / "clip.bin", given["text"], given["vision"])
    given["vision"].proj[0, 0] = 0.0

    with pytest.raises(CheckpointError, match=r"visual\.proj has 1 of 48 values that are not finite in torch\.float16"):
        published.load_vision(tmp_path / "clip.bin", None, networks()["vision"].half())


OPEN_CLIP_TEXT = TextSizes(vocabulary=600, context=11, width=24, layers=3, heads=3, mlp=96, embedding=16)
OPEN_CLIP_VISION = VisionSizes(resolution=24, patch=8, width=24, layers=3, heads=3, mlp=96, embedding=16)


def open_clips(text, vision):
    """Return OpenCLIP's model of these sizes."""
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


def test_names_and_shapes_equal_open_clips():
    with torch.device("meta"):
        theirs = open_clips(TextSizes(), VisionSizes()).state_dict()
        ours = TextTower(TextSizes()).state_dict()
        ours |= {f"visual.{name}": tensor for name, tensor in VisionTower(VisionSizes()).state_dict().items()}
    del theirs[published.TEMPERATURE]

    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}


def test_open_clip_reads_our_file(tmp_path):
    text, vision = TextTower(OPEN_CLIP_TEXT), VisionTower(OPEN_CLIP_VISION)
    randomized(text)
    randomized(vision)
    path = tmp_path / "open_clip_pytorch_model.bin"
    published.save_clip(path, text, vision)
    theirs = open_clips(OPEN_CLIP_TEXT, OPEN_CLIP_VISION)
    theirs.load_state_dict(torch.load(path, weights_only=True))
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[598, 4, 70, 599, 0, 0, 0, 0, 0, 0, 0], [598, *range(30, 39), 599]])

    with torch.no_grad():
        images, texts = theirs.encode_image(pixels), theirs.encode_text(tokens)

    torch.testing.assert_close(vision.project(pixels), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text.project(tokens), texts, rtol=1e-4, atol=1e-5)


def test_diffusers_reads_our_checkpoint(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    converters = pytest.importorskip("diffusers.loaders.single_file_utils")
    sizes = VaeSizes(channels=8, multipliers=(1, 2, 4, 4), groups=4)
    vae, text = AutoencoderKL(sizes), TextTower(OPEN_CLIP_TEXT)
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
