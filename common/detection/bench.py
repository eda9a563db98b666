"""Time COCO's scores of made-up detections: ``python -m common.detection.bench --pictures 24781``.

Pictures have 7 boxes of 264 classes on average, as the validation set of OpenImages for MLPerf about has, and 300
detections: ``--near`` of them near a box and of its class, the others of any. With ``--processes`` each box is filled
by a mask, and boxes and masks are scored side by side, the masks' overlaps by so many processes; COCO 2017 is about
``--pictures 5000 --detections 100 --classes 80 --processes 16``.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch

from common.contract.evaluation import Predictions
from common.data.ragged import bounds_of
from common.detection.annotations import Annotations
from common.detection.coco_scoring import Detections, GroundTruth, score
from common.detection.mask_scorer import MaskScorer
from common.detection.polygons import Polygons
from common.detection.segmentations import Segmentations
from common.ops.bench.stopwatch import require_gpu

CLASSES = 264
BOXES = 7
SIDE = 800.0


def made_up(
    pictures: int, detections: int, near: float, device: torch.device, seed: int = 0, classes: int = CLASSES
) -> tuple[GroundTruth, Detections]:
    """Random ground truth, and detections of which the part ``near`` looks for it."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    def boxes(count: int) -> torch.Tensor:
        return torch.cat([uniform(count, 2) * SIDE / 2, 8 + uniform(count, 2) * SIDE / 2], 1)

    truth = pictures * BOXES
    picture_G = torch.randint(pictures, (truth,), generator=random)
    class_G = (classes * uniform(truth) ** 3).long()  # few classes have most boxes
    box_G4 = boxes(truth)
    total = pictures * detections
    target_D = torch.randint(truth, (total,), generator=random)
    aims_D = uniform(total) < near
    off_D4 = 0.1 * (uniform(total, 4) - 0.5) * box_G4[target_D][:, [2, 3, 2, 3]]
    picture_D, order_D = torch.where(
        aims_D, picture_G[target_D], torch.randint(pictures, (total,), generator=random)
    ).sort()
    class_D = torch.where(aims_D, class_G[target_D], (classes * uniform(total)).long())[order_D]
    box_D4 = torch.where(aims_D.unsqueeze(1), box_G4[target_D] + off_D4, boxes(total))[order_D]
    return (
        GroundTruth(
            torch.arange(pictures, device=device),
            torch.arange(classes, device=device),
            picture_G.to(device),
            class_G.to(device),
            box_G4.to(device),
            box_G4[:, 2:].prod(1).to(device),
            (uniform(truth) < 0.05).to(device),
        ),
        Detections(picture_D.to(device), class_D.to(device), box_D4.to(device), uniform(total).to(device)),
    )


def with_masks(truth: GroundTruth, found: Detections) -> tuple[Annotations, Predictions]:
    """The same with a mask that fills each box, cut to whole pixels of a square picture."""
    objects, side = len(truth.box), int(SIDE)
    x, y, width, height = truth.box.numpy().T
    corners_N42 = np.stack([x, y, x + width, y, x + width, y + height, x, y + height], 1).reshape(-1, 2)
    polygons = Polygons(np.arange(objects + 1, dtype=np.int32), np.arange(objects + 1, dtype=np.int32) * 4, corners_N42)
    annotations = Annotations(
        truth.pictures.numpy(),
        np.full(len(truth.pictures), side),
        np.full(len(truth.pictures), side),
        truth.classes.numpy(),
        truth.picture_id.numpy(),
        truth.class_id.numpy(),
        truth.box.numpy(),
        truth.area.numpy(),
        truth.crowd.numpy(),
        segmentations=Segmentations(polygons, np.zeros(objects + 1, np.int64), np.zeros(0, np.int32)),
    )
    first_D2 = found.box[:, :2].long().clamp(0, side - 2).numpy()
    size_D2 = np.minimum(found.box[:, 2:].long().clamp(min=1).numpy(), side - 1 - first_D2)
    (x, y), (width, height) = first_D2.T, size_D2.T
    count_D = 2 * width + 1
    bounds = bounds_of(count_D)
    nth = np.arange(bounds[-1]) - np.repeat(bounds[:-1], count_D)
    inside = np.repeat(height, count_D)
    runs = np.where(nth % 2, inside, side - inside)
    runs[bounds[:-1]] = x * side + y
    runs[bounds[1:] - 1] = side * side - (x + width - 1) * side - y - height
    columns = {
        "pictures": truth.pictures.numpy(),
        "picture_id": found.picture_id.numpy(),
        "class_id": found.class_id.numpy(),
        "box": found.box.numpy(),
        "score": found.score.numpy(),
        "run_count": count_D.astype(np.int32),
        "runs": runs.astype(np.int32),
    }
    return annotations, Predictions(columns)


def main() -> None:
    """Print seconds of each round, and the most memory."""
    parser = argparse.ArgumentParser(description="time COCO's scores of made-up detections")
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--detections", type=int, default=300, help="of a picture (default: 300)")
    parser.add_argument("--near", type=float, default=0.3, help="part of them near a box (default: 0.3)")
    parser.add_argument("--classes", type=int, default=CLASSES, help=f"(default: {CLASSES})")
    parser.add_argument("--processes", type=int, default=0, help="for overlaps of masks; 0 for no masks (default)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.device.type == "cuda":
        require_gpu("common.detection.bench", "--device cpu measures a CPU")
    where = torch.device("cpu") if args.processes else args.device
    truth, found = made_up(args.pictures, args.detections, args.near, where, classes=args.classes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{args.pictures} pictures x {args.detections}, {args.device}, {torch.get_num_threads()} threads")
    scorer: MaskScorer | None = None
    if args.processes:
        annotations, predictions = with_masks(truth, found)
        scorer = MaskScorer(lambda root: annotations, args.device, args.processes)
        scorer.open_data(Path())
        print(f"masks of {predictions.values['run_count'].mean():.0f} runs, {args.processes} processes")
    for _ in range(args.rounds):
        start = time.perf_counter()
        figures = score(truth, found) if scorer is None else scorer.score(predictions)
        told = ", ".join(f"{name} {figures[name]:.6f}" for name in ("AP", "BBOX", "SEGM") if name in figures)
        print(f"{time.perf_counter() - start:8.2f} s   {told}")
    if scorer is not None:
        scorer.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"host memory {before >> 10} MiB, while scoring at most {after >> 10} MiB")
    if args.device.type == "cuda":
        print(f"device memory at most {torch.cuda.max_memory_allocated(args.device) >> 20} MiB")


if __name__ == "__main__":
    main()
