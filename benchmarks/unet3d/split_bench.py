"""Measure 3D U-Net's training step with volumes split over GPUs, by transport of the halos, with overlap and without.

``python -m benchmarks.unet3d.split_bench --ranks 1,2,4`` prints milliseconds of a captured step (forward, loss,
backward, reduction and update; no data) and how much faster it is than the whole volume on one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.unet3d.config import Facts
from benchmarks.unet3d.model import NetworkSettings, UNet3D
from benchmarks.unet3d.ops import dice_cross_entropy
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.spatial.choose import TRANSPORTS
from common.distributed.spatial.split import VolumeSplit
from common.errors import ConfigError, UnsupportedImplementation
from common.mlperf.fixed import fixed_facts
from common.ops.bench.stopwatch import require_gpu
from common.ops.operation import AUTO, OperationRequest
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate

WARM_UP, TIMED = 20, 100


def build(layout: Layout, settings: NetworkSettings, samples: int, edge: int) -> tuple[StepRunner, Batch]:
    """A captured step in bf16, and this rank's slab of a random micro-batch."""
    split, device, facts = VolumeSplit.from_layout(layout), layout.device, fixed_facts(Facts, "unet3d")
    generator = torch.Generator().manual_seed(1)
    model = UNet3D(facts, settings, generator, device=device, dtype=torch.bfloat16, split=split)
    request = OperationRequest(device, torch.bfloat16, {"classes": facts.classes})
    loss_of = dice_cross_entropy.DICE_CROSS_ENTROPY.select(AUTO, request).function

    def loss(micro_batch: Batch) -> Losses:
        value = loss_of(model(micro_batch.tensors["image"]), micro_batch.tensors["label"], facts.dice_smooth, split)
        return Losses(value, {"loss": value})

    named, redundant = dict(model.named_parameters()), model.redundant_parameters()
    groups = [
        ParameterGroup({name: p for name, p in named.items() if name not in redundant}),
        ParameterGroup({name: p for name, p in named.items() if name in redundant}, replicated_over=("cp",)),
    ]
    optimizer = Optimizer(
        [group for group in groups if group.parameters], SGD(0.9, nesterov=True), constant(1e-3), layout,
        grad_divisor=1.0,
    )  # fmt: skip
    planes = edge // layout.size("cp")
    image = torch.randn(samples, 1, planes, edge, edge, device=device, dtype=torch.bfloat16)
    label = torch.randint(0, facts.classes, (samples, planes, edge, edge), device=device, dtype=torch.uint8)
    runner = StepRunner(TrainStep(accumulate(loss), [optimizer], layout), model, 1)
    return runner, Batch({"image": image, "label": label}, samples)


def milliseconds(runner: StepRunner, batch: Batch) -> float:
    """Median of the timed steps, each measured on this rank's stream."""
    runner.warm_up([batch])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + TIMED + 1)]
    with runner.on_stream():
        events[0].record()
        for event in events[1:]:
            runner([batch])
            event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(events[WARM_UP:]))


def ways(ranks: int) -> Iterator[NetworkSettings]:
    """What to compare."""
    if ranks == 1:
        yield NetworkSettings()
        return
    for transport in TRANSPORTS:
        for overlap in (True, False):
            yield NetworkSettings(halo=transport, overlap=overlap)


def run_rank(rank: int, ranks: int, folder: str, samples: int, edge: int) -> None:
    """Measure every way on this number of ranks; rank 0 prints."""
    torch.backends.cudnn.benchmark = True
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    if ranks > 1:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks, device_id=device
        )
    layout = Layout({"cp": ranks}, rank, device=device)
    for way in ways(ranks):
        try:
            runner, batch = build(layout, way, samples, edge)
        except UnsupportedImplementation as error:
            line = str(error)
        else:
            step_ms = milliseconds(runner, batch)
            runner.close()
            line = f"{step_ms:7.2f} ms  {samples / step_ms * 1e3:6.1f} samples/s"
        if rank == 0:
            name = "whole" if ranks == 1 else f"{way.halo}, {'overlapped' if way.overlap else 'waiting'}"
            print(f"{ranks} GPUs  {name:32s} {line}", flush=True)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of GPUs, separated by commas")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples that the ranks share")
    parser.add_argument("--edge", type=int, default=128, help="voxels along each axis of a volume")
    arguments = parser.parse_args()
    require_gpu("benchmarks.unet3d.split_bench")
    try:
        sizes = [int(word) for word in arguments.ranks.split(",")]
    except ValueError:
        sys.exit(f"--ranks {arguments.ranks}: numbers, separated by commas")
    batch = f"{arguments.micro_batch} x {arguments.edge}³"
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, {batch}", flush=True)
    for ranks in sizes:
        if not 1 <= ranks <= torch.cuda.device_count():
            print(f"{ranks} GPUs: there are {torch.cuda.device_count()}")
            continue
        try:
            fixed_facts(Facts, "unet3d").check_size((arguments.edge,) * 3, ranks)
        except ConfigError as error:
            print(error)
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, args=(ranks, folder, arguments.micro_batch, arguments.edge), nprocs=ranks)


if __name__ == "__main__":
    main()
