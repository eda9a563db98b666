"""Backbones under Caffe2's names: what is read, what is refused, and what is written."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.maskrcnn.caffe2_backbone import load_backbone, write_backbone
from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.model import trunk_shape
from common.errors import CheckpointError, DataError, SuiteError
from common.mlperf.fixed import fixed_facts
from common.nn.backbone_file import fitted_backbone
from common.nn.resnet import ResNetTrunk, TrainedNorm, draw_weights
from tests.common.untrusted.hostile import Call
from tests.common.untrusted.python2_pickles import python2_pickle

SHAPE = trunk_shape(replace(fixed_facts(Facts, "maskrcnn"), layers=(2, 1, 1, 1), width=2))
EXPECTED = {
    "conv1_w": "conv1.weight",
    "res_conv1_bn_s": "bn1.weight",
    "res_conv1_bn_b": "bn1.bias",
    "res2_0_branch2a_w": "layer1.0.conv1.weight",
    "res2_0_branch2b_bn_s": "layer1.0.bn2.weight",
    "res2_0_branch1_w": "layer1.0.downsample.0.weight",
    "res2_0_branch1_bn_b": "layer1.0.downsample.1.bias",
    "res2_1_branch2c_w": "layer1.1.conv3.weight",
    "res5_0_branch2c_bn_b": "layer4.0.bn3.bias",
}
"""Some of the names, by hand."""


def blobs() -> dict[str, np.ndarray]:
    """A published file's arrays, of other values in every one; those of norms have no statistics."""
    generator = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype("<f4")

    def norm(name: str, channels: int) -> dict[str, np.ndarray]:
        return {f"{name}_bn_s": array(channels), f"{name}_bn_b": array(channels)}

    found = {"conv1_w": array(2, 3, 7, 7), "conv1_b": array(2), **norm("res_conv1", 2)}
    channels = 2
    for stage, blocks in enumerate(SHAPE.layers, 2):
        inner, out = 2 * 2 ** (stage - 2), 8 * 2 ** (stage - 2)
        for block in range(blocks):
            layers = {"branch2a": (inner, channels, 1), "branch2b": (inner, inner, 3), "branch2c": (out, inner, 1)}
            if not block:
                layers["branch1"] = (out, channels, 1)
            for branch, (wide, narrow, kernel) in layers.items():
                name = f"res{stage}_{block}_{branch}"
                found |= {f"{name}_w": array(wide, narrow, kernel, kernel), **norm(name, wide)}
            channels = out
    return found | {"fc1000_w": array(5, channels), "fc1000_b": array(5)}


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "written",
    [
        lambda arrays: python2_pickle({"blobs": arrays, "cfg": b"MODEL: {}"}),
        lambda arrays: pickle.dumps({"blobs": arrays}, 2),
        lambda arrays: pickle.dumps(arrays, 4),
    ],
    ids=["by Python 2", "nested", "flat"],
)
def test_a_published_file_becomes_the_trunks_weights(tmp_path, written):
    arrays, trunk = blobs(), ResNetTrunk(SHAPE)
    load_backbone(save(tmp_path / "R-50.pkl", written(arrays)), trunk)
    state = trunk.state_dict()
    for theirs, ours in EXPECTED.items():
        assert state[ours].numpy().tobytes() == arrays[theirs].tobytes(), theirs
    given = sorted(array.sum() for name, array in arrays.items() if name not in ("conv1_b", "fc1000_w", "fc1000_b"))
    taken = sorted(tensor.sum().item() for name, tensor in state.items() if "running" not in name)
    assert taken == pytest.approx(given, abs=1e-5)
    for name, tensor in state.items():
        if "running" in name:
            assert (tensor == (1 if name.endswith("var") else 0)).all(), name


def without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in blobs().items() if key != name}


NAME = "res3_0_branch2b_w"
BAD: dict[str, tuple[Any, type[SuiteError], str]] = {
    "a tensor less": (without(NAME), CheckpointError, f"tensor {NAME} is missing, with 0 others"),
    "more blocks": ({**blobs(), "res4_1_branch2a_w": np.ones(1, "f4")}, CheckpointError, "no tensor res4_1_branch2a_w"),
    "another width": ({**blobs(), NAME: np.ones((4, 2, 3, 3), "f4")}, CheckpointError, rf"{NAME} is \(4, 2, 3, 3\)"),
    "not finite": ({**blobs(), NAME: blobs()[NAME] * np.nan}, CheckpointError, f"{NAME} has 144 of 144 values"),
    "integers": ({**blobs(), NAME: blobs()[NAME].astype("i8")}, CheckpointError, rf"{NAME} is torch\.int64"),
    "a text": ({"blobs": {**blobs(), NAME: "weights"}}, DataError, f"a str under '{NAME}'"),
    "a list": ([blobs()[NAME]], DataError, "no dict of arrays, but a list"),
    "statistics": ({**blobs(), "res_conv1_bn_rm": np.ones(2, "f4")}, CheckpointError, "no tensor res_conv1_bn_rm"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_of_something_else_is_one_error_and_changes_nothing(tmp_path, case):
    content, kind, message = BAD[case]
    trunk = ResNetTrunk(SHAPE)
    before = copy.deepcopy(trunk.state_dict())
    with pytest.raises(kind, match=message) as raised:
        load_backbone(save(tmp_path / "R-50.pkl", pickle.dumps(content, 2)), trunk)
    assert "R-50.pkl" in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in trunk.state_dict().items())


def test_a_pickle_that_calls_is_refused_and_nothing_is_called(tmp_path):
    target = tmp_path / "written by the pickle"
    content = pickle.dumps({"blobs": {**blobs(), NAME: Call(open, str(target), "w")}}, 2)
    with pytest.raises(DataError, match=r"R-50\.pkl: its pickle asks for (builtins|__builtin__|io|_io)\.open"):
        load_backbone(save(tmp_path / "R-50.pkl", content), ResNetTrunk(SHAPE))
    assert not target.exists()


def test_a_damaged_or_missing_file_is_one_error(tmp_path):
    whole, trunk = pickle.dumps({"blobs": blobs()}, 2), ResNetTrunk(SHAPE)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DataError, match=r"R-50\.pkl is damaged"):
            load_backbone(save(tmp_path / "R-50.pkl", whole[:length]), trunk)
    with pytest.raises(CheckpointError, match="no such backbone file"):
        load_backbone(tmp_path / "R-101.pkl", trunk)
    with pytest.raises(DataError, match="a folder"):
        load_backbone(tmp_path, trunk)


def test_a_written_file_computes_what_the_trunk_does_whose_statistics_are_folded(tmp_path):
    shape = replace(SHAPE, norm=TrainedNorm(1e-3, momentum=1.0), width=8)
    image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    state = fitted_backbone(shape, image, seed=0)
    path = tmp_path / "R-50.pkl"
    write_backbone(path, state, epsilon=1e-3)
    frozen, trained = ResNetTrunk(replace(SHAPE, width=8)), ResNetTrunk(shape)
    draw_weights(frozen, torch.Generator().manual_seed(1))
    load_backbone(path, frozen)
    trained.load_state_dict(state)
    with torch.no_grad():
        for found, expected in zip(frozen.features(image), trained.eval().features(image), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_written_file_has_arrays_under_caffe2s_names_alone(tmp_path):
    path = tmp_path / "R-50.pkl"
    write_backbone(path, ResNetTrunk(SHAPE).state_dict(), epsilon=0.0)
    with open(path, "rb") as file:
        found = pickle.load(file)["blobs"]
    published = blobs()
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        name: (array.shape, array.dtype)
        for name, array in published.items()
        if name not in ("conv1_b", "fc1000_w", "fc1000_b")
    }
