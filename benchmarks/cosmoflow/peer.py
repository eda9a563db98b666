"""Peers: the same training with modules of PyTorch, eager and compiled.

The network is channels_last_3d, in bf16 without fp32 master weights, with fused SGD. The cubes of our own example batch
are already on the device. The compiled peer uses ``max-autotune``, which also captures CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.cosmoflow.model import KERNEL, CosmoFlowArchitecture
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.step.plain_step import plain_step


class PlainNetwork(nn.Module):
    """The network of :class:`benchmarks.cosmoflow.model.CosmoFlow`, with PyTorch's own initial weights."""

    def __init__(self, architecture: CosmoFlowArchitecture, dropout: float) -> None:
        super().__init__()
        self.convolutions, self.dense = nn.Sequential(), nn.Sequential()
        for _, narrow, wide in architecture.convolutions:
            layer = nn.Conv3d(narrow, wide, KERNEL, padding=1)
            self.convolutions.extend([layer, nn.LeakyReLU(architecture.slope), nn.MaxPool3d(2)])
        *hidden, (_, inputs, outputs) = architecture.dense
        for _, narrow, wide in hidden:
            self.dense.extend([nn.Linear(narrow, wide), nn.LeakyReLU(architecture.slope), nn.Dropout(dropout)])
        self.dense.append(nn.Linear(inputs, outputs))
        self._scale = architecture.output_scale

    def forward(self, counts_NDHWC: Tensor) -> Tensor:
        """Return estimates (N, P), at least fp32."""
        dtype = self.dense[0].weight.dtype
        assert isinstance(dtype, torch.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        x_NCDHW = self.convolutions(counts_NDHWC.to(wide).log1p().to(dtype).movedim(-1, 1))
        estimate_NP: Tensor = self.dense(x_NCDHW.movedim(1, -1).flatten(1))
        return self._scale * estimate_NP.to(wide).tanh()


def start(run: RunConfig, example: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    torch.backends.cudnn.benchmark = True
    hparams = run.workload.hparams
    network = PlainNetwork(run.workload.facts, hparams.dropout).to(device, torch.bfloat16)
    network = network.to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(
        network.parameters(), hparams.base_learning_rate, hparams.momentum, fused=device.type == "cuda"
    )
    x_NDHWC, y_NP = example.tensors["x"], example.tensors["y"]

    def loss_of(x_NDHWC: Tensor) -> Tensor:
        return nn.functional.mse_loss(network(x_NDHWC), y_NP)

    return plain_step(loss_of, (x_NDHWC,), optimizer, compiled)


PEERS = (
    Peer("PyTorch in bf16 without masters", start),
    Peer("PyTorch in bf16 without masters, compiled with max-autotune", functools.partial(start, compiled=True)),
)
