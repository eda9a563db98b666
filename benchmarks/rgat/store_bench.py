"""Measure how fast features reach a GPU from each place where they can lie: ``python -m benchmarks.rgat.store_bench``.

For each of ``--ranks`` and each placement that serves so many GPUs of one machine, every GPU gathers the rows of random
nodes, ``--asked`` at a time, out of ``--gb`` gigabytes a GPU. Printed are GB/s of rows that one GPU gets, the share of
them that lies elsewhere, and, to compare with, a plain copy over the same way: from a neighbour's memory, or from
pinned memory of the host.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.rgat.block import Block, BlockShape
from benchmarks.rgat.schema import Schema
from benchmarks.rgat.stores.features import build_features
from benchmarks.rgat.stores.partition import Partition
from benchmarks.rgat.stores.placement import EXCHANGE, HOST, LOCAL, PLACEMENTS, Ranks
from common.distributed.layout import Layout
from common.distributed.symmetric_memory import PeerMemory, attempt
from common.errors import SuiteError
from common.ops.bench.stopwatch import require_gpu

WIDTH = 1024
"""Bytes of a row: IGBH's features in FP8."""

COPIED = 1 << 30
"""Bytes of the copies that are compared with."""

PAPERS = Schema.augmented(("paper",), ("paper__cites__paper",), "paper")


def random_block(rows: int, asked: int, device: torch.device, seed: int) -> Block:
    """A block whose nodes are any of ``rows``, of one type; it has no edges."""
    block = Block.empty(BlockShape(PAPERS, ((1,), (asked,)), ((1,),), ((1,),)), device)
    generator = torch.Generator(device).manual_seed(seed)
    block.nodes.copy_(torch.randint(rows, (asked,), generator=generator, device=device))
    block.counts.zero_()
    block.node_counts[-1].fill_(asked)
    return block


def gathered(placement: str, rows: int, asked: int, layout: Layout, programs: int | None, times: int) -> float:
    """Bytes a second of rows that this rank gathers while all do. Collective.

    Args:
        placement: where ``rows`` rows lie.
        asked: rows of a gather.
        layout: of the ranks of one machine.
        programs: of the kernel, at most; None for as many as the GPU holds.
        times: that are timed, after two.
    """

    def fill(partition: Partition, shard: int, own_RF: Tensor) -> None:
        own_RF.view(torch.uint8).fill_(shard)

    store = build_features(
        (rows,), WIDTH, torch.float8_e4m3fn, placement, layout, layout.world_size, layout.device, fill, programs
    )
    block = random_block(rows, asked, layout.device, layout.rank)
    out_NF = torch.empty((asked, WIDTH), dtype=store.dtype, device=layout.device)
    seconds = timed(lambda: store.gather(block, store.plan(block), out_NF), layout, times)
    store.close()
    return asked * WIDTH / seconds


def copied(placement: str, layout: Layout, times: int, size: int = COPIED) -> float | None:
    """Bytes a second of a plain copy the way of a placement; None where rows come by none of one kind. Collective."""
    here = torch.empty(size, dtype=torch.uint8, device=layout.device)
    if placement == HOST:
        there = torch.empty(size, dtype=torch.uint8, pin_memory=layout.device.type == "cuda")
        return size / timed(lambda: here.copy_(there, non_blocking=True), layout, times)
    if placement == LOCAL:
        other = torch.empty_like(here)
        return size / timed(lambda: here.copy_(other), layout, times)
    group = layout.node(layout.world_size)
    if placement == EXCHANGE or group is None:
        return None
    memory, reason = attempt(lambda: PeerMemory.allocate(size, group, layout.device), group, layout.device)
    if memory is None:
        raise SuiteError(f"a neighbour's memory cannot be copied: {reason}")
    neighbour = memory.tensor((memory.rank + 1) % layout.world_size, (size,), torch.uint8)
    rate = size / timed(lambda: here.copy_(neighbour), layout, times)
    memory.close()
    return rate


def timed(work: Callable[[], object], layout: Layout, times: int) -> float:
    """Seconds of ``work`` on all ranks at once, the mean over ``times`` after two."""

    def wait() -> None:
        if layout.device.type == "cuda":
            torch.cuda.synchronize(layout.device)
        if layout.world_size > 1:
            dist.barrier()

    for _ in range(2):
        work()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    if layout.device.type == "cuda":
        torch.cuda.synchronize(layout.device)
    seconds = (time.perf_counter() - began) / times
    wait()
    return seconds


def run_rank(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """Everything that so many ranks measure; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device,
            timeout=timedelta(minutes=5),
        )  # fmt: skip
    layout = Layout({"dp": ranks}, rank, device)
    for placement in PLACEMENTS:
        if Ranks(ranks, ranks, True).refusal(placement) is not None:
            continue
        rows = int(arguments.gb * 1e9) // WIDTH * (1 if placement == LOCAL else ranks)
        try:
            rate = gathered(placement, rows, arguments.asked, layout, arguments.programs or None, arguments.times)
            plain = copied(placement, layout, arguments.times)
        except SuiteError as error:
            text = str(error)
        else:
            elsewhere = 1.0 if placement == HOST else 0.0 if placement == LOCAL else (ranks - 1) / ranks
            text = f"{rate / 1e9:8.1f} GB/s a GPU, {elsewhere:.0%} from elsewhere"
            if plain is not None:
                share = rate * (elsewhere or 1.0) / plain
                text += f"; {share:.2f} of a plain copy's {plain / 1e9:.1f} GB/s"
        if rank == 0:
            print(f"{ranks} x {placement:<10}{text}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of GPUs, separated by commas")
    parser.add_argument("--gb", type=float, default=8.0, help="gigabytes of features a GPU (default: 8)")
    parser.add_argument("--asked", type=int, default=2_600_000, help="rows of a gather (default: those of 2,048 seeds)")
    parser.add_argument("--programs", type=int, default=0, help="of the kernel at most (default: all)")
    parser.add_argument("--times", type=int, default=20, help="that are timed (default: 20)")
    arguments = parser.parse_args()
    require_gpu("benchmarks.rgat.store_bench")
    try:
        sizes = [int(word) for word in arguments.ranks.split(",")]
    except ValueError:
        sys.exit(f"--ranks {arguments.ranks}: numbers, separated by commas")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.asked:,} rows of {WIDTH} bytes")
    for ranks in sizes:
        if not 1 <= ranks <= torch.cuda.device_count():
            print(f"{ranks} GPUs: there are {torch.cuda.device_count()}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, args=(ranks, folder, arguments), nprocs=ranks)


if __name__ == "__main__":
    main()
