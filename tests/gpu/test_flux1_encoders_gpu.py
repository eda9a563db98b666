"""The frozen encoders of FLUX.1 on a GPU, in bf16, and preparation from pictures with them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.flux1.encoders import Encoders
from benchmarks.flux1.encodings import EncodingSizes
from benchmarks.flux1.prepare import COMMANDS, prepare
from tests.benchmarks.flux1.small_encoders import CAPTIONS, SIZES, write_encoders
from tests.benchmarks.flux1.small_pictures import write_pictures

pytestmark = pytest.mark.gpu


def test_encodings_in_bf16_are_those_in_fp32_up_to_rounding(tmp_path):
    folder, sizes = write_encoders(tmp_path / "encoders"), EncodingSizes(**SIZES)
    exact = Encoders(folder, sizes, torch.device("cpu"), torch.float32)
    rounded = Encoders(folder, sizes, torch.device("cuda"), torch.bfloat16)
    pictures = torch.rand((2, 3, 256, 256), generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = exact.captions(CAPTIONS) | exact.pictures(pictures)
    found = rounded.captions(CAPTIONS) | rounded.pictures(pictures)
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert (found[name].float() - values).norm() < 0.03 * values.norm(), name


def test_pictures_are_prepared_on_the_gpu(tmp_path):
    folder, raw = write_encoders(tmp_path / "encoders"), write_pictures(tmp_path / "raw")
    made = prepare(raw, tmp_path / "data", folder, train=4, eval=10, device="cuda", workers=4)
    assert (made.counts["train_samples"], made.counts["eval_samples"]) == (4, 10)
    assert COMMANDS.verify(tmp_path / "data") == made
