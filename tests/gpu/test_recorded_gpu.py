"""What the profiler is asked for is what it counts."""

from __future__ import annotations

import pytest
import torch

from common.run.kernel_profile import breakdown, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_kernels_before_the_recorded_ones_do_not_count() -> None:
    x = torch.randn(256, 256, device="cuda")
    kernels, result = recorded(lambda: x @ x, lambda: [x.sin() for _ in range(3)])
    assert len(result) == 3
    assert len(kernels) == 3
    assert len({kernel.name for kernel in kernels}) == 1
    assert all(kernel.end > kernel.start for kernel in kernels)
    found = breakdown(kernels, 3)
    assert list(found.kinds) == ["other"]
    assert next(iter(found.kernels.values()))[1] == 1
