"""Test that ``prepare`` accepts raw data in the folders of official tools, and names missing files of other layouts.

The tests of BERT, GPT-3 and RetinaNet train on such data; those of the contract train all other workloads.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from benchmarks import WORKLOADS
from benchmarks.dlrm_dcnv2.prepare import encoding
from common.data import manifest
from common.data.commands import DataCommands
from common.data.synthetic import MARKER, mark
from common.errors import DataError
from common.recommendation.criteo.sample_rows import DAYS

Source = Callable[[Callable[[str], Path], Path], Path]
"""Function that gets ``data_of`` and a new folder, and returns a raw folder in our layout."""


def generated(workload: str) -> Source:
    """Return the raw data that ``generate`` wrote for the test recipe."""
    return lambda data_of, folder: data_of(workload).parent / "raw"


def pairs(workload: str) -> Source:
    """Return prepared pairs of ``.bin`` and ``.idx`` files, which MLCommons distributes for the real data."""

    def make(data_of: Callable[[str], Path], folder: Path) -> Path:
        raw = data_of(workload).parent / "raw"
        linked(raw, folder, {MARKER: "{path}"}, others=False)
        linked(data_of(workload), folder, {"*_text_document.*": "{path}"}, others=False)
        return folder

    return make


def distributed_text(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return BERT's text in parts, as in MLCommons' archive, and a vocabulary."""
    (folder / "results4").mkdir(parents=True)
    words = ["river", "stone", "walk", "north", "town"]
    for name in ("part-00000-of-00002", "part-00001-of-00002", "eval.txt"):
        sentences = [f"{first} {second} {third}.\n" for first in words for second in words for third in words]
        documents = ["".join(sentences[start : start + 5]) + "\n" for start in range(0, len(sentences), 5)]
        (folder / "results4" / name).write_text("".join(documents), encoding="utf-8")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    mark(folder, {"settings": {"max_sequence_length": 64, "shards": 2, "eval_samples": 4}})
    return folder


def unpacked_text(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return C4 as MLCommons distributes it: unpacked, with one packed evaluation file for Llama 3.1."""
    raw = data_of("llama31_8b").parent / "raw"
    linked(raw, folder, {MARKER: "{path}", "tokenizer.json": "{path}"}, others=False)
    for path in raw.glob("c4-train*"):
        (folder / path.name.removesuffix(".gz")).write_bytes(gzip.decompress(path.read_bytes()))
    whole = b"".join(path.read_bytes() for path in sorted(raw.glob("c4-validation*")))
    (folder / "c4-validation-91205-samples.en.json.gz").write_bytes(whole)
    return folder


def cloned_text(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return a clone of C4's repository with only the benchmark's variant."""
    linked(data_of("llama31_8b").parent / "raw", folder, {"c4*": "c4/en/{name}"})
    (folder / "c4" / "en.noblocklist").mkdir()
    for path in (folder / "c4" / "en").iterdir():
        (folder / "c4" / "en.noblocklist" / path.name).write_text("version https://git-lfs.github.com/spec/v1\n")
    return folder


def multi_hot_days(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return MLCommons' multi-hot days with 3 rows each."""
    folder.mkdir(parents=True)
    hotness = encoding().hotness
    for day in range(DAYS):
        np.save(folder / f"day_{day}_labels.npy", np.zeros((3, 1), np.int32))
        np.save(folder / f"day_{day}_dense.npy", np.zeros((3, 13), np.float32))
        tables = {str(table): np.zeros((3, hot), np.int32) for table, hot in enumerate(hotness)}
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **tables)
    mark(folder, {"table_rows": [1] * len(hotness)})
    return folder


def moments(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return Stable Diffusion's tars of moments, which ``prepare`` writes as MLCommons distributes them."""
    raw, made = data_of("stable_diffusion").parent / "raw", folder.with_name("made")
    given = ["--raw-dir", str(raw), "--data-dir", str(made), "--assets-dir", str(raw / "assets"), "--workers", "1"]
    assert commands_of("stable_diffusion").run("prepare", [*given, "--members", "moments"]) == 0
    linked(raw, folder, {"images/*": ""})
    linked(made / "train", folder / "moments", {})
    return folder


def tars_of_encodings(data_of: Callable[[str], Path], folder: Path) -> Path:
    """Return FLUX.1's encodings as tars, as NVIDIA converts them."""
    options = json.loads((data_of("flux1").parent / "raw" / MARKER).read_text())
    sizes = ("train", "eval", "text_length", "text_width", "caption_width", "latent_channels", "latent_size")
    given = [f"--{name.replace('_', '-')}={options[name]}" for name in sizes]
    assert commands_of("flux1").run("generate", [f"--raw-dir={folder}", "--form=tar", "--workers=1", *given]) == 0
    return folder


@dataclass(frozen=True)
class Official:
    """A layout of an official tool.

    Attributes:
        workload: whose raw data it has.
        source: makes them in our layout.
        folders: pattern of paths below the raw folder to where the official tool puts them; all others stay.
        lost: a file of the official layout, without which ``complaint`` is in the message.
        complaint: a regular expression.
        twice: folder of which a second copy makes the raw data ambiguous.
    """

    workload: str
    source: Source
    folders: Mapping[str, str]
    lost: str
    complaint: str
    twice: str | None = None


def of(workload: str, folders: Mapping[str, str], lost: str, complaint: str, twice: str | None = None) -> Official:
    """Return the official layout of data that ``generate`` can write."""
    return Official(workload, generated(workload), folders, lost, complaint, twice)


STABLE_DIFFUSION = {
    "validation/*": "coco2014/{name}",
    "assets/512*": "sd/{name}",
    "assets/open_clip*": "clip/{name}",
    "assets/pt_inception*": "inception/{name}",
}
OFFICIAL = {
    "bert": Official(
        "bert",
        distributed_text,
        {"vocab.txt": "input_files/{name}", "results4/*": "processed_dataset/{path}"},
        "processed_dataset/results4/part-00000-of-00002",
        "results4 lacks part-00000-of-00002",
        "processed_dataset",
    ),
    "cosmoflow": of(
        "cosmoflow",
        {"*/*": "cosmoUniverse_2019_05_4parE_tf_v2/{path}"},
        "cosmoUniverse_2019_05_4parE_tf_v2/validation",
        "has no samples in a folder validation",
        "cosmoUniverse_2019_05_4parE_tf_v2",
    ),
    "deepcam": of(
        "deepcam",
        {"stats.h5": "All-Hist/{name}", "*/*": "All-Hist/{path}"},
        "All-Hist/stats.h5",
        r"All-Hist/stats\.h5 is missing",
        "All-Hist",
    ),
    "dlrm": of("dlrm", {}, "day_3", "lacks day_3; all 24 days"),
    "dlrm_dcnv2": Official(
        "dlrm_dcnv2",
        multi_hot_days,
        {"day_*": "criteo_multihot_v3.0_reference/{name}"},
        "criteo_multihot_v3.0_reference/day_5_dense.npy",
        r"criteo_multihot_v3\.0_reference lacks day_5_dense\.npy",
        "criteo_multihot_v3.0_reference",
    ),
    "flux1": of(
        "flux1",
        {"*/*": "datasets/{path}"},
        "datasets/coco_preprocessed/data-00001-of-00002.arrow",
        r"coco_preprocessed lacks 1 of 2 shards, such as data-00001-of-00002\.arrow",
        "datasets/cc12m_preprocessed",
    ),
    "flux1, tars": Official(
        "flux1",
        tars_of_encodings,
        {"cc12m_preprocessed/*": "energon/train/{name}", "coco_preprocessed/*": "energon/val/{name}"},
        "energon/val",
        r"has neither state\.json nor shard_\*\.tar",
    ),
    "gpt3": Official(
        "gpt3",
        pairs("gpt3"),
        {"c4_en*": "megatron-lm/preprocessed_c4_spm/{name}"},
        "megatron-lm/preprocessed_c4_spm/c4_en_7_c4_spm_text_document.idx",
        r"c4_en_7_c4_spm_text_document\.idx is missing",
        "megatron-lm",
    ),
    "gpt3, text": of(
        "gpt3",
        {
            "c4-train*": "original/en_json/3.0.1/{name}",
            "c4-validation*": "original/en_val_subset_json/{name}",
            "*.model": "megatron-lm/spm/{name}",
        },
        "megatron-lm/spm/c4_en_301_5Mexp2_spm.model",
        r"c4_en_301_5Mexp2_spm\.model is missing: text needs the tokenizer",
    ),
    "llama2_70b_lora": of(
        "llama2_70b_lora",
        {"*.jsonl": "gov_report/{name}", "base/*": "Llama2-70b-fused-qkv-mlperf/{name}"},
        "gov_report/validation.jsonl",
        r"gov_report/validation\.jsonl is missing beside the other",
        "gov_report",
    ),
    "llama31_8b": Official(
        "llama31_8b",
        pairs("llama31_8b"),
        {"c4*": "llama3_1_8b/{name}"},
        "llama3_1_8b/c4-train.en_6_text_document.bin",
        r"llama3_1_8b/c4-train\.en_6_text_document\.bin is missing",
        "llama3_1_8b",
    ),
    "llama31_8b, text": of(
        "llama31_8b",
        {"c4*": "en/{name}", "tokenizer.json": "llama3_1_8b/{name}"},
        "en/c4-validation.00000-of-00008.json.gz",
        r"c4-validation\.00000-of-00008\.json\.gz is missing",
    ),
    "llama31_8b, cloned text": Official(
        "llama31_8b",
        cloned_text,
        {},
        "c4/en/c4-train.00768-of-01024.json.gz",
        r"holds neither text \(c4-train\.00768",
    ),
    "llama31_8b, unpacked text": Official(
        "llama31_8b",
        unpacked_text,
        {
            "c4-train*": "llama31_8b/en_json/3.0.1/{name}",
            "c4-validation*": "llama31_8b/{name}",
            "tokenizer.json": "tokenizer/{name}",
        },
        "llama31_8b/en_json/3.0.1/c4-train.00768-of-01024.json",
        r"holds neither text \(c4-train\.00768",
    ),
    "maskrcnn": of("maskrcnn", {}, "annotations/instances_val2017.json", r"instances_val2017\.json"),
    "resnet": of("resnet", {}, "val", "holds no val pictures"),
    "retinanet": of("retinanet", {}, "class-descriptions-boxable.csv", r"class-descriptions-boxable\.csv is missing"),
    "oc20": of(
        "oc20",
        {"train/*": "s2ef_train_2M/s2ef_train_2M/{name}", "val_id/*": "s2ef_val_id/s2ef_val_id/{name}"},
        "s2ef_val_id/s2ef_val_id/0000.txt",
        r"s2ef_val_id/s2ef_val_id/0000\.txt: cannot be read",
        "s2ef_train_2M",
    ),
    "openfold": of(
        "openfold",
        {},
        "open_protein_set/duplicate_pdb_chains.txt",
        r"open_protein_set/duplicate_pdb_chains\.txt",
    ),
    "rgat": of(
        "rgat",
        {"*/*": "igbh/full/processed/{path}"},
        "igbh/full/processed/fos/node_feat.npy",
        r"processed/fos/node_feat\.npy cannot be read",
        "igbh/full",
    ),
    "rnnt": of("rnnt", {}, "LibriSpeech/dev-clean", "LibriSpeech.*dev-clean"),
    "ssd300": of("ssd300", {}, "annotations/instances_train2017.json", r"instances_train2017\.json"),
    "stable_diffusion": of(
        "stable_diffusion",
        {**STABLE_DIFFUSION, "images/*": "images-webdataset-filtered/{name}"},
        "coco2014/val2014_30k.tsv",
        r"val2014_30k\.tsv is missing",
        "images-webdataset-filtered",
    ),
    "stable_diffusion, moments": Official(
        "stable_diffusion",
        moments,
        {
            "moments/*": "datasets/laion-400m/webdataset-moments-filtered/{name}",
            "validation/*": "datasets/coco2014/{name}",
            "assets/512*": "checkpoints/sd/{name}",
            "assets/open_clip*": "checkpoints/clip/{name}",
            "assets/pt_inception*": "checkpoints/inception/{name}",
        },
        "datasets/laion-400m/webdataset-moments-filtered",
        "no tars in .*/images and .*/moments and .*/encoded, nor in folders of MLCommons' names",
    ),
    "unet3d": of(
        "unet3d",
        {"case_*/*": "kits19/data/{path}"},
        "kits19/data/case_00000/imaging.nii.gz",
        r"kits19/data/case_00000/imaging\.nii\.gz",
        "kits19",
    ),
}  # fmt: skip


UNPUBLISHED = {"minigo"}
"""Workloads whose data are no longer published."""


def commands_of(workload: str) -> DataCommands:
    """Return the data commands of a workload."""
    package = WORKLOADS[workload].partition(":")[0].rpartition(".")[0]
    commands: DataCommands = importlib.import_module(f"{package}.prepare").COMMANDS
    return commands


def linked(source: Path, target: Path, folders: Mapping[str, str], others: bool = True) -> None:
    """Link the files below ``source`` to where ``folders`` puts them below ``target``; "" leaves them out."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            link = next((to for pattern, to in folders.items() if fnmatch(name, pattern)), "{path}" if others else "")
            if link:
                linked_file = target / link.format(path=name, name=path.name)
                linked_file.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, linked_file)


def prepare(workload: str, raw: Path, data: Path) -> None:
    """Run ``prepare`` in this process."""
    workers = ["--workers", "1"]
    assert commands_of(workload).run("prepare", ["--raw-dir", str(raw), "--data-dir", str(data), *workers]) == 0


@pytest.fixture(scope="module")
def laid_out(data_of, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns a folder with a layout, which it makes once."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            official, folder = OFFICIAL[name], tmp_path_factory.mktemp("official")
            linked(official.source(data_of, folder / "ours"), folder / "raw", official.folders)
            made[name] = folder / "raw"
        return made[name]

    return find


def test_every_workload_has_an_official_layout():
    assert {official.workload for official in OFFICIAL.values()} == set(WORKLOADS) - UNPUBLISHED


@pytest.mark.parametrize("name", OFFICIAL)
def test_prepare_takes_the_official_layout(name, laid_out, tmp_path):
    workload = OFFICIAL[name].workload
    prepare(workload, laid_out(name), tmp_path / "data")
    assert commands_of(workload).run("verify", ["--data-dir", str(tmp_path / "data")]) == 0


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_layout_without_one_of_its_files_is_refused_by_name(name, laid_out, tmp_path):
    linked(laid_out(name), tmp_path / "raw", {OFFICIAL[name].lost: "", f"{OFFICIAL[name].lost}/*": ""})
    with pytest.raises(DataError, match=OFFICIAL[name].complaint):
        prepare(OFFICIAL[name].workload, tmp_path / "raw", tmp_path / "data")
    assert not (tmp_path / "data" / manifest.NAME).exists()


@pytest.mark.parametrize("name", [name for name, official in OFFICIAL.items() if official.twice])
def test_two_folders_of_the_same_files_are_both_named(name, laid_out, tmp_path):
    raw, twice = tmp_path / "raw", OFFICIAL[name].twice
    linked(laid_out(name), raw, {})
    shutil.copytree(raw / twice, raw / "older" / Path(twice).name)
    with pytest.raises(
        DataError, match=rf"{raw}/.* and {raw}/.* are two copies of the same data below {raw}; "
    ) as raised:
        prepare(OFFICIAL[name].workload, raw, tmp_path / "data")
    assert f"{raw}/older/" in str(raised.value)
    assert f"{raw}/{twice}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("bert", "processed_dataset/results_text.tar.gz"),
        ("bert", "processed_dataset/results_text.zip"),
        ("gpt3", "megatron-lm/dataset_c4_spm.tar"),
    ],
)
def test_an_archive_that_nobody_unpacked_is_named(name, archive, laid_out, tmp_path):
    raw = tmp_path / "raw"
    linked(laid_out(name), raw, {"*results4/*": "", "*.bin": "", "*.idx": ""})
    (raw / archive).parent.mkdir(exist_ok=True)
    (raw / archive).touch()
    with pytest.raises(DataError, match=f"{raw / archive} is still packed: unpack it there"):
        prepare(OFFICIAL[name].workload, raw, tmp_path / "data")


@pytest.mark.parametrize("name", ["llama31_8b, text", "rgat", "unet3d"])
def test_synthetic_data_below_the_named_folder_stay_synthetic(name, laid_out, tmp_path):
    linked(laid_out(name), tmp_path / "raw" / "synthetic", {})
    prepare(OFFICIAL[name].workload, tmp_path / "raw", tmp_path / "data")
    assert json.loads((tmp_path / "data" / manifest.NAME).read_text())["synthetic"]
