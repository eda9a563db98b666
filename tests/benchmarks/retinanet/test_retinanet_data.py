"""Batches of RetinaNet's pictures: pixels by a naive formula, boxes beside them, the order, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.retinanet.data import ground_truth
from benchmarks.retinanet.prepare import prepare
from common.data.batches import Block
from common.data.order import EpochStream
from common.detection.annotations import read_coco
from common.distributed.layout import Layout
from common.errors import DataError
from tests.benchmarks.retinanet.small_pictures import label, row, settings, smooth, write_raw

SAMPLES, EVAL = 11, 7
BLOCKS = [Block(i, i + 1, 1, i * SAMPLES, SAMPLES) for i in range(2)]
SHAPES = [(24, 40), (16, 16), (33, 20), (7, 50)]


def number_of(sample: int) -> str:
    """XMin of a training picture's first box, by which batches are recognised: 32 px times it are ``sample`` + 1."""
    return f"{(sample + 1) / 32:.6f}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Pictures of several sizes; the first boxes begin at x = 1, 2, 3 ... after resizing to 32 px."""
    folder = tmp_path_factory.mktemp("retinanet")
    names = [f"{number:02x}" for number in range(SAMPLES)]
    rows = {"train": [], "validation": []}
    for number, name in enumerate(names):
        rows["train"].append(row(name, label(number % 3), f"{number_of(number)},1,0.25,0.75"))
        rows["train"] += [row(name, label(1), "0.125,0.5,0,1", "0,0,1,0,0")] * (number % 3)
    rows["validation"] = [row(name, label(2), "0,0.5,0,0.5") for name in names[:EVAL]]
    pictures = {
        "train": {name: smooth(*SHAPES[number % 4], number) for number, name in enumerate(names)},
        "validation": {name: smooth(*SHAPES[number % 4], 50 + number) for number, name in enumerate(names[:EVAL])},
    }
    raw_dir = write_raw(folder / "raw", rows, pictures)
    prepare(raw_dir, folder / "data")
    return folder / "data"


def train(root, micro_batch=4, seed=1, **changes):
    source = settings(**changes).open_train(root, Layout(seed=seed), micro_batch)
    batches = [batch for block in BLOCKS for batch in source.batches(block)]
    source.close()
    return batches


def bilinear(pixels_HWC, size):
    """Interpolation between the four nearest pixels, whose centres lie at halves; the border goes on outside."""
    height, width, _ = pixels_HWC.shape
    result = np.empty((size, size, 3))
    for i in range(size):
        for j in range(size):
            y = min(max((i + 0.5) * height / size - 0.5, 0), height - 1)
            x = min(max((j + 0.5) * width / size - 0.5, 0), width - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            dy, dx = y - top, x - left
            upper = pixels_HWC[top, left] * (1 - dx) + pixels_HWC[top, right] * dx
            lower = pixels_HWC[bottom, left] * (1 - dx) + pixels_HWC[bottom, right] * dx
            result[i, j] = upper * (1 - dy) + lower * dy
    return result


def expected_image(path, mirrored):
    """(3, 32, 32) by the definition: decode, mirror, resize without antialiasing, normalise."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(np.float64)
    resized = bilinear(pixels[:, ::-1] if mirrored else pixels, 32)
    scaled = (resized / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    return torch.from_numpy(scaled.transpose(2, 0, 1))


@pytest.mark.parametrize("mirror", [0.0, 1.0])
def test_pixels_and_boxes_are_those_of_the_definition(root, mirror):
    stream = EpochStream(SAMPLES, 4, seed=1)
    for position, batch in enumerate(train(root, mirror=mirror)[:3]):
        for slot, (_, sample) in enumerate(stream.samples(BLOCKS[0], position)):
            path = root / f"train/data/{sample:02x}.jpg"
            image = batch.tensors["image"][slot].double()
            assert (image - expected_image(path, mirror == 1)).abs().max() < 2e-5
            first = sample + 1
            boxes = [[first, 8, 32, 24], *[[4, 0, 16, 32]] * (sample % 3)]
            if mirror:
                boxes = [[32 - x2, y1, 32 - x1, y2] for x1, y1, x2, y2 in boxes]
            count = 1 + sample % 3
            assert batch.tensors["count"][slot] == count
            torch.testing.assert_close(
                batch.tensors["boxes"][slot, :count], torch.tensor(boxes, dtype=torch.float32), atol=2e-4, rtol=0
            )
            assert batch.tensors["label"][slot, :count].tolist() == [sample % 3, *[1] * (sample % 3)]
            assert not batch.tensors["boxes"][slot, count:].any()
            assert not batch.tensors["label"][slot, count:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches_have_the_form_that_the_model_expects(root, dtype):
    for batch in train(root, dtype=dtype):
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.tensors.items()}
        assert found == {
            "image": ((4, 3, 32, 32), dtype),
            "boxes": ((4, 6, 4), torch.float32),
            "label": ((4, 6), torch.int64),
            "count": ((4,), torch.int64),
        }
        assert batch.tensors["image"].is_contiguous(memory_format=torch.channels_last)
        assert batch.samples == 4


def test_pictures_are_mirrored_by_seed_epoch_and_sample_alone(root):
    def mirrored(batches):
        return [float(x) for batch in batches for x in batch.tensors["boxes"][:, 0, 2]]

    whole = mirrored(train(root, 4, mirror=0.5))
    assert 4 < sum(x < 32 for x in whole) < 18  # of 24
    assert mirrored(train(root, 2, mirror=0.5))[: 2 * SAMPLES] == whole[: 2 * SAMPLES]
    assert mirrored(train(root, 4, mirror=0.5, seed=2)) != whole


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in batch.tensors.items())


def test_evaluation_pictures_come_with_id_and_size(root):
    source = settings().open_eval(root, Layout(), 4)
    first, second = list(source)
    source.close()
    assert {name: tensor.dtype for name, tensor in first.tensors.items()} == {
        "image": torch.float32, "picture": torch.int64, "size": torch.float32,
    }  # fmt: skip
    assert first.tensors["image"].is_contiguous(memory_format=torch.channels_last)
    assert first.tensors["picture"].tolist() == [1, 2, 3, 4]
    assert second.tensors["picture"].tolist() == [5, 6, 7, -1]
    assert first.tensors["size"].tolist() == [list(shape) for shape in SHAPES]
    assert not second.tensors["image"][3].any()
    for slot in range(4):
        wanted = expected_image(root / f"validation/data/{slot:02x}.jpg", False)
        assert (first.tensors["image"][slot].double() - wanted).abs().max() < 2e-5


@pytest.fixture
def references_folder(root, tmp_path):
    """A folder of the reference's script: pictures, JSON and unused files."""
    folder = tmp_path / "reference"
    shutil.copytree(root, folder)
    for name in ("manifest.json", "prepare.lock"):
        (folder / name).unlink()
    for split in ("train", "validation"):
        shutil.rmtree(folder / split / "boxes")
        (folder / split / "labels/detections.csv").write_text("ImageID\n")
    return folder


def test_a_folder_of_the_references_script_is_read_as_it_is(root, references_folder):
    assert_same(train(references_folder), train(root))
    source = settings().open_train(references_folder, Layout(), 4)
    assert (source.train_samples, source.eval_samples, source.synthetic) == (SAMPLES, EVAL, False)
    source.close()
    batches = []
    for folder in (references_folder, root):
        source = settings().open_eval(folder, Layout(), 3)
        batches.append(list(source))
        source.close()
    assert_same(*batches)


def test_the_ground_truth_is_that_of_the_validation_pictures(root, references_folder):
    wanted = read_coco(root / "validation/labels/openimages-mlperf.json")
    for folder in (root, references_folder):
        found = ground_truth(folder)
        for name, column in vars(wanted).items():
            assert column is None or np.array_equal(getattr(found, name), column)


def edit(folder, split, change):
    """Change the JSON of a split of the reference's folder."""
    path = folder / split / "labels/openimages-mlperf.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def count_from_one(content):
    for category in content["categories"]:
        category["id"] += 1
    for annotation in content["annotations"]:
        annotation["category_id"] += 1


def test_categories_that_are_counted_from_1_are_refused(references_folder):
    edit(references_folder, "train", count_from_one)
    with pytest.raises(DataError, match=r"train/labels/.*\.json: categories are counted from 1, .*subtract 1"):
        settings().open_train(references_folder, Layout(), 4)
    edit(references_folder, "validation", count_from_one)
    for read in (ground_truth, lambda folder: settings().open_eval(folder, Layout(), 4)):
        with pytest.raises(DataError, match=r"validation/.* categories are counted from 1"):
            read(references_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["images"][1].update(id=1), r"images\[1\]: 'id' is 1, but must be one that no entry"),
        (lambda content: content["annotations"][0].update(category_id=5), r"'category_id' is 5, but must be an id of"),
        (
            lambda content: content["annotations"][2].update(bbox=[1, 1, -2, 1]),
            r"\[2\]: 'bbox' is \[1, 1, -2",
        ),
        (lambda content: content["annotations"][0].update(bbox=[1, float("nan"), 2, 1]), "'bbox' is .*nan"),
        (lambda content: content["images"][0].pop("file_name"), r"images\[0\]: 'file_name' is missing"),
        (lambda content: content.update(categories=[{"id": 0}, {"id": 1}, {"id": 7}, {"id": 2}]), "0 to 7, 4 in all"),
        (lambda content: content.update(images=[], annotations=[]), "has no pictures"),
    ],
)
def test_a_wrong_json_is_one_error(references_folder, change, message):
    edit(references_folder, "train", change)
    with pytest.raises(DataError, match=message):
        settings().open_train(references_folder, Layout(), 4)


def test_a_picture_without_boxes_is_trained_on(references_folder):
    edit(references_folder, "train", lambda content: content.update(annotations=content["annotations"][:1]))
    counts = torch.cat([batch.tensors["count"] for batch in train(references_folder, 1)[:SAMPLES]])
    assert sorted(counts.tolist()) == [0] * (SAMPLES - 1) + [1]


def test_more_boxes_than_the_capacity_name_the_picture(root):
    with pytest.raises(DataError, match=r"02\.jpg has 3 boxes, and a batch holds at most 2: use reader\.max_boxes=3"):
        settings(max_boxes=2).open_train(root, Layout(), 4)


def test_more_classes_than_the_model_has_are_refused(root):
    data = settings(classes=2)
    for opened in (data.open_train, data.open_eval):
        with pytest.raises(DataError, match="holds 3 classes where the model has 2: it is another data set"):
            opened(root, Layout(), 4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "the picture cannot be read: No such file or directory; prepare"),
        (lambda path: path.write_bytes(path.read_bytes()[:-300]), "has .* bytes where .* were prepared"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "the picture cannot be decoded: cannot identify"),
    ],
)
def test_a_missing_or_damaged_picture_is_named(root, tmp_path, spoil, message):
    folder = tmp_path / "data"
    shutil.copytree(root, folder)
    spoil(folder / "train/data/05.jpg")
    with pytest.raises(DataError, match=rf"train/data/05\.jpg.*{message}"):
        train(folder)


def test_a_picture_of_another_size_than_its_boxes_are_for_is_named(references_folder):
    (references_folder / "validation/data/03.jpg").write_bytes(smooth(20, 21, 0))
    source = settings().open_eval(references_folder, Layout(), 4)
    with pytest.raises(DataError, match=r"03\.jpg is 21 x 20 px, its boxes are for 50 x 7"):
        list(source)
    source.close()


def test_data_that_are_not_prepared_are_one_error(tmp_path):
    for opened in (settings().open_train, settings().open_eval):
        with pytest.raises(DataError, match="does not exist; run 'mlperf-suite prepare benchmark=retinanet"):
            opened(tmp_path / "none", Layout(), 4)
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        ground_truth(tmp_path)


def test_a_folder_whose_preparation_was_cut_off_is_not_the_references(root, tmp_path):
    shutil.copytree(root, tmp_path / "cut off")
    (tmp_path / "cut off/manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        settings().open_train(tmp_path / "cut off", Layout(), 4)
