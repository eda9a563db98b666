"""Measure what a detector's evaluation takes on a GPU beside reading and scoring: passes, suppression, gathering."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from common.config import loading
from common.config.composition import compose
from common.contract.workload import Workload
from common.data.batches import HostBatch
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout

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


def main(benchmark: str, workload_type: type[Workload], arguments: Sequence[str]) -> None:
    """Print pictures per second of ``benchmark`` with the overrides that ``arguments`` are.

    Raises:
        SystemExit: PyTorch sees no GPU, and ``device=cpu`` is not among the arguments.
    """
    run, session = loading.load(
        compose([f"benchmark={benchmark}", "scale=1xH200", *arguments]), lambda _: workload_type
    )
    if session.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU; device=cpu measures a CPU")
    device = torch.device("cpu" if session.device == "cpu" else "cuda")
    torch.backends.cudnn.benchmark = True
    workload = workload_type(run, Layout(run.layout, device=device, seed=1))
    pictures = PICTURES if device.type == "cuda" else 2
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    seconds = evaluation_seconds(workload, pictures)
    print(f"{name}, PyTorch {torch.__version__}, {run.precision}, batches of {run.workload.reader.eval_batch}")
    print(f"{pictures} pictures in {seconds:.3f} s: {pictures / seconds:,.0f} pictures/s, neither read nor scored")


def evaluation_seconds(workload: Workload, pictures: int) -> float:
    """Median seconds of an evaluation of pictures of noise by heads that see something in it, after a first one."""
    device, generator = workload.layout.device, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in workload.model.named_parameters():
            if "head" in name and parameter.ndim == 4:
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
            evaluation.predict(workload.weights())
            if stream is not None:
                stream.synchronize()
            times.append(time.perf_counter() - began)
    evaluation.close()
    return statistics.median(times[1:])
