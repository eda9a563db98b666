"""Published state dicts are read without executing code in them."""

import collections
import hashlib
import os
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from common.errors import CheckpointError, ConfigError
from common.untrusted.tensor_file import check_digest, read_state, read_values
from tests.common.untrusted.hostile import Call

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3), "half": torch.ones(2).half()}


def save(path, content, legacy=False):
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict, lambda state: {"state_dict": state, "epoch": 3}])
def test_states_and_checkpoints_are_read(tmp_path, legacy, wrap):
    equal(read_state(save(tmp_path / "a.ckpt", wrap(STATE), legacy)), STATE)


@pytest.mark.parametrize("legacy", [False, True])
def test_nested_values_are_read(tmp_path, legacy):
    content = {"args": {"lr": 0.1, "name": None}, "optimizer": {"param_groups": [{"step": 4000, 3: (1, "a")}]}}

    assert read_values(save(tmp_path / "common.pt", content, legacy)) == content
    equal(read_values(save(tmp_path / "common.pt", [STATE], legacy))[0], STATE)


def test_the_state_of_a_module_is_read(tmp_path):
    module = torch.nn.BatchNorm2d(3)  # its dict has an attribute of its own

    equal(read_state(save(tmp_path / "a.pth", module.state_dict())), module.state_dict())


def test_safetensors_are_read(tmp_path):
    state = {name: tensor.contiguous() for name, tensor in STATE.items()}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")

    found = read_state(tmp_path / "a.safetensors")

    equal({name: found[name] for name in state}, state)


def test_tensors_of_a_zip_are_mapped_and_not_read(tmp_path):
    path = save(tmp_path / "a.ckpt", {"a": torch.zeros(10_000_000), "b": torch.ones(1)})
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert not mapped

    found = read_state(path)

    assert [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert found["b"].item() == 1


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "path", ["pytorch_lightning.callbacks.model_checkpoint", "lightning.pytorch.callbacks.model_checkpoint"]
)
def test_objects_of_lightning_are_skipped(tmp_path, monkeypatch, legacy, path):
    made = []

    class ModelCheckpoint:
        def __init__(self):
            self.best = 3

        def __setstate__(self, state):
            made.append(state)

    ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = path, "ModelCheckpoint"
    module = types.ModuleType(path)
    module.ModelCheckpoint = ModelCheckpoint
    with monkeypatch.context() as patched:
        for count in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:count])
            patched.setitem(sys.modules, name, module if name == path else types.ModuleType(name))
        content = {
            "state_dict": STATE,
            "callbacks": {ModelCheckpoint: {"best": np.float64(1.5)}, "one": ModelCheckpoint()},
        }
        file = save(tmp_path / "a.ckpt", content, legacy)
    assert b"best" in file.read_bytes()

    equal(read_state(file), STATE)

    assert not made


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "attack",
    [
        lambda path: Call(os.system, f"touch {path}"),
        lambda path: {"state_dict": {"a": Call(open, str(path), "w")}},
        lambda path: {"state_dict": STATE, "callbacks": Call(eval, f"open({str(path)!r}, 'w')")},
        lambda path: {"state_dict": STATE, "other": Call(np.fromfile, str(path))},
        lambda path: {"state_dict": STATE, "other": Call(torch.load, str(path))},
    ],
    ids=["system", "open", "eval", "numpy", "torch"],
)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, attack, legacy):
    mark = tmp_path / "ran"
    path = save(tmp_path / "a.ckpt", attack(mark), legacy)

    for read in (read_state, read_values):
        message = r"a\.ckpt: .*its pickle asks for [\w.]+, which tensors have no use for"
        with pytest.raises(CheckpointError, match=message):
            read(path)

    assert not mark.exists()


def test_the_same_pickle_runs_code_without_weights_only(tmp_path):
    """So the test before does test something."""
    mark = tmp_path / "ran"
    path = save(tmp_path / "a.ckpt", Call(os.system, f"touch {mark}"))

    torch.load(path, weights_only=False)

    assert mark.exists()


def test_a_plain_pickle_is_no_file_of_tensors(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(pickle.dumps({"a": [1, 2]}, 2))

    with pytest.raises(CheckpointError, match=r"a\.pth: not a file of tensors"):
        read_state(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_cut_off_anywhere_is_one_error(tmp_path, legacy):
    whole = save(tmp_path / "a.pth", STATE, legacy).read_bytes()
    for length in range(0, len(whole) - 1, len(whole) // 50):
        (tmp_path / "a.pth").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.pth: not a file of tensors"):
            read_state(tmp_path / "a.pth")


def test_cut_safetensors_are_one_error(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    for length in (0, 7, 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.safetensors: not a file of tensors"):
            read_state(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "but a list"),
        ({"a": [1]}, "a list under 'a'"),
        ({3: torch.ones(1)}, "a Tensor under 3"),
        ({"a": torch.eye(3).to_sparse()}, "a is no plain tensor"),
        ({"a": torch.ones(3, device="meta")}, "a is no plain tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_other_content_is_refused(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        read_state(save(tmp_path / "a.pth", content))


def test_special_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    for path, message in (("gone.pth", "missing"), (".", "no regular file"), ("pipe.pth", "no regular file")):
        with pytest.raises(CheckpointError, match=message):
            read_state(tmp_path / path)
        with pytest.raises(CheckpointError, match=message):
            read_values(tmp_path / path)


@pytest.mark.parametrize("algorithm", ["sha256", "sha1"])
def test_digests_are_checked(tmp_path, algorithm):
    path = save(tmp_path / "a.pth", STATE)
    right = hashlib.new(algorithm, path.read_bytes()).hexdigest()

    equal(read_state(path, right), STATE)
    with pytest.raises(CheckpointError, match=rf"a\.pth: its {algorithm.upper()} is {right}, and 0+ is expected"):
        read_state(path, "0" * len(right))


def test_a_changed_file_gets_a_new_digest(tmp_path):
    path = save(tmp_path / "a.pth", STATE)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    check_digest(path, right)
    path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(CheckpointError, match="damaged, or another file"):
        check_digest(path, right)


@pytest.mark.parametrize("digest", ["", "0" * 63, "x" * 64, "0" * 128])
def test_a_text_that_is_no_digest_is_refused(tmp_path, digest):
    with pytest.raises(ConfigError, match="64"):
        read_state(save(tmp_path / "a.pth", STATE), digest)
