"""Running statistics for an evaluation, from batch norms whose replicas each use only their own samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.nn.batch_norm import BatchNorm2d


@torch.no_grad()
def averaged_statistics(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return the running means and variances of every :class:`BatchNorm2d`, averaged over the replicas.

    All replicas must call this; it runs one all-reduce. The result maps buffer names of the model to copies. With a
    single replica, it has the buffers themselves.
    """
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if isinstance(module, BatchNorm2d)
        for name, buffer in module.named_buffers(recurse=False)
    }
    group = layout.group("dp")
    if group is None or not buffers:
        return buffers
    flat = torch.cat([buffer.flatten() for buffer in buffers.values()])
    dist.all_reduce(flat, group=group)
    flat /= layout.size("dp")
    return dict(zip(buffers, flat.split([buffer.numel() for buffer in buffers.values()]), strict=True))
