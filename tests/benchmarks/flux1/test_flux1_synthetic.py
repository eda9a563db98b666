"""Synthetic encodings: published formats, and captions that determine the pattern of a latent."""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile

import numpy as np
import pyarrow
import pytest
import torch

from benchmarks.flux1.prepare import COMMANDS
from benchmarks.flux1.synthetic import NOISE, SyntheticEncodings, generate, patterns, sample
from common.errors import ConfigError

SMALL = {"text_length": 3, "text_width": 8, "caption_width": 6, "latent_channels": 4, "latent_size": 4}
OPTIONS = SyntheticEncodings(train=32, eval=11, shards=2, **SMALL)


def arrays(content: bytes) -> torch.Tensor:
    """Read an array as the reference does: a ``.npy`` of the bits of bf16."""
    return torch.from_numpy(np.load(io.BytesIO(content)).view(np.int16)).view(torch.bfloat16)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "raw"
    generate(folder, OPTIONS)
    return folder


def rows(folder):
    """Read the rows of a data set in the order of its state, as Hugging Face's library does."""
    files = json.loads((folder / "state.json").read_text())["_data_files"]
    tables = [pyarrow.ipc.open_stream(str(folder / file["filename"])).read_all() for file in files]
    return pyarrow.concat_tables(tables).to_pylist()


def test_files_are_data_sets_with_the_published_columns(raw):
    for split, folder, count in (("train", "cc12m_preprocessed", 32), ("eval", "coco_preprocessed", 11)):
        found = rows(raw / folder)
        assert [row["__key__"] for row in found] == [f"{number:08d}" for number in range(count)]
        for number, row in enumerate(found):
            expected = sample(OPTIONS, split, number)
            for name, column in (
                ("t5", "t5_encodings"), ("clip", "clip_encodings"), ("mean", "mean"), ("logvar", "logvar"),
            ):  # fmt: skip
                assert torch.equal(arrays(row[column]), expected[name])
            assert row["timestep"] == (number % 8 if split == "eval" else None)
    info = json.loads((raw / "coco_preprocessed" / "dataset_info.json").read_text())
    assert info["features"]["t5_encodings"] == {"dtype": "binary", "_type": "Value"}
    assert info["features"]["timestep"] == {"dtype": "int32", "_type": "Value"}


def test_tars_have_the_same_samples(raw, tmp_path):
    generate(tmp_path / "raw", SyntheticEncodings(train=32, eval=11, shards=2, form="tar", **SMALL))
    for folder in ("cc12m_preprocessed", "coco_preprocessed"):
        expected = rows(raw / folder)
        members = {}
        for path in sorted((tmp_path / "raw" / folder).iterdir()):
            with tarfile.open(path) as tar:
                members |= {member.name: tar.extractfile(member).read() for member in tar}
        assert len(members) == 5 * len(expected)
        for number, row in enumerate(expected):
            about = json.loads(members[f"{number:08d}.json"])
            assert (about["key"], about.get("timestep")) == (row["__key__"], row["timestep"])
            assert members[f"{number:08d}.t5.bytes"] == row["t5_encodings"]
            assert members[f"{number:08d}.logvar.bytes"] == row["logvar"]


def test_empty_encodings_are_float16_with_a_leading_axis(raw):
    t5, clip = (np.load(raw / "empty_encodings" / f"{name}_empty.npy") for name in ("t5", "clip"))
    assert (t5.dtype, t5.shape, clip.dtype, clip.shape) == (np.float16, (1, 3, 8), np.float16, (1, 6))


def test_both_encodings_of_the_caption_determine_the_pattern_of_the_latent():
    known = patterns(OPTIONS)[:4]
    used = set()
    for number in range(32):
        arrays_of = sample(OPTIONS, "train", number)
        mean = (arrays_of["mean"].float() - 0.1159) / 2.77
        found = {
            name: min(range(4), key=lambda index: float((values - known[index][name]).pow(2).mean()))
            for name, values in (("t5", arrays_of["t5"].float()), ("clip", arrays_of["clip"].float()), ("mean", mean))
        }
        assert len(set(found.values())) == 1
        assert (mean - known[found["mean"]]["mean"]).std() == pytest.approx(0.1, abs=0.03)
        used.add(found["mean"])
    assert used == {0, 1, 2, 3}


@pytest.mark.parametrize("width", [1, 3])
def test_patterns_are_orthogonal_and_captions_differ_for_every_seed_and_size(width):
    for seed in range(20):
        found = patterns(
            SyntheticEncodings(
                text_length=1, text_width=width, caption_width=width, latent_channels=width, latent_size=2, seed=seed
            )
        )
        for one, other in itertools.combinations(found, 2):
            for name in ("t5", "clip"):
                assert (one[name] - other[name]).abs().max() > 5 * NOISE
        for one, other in itertools.combinations(found[:4], 2):
            assert (one["mean"] * other["mean"]).sum() == 0


def test_normalised_latents_have_about_unit_variance():
    options = SyntheticEncodings(train=64, eval=8, shards=1, **SMALL)
    latents = torch.stack(
        [0.3611 * (sample(options, "train", number)["mean"].float() - 0.1159) for number in range(64)]
    )
    assert latents.var() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latent-size=5"], "--latent-size=5: must be a multiple of 2"),
        (["--shards=12", "--eval=11"], "--shards=12: at most --train and --eval"),
    ],
)
def test_impossible_options_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        COMMANDS.run("generate", [f"--raw-dir={tmp_path / 'raw'}", *options])
