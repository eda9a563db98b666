"""Anchors and proposals: from the outputs of the region proposal network to the regions of the heads.

Anchors have one size per level of the pyramid, in several ratios (Lin et al., arXiv:1612.03144). The first anchors of
a level are computed for a cell of one stride and rounded to whole pixels; then they are enlarged. This order is that of
the published code of Faster R-CNN (Ren et al., arXiv:1506.01497) and of the reference. Corners are legacy ones: a box
from x1 to x2 has the width x2 - x1 + 1.

The best candidates of each level are decoded and clipped to their picture. Suppression drops those that overlap a
better one of their level too much. The best of all levels are the proposals. Ren et al., arXiv:1506.01497, sections
3.1 and 3.3, and Lin et al., arXiv:1612.03144, section 4.1. Shapes are fixed, nothing
waits for the device, and nothing has a gradient.

Candidates are ranked by fp32 logits, because probabilities would saturate and tie. Of equal logits, the first anchor
and the finer level come first.

Shapes: B pictures, L levels, A anchors of a level, C candidates of a level, S slots of a picture, M boxes at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.maskrcnn.config import Architecture, Facts
from common.detection.coding import BoxCoding, clip, rows_of
from common.ops.operation import OperationRequest, select
from common.ops.suppression import SUPPRESSION
from common.ops.triton_support import widen

STRIDES = (4, 8, 16, 32, 64)
"""Distance between cells of each level in px, from the finest level."""


def level_sizes(size: Sequence[int]) -> list[tuple[int, int]]:
    """Return height and width of each level in cells, from the finest.

    Args:
        size: height and width of the padded picture, px.
    """
    height, width = size
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES]


def anchors(architecture: Architecture, size: Sequence[int]) -> list[Tensor]:
    """Return the anchors of a picture, in the order of the network's outputs.

    Args:
        size: height and width of the padded picture, px.

    Returns:
        For each level from the finest (A, 4) fp32 corners x1, y1, x2, y2 in px, by row, column and ratio, not clipped
        to the picture.
    """
    found = []
    for cells, stride, side in zip(level_sizes(size), STRIDES, architecture.anchor_sizes, strict=True):
        first_R4 = torch.tensor([_first_anchor(stride, side, ratio) for ratio in architecture.anchor_ratios])
        y, x = torch.meshgrid(*(torch.arange(count, dtype=torch.float32) * stride for count in cells), indexing="ij")
        found.append((torch.stack([x, y, x, y], -1)[:, :, None] + first_R4).flatten(0, 2))
    return found


def _first_anchor(stride: int, side: int, ratio: float) -> list[float]:
    """Return corners around the middle of the first cell. ``round`` rounds halves to even, as in the reference."""
    width = round(math.sqrt(stride * stride / ratio))
    height = round(width * ratio)
    middle = (stride - 1) / 2
    half_width, half_height = ((length * side / stride - 1) / 2 for length in (width, height))
    return [middle - half_width, middle - half_height, middle + half_width, middle + half_height]


PIXEL = 1.0
"""Corners are the first and the last pixel of a box."""

CODING = BoxCoding(weights=(1.0, 1.0, 1.0, 1.0), most_growth=1000 / 16, pixel=PIXEL)
"""Coding of the region proposal network's offsets."""


class Proposals(NamedTuple):
    """Regions in fixed slots.

    Attributes:
        boxes_BS4: corners in px of the resized picture, fp32; 0 in empty slots.
        score_BS: probability of an object, fp32; -inf in empty slots.
    """

    boxes_BS4: Tensor
    score_BS: Tensor


@dataclass(frozen=True)
class Selection:
    """Numbers of candidates and proposals.

    Attributes:
        candidates: maximum number of candidates per level before suppression.
        proposals: maximum number of proposals over all levels.
        over: whether ``proposals`` is per ``picture`` or for the whole ``micro_batch``.
    """

    candidates: int
    proposals: int
    over: Literal["micro_batch", "picture"]


class Proposer:
    """Selects proposals.

    Args:
        facts: threshold of the suppression.

    Raises:
        UnsupportedImplementation: the message names the configuration key.
    """

    def __init__(
        self, facts: Facts, selection: Selection, implementations: Mapping[str, str], device: torch.device
    ) -> None:
        request = OperationRequest(device, torch.float32, {"candidates": selection.candidates})
        self.choice, self._suppress = select(implementations, "suppression", SUPPRESSION, request)
        self._threshold, self._selection = facts.rpn_nms_threshold, selection

    @torch.no_grad()
    def __call__(
        self,
        levels: Sequence[tuple[Tensor, Tensor]],
        anchors: Sequence[Tensor],
        size_B2: Tensor,
        real_B: Tensor | None = None,
    ) -> Proposals:
        """Return the proposals of a micro-batch, without waiting for the device.

        Args:
            levels: logits (B, A) and offsets (B, A, 4) of each level, of any dtype.
            anchors: (A, 4) of each level, fp32.
            size_B2: height and width of the resized pictures without padding, px.
            real_B: bool; pictures with False get no proposals and do not compete with others. None: all are real.

        Returns:
            For a selection over the micro-batch: one slot per candidate, level by level from the finest, the best
            first. For a selection per picture: at most ``proposals`` slots, the best first.
        """
        selection = self._selection
        most = max(min(selection.candidates, len(level)) for level in anchors)
        parts = [
            _best(logits_BA, offsets_BA4, level_A4, min(selection.candidates, len(level_A4)), most)
            for (logits_BA, offsets_BA4), level_A4 in zip(levels, anchors, strict=True)
        ]
        logit_BLC, offsets_BLC4, anchors_BLC4 = (torch.stack(part, 1) for part in zip(*parts, strict=True))
        if real_B is not None:
            logit_BLC = torch.where(real_B.view(-1, 1, 1), logit_BLC, -torch.inf)
        height_B, width_B = size_B2.float().unbind(1)
        boxes_BLC4 = CODING.decode(offsets_BLC4, anchors_BLC4)
        boxes_BLC4 = clip(boxes_BLC4, height_B.view(-1, 1, 1), width_B.view(-1, 1, 1), PIXEL)
        boxes_PC4, logit_PC = boxes_BLC4.flatten(0, 1), logit_BLC.flatten(0, 1)
        kept_PC, valid_PC = self._suppress(
            boxes_PC4, logit_PC, None, self._threshold, most, pixel=PIXEL, presorted=True
        )
        boxes_BLC4 = rows_of(boxes_PC4, kept_PC).view_as(boxes_BLC4)
        logit_BLC = torch.where(valid_PC, logit_PC.gather(1, kept_PC), -torch.inf).view_as(logit_BLC)
        slots = [min(selection.candidates, len(level)) for level in anchors]
        boxes_BS4 = torch.cat([boxes_BLC4[:, level, :kept] for level, kept in enumerate(slots)], 1)
        logit_BS = torch.cat([logit_BLC[:, level, :kept] for level, kept in enumerate(slots)], 1)
        if selection.over == "picture":
            order_BS = logit_BS.sort(dim=1, descending=True, stable=True).indices[:, : selection.proposals]
            boxes_BS4, logit_BS = rows_of(boxes_BS4, order_BS), logit_BS.gather(1, order_BS)
        else:
            beyond = logit_BS.flatten().sort(descending=True, stable=True).indices[selection.proposals :]
            logit_BS = logit_BS.flatten().index_fill(0, beyond, -torch.inf).view_as(logit_BS)
        valid_BS = logit_BS > -torch.inf
        return Proposals(
            torch.where(valid_BS.unsqueeze(2), boxes_BS4, 0.0), torch.where(valid_BS, logit_BS.sigmoid(), -torch.inf)
        )


def with_truth(proposals: Proposals, boxes_BM4: Tensor, count_B: Tensor) -> Proposals:
    """Append M slots to the proposals: the ground-truth boxes with score 1, then empty slots."""
    slot_M = torch.arange(boxes_BM4.shape[1], device=boxes_BM4.device)
    valid_BM = slot_M < count_B.unsqueeze(1)
    score_BM = torch.zeros_like(valid_BM, dtype=torch.float32).masked_fill(valid_BM, 1.0)
    return Proposals(
        torch.cat([proposals.boxes_BS4, torch.where(valid_BM.unsqueeze(2), boxes_BM4, 0.0)], 1),
        torch.cat([proposals.score_BS, torch.where(valid_BM, score_BM, -torch.inf)], 1),
    )


def _best(
    logits_BA: Tensor, offsets_BA4: Tensor, anchors_A4: Tensor, best: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (fp32), offsets and anchors of a level's ``best`` candidates, the best first, in ``slots`` slots.

    Empty slots have a logit of -inf, and zeros as offsets and anchors.
    """
    anchors = logits_BA.shape[1]
    logits_BA = logits_BA.float()
    # The index makes ranks unique: bf16 has many equal logits, and a library can choose any of them.
    position_A = torch.arange(anchors - 1, -1, -1, device=logits_BA.device)
    rank_BC = (_ordered(logits_BA) << 32 | position_A).topk(best, dim=1).values
    row_BC = anchors - 1 - (rank_BC & 0xFFFFFFFF)
    empty = (0, slots - best)
    return (
        torch.nn.functional.pad(logits_BA.gather(1, row_BC), empty, value=-torch.inf),
        torch.nn.functional.pad(widen(rows_of(offsets_BA4, row_BC)), (0, 0, *empty)),
        torch.nn.functional.pad(anchors_A4[row_BC], (0, 0, *empty)),
    )


def _ordered(values: Tensor) -> Tensor:
    """Return integers, int64, in the order of fp32 values. Both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
