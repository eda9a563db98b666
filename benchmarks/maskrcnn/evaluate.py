"""Mask R-CNN's evaluation: connects reader, network, proposals, detections, masks and scores.

A captured pass begins with a reader's batch of decoded pictures. There is one pass per padded shape.

Legend: B pictures of a batch, S side of a slot, D detections of all pictures, M height and width of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Facts, MaskRCNNConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.detect import Detector
from benchmarks.maskrcnn.heads import RpnOutput
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.ops.paste import PASTE
from benchmarks.maskrcnn.ops.paste.masks import find_runs
from benchmarks.maskrcnn.ops.roi_align import ROI_ALIGN
from benchmarks.maskrcnn.pictures import Preparer
from benchmarks.maskrcnn.prepared import open_prepared
from benchmarks.maskrcnn.proposals import Proposals, Proposer, Selection, anchors
from common.contract.evaluation import Scorer
from common.data.batches import EvalSource
from common.detection.annotations import Annotations
from common.detection.detections import PADDING, Found
from common.detection.evaluation import BatchShape, DetectionEvaluation
from common.distributed.layout import Layout
from common.ops.operation import OperationRequest, select


def evaluation(
    model: MaskRCNN,
    own: MaskRCNNConfig,
    data: MaskData,
    preparer: Preparer,
    layout: Layout,
    capture: bool,
    scorer: Scorer,
) -> tuple[DetectionEvaluation, dict[str, str]]:
    """Build the evaluation: COCO's mean average precision of boxes and of masks, ``BBOX`` and ``SEGM``.

    Args:
        model: the network, on its final device.
        preparer: computes the network's input from decoded pictures.
        layout: ranks that share the evaluation set.
        capture: replay the passes as CUDA graphs.

    Returns:
        The evaluation, and operation to the chosen implementation.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """
    facts, device, implementations = own.facts, layout.device, own.model.implementations
    align = select(implementations, "roi_align", ROI_ALIGN, OperationRequest(device, _dtype(model)))
    pasting = select(implementations, "paste", PASTE, OperationRequest(device, torch.float32))
    detector = Detector(model, facts, align.function, implementations, device)
    proposer = Proposer(facts, Selection.evaluation(facts), implementations, device)

    def batches(shape: tuple[int, int]) -> BatchShape:
        of_levels = [level_A4.to(device) for level_A4 in anchors(facts, shape)]

        def propose(outputs: Sequence[RpnOutput], size_B2: Tensor) -> Proposals:
            return proposer([output.flat() for output in outputs], of_levels, size_B2)

        def detect(inputs: Mapping[str, Tensor]) -> Found:
            return detector(preparer.evaluation(inputs, shape), propose)

        return BatchShape(detect, example_inputs(facts, own.reader.eval_batch, shape, layout))

    def open_source(root: Path) -> EvalSource:
        detector.name_classes(data.category_ids(root))
        return data.open_eval(root, layout, own.reader.eval_batch)

    made = DetectionEvaluation(
        model,
        {shape: batches(shape) for shape in own.reader.shapes},
        open_source,
        facts.detections,
        layout,
        capture,
        scorer,
        partial(find_runs, pasting.function, facts.mask_threshold),
    )
    return made, {"suppression": detector.choice, "roi_align": align.name, "paste": pasting.name}


def ground_truth(root: Path) -> Annotations:
    """Return all objects of the validation pictures under ``root``, with segmentations.

    Raises:
        DataError: manifest or files are missing or damaged.
    """
    truth = open_prepared(root).truth()
    return replace(truth.annotations, segmentations=truth.segmentations)


def example_inputs(facts: Facts, batch: int, shape: tuple[int, int], layout: Layout) -> dict[str, Tensor]:
    """Return a synthetic batch of random pictures for padded ``shape``, on the device, in the format of the readers."""
    (height, width), side = shape, facts.longest_side
    scale = min(1.0, side / max(shape))
    decoded = [max(int(length * scale), 1) for length in shape]
    noise = torch.randint(256, (batch, side, side, 3), generator=layout.generator("example")).to(torch.uint8)
    inputs = {
        "pixels": noise,
        "decoded_size": torch.tensor([decoded] * batch, dtype=torch.int32),
        "size": torch.tensor([[float(height), float(width)]] * batch),
        "picture": torch.full((batch,), PADDING, dtype=torch.int64),
    }
    return {name: tensor.to(layout.device) for name, tensor in inputs.items()}


def _dtype(model: MaskRCNN) -> torch.dtype:
    return next(model.parameters()).dtype
