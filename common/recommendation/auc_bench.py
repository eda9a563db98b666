"""How long the area under the ROC curve takes: ``python -m common.recommendation.auc_bench --samples 89137319``.

Keys are made of normal logits whose mean depends on the label, of which 3 % are positive, as in Criteo's data.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from common.ops.bench.stopwatch import require_gpu
from common.recommendation.auc import CHUNK, rank, ranking_keys

POSITIVE_SHARE = 0.03


def made_keys(samples: int, device: torch.device, seed: int = 0) -> Tensor:
    """Keys of ``samples`` made-up predictions: int32 (samples,)."""
    generator = torch.Generator(device).manual_seed(seed)
    keys_N = torch.empty(samples, dtype=torch.int32, device=device)
    for part_C in keys_N.split(CHUNK):
        label_C = torch.rand(len(part_C), generator=generator, device=device) < POSITIVE_SHARE
        logit_C = torch.randn(len(part_C), generator=generator, device=device) + 1.2 * label_C - 3.5
        part_C.copy_(ranking_keys(logit_C, label_C))
    return keys_N


def main(arguments: Sequence[str] | None = None) -> None:
    """Print area and median time in milliseconds; two runs before are not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=89_137_319)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=10)
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda":
        require_gpu("common.recommendation.auc_bench", "--device cpu measures a CPU")
    keys_N = made_keys(asked.samples, device)
    times = []
    for _ in range(2 + asked.runs):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        area = rank(keys_N).area  # waits for the device
        times.append(1000 * (time.perf_counter() - start))
    print(f"{asked.samples:,} samples on {device}: AUC {area:.6f}, {statistics.median(times[2:]):.2f} ms")
    if device.type == "cuda":
        print(f"memory at its peak, keys included: {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
