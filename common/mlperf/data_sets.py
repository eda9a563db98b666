"""How many samples the rules' data sets have, as published logs count them.

Sources: the benchmarks' references and rule files, and the logs of the rounds v0.7 to v6.0. Benchmarks whose logs say
how much was trained instead of how much there is (``train_samples`` of BERT, GPT-3, Llama 3.1) have no entry for it.
"""

from __future__ import annotations

import math

from common.mlperf.rules import Rules

TRAINING: dict[str, tuple[int, ...]] = {
    "resnet": (1_281_167,),
    "ssd300": (117_266, 118_287),  # images with objects, and all
    "retinanet": (1_170_301,),
    "maskrcnn": (117_266, 118_287),
    "unet3d": (168,),
    "dlrm": (4_195_197_692,),
    "dlrm_dcnv2": (4_195_197_692,),
    "stable_diffusion": (6_513_144,),
    "llama2_70b_lora": (3_901,),
    "cosmoflow": (524_288,),
    "deepcam": (121_266,),
}
"""Benchmark to the sizes of its training set."""

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
"""Benchmark to the sizes of its evaluation set."""

PADDING = 1.5
"""By how much an evaluation set may be filled up: with 65,536 pictures for 50,000 in a published result."""


def wrong_size(key: str, value: int, global_batch: int, rules: Rules) -> str | None:
    """Why ``train_samples`` or ``eval_samples`` is not what the rules' data set has; None if nothing is known.

    Published logs count samples, whole batches of them, or the batches.
    """
    sizes = (TRAINING if key == "train_samples" else EVALUATION).get(rules.benchmark)
    if sizes is None or any(_fits(key, value, size, global_batch) for size in sizes):
        return None
    return f"{key} is {value:,}; the rules' set of {rules.benchmark} has {' or '.join(f'{size:,}' for size in sizes)}"


def _fits(key: str, value: int, size: int, global_batch: int) -> bool:
    batches = math.ceil(size / global_batch)
    if value in (size, batches):
        return True
    if key == "eval_samples":
        return size <= value <= PADDING * size
    return value in (batches * global_batch, (batches - 1) * global_batch)
