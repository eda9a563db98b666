"""Synthetic data of OpenImages: raw format, boxes, and a backbone that fits the pictures."""

import csv
import json

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from benchmarks.retinanet import raw
from benchmarks.retinanet.prepare import COMMANDS, prepare
from benchmarks.retinanet.prepared import open_prepared
from benchmarks.retinanet.synthetic import HEADER, SPECIAL, SyntheticOpenImages, generate
from common.errors import ConfigError

SMALL = {
    "train": 12, "eval": 5, "classes": 3, "size": (48, 80), "boxes": 3, "image_size": 64, "layers": (1, 1, 1, 1),
    "width": 64, "groups": 2, "width_per_group": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "raw"
    generate(folder, SyntheticOpenImages(**SMALL))
    return folder


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_layout_is_that_of_openimages(raw_dir):
    assert {path.name for path in raw_dir.iterdir()} == {
        "train", "validation", "oidv6-train-annotations-bbox.csv", "validation-annotations-bbox.csv",
        "class-descriptions-boxable.csv", "backbone.pth", "SYNTHETIC",
    }  # fmt: skip
    rows = rows_of(raw_dir / "oidv6-train-annotations-bbox.csv")
    assert tuple(rows[0]) == HEADER
    described = dict(csv.reader((raw_dir / "class-descriptions-boxable.csv").read_text().splitlines()))
    assert len(described) == 1 + 264 + 3
    for row in rows:
        with Image.open(raw_dir / "train" / f"{row['ImageID']}.jpg") as picture:
            assert picture.format == "JPEG"
        assert 0 <= float(row["XMin"]) < float(row["XMax"]) <= 1
        assert 0 <= float(row["YMin"]) < float(row["YMax"]) <= 1
        assert described[row["LabelName"]]
        assert all(row[flag] in ("0", "1") for flag in raw.FLAGS)


def test_as_many_pictures_are_selected_as_were_asked_for(raw_dir, tmp_path):
    assert len(list((raw_dir / "train").iterdir())) == 13
    assert len(list((raw_dir / "validation").iterdir())) == 6
    made = prepare(raw_dir, tmp_path / "data")
    assert made.synthetic
    assert (made.counts["train_samples"], made.counts["eval_samples"], made.counts["classes"]) == (12, 5, 3)
    split = open_prepared(tmp_path / "data").split("train")
    assert set(split.annotations.box_class.tolist()) == {0, 1, 2}
    assert np.unique(split.annotations.box_picture).tolist() == list(range(1, 13))


def test_boxes_are_where_the_objects_are(raw_dir):
    """Inside a box of class 0, a red disc, there is much red; outside of all boxes there is little."""
    reds, others = [], []
    described = csv.reader((raw_dir / raw.CLASSES).read_text().splitlines())
    red = next(label for label, name in described if name == "Airplane")
    for row in rows_of(raw_dir / raw.SPLITS["train"]):
        with Image.open(raw_dir / "train" / f"{row['ImageID']}.jpg") as picture:
            pixels = np.asarray(picture).astype(np.float64)
        height, width, _ = pixels.shape
        x1, x2 = round(float(row["XMin"]) * width), round(float(row["XMax"]) * width)
        y1, y2 = round(float(row["YMin"]) * height), round(float(row["YMax"]) * height)
        part = pixels[y1:y2, x1:x2]
        redness = float(np.mean((part[..., 0] > 150) & (part[..., 1] < 90)))
        (reds if row["LabelName"] == red else others).append(redness)
    assert min(reds) > 0.4
    assert np.mean(others) < 0.1


def test_another_seed_draws_other_pictures(raw_dir, tmp_path):
    generate(tmp_path / "other", SyntheticOpenImages(**{**SMALL, "seed": 1}))
    assert not {path.name for path in (tmp_path / "other/train").iterdir()} & {
        path.name for path in (raw_dir / "train").iterdir()
    }


def test_the_backbone_is_a_file_of_torchvisions_whose_norms_fit_the_pictures(raw_dir):
    state = torch.load(raw_dir / "backbone.pth", weights_only=True)
    bottleneck = torchvision.models.resnet.Bottleneck
    network = torchvision.models.resnet.ResNet(bottleneck, [1, 1, 1, 1], groups=2, width_per_group=4)
    missing = network.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["fc.weight", "fc.bias"], [])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = []
    for path in (raw_dir / "train").iterdir():
        with Image.open(path) as picture:
            pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
        images.append(torch.nn.functional.interpolate(pixels[None], (64, 64), mode="bilinear")[0])
    normalised = (torch.stack(images) - mean[:, None, None]) / std[:, None, None]
    seen = {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.register_forward_hook(lambda *hooked, name=name: seen.update({name: hooked[2].clone()}))
    with torch.no_grad():
        network.eval()(normalised)
    assert len(seen) == 1 + 4 * 4
    for name, output in seen.items():  # 13 pictures, the norms were fitted to 12 of them
        assert output.mean((0, 2, 3)).abs().max() < 0.3, name
        assert 0.7 < output.var((0, 2, 3)).mean() < 1.3, name


def test_many_pictures_include_special_ones_and_processes_draw_alike(tmp_path):
    request = {**SMALL, "train": SPECIAL, "eval": 3, "width": 8}
    generate(tmp_path / "one", SyntheticOpenImages(**request))
    generate(tmp_path / "two", SyntheticOpenImages(**request), workers=2)
    names = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.[jc]*"))
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    prepare(tmp_path / "one", tmp_path / "data")
    annotations = open_prepared(tmp_path / "data").split("train").annotations
    counts = np.bincount(annotations.box_picture)[1:]
    assert counts.max() > 300
    assert sorted(counts)[-2] <= 3 + 2
    tiny = np.flatnonzero(np.isclose(annotations.box_xywh[:, 2:], 2, atol=0.01).all(axis=1))
    assert any(counts[annotations.box_picture[box] - 1] == 1 for box in tiny)
    assert 0 < annotations.box_crowd.sum() < 30


def test_the_command_takes_and_says_what_it_should(tmp_path, capsys):
    argv = ["--raw-dir", str(tmp_path / "raw"), "--workers", "1"]
    for name, value in {**SMALL, "width": 8}.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        argv += [f"--{name.replace('_', '-')}", text]
    COMMANDS.run("generate", argv)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'raw'}: 13 pictures to train, 6 pictures to validation; ")
    marked = json.loads((tmp_path / "raw/SYNTHETIC").read_text())
    assert (marked["classes"], marked["size"], marked["layers"]) == (3, [48, 80], [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 0}, "--train=0: at least 1"),
        ({"classes": 265}, "--classes=265: the benchmark has 264"),
        ({"size": (30, 90)}, "sides of 30 to 90 px"),
        ({"size": (90,)}, "--size: the least and the largest side"),
        ({"layers": (1, 1, 1)}, "--layers: blocks of four stages"),
        ({"boxes": 0}, "0 boxes of 3 classes"),
    ],
)
def test_impossible_requests_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticOpenImages(**{**SMALL, **changes})


def test_the_default_backbone_is_the_benchmarks():
    shape = SyntheticOpenImages().backbone
    assert (shape.layers, shape.width, shape.groups, shape.width_per_group) == ((3, 4, 6, 3), 64, 32, 4)
