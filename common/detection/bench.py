"""Time COCO's scores of made-up detections: ``python -m common.detection.bench --pictures 24781``.

Pictures have 7 boxes of 264 classes on average, as the validation set of OpenImages for MLPerf about has, and 300
detections: ``--near`` of them near a box and of its class, the others of any.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from common.detection.coco_scoring import Detections, GroundTruth, score

CLASSES = 264
BOXES = 7
SIDE = 800.0


def made_up(
    pictures: int, detections: int, near: float, device: torch.device, seed: int = 0
) -> tuple[GroundTruth, Detections]:
    """Random ground truth, and detections of which the part ``near`` looks for it."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    def boxes(count: int) -> torch.Tensor:
        return torch.cat([uniform(count, 2) * SIDE / 2, 8 + uniform(count, 2) * SIDE / 2], 1)

    truth = pictures * BOXES
    picture_G = torch.randint(pictures, (truth,), generator=random)
    class_G = (CLASSES * uniform(truth) ** 3).long()  # few classes have most boxes
    box_G4 = boxes(truth)
    total = pictures * detections
    target_D = torch.randint(truth, (total,), generator=random)
    aims_D = uniform(total) < near
    off_D4 = 0.1 * (uniform(total, 4) - 0.5) * box_G4[target_D][:, [2, 3, 2, 3]]
    picture_D, order_D = torch.where(
        aims_D, picture_G[target_D], torch.randint(pictures, (total,), generator=random)
    ).sort()
    class_D = torch.where(aims_D, class_G[target_D], (CLASSES * uniform(total)).long())[order_D]
    box_D4 = torch.where(aims_D.unsqueeze(1), box_G4[target_D] + off_D4, boxes(total))[order_D]
    return (
        GroundTruth(
            torch.arange(pictures, device=device),
            torch.arange(CLASSES, device=device),
            picture_G.to(device),
            class_G.to(device),
            box_G4.to(device),
            box_G4[:, 2:].prod(1).to(device),
            (uniform(truth) < 0.05).to(device),
        ),
        Detections(picture_D.to(device), class_D.to(device), box_D4.to(device), uniform(total).to(device)),
    )


def main() -> None:
    """Print seconds of each round, and the most memory."""
    parser = argparse.ArgumentParser(description="time COCO's scores of made-up detections")
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--detections", type=int, default=300, help="of a picture (default: 300)")
    parser.add_argument("--near", type=float, default=0.3, help="part of them near a box (default: 0.3)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    truth, found = made_up(args.pictures, args.detections, args.near, args.device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{args.pictures} pictures x {args.detections}, {args.device}, {torch.get_num_threads()} threads")
    for _ in range(args.rounds):
        start = time.perf_counter()
        figures = score(truth, found)
        print(f"{time.perf_counter() - start:8.2f} s   AP {figures['AP']:.6f}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"host memory {before >> 10} MiB, while scoring at most {after >> 10} MiB")
    if args.device.type == "cuda":
        print(f"device memory at most {torch.cuda.max_memory_allocated(args.device) >> 20} MiB")


if __name__ == "__main__":
    main()
