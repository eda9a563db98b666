"""SwiGLU with the Triton kernels of :mod:`common.ops.swiglu.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Shapes: T tokens, F features.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling
from common.ops.fp8_cast.triton import launch, output
from common.ops.swiglu import kernels
from common.ops.swiglu.reference import Activated
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(rows=1, columns=2048, warps=4, programs=8, stages=1),
    "backward": Tile(rows=1, columns=2048, warps=4, programs=8, stages=1),
}
"""Tile of each pass."""


def forward(
    gate_up_T2F: Tensor,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """See :func:`common.ops.swiglu.reference.forward_reference`. One launch."""
    require_contiguous(gate_up=gate_up_T2F)
    tokens, both = gate_up_T2F.shape
    y = output(gate_up_T2F, both // 2, E4M3, fp8, half=fp8 is None, frozen_scales=frozen_scales)
    saved = output(gate_up_T2F, both, E4M3, save_fp8, half=False, frozen_scales=frozen_scales)
    launch(kernels.swiglu_forward, TILES["forward"], (gate_up_T2F,), tokens, both // 2, y, saved)
    dtype = gate_up_T2F.dtype
    return Activated(y.half, y.fp8(dtype), saved.fp8(dtype) or gate_up_T2F)


def backward(
    dy_TF: Tensor, saved: Tensor | Fp8Tensor, *, fp8: Scaling | None = None, frozen_scales: bool = False
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """See :func:`common.ops.swiglu.reference.backward_reference`. One launch."""
    tokens, features = dy_TF.shape
    data, inverse = (saved.data, saved.scale_inverse) if isinstance(saved, Fp8Tensor) else (saved, None)
    require_contiguous(dy=dy_TF, saved=data)
    d_gate_up = output(dy_TF, 2 * features, E5M2, fp8, half=fp8 is None, frozen_scales=frozen_scales)
    launch(kernels.swiglu_backward, TILES["backward"], (dy_TF, data), tokens, features, d_gate_up, inverse=inverse)
    return d_gate_up.half, d_gate_up.fp8(dy_TF.dtype)
