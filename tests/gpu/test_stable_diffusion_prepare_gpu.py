"""Tars prepared on a GPU: what the CPU makes of the same pictures and captions, up to TF32's rounding."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from benchmarks.stable_diffusion.prepare import prepare
from tests.benchmarks.stable_diffusion.small_raw import pictures, read_tar, write_raw

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TARS = ("00000.tar", "00001.tar")


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_raw(tmp_path_factory.mktemp("raw"), "images", [pictures(0, 18), pictures(1, 3)])


def _close(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < share


def test_moments_are_those_of_the_cpu(raw_dir: Path, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        prepare(raw_dir, tmp_path / device, members="moments", device=device, workers=2)
    for name in TARS:
        ours, expected = (read_tar(tmp_path / device / "train" / name) for device in ("cuda", "cpu"))
        assert list(ours) == list(expected)
        for member in ours:
            if member.endswith(".npy"):
                found, wanted = (torch.from_numpy(np.load(io.BytesIO(tar[member]))) for tar in (ours, expected))
                assert (found.dtype, found.shape) == (torch.float32, (1, 8, 4, 4))
                _close(found, wanted, 5e-3)
            else:
                assert ours[member] == expected[member]


def test_encoded_samples_are_those_of_the_cpu(raw_dir: Path, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        prepare(raw_dir, tmp_path / device, device=device, workers=2)
    for name in TARS:
        ours, expected = (read_tar(tmp_path / device / "train" / name) for device in ("cuda", "cpu"))
        assert list(ours) == list(expected)
        for member in ours:
            if member.endswith(".safetensors"):
                found, wanted = (safetensors.torch.load(tar[member]) for tar in (ours, expected))
                for key in ("moments", "captions"):
                    assert found[key].dtype == torch.bfloat16
                    _close(found[key], wanted[key], 1e-2)
