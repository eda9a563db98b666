"""The frozen encoders against transformers and diffusers, and preparation from pictures and captions."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import sentencepiece
import torch
from diffusers import AutoencoderKL
from small_encoders import CAPTIONS, SIZES, write_encoders
from small_pictures import write_pictures
from transformers import CLIPTextModel, T5EncoderModel

from benchmarks.flux1 import encoders as module
from benchmarks.flux1.config import ReaderConfig
from benchmarks.flux1.data import open_eval, open_train
from benchmarks.flux1.encoders import Encoders
from benchmarks.flux1.encodings import EncodingSizes
from benchmarks.flux1.prepare import COMMANDS, prepare
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, DataError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("encoders") / "FLUX.1-schnell")


@pytest.fixture(scope="module")
def encoders(folder: Path) -> Encoders:
    return Encoders(folder, EncodingSizes(**SIZES), CPU, torch.float32)


def test_t5_encodes_padded_captions_without_a_mask(folder, encoders):
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer_2" / "spiece.model"))
    tokens = [[*pieces.encode(caption)[:11], pieces.eos_id()] for caption in CAPTIONS]
    assert {len(row) for row in tokens} > {12}  # some are cut, and some are padded
    tokens_NT = torch.tensor([row + [pieces.pad_id()] * (12 - len(row)) for row in tokens])
    assert torch.equal(encoders.t5_tokens(CAPTIONS), tokens_NT)
    network = T5EncoderModel.from_pretrained(folder / "text_encoder_2").eval()
    with torch.no_grad():
        expected = network(input_ids=tokens_NT, attention_mask=torch.ones_like(tokens_NT)).last_hidden_state
    assert torch.equal(encoders.captions(CAPTIONS)["t5"], expected)


def test_clip_encodes_a_caption_as_the_features_of_its_end(folder, encoders):
    network = CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    end, start = network.config.eos_token_id, network.config.bos_token_id
    pooled = encoders.captions(CAPTIONS)["clip"]
    assert pooled.shape == (3, 24)
    tokens_NT = encoders.clip_tokens(CAPTIONS)
    assert tokens_NT.shape == (3, 77)
    assert (tokens_NT[:, 0] == start).all()
    assert (tokens_NT[:, -1] == end).all()  # padding, or the end of a caption that is cut
    first_end_N = (tokens_NT == end).int().argmax(1)
    assert first_end_N[2] == 76
    with torch.no_grad():
        hidden = network(input_ids=tokens_NT, attention_mask=torch.ones_like(tokens_NT)).last_hidden_state
    assert torch.equal(pooled, hidden[torch.arange(3), first_end_N])


def test_the_autoencoder_encodes_mean_and_unclamped_log_variance(folder, encoders):
    network = AutoencoderKL.from_pretrained(folder / "vae").eval()
    pictures = torch.randn((2, 3, 256, 256), generator=torch.Generator().manual_seed(1))
    found = encoders.pictures(pictures)
    with torch.no_grad():
        moments = network.encoder(pictures)
        assert torch.equal(found["mean"], network.encode(pictures).latent_dist.mean)
    assert torch.equal(torch.cat([found["mean"], found["logvar"]], 1), moments)
    with torch.no_grad():
        encoders._vae.encoder.conv_out.bias[4:] += 100
        assert encoders.pictures(pictures)["logvar"].min() > 20  # where diffusers clamps
        encoders._vae.encoder.conv_out.bias[4:] -= 100


def test_the_empty_caption_is_float16_with_a_leading_axis(encoders):
    empty = encoders.empty()
    for name, shape in (("t5", (1, 12, 16)), ("clip", (1, 24))):
        assert (empty[name].dtype, empty[name].shape) == (np.float16, shape)
        assert np.array_equal(empty[name], encoders.captions([""])[name].numpy().astype(np.float16))


def test_pictures_and_captions_are_encoded_in_bf16_and_prepared(folder, tmp_path):
    raw, data = write_pictures(tmp_path / "raw"), tmp_path / "data"
    made = prepare(raw, data, folder, train=4, eval=10, device="cpu", workers=1)
    assert made.counts == {"train_samples": 4, "eval_samples": 10, **SIZES}
    assert prepare(raw, data, folder, train=4, eval=10, device="cpu") == made
    assert COMMANDS.verify(data) == made
    with pytest.raises(DataError, match="was prepared with"):
        prepare(raw, data, folder, train=5, eval=10, device="cpu")

    table = pyarrow.ipc.open_stream((data / "train" / "00000.arrow").read_bytes()).read_all().to_pylist()
    assert [int(row["__key__"]) for row in table] == [0, 2, 4, 6]
    networks = Encoders(folder, EncodingSizes(**SIZES), CPU, torch.bfloat16)
    expected = networks.captions([f"caption {number}" for number in (0, 2, 4, 6)])
    for number, row in enumerate(table):
        found = torch.from_numpy(np.load(io.BytesIO(row["t5_encodings"])).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found, expected["t5"][number])
    assert np.array_equal(np.load(data / "t5_empty.npy"), networks.empty()["t5"])

    own = SimpleNamespace(
        facts=SimpleNamespace(**SIZES, text_dropout=0.0, eval_timesteps=8),
        reader=ReaderConfig(threads=1, prefetch=1, eval_batch=10),
    )
    source, evaluation = open_train(data, own, Layout({}, 0), 4, 1), open_eval(data, own, Layout({}, 0))
    (batch,), (rows,) = source.batches(Block(0, 0, 0, 0, 4)), evaluation
    assert torch.equal(batch.tensors["clip"], expected["clip"])
    assert rows.tensors["timesteps"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert rows.tensors["mean"].shape == (10, 4, 32, 32)
    source.close()
    evaluation.close()


def test_the_encoders_are_checked_before_anything_is_stored(folder, tmp_path):
    raw, data = write_pictures(tmp_path / "raw"), tmp_path / "data"
    with pytest.raises(CheckpointError, match=r"wrong/text_encoder/config\.json is missing"):
        prepare(raw, data, tmp_path / "wrong", train=4, eval=10, device="cpu")
    with pytest.raises(CheckpointError, match=r"the encoders are \(16, 32, 4\) wide"):
        prepare(raw, data, write_encoders(tmp_path / "wide", 32), train=4, eval=10, device="cpu")
    assert not data.exists()
    assert prepare(raw, data, folder, train=4, eval=10, device="cpu").counts["train_samples"] == 4


def test_a_disk_without_space_is_noticed_before_encoding(folder, tmp_path, monkeypatch):
    raw = write_pictures(tmp_path / "raw")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(DataError, match=r"data needs 0\.0 GB more; its disk has 0\.0 GB left"):
        prepare(raw, tmp_path / "data", folder, train=4, eval=10, device="cpu")
    assert not (tmp_path / "data" / "train").exists()


@pytest.mark.parametrize(
    "name",
    [
        "text_encoder/model.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors",
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "tokenizer_2/spiece.model",
        "vae/config.json",
    ],
)
def test_the_first_missing_file_is_named(name, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(str(copy / name))} is missing"):
        Encoders(copy, EncodingSizes(**SIZES), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vae/config.json", "is no readable JSON"),
        ("tokenizer/vocab.json", "is no readable JSON"),
        ("text_encoder/model.safetensors", "is cut off"),
        ("tokenizer_2/spiece.model", "cannot be read"),
    ],
)
def test_a_file_that_is_cut_off_is_one_clear_error(name, message, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{Path(name).parent}.*{message}"):
        Encoders(copy, EncodingSizes(**SIZES), CPU, torch.float32)


def test_encoders_of_other_sizes_are_refused(folder):
    with pytest.raises(CheckpointError, match=r"the encoders are \(16, 24, 4\) wide, .* are \(16, 768, 4\) wide"):
        Encoders(folder, EncodingSizes(**SIZES | {"caption_width": 768}), CPU, torch.float32)


def test_without_the_packages_the_message_says_what_to_install(folder, tmp_path, monkeypatch):
    missing = SimpleNamespace(unavailable=lambda: "diffusers is not installed")
    monkeypatch.setattr(module, "DIFFUSERS", missing)
    with pytest.raises(ConfigError, match=r"diffusers is not installed: pip install 'mlperf-suite\[flux-prepare\]'"):
        prepare(tmp_path, tmp_path / "data", folder)
