"""What the peers of several workloads share: weights without zeros, and a compiled step of the workload itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.ops.operation import REFERENCE
from common.step.graphs import StepRunner

ZERO_STD = 0.02
"""Standard deviation of values for tensors that start at zero, because a device multiplies zeros faster."""


@torch.no_grad()
def fill_zeros(network: nn.Module) -> None:
    """Fill each parameter that is all zeros, even biases of norms, with normal values; zeros would be faster."""
    for parameter in network.parameters():
        if not parameter.any():
            parameter.normal_(0.0, ZERO_STD)


def compile_blocks(network: nn.Module, names: Sequence[str]) -> None:
    """Compile modules of a network, and those of lists of modules, each separately, with TorchInductor.

    Args:
        names: names of modules, as :meth:`torch.nn.Module.get_submodule` takes them.
    """
    for name in names:
        part = network.get_submodule(name)
        if isinstance(part, nn.ModuleList):
            for number, block in enumerate(part):
                part[number] = _compiled(block)
        else:
            owner, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(owner), attribute, _compiled(part))


def _compiled(block: nn.Module) -> Any:
    return torch.compile(block, dynamic=False)


def start_compiled_step(
    workload_type: type[Workload],
    operations: Sequence[str],
    blocks: Sequence[str],
    run: RunConfig,
    example: Batch,
    device: torch.device,
    **model: object,
) -> Callable[[], object]:
    """Start a workload's step with references that TorchInductor compiles, and return a function that runs it.

    The function runs the step on ``example``; see :class:`common.contract.workload.Peer`.

    Args:
        workload_type: the workload, whose configuration has ``model.implementations``.
        operations: operations that use the reference.
        blocks: names of the network's modules that are compiled, and of lists of such modules.
        model: other settings of ``model`` than those of ``run``.
    """
    given = run.workload.model
    implementations = {**given.implementations, **dict.fromkeys(operations, REFERENCE)}
    changed = dataclasses.replace(given, implementations=implementations, **model)
    run = dataclasses.replace(run, workload=dataclasses.replace(run.workload, model=changed))
    workload = workload_type(run, Layout(device=device))
    compile_blocks(workload.model, blocks)  # before the optimizer is built
    runner = StepRunner(workload.build_step(), workload.model, 1, run.cuda_graphs)
    runner.warm_up([example])

    def step() -> None:
        with runner.on_stream():
            runner([example])

    return step
