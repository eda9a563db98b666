"""Running statistics of batch norms that every replica takes over its own samples, as an evaluation uses them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.nn.batch_norm import BatchNorm2d


@torch.no_grad()
def averaged_statistics(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The running means and variances of every :class:`BatchNorm2d`, averaged over the replicas by one all-reduce.

    Collective. Copies, by the names of the model's buffers; of a single replica they are the buffers themselves.
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
