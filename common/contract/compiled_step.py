"""A peer for comparison: a workload's own step with reference implementations that TorchInductor compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.ops.operation import REFERENCE
from common.step.graphs import StepRunner


def start_compiled_step(
    workload_type: type[Workload],
    operations: Sequence[str],
    compile_blocks: Callable[[Any], None],
    run: RunConfig,
    example: Batch,
    device: torch.device,
    **model: object,
) -> Callable[[], object]:
    """Start the step and return a function that runs it on ``example``; see :class:`common.contract.workload.Peer`.

    Args:
        workload_type: the workload, whose configuration has ``model.implementations``.
        operations: operations that use the reference.
        compile_blocks: compiles blocks of the workload's network, before the optimizer is built.
        model: other settings of ``model`` than those of ``run``.
    """
    given = run.workload.model
    implementations = {**given.implementations, **dict.fromkeys(operations, REFERENCE)}
    changed = dataclasses.replace(given, implementations=implementations, **model)
    run = dataclasses.replace(run, workload=dataclasses.replace(run.workload, model=changed))
    workload = workload_type(run, Layout(device=device))
    compile_blocks(workload)
    runner = StepRunner(workload.build_step(), workload.model, 1, run.cuda_graphs)
    runner.warm_up([example])

    def step() -> None:
        with runner.on_stream():
            runner([example])

    return step
