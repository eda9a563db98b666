"""The losses of an iteration, picture by picture, on lists without padding: oracle of the iteration at fixed shapes.

Both use the same layers of the network. Here, torchvision cuts out regions, pycocotools draws masks, and
:mod:`tests.benchmarks.maskrcnn.plain_detector` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align

from benchmarks.maskrcnn.config import MaskRCNNConfig
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.proposals import STRIDES, anchors
from tests.benchmarks.maskrcnn import plain_detector as plain
from tests.benchmarks.maskrcnn.mask_oracle import Outline, Targets, expected_targets

NAMES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")


class Picture(NamedTuple):
    """Content of a slot of a batch.

    Attributes:
        size: height and width without padding, px.
        boxes, labels, outlines: its objects; the outlines in px of the published picture.
        transform: see ``ops.mask_targets``.
        real: whether the slot counts.
    """

    size: tuple[float, float]
    boxes: list[list[float]]
    labels: list[int]
    outlines: list[Outline]
    transform: list[float]
    real: bool = True


def smooth_l1(found: Tensor, wanted: Sequence[float], beta: float) -> Tensor:
    distance = (found - torch.tensor(wanted, dtype=found.dtype)).abs()
    return torch.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta).sum()


def losses(
    model: MaskRCNN, own: MaskRCNNConfig, image_NCHW: Tensor, pictures: Sequence[Picture], seed: int
) -> dict[str, Tensor]:
    """The five losses by their names, and ``mask_slots``."""
    facts, hparams, capacity = own.facts, own.hparams, own.reader.max_boxes
    shape = (image_NCHW.shape[2], image_NCHW.shape[3])
    levels = model.pyramid(image_NCHW)
    outputs = [_by_anchor(output) for output in model.propose(levels)]
    anchors_by_level = [level.tolist() for level in anchors(facts, shape)]
    every_anchor = [anchor for level in anchors_by_level for anchor in level]

    entropy, distance, sampled = _zero(image_NCHW), _zero(image_NCHW), 0
    regions = []
    for number, picture in enumerate(pictures):
        if not picture.real:
            regions.append([])
            continue
        logits, offsets = (torch.cat([level[part][number] for level in outputs]) for part in range(2))
        target = plain.rpn_target(
            every_anchor, picture.boxes, *picture.size, facts.rpn_low, facts.rpn_high, facts.rpn_samples,
            int(facts.rpn_samples * facts.rpn_positive), _keys(seed, plain.RPN_STREAM, number, len(every_anchor)),
        )  # fmt: skip
        sampled += len(target.positive) + len(target.negative)
        for index, wanted in zip(target.positive, target.offsets, strict=True):
            entropy = entropy - F.logsigmoid(logits[index])
            distance = distance + smooth_l1(offsets[index], wanted, facts.rpn_beta)
        for index in target.negative:
            entropy = entropy - F.logsigmoid(-logits[index])
        regions.append(
            plain.propose(
                [(level[0][number].tolist(), level[1][number].tolist()) for level in outputs], anchors_by_level,
                *picture.size, facts.train_candidates, facts.rpn_nms_threshold,
            )
        )  # fmt: skip
    slots = sum(min(len(level), facts.train_candidates) for level in anchors_by_level)
    if hparams.candidates_from == "picture":
        slots = min(slots, hparams.image_candidates)
        regions = [plain.best_of_picture(of, slots) for of in regions]
    else:
        regions = plain.best_of_batch(regions, hparams.image_candidates)

    found: list[tuple[int, plain.RoiTarget]] = []
    for number, (picture, of) in enumerate(zip(pictures, regions, strict=True)):
        found += [
            (number, target)
            for target in plain.roi_targets(
                of, picture.boxes, picture.labels, slots, facts.roi_low, facts.box_weights, facts.roi_sampled,
                int(facts.roi_sampled * facts.roi_positive), _keys(seed, plain.ROI_STREAM, number, slots + capacity),
            )
        ]  # fmt: skip
    made = dict.fromkeys(NAMES, _zero(image_NCHW))
    made["loss_objectness"], made["loss_rpn_box_reg"] = entropy / max(sampled, 1), distance / max(sampled, 1)
    if found:
        logits, deltas = model.box_head(_cut_out(levels, found, facts.box_resolution, facts.roi_samples))
        labels = torch.tensor([target.label for _, target in found])
        made["loss_classifier"] = F.cross_entropy(logits, labels)
        made["loss_box_reg"] = sum(
            (
                smooth_l1(row[4 * target.label : 4 * target.label + 4], target.offsets, facts.box_beta)
                for row, (_, target) in zip(deltas, found, strict=True)
                if target.label > 0
            ),
            _zero(image_NCHW),
        ) / len(found)
    masked = [(number, target) for number, target in found if target.label > 0]
    if masked:
        features = _cut_out(levels, masked, facts.mask_resolution, facts.roi_samples)
        own_logits = model.mask_head(features, torch.tensor([target.label for _, target in masked]))
        wanted = [_mask(pictures[number], target, facts.mask_size) for number, target in masked]
        made["loss_mask"] = F.binary_cross_entropy_with_logits(own_logits, torch.stack(wanted).to(own_logits.dtype))
    made["mask_slots"] = torch.tensor(len(masked))
    return made


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype)


def _keys(seed: int, stream: int, picture: int, candidates: int) -> Callable[[int], int]:
    return lambda index: plain.key(seed, stream, picture * candidates + index)


def _by_anchor(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (N, A) and offsets (N, A, 4) by row, column and shape of the anchor."""
    logits_NAHW, deltas_NXHW = output
    pictures, shapes = logits_NAHW.shape[:2]
    deltas = deltas_NXHW.unflatten(1, (shapes, 4)).permute(0, 3, 4, 1, 2)
    return logits_NAHW.permute(0, 2, 3, 1).reshape(pictures, -1), deltas.reshape(pictures, -1, 4)


def _cut_out(levels: Sequence[Tensor], found: Sequence[tuple[int, plain.RoiTarget]], size: int, samples: int) -> Tensor:
    rows = []
    for number, target in found:
        x1, y1, x2, y2 = target.box
        area = (x2 - x1 + 1) * (y2 - y1 + 1)
        level = min(max(math.floor(4 + math.log2(math.sqrt(area) / 224 + 1e-6)), 2), 5) - 2
        box = torch.tensor([[number, *target.box]], dtype=levels[0].dtype)
        rows.append(roi_align(levels[level].contiguous(), box, size, 1 / STRIDES[level], samples, aligned=False))
    return torch.cat(rows)


def _mask(picture: Picture, target: plain.RoiTarget, size: int) -> Tensor:
    case = Targets(
        picture.outlines, torch.tensor([target.slot]), torch.tensor([target.box]), torch.tensor([picture.transform])
    )
    return expected_targets(case, size)[0]
