"""Ranks, FP8 marks, captures of CUDA graphs, evaluations and errors for tests on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.data.batches import HostBatch
from common.evaluation.counts import CountedEvaluation
from common.ops.cases import Draw
from common.ops.fp8_cast.reference import Scaling
from common.step.capture import capturing

T = TypeVar("T")

GPU = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
WITH_FP8 = pytest.mark.skipif(CAPABILITY < (8, 9), reason="needs FP8 units")
BF16_AND_FP8 = pytest.mark.parametrize("linear", ["torch", pytest.param("fp8", marks=WITH_FP8)])


def start_rank(rank: int, run: Callable[[int, int, Path], Any], world: int, folder: Path) -> None:
    """Run ``run(rank, world, folder)`` as a rank of an NCCL group, and save its result as ``<rank>.pt``."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
    torch.save(run(rank, world, folder), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the expected values."""
    exact = expected.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


class OnDevice:
    """Evaluation data whose batches are on the device; an :class:`common.data.batches.EvalSource`."""

    def __init__(self, batches: list[dict[str, Tensor]], eval_samples: int) -> None:
        self.batches = [{name: tensor.to(GPU) for name, tensor in batch.items()} for batch in batches]
        self.eval_samples = eval_samples

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[HostBatch]:
        return (HostBatch(batch, 1, number) for number, batch in enumerate(self.batches))

    def close(self) -> None:
        """Do nothing: there are no threads."""


def eager_and_captured_scores(
    source: OnDevice, evaluation_of: Callable[[dict[str, Tensor], bool], tuple[CountedEvaluation, nn.Module]]
) -> list[dict[str, float]]:
    """Return the scores of an eager and of a captured evaluation of ``source``.

    Args:
        evaluation_of: returns an evaluation and its network from an example batch, and whether to capture.
    """
    scores = []
    for capture in (False, True):
        example = {name: tensor.clone() for name, tensor in source.batches[0].items()}
        evaluation, model = evaluation_of(example, capture)
        with torch.cuda.stream(torch.cuda.Stream()):  # a capture needs a stream of its own
            evaluation.warm_up()
        torch.cuda.synchronize()
        evaluation.open_data(Path())
        scores.append(evaluation.scorer.score(evaluation.predict(Weights(dict(model.named_parameters())))))
        evaluation.close()
    return scores


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise an error if the host waits for the device inside the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run ``step`` twice and capture it. The second run must not wait for the device.

    Returns:
        The graph, and the results of the captured ``step``, which each replay writes.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with waiting_is_an_error():
            step()
        with capturing(graph, stream):
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, found


def follows_its_inputs(
    step: Callable[[list[Scaling]], list[Tensor]], change: Callable[[], Any], scales: int
) -> list[Tensor]:
    """Check that each of three replays of a captured step gives the results and scales of the eager step.

    Args:
        step: takes the states of its scales.
        change: changes the inputs before each replay.
        scales: number of states.

    Returns:
        The first tensor of ``step`` in every replay.
    """
    draw, seen = Draw(GPU, torch.bfloat16), []
    ours, eager = ([draw.scaling() for _ in range(scales)] for _ in range(2))
    graph, results = captured(lambda: step(ours))
    for state in ours:
        state.scale.zero_()
    for _ in range(3):
        change()
        replay_over_nan(graph, results)
        for found, expected in zip(results, step(eager), strict=True):
            assert torch.equal(found, expected)
        seen.append(results[0].detach().clone())
    assert [state.scale.item() for state in ours] == [state.scale.item() for state in eager]
    return seen


def replay_over_nan(graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
    """Replay a graph after its results have been overwritten with NaN, or with 255 in integers."""
    for tensor in results:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 255)
    graph.replay()
