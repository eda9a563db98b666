"""Test the files that ``generate`` writes."""

import csv
import dataclasses
import io
import json
import re
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.frozen.published import load_inception, load_text, load_vae, load_vision
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from benchmarks.stable_diffusion.prepare import COMMANDS
from benchmarks.stable_diffusion.synthetic import COLOURS, ShapePlan, SyntheticPictures, draw, generate
from benchmarks.stable_diffusion.synthetic_networks import random_inception
from common.errors import ConfigError

SIZES = {
    "vae": VaeSizes(channels=8, multipliers=(1, 1, 2), blocks=1, groups=4),
    "text": TextSizes(vocabulary=546, width=16, layers=2, heads=2, mlp=32, embedding=8),
    "vision": VisionSizes(resolution=16, patch=8, width=16, layers=1, heads=2, mlp=32, embedding=8),
    "inception": InceptionSizes(width_factor=1 / 32, resolution=75),
}
COUNTS = {"train": 33, "eval": 12, "tars": 2, "image_size": 16, "sides": (16, 24), "vae_steps": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "raw"
    return folder, generate(folder, SyntheticPictures(**COUNTS, **SIZES))


def middle_and_corner(jpeg):
    with Image.open(io.BytesIO(jpeg)) as opened:
        pixels = np.array(opened.convert("RGB")).astype(int)
    return pixels[pixels.shape[0] // 2, pixels.shape[1] // 2], pixels[1, 1]


@pytest.mark.parametrize("number", range(8))
def test_captions_describe_the_pictures(number):
    drawn = draw(ShapePlan(0, number, (32, 48)))
    _, inner, shape, _, _, outer, _ = drawn.caption.split()
    found = middle_and_corner(drawn.jpeg)

    assert shape in ("circle", "square", "triangle")
    for pixel, colour in zip(found, (inner, outer), strict=True):
        assert min(COLOURS, key=lambda name: np.abs(pixel - COLOURS[name]).sum()) == colour
    assert drawn == draw(ShapePlan(0, number, (32, 48)))
    assert drawn != draw(ShapePlan(1, number, (32, 48)))


def test_tars_have_img2datasets_layout(made):
    folder, generated = made
    assert generated.startswith("33 pictures for training, 12 for evaluation; ")
    samples = 0
    for number in range(2):
        with tarfile.open(folder / raw.IMAGES / f"{number:05d}.tar") as tar:
            names = tar.getnames()
            for key in sorted({name.partition(".")[0] for name in names}):
                assert key.startswith(f"{number:05d}")
                assert len(key) == 9
                jpeg, about, caption = (tar.extractfile(f"{key}.{kind}").read() for kind in ("jpg", "json", "txt"))
                with Image.open(io.BytesIO(jpeg)) as opened:
                    assert opened.format == "JPEG"
                    assert opened.size == (json.loads(about)["width"], json.loads(about)["height"])
                assert json.loads(about)["caption"] == caption.decode()
                samples += 1
            assert names == sorted(names)
            assert len(names) == 3 * len({name.partition(".")[0] for name in names})
    assert samples == 33


def test_evaluation_captions_are_a_table_sorted_by_id(made):
    with open(made[0] / raw.VALIDATION / raw.PROMPTS, newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    assert rows[0] == ["image_id", "id", "caption"]
    assert [int(row[1]) for row in rows[1:]] == list(range(12))
    assert all(row[2].startswith("a ") for row in rows[1:])


def test_statistics_are_those_of_the_evaluation_pictures(made):
    """They equal NumPy's mean and covariance of the features of pictures that Pillow resizes."""
    folder, _ = made
    network = random_inception(SIZES["inception"], seed=5)
    load_inception(folder / raw.ASSETS / raw.INCEPTION, None, network)
    pictures = []
    for number in range(12):
        with Image.open(io.BytesIO(draw(ShapePlan(0, (1 << 32) + number, (16, 24))).jpeg)) as opened:
            pictures.append(np.array(opened.resize((16, 16), Image.Resampling.BICUBIC)) / 255)
    images = torch.tensor(np.stack(pictures), dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        features = network.features(images).double().numpy()
    with np.load(folder / raw.VALIDATION / raw.STATISTICS) as found:
        assert found["mu"].dtype == found["sigma"].dtype == np.float64
        np.testing.assert_allclose(found["mu"], features.mean(0), rtol=1e-4, atol=1e-5)
        expected = np.cov(features, rowvar=False)
        np.testing.assert_allclose(found["sigma"], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_the_networks_load_like_published_ones(made):
    assets = made[0] / raw.ASSETS
    vae, text, clip_text = AutoencoderKL(SIZES["vae"]), TextTower(SIZES["text"]), TextTower(SIZES["text"])
    vision = VisionTower(SIZES["vision"])
    load_vae(assets / raw.CHECKPOINT, None, vae)
    load_text(assets / raw.CHECKPOINT, None, text)
    load_text(assets / raw.CLIP, None, clip_text)
    load_vision(assets / raw.CLIP, None, vision)

    tokens = ClipTokenizer(assets / raw.VOCABULARY, 546, SIZES["text"].context)(["a red circle on a blue background"])
    assert text.encode(tokens).isfinite().all()
    assert torch.equal(text.encode(tokens), clip_text.encode(tokens))
    assert vision.project(torch.zeros(1, 3, 16, 16)).shape == (1, 8)


def test_bounds_of_the_scores_are_printed(made):
    printed = re.findall(r"\n  (.+): FID (.+), CLIP (.+)", made[1])
    fid, clip = ({kind: float(score[number]) for kind, *score in printed} for number in range(2))
    assert fid["real pictures"] == fid["with shuffled captions"]
    assert clip["real pictures"] > clip["with shuffled captions"] + 0.2
    assert fid["of an untrained U-Net"] > 2 * fid["real pictures"]


def test_raw_data_are_opened_with_the_generated_sizes(made):
    found = raw.open_raw(made[0])
    assert (found.form, found.image_size, found.vae, found.text) == (raw.IMAGES, 16, SIZES["vae"], SIZES["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 1}, "--train=1: at least 2"),
        ({"tars": 9, "train": 8}, "--tars=9: at most --train=8"),
        ({"image_size": 30}, "--image-size=30: a multiple of the autoencoder's 4"),
        ({"sides": (48, 32)}, "--sides=48,32: smallest side"),
        ({"vision": VisionSizes(resolution=32, patch=8, embedding=16)}, "embeddings of 32 and 16"),
    ],
)
def test_inconsistent_sizes_are_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticPictures(**options)


def test_sizes_of_the_command_line_are_checked(tmp_path):
    for text in ("{chanels: 16}", "16", "{"):
        with pytest.raises(ConfigError, match="--vae"):
            COMMANDS.run("generate", ["--raw-dir", str(tmp_path / "raw"), f"--vae={text}"])


def test_too_few_captions_are_an_error(tmp_path):
    text = dataclasses.replace(SIZES["text"], vocabulary=1000)
    with pytest.raises(ConfigError, match=r"cannot be fitted to 33 captions: .* pairs to merge, .*required 486"):
        generate(tmp_path / "raw", SyntheticPictures(**COUNTS, **{**SIZES, "text": text}))
