"""Peers: the same training with PyTorch's functions, eager and compiled.

The network is ours, with the reference implementations: PyTorch's batch norm, then ReLU. It is channels_last, in bf16
without fp32 master weights, and its optimizer is fused AdamW, because PyTorch has no LAMB. The images of our own
example batch are already on the device. The compiled peer uses ``max-autotune``, which also captures CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.deepcam.model import OPERATIONS, DeepLab, normalised, weighted_cross_entropy
from common.config.schema import RunConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.ops.operation import REFERENCE
from common.step.plain_step import plain_step


def start(run: RunConfig, example: Batch, device: torch.device, compiled: bool = False) -> Callable[[], Tensor]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    torch.backends.cudnn.benchmark = True
    facts, hparams = run.workload.facts, run.workload.hparams
    network = DeepLab(facts, run.workload.model.low_level_relu).cast(torch.bfloat16).to(device)
    network.choose_implementations(dict.fromkeys(OPERATIONS, REFERENCE), torch.bfloat16)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        hparams.base_learning_rate,
        tuple(hparams.betas),
        hparams.epsilon,
        hparams.weight_decay,
        fused=device.type == "cuda",
    )
    weight_K, tensors = torch.tensor(facts.class_weights, device=device), example.tensors

    def loss_of(x_NHWC: Tensor) -> Tensor:
        x_NCHW = normalised(x_NHWC, tensors["shift"], tensors["scale"], torch.bfloat16)
        return weighted_cross_entropy(network(x_NCHW), tensors["y"], weight_K)

    return plain_step(loss_of, (tensors["x"],), optimizer, compiled)


PEERS = (
    Peer("PyTorch in bf16 without masters, AdamW", start),
    Peer("PyTorch in bf16 without masters, AdamW, compiled with max-autotune", functools.partial(start, compiled=True)),
)
