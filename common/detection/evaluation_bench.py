"""Measure what a detector's evaluation takes on a GPU beside reading: passes, suppression, gathering; and scoring."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from common.config import loading
from common.config.composition import compose
from common.contract.evaluation import Predictions
from common.contract.workload import Workload
from common.data.batches import HostBatch
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout
from common.ops.bench.stopwatch import require_gpu

PICTURES = 4096
"""Of an evaluation, unless the arguments say otherwise."""

TIMES = 3
SPREAD = 0.02
"""Standard deviation that the heads' weights are given, so that a picture of noise has candidates of many classes."""


class MadeUp:
    """An evaluation source whose pictures lie on the device: the same batches again and again, under other ids.

    Args:
        batches: of each key, what the network reads; all of as many pictures. Keys take turns.
        pictures: how many; the last batch is filled up with padding.
    """

    def __init__(self, batches: Mapping[Hashable, dict[str, torch.Tensor]], pictures: int) -> None:
        self.eval_samples = pictures
        self._batches = list(batches.items())
        self._each = len(self._batches[0][1]["picture"])

    def __len__(self) -> int:
        return -(-self.eval_samples // self._each)

    def __iter__(self) -> Iterator[HostBatch]:
        for position in range(len(self)):
            ids = torch.arange(position * self._each, (position + 1) * self._each)
            picture_B = torch.where(ids < self.eval_samples, ids, -1)
            key, batch = self._batches[position % len(self._batches)]
            yield HostBatch({**batch, "picture": picture_B}, self._each, position, key)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Timed:
    """Evaluations of made-up pictures.

    Attributes:
        find: median seconds of passes over all pictures, up to the last detection on the device.
        gather: of what follows until the host has all of it; of masks that is where they become runs.
        predictions: of the last one.
    """

    find: float
    gather: float
    predictions: Predictions


def main(
    benchmark: str,
    workload_type: type[Workload],
    arguments: Sequence[str],
    scored: Callable[[Workload, Predictions], str] | None = None,
) -> None:
    """Print pictures per second of ``benchmark`` with the overrides that ``arguments`` are.

    Args:
        benchmark, workload_type: of a detector.
        arguments: overrides.
        scored: scores the predictions, and says in a line what that took; None where it is not measured.

    Raises:
        SystemExit: PyTorch sees no GPU, and ``device=cpu`` is not among the arguments.
    """
    run, session = loading.load(
        compose([f"benchmark={benchmark}", "scale=1xH200", *arguments]), lambda _: workload_type
    )
    if session.device != "cpu":
        require_gpu(f"benchmarks.{benchmark}.evaluate_bench", "device=cpu measures a CPU")
    device = torch.device("cpu" if session.device == "cpu" else "cuda")
    torch.backends.cudnn.benchmark = True
    workload = workload_type(run, Layout(run.layout, device=device, seed=1))
    pictures = PICTURES if device.type == "cuda" else 2
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    timed = evaluate(workload, pictures)
    seconds = timed.find + timed.gather
    print(f"{name}, PyTorch {torch.__version__}, {run.precision}, batches of {run.workload.reader.eval_batch}")
    print(f"{pictures} pictures in {seconds:.3f} s: {pictures / seconds:,.0f} pictures/s, neither read nor scored")
    print(f"of that {timed.find:.3f} s until all is found, {timed.gather:.3f} s until it is on the host")
    if scored is not None:
        print(scored(workload, timed.predictions))


def evaluate(workload: Workload, pictures: int) -> Timed:
    """Evaluations of pictures of noise by heads that see something in it, timed after a first one."""
    device, generator = workload.layout.device, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in workload.model.named_parameters():
            if "head" in name and parameter.ndim > 1:
                parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
    evaluation = workload.evaluation(workload.layout)
    assert isinstance(evaluation, DetectionEvaluation)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        evaluation.warm_up()
        evaluation.read_from(MadeUp(evaluation.made_up(), pictures))
        times = []
        for _ in range(1 + TIMES):
            began = time.perf_counter()
            evaluation.find(workload.weights())
            if stream is not None:
                stream.synchronize()
            found = time.perf_counter()
            predictions = evaluation.gathered()
            if stream is not None:
                stream.synchronize()
            times.append((found - began, time.perf_counter() - found))
    evaluation.close()
    assert predictions is not None, "there is one rank"
    find, gather = (statistics.median(part) for part in zip(*times[1:], strict=True))
    return Timed(find, gather, predictions)
