"""Test the preparation of tars: values, bytes, interruptions and damage."""

import io
import json
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.stable_diffusion import prepare as module
from benchmarks.stable_diffusion import raw
from benchmarks.stable_diffusion.frozen.clip_tokenizer import ClipTokenizer
from benchmarks.stable_diffusion.prepare import COMMANDS, prepare, verify
from benchmarks.stable_diffusion.prepared import open_prepared
from common.data.preparation import assets_of
from common.data.stages import Stages
from common.errors import CheckpointError, ConfigError, DataError
from tests.benchmarks.stable_diffusion.public_names import text_of_transformers
from tests.benchmarks.stable_diffusion.small_raw import (
    SIDE,
    SIZES,
    TEXT,
    networks,
    pictures,
    read_tar,
    write_raw,
    write_tar,
)

RAW = [pictures(0, 3), pictures(1, 18), pictures(2, 2)]  # 18: more than one group of the encoders


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    return write_raw(tmp_path_factory.mktemp("raw"), "images", RAW)


@pytest.fixture(scope="module")
def encoded(raw_dir, tmp_path_factory):
    data = tmp_path_factory.mktemp("encoded") / "data"
    prepare(raw_dir, data)
    return data


@pytest.fixture(scope="module")
def moments(raw_dir, tmp_path_factory):
    data = tmp_path_factory.mktemp("moments") / "data"
    prepare(raw_dir, data, members="moments")
    return data


@pytest.fixture
def copied(raw_dir, tmp_path):
    return shutil.copytree(raw_dir, tmp_path / "raw")


def reference_moments(members):
    """Return moments by key, float64 (8, 4, 4), of torchvision's transforms and the network in float64."""
    steps = [transforms.ToTensor(), transforms.Resize(SIDE, InterpolationMode.BICUBIC, antialias=False)]
    transform = transforms.Compose([*steps, transforms.CenterCrop(SIDE)])
    jpegs = {name[:-4]: content for name, content in members.items() if name.endswith(".jpg")}
    images = torch.stack([transform(Image.open(io.BytesIO(content))) for content in jpegs.values()])
    return dict(zip(jpegs, networks()[0].double().encode_moments(images.double()).numpy(), strict=True))


def reference_captions(captions):
    """Return the features (N, T, K) of Transformers' CLIP without its last layer."""
    config = CLIPTextConfig(
        vocab_size=TEXT.vocabulary, hidden_size=TEXT.width, intermediate_size=TEXT.mlp, hidden_act="gelu",
        num_hidden_layers=TEXT.layers - 1, num_attention_heads=TEXT.heads, max_position_embeddings=TEXT.context,
    )  # fmt: skip
    theirs = CLIPTextModel(config).eval()
    last = f"text_model.encoder.layers.{TEXT.layers - 1}."
    state = text_of_transformers(networks()[1].state_dict())
    names = theirs.state_dict().keys()
    state = {name: tensor for name, tensor in state.items() if not name.startswith((last, "text_projection"))}
    if not next(iter(names)).startswith("text_model."):
        state = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    theirs.load_state_dict(state)
    with torch.no_grad():
        return theirs(captions).last_hidden_state


def contents(data):
    return {path.name: path.read_bytes() for path in data.rglob("*") if path.suffix in (".tar", ".npy", ".tsv", ".npz")}


def made_tars(monkeypatch):
    """Return a list that receives the names of the tars that are made from now on."""
    done, keep = [], Stages.keep
    monkeypatch.setattr(Stages, "keep", lambda self, *note: done.append(note[1]) or keep(self, *note))
    return done


def test_moments_are_those_of_torchvisions_pictures(moments):
    for number, members in enumerate(RAW):
        found = read_tar(moments / f"train/{number:05d}.tar")
        expected = reference_moments(members)
        assert list(found) == sorted(name for key in expected for name in (f"{key}.npy", f"{key}.txt"))
        for key, values in expected.items():
            array = np.load(io.BytesIO(found[f"{key}.npy"]), allow_pickle=False)
            assert array.dtype == np.float32
            assert array.flags.c_contiguous
            np.testing.assert_allclose(array, values[None], rtol=1e-4, atol=1e-5)
            saved = io.BytesIO()
            np.save(saved, array)
            assert found[f"{key}.npy"] == saved.getvalue()
            assert found[f"{key}.txt"] == members[f"{key}.txt"]


def test_encoded_samples_are_moments_and_captions_in_bf16(encoded, moments):
    tokenize = ClipTokenizer(assets_of(encoded) / raw.VOCABULARY, TEXT.vocabulary, TEXT.context)
    for number in range(len(RAW)):
        found, plain = (read_tar(data / f"train/{number:05d}.tar") for data in (encoded, moments))
        keys = [name[:-4] for name in found if name.endswith(".txt")]
        assert list(found) == [f"{key}.{kind}" for key in keys for kind in ("safetensors", "txt")]
        captions_NTK = reference_captions(tokenize([plain[f"{key}.txt"].decode() for key in keys]))
        for key, captions_TK in zip(keys, captions_NTK, strict=True):
            sample = safetensors.torch.load(found[f"{key}.safetensors"])
            fp32 = torch.from_numpy(np.load(io.BytesIO(plain[f"{key}.npy"])))[0]
            assert torch.equal(sample["moments"], fp32.to(torch.bfloat16))
            assert sample["captions"].dtype == torch.bfloat16
            torch.testing.assert_close(sample["captions"].float(), captions_TK, rtol=2**-8, atol=1e-4)
            assert found[f"{key}.txt"] == plain[f"{key}.txt"]


def test_a_prepared_folder_can_be_opened_and_verified(encoded):
    found = open_prepared(encoded)
    assert found.samples == (3, 18, 2)
    assert found.kind == "safetensors"
    assert {name: found.manifest.counts[name] for name in ("train_samples", "eval_samples", "tars")} == {
        "train_samples": 23,
        "eval_samples": 5,
        "tars": 3,
    }
    assert found.manifest.synthetic
    assert json.loads(found.manifest.source["description"]) == json.loads(json.dumps(SIZES))
    with open(encoded / "train/00001.tar", "rb") as file:
        offset, size, at, length = found.index(1)[2]
        assert os.pread(file.fileno(), size, offset) == read_tar(encoded / "train/00001.tar")["000010002.safetensors"]
        assert os.pread(file.fileno(), length, at) == RAW[1]["000010002.txt"]
    assert verify(encoded, workers=2) == found.manifest
    for name in (raw.CHECKPOINT, raw.VOCABULARY):
        assert (assets_of(encoded) / name).is_file()


@pytest.mark.slow
def test_several_processes_write_the_same_files(raw_dir, moments, tmp_path):
    prepare(raw_dir, tmp_path / "data", members="moments", workers=2)
    assert contents(tmp_path / "data") == contents(moments)


def test_a_deleted_tar_is_made_again(raw_dir, moments, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "counts_of", lambda *given: 1 / 0)  # all is done except the manifest
    with pytest.raises(ZeroDivisionError):
        prepare(raw_dir, tmp_path / "data", members="moments")
    monkeypatch.undo()
    (tmp_path / "data/train/00002.tar").unlink()
    prepare(raw_dir, tmp_path / "data", members="moments")
    assert contents(tmp_path / "data") == contents(moments)


def test_published_moments_are_linked_or_get_encoded_captions(encoded, moments, tmp_path):
    members = [read_tar(moments / f"train/{number:05d}.tar") for number in range(len(RAW))]
    published = write_raw(tmp_path / "raw", "moments", members)

    prepare(published, tmp_path / "placed", members="moments")
    prepare(published, tmp_path / "encoded")

    placed = tmp_path / "placed/train/00001.tar"
    assert placed.samefile(published / "moments/00001.tar")
    assert verify(tmp_path / "placed").counts["train_samples"] == 23
    assert contents(tmp_path / "encoded") == contents(encoded)


def test_nvidias_samples_are_linked_or_converted(encoded, moments, tmp_path):
    members = []
    for number in range(len(RAW)):
        found = read_tar(encoded / f"train/{number:05d}.tar")
        pickled = {}
        for name in found:
            key, _, kind = name.partition(".")
            if kind == "txt":
                pickled[name] = found[name]
                continue
            sample = safetensors.torch.load(found[name])
            arrays = {
                "image_embed": sample["moments"].float().numpy()[None],
                "captions_embed": sample["captions"].float().numpy(),
            }
            pickled[f"{key}.pyd"] = pickle.dumps(arrays)
        members.append(pickled)
    theirs = write_raw(tmp_path / "raw", "encoded", members)

    prepare(theirs, tmp_path / "placed", members="nvidia")
    prepare(theirs, tmp_path / "ours")

    assert open_prepared(tmp_path / "placed").kind == "pyd"
    assert read_tar(tmp_path / "placed/train/00001.tar") == members[1]
    assert contents(tmp_path / "ours") == contents(encoded)


def test_preparation_resumes_after_a_truncated_tar_is_replaced(copied, tmp_path, monkeypatch):
    path = copied / "images/00001.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    whole = path.read_bytes()
    for cut in (last.offset_data + 512, last.offset_data + 2):  # at the end of a member, and within it
        os.truncate(path, cut)
        with pytest.raises(DataError, match=r"images/00001\.tar: the tar at byte 0 is truncated or damaged"):
            prepare(copied, tmp_path / "data")
        assert not (tmp_path / "data/train/00001.tar").exists()

    path.write_bytes(whole)
    done = made_tars(monkeypatch)
    prepare(copied, tmp_path / "data")
    assert done == ["00001", "00002"]


@pytest.mark.parametrize("kind", ["txt", "jpg"])
def test_a_sample_without_its_caption_or_picture_is_an_error(copied, tmp_path, kind):
    write_tar(copied / "images/00001.tar", {name: data for name, data in RAW[1].items() if name != f"000010005.{kind}"})
    with pytest.raises(DataError, match=rf"00001\.tar: 1 of 18 samples have no \.{kind}: 000010005; fetch"):
        prepare(copied, tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("000010005.txt", b"caf\xe9", r"00001\.tar: 000010005\.txt is no UTF-8"),
        ("000010005.jpg", RAW[1]["000010005.jpg"][:-300], r"00001\.tar: 000010005\.jpg is no whole JPEG: .*truncated"),
        ("000010005.jpg", b"<html>", r"00001\.tar: 000010005\.jpg is no whole JPEG"),
    ],
    ids=["text", "cut off", "no picture"],
)
def test_a_damaged_member_is_an_error(copied, tmp_path, name, content, message):
    write_tar(copied / "images/00001.tar", RAW[1] | {name: content})
    with pytest.raises(DataError, match=message):
        prepare(copied, tmp_path / "data")


def test_moments_that_are_not_finite_are_an_error(moments, tmp_path):
    members = read_tar(moments / "train/00000.tar")
    name = next(name for name in members if name.endswith(".npy"))
    values = np.load(io.BytesIO(members[name]))
    values.flat[7] = np.inf
    other = io.BytesIO()
    np.save(other, values)
    published = write_raw(tmp_path / "raw", "moments", [{**members, name: other.getvalue()}])
    with pytest.raises(DataError, match=rf"00000\.tar: {name}: moments have values that are not finite"):
        prepare(published, tmp_path / "data", members="moments")


def test_moments_of_another_shape_are_an_error(tmp_path):
    other = io.BytesIO()
    np.save(other, np.zeros((1, 8, 8, 8), np.float32))
    published = write_raw(tmp_path / "raw", "moments", [{"0.npy": other.getvalue(), "0.txt": b"a"}])
    for number, members in enumerate(("moments", "encoded")):
        with pytest.raises(DataError, match=r"00000\.tar: 0\.npy: .*\(1, 8, 8, 8\), expected .*\(1, 8, 4, 4\)"):
            prepare(published, tmp_path / f"data{number}", members=members)


def test_a_checkpoint_of_another_digest_is_an_error(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(raw.RawLaion, "checkpoint_digest", raw.DIGESTS[raw.CHECKPOINT])
    with pytest.raises(CheckpointError, match=rf"{raw.CHECKPOINT}.*{raw.DIGESTS[raw.CHECKPOINT]}"):
        prepare(copied, tmp_path / "data")


def test_real_data_require_the_published_checkpoint(copied, monkeypatch):
    (copied / "SYNTHETIC").unlink()
    monkeypatch.setattr(raw, "BENCHMARK_TARS", len(RAW))
    found = raw.open_raw(copied)
    assert found.synthetic is None
    assert found.image_size == 512
    assert found.checkpoint_digest == "d635794c1fedfdfa261e065370bea59c651fc9bfa65dc6d67ad29e11869a1824"


def test_real_data_require_all_tars(copied, tmp_path):
    (copied / "SYNTHETIC").unlink()
    with pytest.raises(DataError, match=r"images lacks 829 of 832 tars, such as 00003\.tar, 00004\.tar, 00005\.tar"):
        prepare(copied, tmp_path / "data")


def test_a_doubled_tar_of_real_data_is_refused(copied, monkeypatch):
    (copied / "SYNTHETIC").unlink()
    monkeypatch.setattr(raw, "BENCHMARK_TARS", len(RAW))
    tar = next(copied.rglob("00000.tar"))
    shutil.copy(tar, tar.with_name("00000 (1).tar"))
    with pytest.raises(DataError, match=r"00000 \(1\)\.tar is none of the 3 tars 00000\.tar to 00002\.tar; move it"):
        raw.open_raw(copied)


@pytest.mark.parametrize("name", [raw.CHECKPOINT, raw.VOCABULARY])
def test_a_missing_asset_is_an_error(copied, tmp_path, name):
    (copied / "assets" / name).unlink()
    with pytest.raises(DataError, match=rf"data-assets/{name} is missing, and is needed to encode images"):
        prepare(copied, tmp_path / "data")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (".", r"raw folder .*/raw does not exist; download the data there"),
        ("images", r"no tars in .*/raw/images and .*'mlperf-suite download benchmark=stable_diffusion'"),
        (f"validation/{raw.PROMPTS}", rf"validation/{raw.PROMPTS} is missing, and no other folder of the raw data"),
    ],
    ids=["folder", "tars", "captions"],
)
def test_missing_raw_data_are_an_error(copied, tmp_path, missing, message):
    path = copied / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match=message):
        prepare(copied, tmp_path / "data")


@pytest.mark.parametrize(
    ("members", "message"),
    [([], "has no samples"), (["a.jpg", "a.txt", "a.jpg"], r"has a\.jpg twice")],
    ids=["no samples", "twice"],
)
def test_a_tar_of_other_members_is_an_error(copied, tmp_path, members, message):
    with tarfile.open(copied / "images" / "00002.tar", "w") as tar:
        for name in members:
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=rf"images/00002\.tar {message}"):
        prepare(copied, tmp_path / "data")


def test_several_forms_require_a_choice(copied, tmp_path):
    shutil.copytree(copied / "images", copied / "moments")
    with pytest.raises(DataError, match="has tars in images and moments; select one of them with --source"):
        prepare(copied, tmp_path / "data")
    assert raw.open_raw(copied, "images").form == "images"


def test_other_settings_or_raw_data_are_refused(raw_dir, copied, encoded, tmp_path):
    with pytest.raises(DataError, match=r"was prepared with .*safetensors.*, not with .*npy"):
        prepare(raw_dir, encoded, members="moments")
    write_tar(copied / "images/00001.tar", pictures(1, 2))
    with pytest.raises(DataError, match="was prepared from tars of other sizes"):
        prepare(copied, encoded)
    write_tar(copied / "images/00003.tar", pictures(3, 1))
    with pytest.raises(DataError, match="was prepared from other raw data"):
        prepare(copied, encoded)


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ({"vae": {"chanels": 8}}, r"SYNTHETIC: vae\.chanels: unknown key"),
        ({"text": {"width": "16"}}, r"SYNTHETIC: text\.width"),
        ({"vae": SIZES["vae"], "image_size": 18}, "SYNTHETIC: image_size is 18, but must be a multiple of the VAE's 4"),
    ],
)
def test_a_damaged_marker_is_an_error(copied, tmp_path, marked, message):
    (copied / "SYNTHETIC").write_text(json.dumps(marked))
    with pytest.raises(DataError, match=message):
        prepare(copied, tmp_path / "data")


def test_impossible_options_are_errors(raw_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"--members=nvidia: only copied from raw tars of this form; .*raw.* has images"
    ):
        prepare(raw_dir, tmp_path / "data", members="nvidia")
    with pytest.raises(ConfigError, match="--device=cuda: PyTorch finds no GPU"):
        prepare(raw_dir, tmp_path / "data", device="cuda")


def test_verify_finds_unexpected_files(encoded, tmp_path):
    data = shutil.copytree(encoded, tmp_path / "data")
    (data / "train/00009.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"00009\.tar was not prepared"):
        verify(data)


def test_the_commands_print_counts_and_missing_assets(raw_dir, tmp_path, capsys):
    data = tmp_path / "data"
    folders = ["--raw-dir", str(raw_dir), "--data-dir", str(data)]
    assert COMMANDS.run("prepare", [*folders, "--members", "moments", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{data}: synthetic, train_samples 23, eval_samples 5, tars 3\n" in printed
    assert f"{data}-assets: lacks {raw.CLIP}, {raw.INCEPTION}" in printed
    assert COMMANDS.run("verify", ["--data-dir", str(data), "--workers", "1"]) == 0
