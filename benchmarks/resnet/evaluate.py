"""ResNet-50's evaluation: top-1 accuracy over exactly the validation set.

Rules: every validation picture once, one central crop, the current weights with batch-norm statistics averaged over
the ranks (MLPerf training_rules, benchmark table).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.resnet.data import EvalSource
from benchmarks.resnet.model import ResNet50
from common.capture import capturing
from common.distributed.layout import Layout
from common.evaluation.base import Evaluation, Predictions, Weights


class TopOne(Evaluation):
    """Counts right answers as integers, summed over the ranks.

    Args:
        model: a network of its own, which takes over the weights that are evaluated.
        open_source: opens this rank's share of the evaluation data under a folder.
        example: pictures (N, C, H, W) of an evaluation batch's shape, for warm-up.
        layout: the ranks that share the evaluation set.
        capture: replay the forward pass as a CUDA graph.
        cache_bytes: device memory for the finished pictures; if all fit, evaluations after the first read nothing.
    """

    def __init__(
        self,
        model: ResNet50,
        open_source: Callable[[Path], EvalSource],
        example: Tensor,
        layout: Layout,
        capture: bool,
        cache_bytes: int = 0,
    ) -> None:
        self._model = model.eval()
        self._open_source = open_source
        self._source: EvalSource | None = None
        self._layout = layout
        self._group = layout.group("dp")
        self._image_NCHW = example.clone()
        self._label_N = torch.full((len(example),), -1, dtype=torch.int64, device=layout.device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=layout.device)
        self._capture = capture and layout.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._cache_bytes = cache_bytes
        self._kept: list[tuple[Tensor, Tensor]] = []

    def warm_up(self) -> None:
        """Forward passes on zeros, the last of them recorded on a GPU."""
        for _ in range(2):
            self._count()
        if self._capture:
            self._graph = torch.cuda.CUDAGraph()
            with capturing(self._graph, torch.cuda.current_stream()):
                self._count()
        if self._group is not None:
            dist.all_reduce(self._counts, group=self._group)
        self._counts.zero_()

    def open_data(self, root: Path) -> None:
        """Open this rank's share of the validation set."""
        self._source = self._open_source(root)

    def predict(self, weights: Weights) -> Predictions:
        """Count right answers and pictures over all ranks."""
        assert self._source is not None, "open_data comes first"
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                tensor.copy_(weights.tensors[name])
            self._counts.zero_()
            for image_NCHW, label_N in self._batches(self._source):
                self._image_NCHW.copy_(image_NCHW, non_blocking=True)
                self._label_N.copy_(label_N, non_blocking=True)
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._count()
        if self._group is not None:
            dist.all_reduce(self._counts, group=self._group)
        right, pictures = self._counts.tolist()
        return Predictions({"right": right, "pictures": pictures, "expected": self._source.eval_samples})

    def _batches(self, source: EvalSource) -> Iterator[tuple[Tensor, Tensor]]:
        if self._kept:
            yield from self._kept
            return
        bytes_of_all = len(source) * self._image_NCHW.numel() * self._image_NCHW.element_size()
        kept = []
        for batch in source:
            pair = tuple(batch.tensors[name].to(self._layout.device, non_blocking=True) for name in ("image", "label"))
            if bytes_of_all <= self._cache_bytes:
                kept.append(pair)
            yield pair[0], pair[1]
        self._kept = [(image_NCHW, label_N) for image_NCHW, label_N in kept]

    @staticmethod
    def score(predictions: Predictions) -> dict[str, float]:
        """Accuracy: right answers over pictures."""
        values = predictions.values
        if values["pictures"] != values["expected"]:
            raise RuntimeError(f"{values['pictures']} pictures were evaluated, the set has {values['expected']}")
        return {"accuracy": values["right"] / values["pictures"]}

    def close(self) -> None:
        """Close the reader and forget the pictures."""
        self._kept.clear()
        if self._source is not None:
            self._source.close()

    @torch.no_grad()
    def _count(self) -> None:
        answer_N = self._model(self._image_NCHW).argmax(dim=1)
        real_N = self._label_N >= 0
        self._counts += torch.stack([((answer_N == self._label_N) & real_N).sum(), real_N.sum()])
