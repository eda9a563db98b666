"""Gradient reduction over two GPUs with NCCL, overlapped with the backward pass and captured in a CUDA graph."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.rules import LARS
from common.optim.schedules import polynomial

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ITERATIONS = 4


class Trainee:
    """A small network whose iteration has two micro-batches."""

    def __init__(self, layout: Layout, dtype: torch.dtype, overlap: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU())])
        self.model.to(layout.device, dtype)
        named = dict(self.model.named_parameters())
        groups = [
            ParameterGroup({n: p for n, p in named.items() if p.ndim > 1}, 1e-4, trust_ratio=True),
            ParameterGroup({n: p for n, p in named.items() if p.ndim == 1}),
        ]
        self.optimizer = Optimizer(
            groups,
            LARS(0.9, eta=0.01),
            polynomial(1.0, 0.1, 2, 2, 8, first_step=1),
            layout,
            grad_divisor=64.0,
            bucket_bytes=300_000,
            overlap=overlap,
        )
        self.skip = torch.zeros((), device=layout.device)
        self.inputs = torch.zeros(2, 16, 256, device=layout.device, dtype=dtype)

    def iterate(self) -> None:
        self.optimizer.begin()
        for index, x_BC in enumerate(self.inputs.unbind()):
            if index == 1:
                self.optimizer.arm()
            self.model(x_BC).float().square().sum().backward()
        self.optimizer.update(self.skip)


def train(layout: Layout, dtype: torch.dtype, overlap: bool, captured: bool) -> list[Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        trainee = Trainee(layout, dtype, overlap)
        graph = torch.cuda.CUDAGraph()
        if captured:
            trainee.skip.fill_(1.0)
            for _ in range(3):
                trainee.iterate()
            # NCCL's watchdog thread may query events meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                trainee.iterate()
            trainee.skip.zero_()
        for iteration in range(ITERATIONS):
            generator = torch.Generator().manual_seed(10 * iteration + layout.rank)
            trainee.inputs.copy_(torch.randn(2, 16, 256, generator=generator))
            if captured:
                graph.replay()
            else:
                trainee.iterate()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in trainee.model.parameters()]


def run_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layout = Layout({"dp": 2}, rank, device=f"cuda:{rank}")
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, overlap, captured in (("eager", False, False), ("overlap", True, False), ("captured", True, True)):
            results[f"{name}.{dtype}"] = train(layout, dtype, overlap, captured)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, list[Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["overlap", "captured"])
def test_overlapped_and_captured_reduction_equal_the_plain_one(ranks, mode, dtype):
    for ours, expected in zip(ranks[0][f"{mode}.{dtype}"], ranks[0][f"eager.{dtype}"], strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_agree_bit_for_bit(ranks, dtype):
    for first, second in zip(ranks[0][f"captured.{dtype}"], ranks[1][f"captured.{dtype}"], strict=True):
        assert torch.equal(first, second)
