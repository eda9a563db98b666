"""Peers: the same training in TF32 with the reference implementations of all operations, eager and compiled.

Network, losses and update are our own; products, attention and norms are PyTorch's. The compiled peer compiles each
block of the three stacks with TorchInductor, and has the CUDA graphs of the recipe. The eager one has none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from benchmarks.openfold.layers import OPERATIONS
from benchmarks.openfold.workload import OpenFold
from common.config.schema import RunConfig
from common.contract.peer_steps import start_compiled_step
from common.contract.workload import Peer
from common.data.batches import Batch
from common.nn.tf32 import tf32_products

STACKS = ("template_pair_stack.blocks", "extra_msa_stack.blocks", "evoformer_stack.blocks")
"""Lists of the blocks that TorchInductor compiles."""


def start(run: RunConfig, example: Batch, device: torch.device, compiled: bool = False) -> Callable[[], object]:
    """Start the peer; see :class:`common.contract.workload.Peer`."""
    run = dataclasses.replace(run, precision="fp32")
    if not compiled:
        run = dataclasses.replace(run, cuda_graphs=False, chunk_graphs=False)
    torch._dynamo.config.cache_size_limit = 128  # per code object: every block has other sites of dropout
    with tf32_products():
        step = start_compiled_step(OpenFold, tuple(OPERATIONS), STACKS if compiled else (), run, example, device)
    return tf32_products()(step)


PEERS = (
    Peer("references in TF32", start),
    Peer("references in TF32, compiled", functools.partial(start, compiled=True)),
)
