"""The evaluation of a network that finds boxes in pictures: every picture once, at fixed shapes, without a wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.detection.detections import PADDING, DetectionBuffer, Found
from common.distributed.layout import Layout
from common.evaluation.forward import ForwardPass


class DetectionEvaluation(Evaluation):
    """Gathers the detections of all ranks, and has a scorer judge them.

    The network that trains can be the one that is evaluated.

    Args:
        model: the network, whose weights an evaluation may replace.
        detect: what it finds in a batch; uses the network; capturable.
        open_source: opens this rank's share of the evaluation pictures. A batch has ``image`` (B, C, H, W), ``picture``
            (B,), ids with -1 for padding, and ``size`` (B, 2), height and width before resizing.
        example: pictures of a batch's shape, for warm-up.
        keep: detections of a picture at most.
        layout: the ranks that share the evaluation set.
        capture: replay the forward pass as a CUDA graph.
        scorer: judges them.
    """

    def __init__(
        self,
        model: nn.Module,
        detect: Callable[[Mapping[str, Tensor]], Found],
        open_source: Callable[[Path], EvalSource],
        example: Tensor,
        keep: int,
        layout: Layout,
        capture: bool,
        scorer: Scorer,
    ) -> None:
        self.scorer = scorer
        self._open_source, self._layout = open_source, layout
        self._source: EvalSource | None = None
        self._buffer = DetectionBuffer(layout, keep)
        batch, _, height, width = example.shape
        inputs = {
            "image": example.clone(),
            "picture": torch.full((batch,), PADDING, dtype=torch.int64, device=layout.device),
            "size": torch.tensor([[float(height), float(width)]] * batch, device=layout.device),
        }
        self._forward: ForwardPass[Found] = ForwardPass(model, detect, inputs, capture)

    def warm_up(self) -> None:
        """Passes over made-up pictures, and gathering what they give. Collective."""
        found = self._forward.warm_up()
        picture_B = self._forward.inputs["picture"]
        self._buffer.begin(len(picture_B))
        self._buffer.add(picture_B, found)
        self._buffer.columns()

    def open_data(self, root: Path) -> None:
        """Open this rank's share of the evaluation pictures."""
        self.read_from(self._open_source(root))

    def read_from(self, source: EvalSource) -> None:
        """Evaluate the pictures of an open source."""
        self._source = source

    def made_up(self) -> dict[str, Tensor]:
        """Copies of a batch's inputs as they were before the first batch of the data."""
        return {name: tensor.clone() for name, tensor in self._forward.inputs.items()}

    def predict(self, weights: Weights) -> Predictions | None:
        """Find boxes in every picture; their columns on the first rank. Collective."""
        assert self._source is not None, "open_data comes first"
        inputs = self._forward.inputs
        with self._forward.evaluating(weights):
            self._buffer.begin(len(self._source) * len(inputs["picture"]))
            for host in self._source:
                batch = {name: host.tensors[name].to(self._layout.device, non_blocking=True) for name in inputs}
                self._buffer.add(batch["picture"], self._forward(batch))
        columns = self._buffer.columns()
        return None if columns is None else Predictions(columns)

    def close(self) -> None:
        """Free the graph and the buffers, and close the reader."""
        self._forward.close()
        self._buffer.close()
        if self._source is not None:
            self._source.close()
