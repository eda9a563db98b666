"""Dropout with joined frames is dropout, and frames side by side."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rnnt.ops import joined_dropout
from common.ops.dropout.reference import dropout_reference
from common.ops.operation import OperationRequest

SEED = torch.tensor(5)


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_frames_stand_side_by_side_and_a_missing_one_is_zero(frames):
    x_TBH = torch.randn((frames, 3, 4), generator=torch.Generator().manual_seed(2))
    y_SBK = joined_dropout.JOINED_DROPOUT.function("reference")(x_TBH, 0.4, SEED, 7)
    dropped_TBH = dropout_reference(x_TBH, 0.4, SEED, 7)
    for joined in range(len(y_SBK)):
        for row in range(3):
            second = dropped_TBH[2 * joined + 1, row] if 2 * joined + 1 < frames else torch.zeros(4)
            assert torch.equal(y_SBK[joined, row], torch.cat([dropped_TBH[2 * joined, row], second]))
    assert len(y_SBK) == (frames + 1) // 2


def test_an_odd_width_is_not_for_the_kernel():
    request = OperationRequest(torch.device("cuda"), torch.float16, {"width": 3})
    reason = joined_dropout.JOINED_DROPOUT.unsupported("triton", request)
    assert reason is not None
    assert "width is a multiple of 2, not 3" in reason
