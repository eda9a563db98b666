"""Sizes of the reference data sets, in samples.

Sources: the reference implementations, the rule files of the checkers, and the published logs of v0.7 to v6.0.
Benchmarks whose ``train_samples`` reports the number of trained samples (BERT, GPT-3, Llama 3.1) have no training size.
"""

from __future__ import annotations

import math

from common.mlperf.rules import Rules

TRAINING: dict[str, tuple[int, ...]] = {
    "resnet": (1_281_167,),
    "ssd300": (117_266, 118_287),  # images with objects; all images
    "retinanet": (1_170_301,),
    "maskrcnn": (117_266, 118_287),
    "unet3d": (168,),
    "dlrm": (4_195_197_692,),
    "dlrm_dcnv2": (4_195_197_692,),
    "stable_diffusion": (6_513_144,),
    "llama2_70b_lora": (3_901,),
    "rgat": (94_605_581,),
    "cosmoflow": (524_288,),
    "deepcam": (121_266,),
}
"""Benchmark -> possible sizes of its training set."""

EVALUATION: dict[str, tuple[int, ...]] = {
    "resnet": (50_000,),
    "ssd300": (5_000,),
    "retinanet": (24_781,),
    "maskrcnn": (5_000,),
    "unet3d": (42,),
    "rnnt": (2_703,),
    "bert": (10_000,),
    "dlrm": (89_137_318, 89_137_319),
    "dlrm_dcnv2": (89_137_319,),
    "stable_diffusion": (30_000,),
    "llama2_70b_lora": (173,),
    "llama31_8b": (1_024,),
    "llama31_405b": (5_760,),
    "rgat": (788_379,),
    "cosmoflow": (65_536,),
    "deepcam": (15_158,),
    "openfold": (180,),
}
"""Benchmark -> possible sizes of its evaluation set."""

PADDING = 1.5
"""Largest allowed ratio of padded to real evaluation samples. One published result pads 50,000 images to 65,536."""


def wrong_size(key: str, value: int, global_batch: int, rules: Rules) -> str | None:
    """Return why ``train_samples`` or ``eval_samples`` is not the size of the reference data set; None if it may be.

    Accepts samples, samples in whole batches, and batches, because published logs use all three.
    """
    sizes = (TRAINING if key == "train_samples" else EVALUATION).get(rules.benchmark)
    if sizes is None or any(_fits(key, value, size, global_batch) for size in sizes):
        return None
    return (
        f"{key} is {value:,}; the reference data set of {rules.benchmark} has "
        f"{' or '.join(f'{size:,}' for size in sizes)}"
    )


def _fits(key: str, value: int, size: int, global_batch: int) -> bool:
    batches = math.ceil(size / global_batch)
    if value in (size, batches):
        return True
    if key == "eval_samples":
        return size <= value <= PADDING * size
    return value in (batches * global_batch, (batches - 1) * global_batch)
