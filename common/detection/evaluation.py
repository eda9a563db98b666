"""Evaluation of a detection network: every picture once, at fixed shapes, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource, HostBatch
from common.detection.detections import PADDING, DetectionBuffer, Found, RunLengths
from common.distributed.layout import Layout
from common.evaluation.forward import ForwardPass, evaluating

Detect = Callable[[Mapping[str, Tensor]], Found]
"""Function that returns the detections of a batch; capturable."""

SPREAD = 0.02
"""Standard deviation of random weights of the heads, large enough to detect objects of many classes in noise."""


@dataclass(frozen=True)
class BatchShape:
    """Batches of one shape.

    Attributes:
        detect: runs the network on a batch.
        inputs: synthetic inputs on the device, for warm-up: ``picture`` (B,), ids with -1 for padding, and the inputs
            of ``detect``. Real batches have the same keys.
    """

    detect: Detect
    inputs: dict[str, Tensor]


def of_pictures(detect: Detect, example: Tensor) -> BatchShape:
    """Return the shape of batches of pictures of one size.

    Args:
        detect: finds objects in ``image`` (B, C, H, W), pictures of original height and width ``size`` (B, 2).
    """
    batch, _, height, width = example.shape
    inputs = {
        "image": example.clone(),
        "picture": torch.full((batch,), PADDING, dtype=torch.int64, device=example.device),
        "size": torch.tensor([[float(height), float(width)]] * batch, device=example.device),
    }
    return BatchShape(detect, inputs)


class SyntheticPictures:
    """An evaluation source of noise on the device. It repeats the same batches with new picture ids.

    Args:
        batches: inputs of the network by key, all with the same number of pictures. Batches alternate between the
            keys, in order.
        pictures: number of pictures over all ranks; the last batches are padded with id -1.
        layout: ranks that share the pictures.
    """

    def __init__(self, batches: Mapping[Hashable, dict[str, Tensor]], pictures: int, layout: Layout) -> None:
        self.eval_samples, self._batches = pictures, list(batches.items())
        self._each = len(self._batches[0][1]["picture"])
        self._ranks, self._rank = layout.size("dp"), layout.index("dp")

    def __len__(self) -> int:
        return -(-self.eval_samples // (self._each * self._ranks))

    def __iter__(self) -> Iterator[HostBatch]:
        for position in range(len(self)):
            first = (position * self._ranks + self._rank) * self._each
            id_B = torch.arange(first, first + self._each)
            key, inputs = self._batches[position % len(self._batches)]
            picture_B = id_B.where(id_B < self.eval_samples, PADDING)
            yield HostBatch({**inputs, "picture": picture_B}, self._each, position, key)

    def close(self) -> None:
        """Do nothing: no file is open."""


class DetectionEvaluation(Evaluation):
    """Gathers the detections of all ranks, which a scorer then scores.

    The model may be the one that trains.

    Args:
        model: the network, whose weights an evaluation may replace.
        shapes: shapes of batches by key; all with the same number of pictures.
        open_source: opens this rank's share of the evaluation pictures.
        keep: largest number of detections of a picture.
        capture: replay the forward passes as CUDA graphs, one for each shape, which share their memory.
        run_lengths: converts masks to runs, if the network finds masks.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[Hashable, BatchShape],
        open_source: Callable[[Path], EvalSource],
        keep: int,
        layout: Layout,
        capture: bool,
        scorer: Scorer,
        run_lengths: RunLengths | None = None,
    ) -> None:
        self.scorer = scorer
        self._model = model
        self._open_source, self._layout = open_source, layout
        self._source: EvalSource | None = None
        self._buffer = DetectionBuffer(layout, keep, run_lengths)
        pool = torch.cuda.graph_pool_handle() if capture and layout.device.type == "cuda" else None
        self._forward: dict[Hashable, ForwardPass[Found]] = {
            key: ForwardPass(model, shape.detect, shape.inputs, capture, pool) for key, shape in shapes.items()
        }
        (self._batch,) = {len(shape.inputs["picture"]) for shape in shapes.values()}

    def warm_up(self) -> None:
        """Run and gather synthetic pictures of each shape. Collective."""
        for forward in self._forward.values():
            found = forward.warm_up()
            self._buffer.begin(self._batch)
            self._buffer.add(forward.inputs["picture"], found)
        self._buffer.columns()

    def open_data(self, root: Path) -> None:
        """Open this rank's share of the evaluation pictures."""
        self._source = self._open_source(root)

    def with_noise(self, pictures: int) -> Self:
        """Make ``pictures`` of noise the data, heads' weights random and their biases 0; return this evaluation."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "head" in name and name.endswith("bias"):
                    parameter.zero_()  # RetinaNet's initial bias makes every class rare
                elif "head" in name and parameter.ndim > 1:
                    parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
        batches = {
            key: {name: tensor.clone() for name, tensor in forward.inputs.items()}
            for key, forward in self._forward.items()
        }
        self._open_source = lambda root: SyntheticPictures(batches, pictures, self._layout)
        return self

    def predict(self, weights: Weights) -> Predictions | None:
        """Find objects in every picture; return their columns on the first rank. Collective."""
        self.find(weights)
        return self.gathered()

    def find(self, weights: Weights) -> None:
        """Find objects in every picture of this rank, without waiting for the device."""
        assert self._source is not None, "open_data comes first"
        with evaluating(self._model, weights):
            self._buffer.begin(len(self._source) * self._batch)
            for host in self._source:
                forward = self._forward[host.key]
                batch = {name: host.tensors[name].to(self._layout.device, non_blocking=True) for name in forward.inputs}
                self._buffer.add(batch["picture"], forward(batch))

    def gathered(self) -> Predictions | None:
        """Return the columns of all ranks on the first rank; see :meth:`DetectionBuffer.columns`. Collective."""
        columns = self._buffer.columns()
        return None if columns is None else Predictions(columns)

    def close(self) -> None:
        """Free the graphs and the buffers, and close the reader and the scorer."""
        for forward in self._forward.values():
            forward.close()
        self._buffer.close()
        if self._source is not None:
            self._source.close()
        self.scorer.close()
