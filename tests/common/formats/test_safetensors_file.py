"""Safetensors files, compared with those of the library."""

import pytest
import safetensors
import safetensors.torch
import torch

from common.errors import CheckpointError
from common.formats.safetensors_file import NAMES, read_tensors, write_tensors

CPU = torch.device("cpu")


def test_the_library_reads_every_dtype_that_is_written(tmp_path):
    made = {str(dtype): torch.arange(7).reshape(7, 1).to(dtype) for dtype in NAMES}
    write_tensors(tmp_path / "made", made, {"step": "12"})
    found = safetensors.torch.load_file(tmp_path / "made")
    assert found.keys() == made.keys()
    assert all(found[name].dtype == made[name].dtype and torch.equal(found[name], made[name]) for name in made)
    with safetensors.safe_open(tmp_path / "made", "pt") as file:
        assert file.metadata() == {"step": "12"}


def test_a_file_of_the_library_is_read(tmp_path):
    made = {"a": torch.randn(3, 4), "b": torch.tensor(2.0, dtype=torch.bfloat16)}
    safetensors.torch.save_file(made, tmp_path / "theirs")
    found = read_tensors(tmp_path / "theirs", CPU)
    assert all(torch.equal(found[name], made[name]) for name in made)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is missing"):
        read_tensors(tmp_path / "nowhere", CPU)
    write_tensors(tmp_path / "cut", {"a": torch.zeros(100)}, {})
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut cannot be read"):
        read_tensors(tmp_path / "cut", CPU)
