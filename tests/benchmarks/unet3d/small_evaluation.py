"""An evaluation of a few small volumes: their voxels, and what a network's predictions for them count."""

from __future__ import annotations

import torch

from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import VolumeEntry
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from tests.benchmarks.unet3d import evaluation_oracle as oracle
from tests.benchmarks.unet3d.evaluation_oracle import Pattern

EVAL_CASES = [VolumeEntry(f"case_{number:05d}", shape, "eval") for number, shape in enumerate(oracle.SHAPES)]
SMALL = SlidingWindow((16, 16, 16), 0.5, oracle.PADDING_VALUE)


def read(case):
    return oracle.volume(case.shape, seed=int(case.name[-5:]))


def by_hand(**options):
    network = Pattern(**options).eval()
    return {case.name: oracle.counts(*read(case), network) for case in EVAL_CASES}


def evaluation_of(model, layout=None, batch=3, share=None, window=SMALL, cases=EVAL_CASES, dtype=torch.float32):
    settings = EvaluationSettings(window, batch, share, dice_smooth=1e-6)
    evaluation = MeanDice(model, settings, layout or Layout(), dtype, capture=True)
    evaluation.warm_up()
    evaluation.cache(cases, read)
    return evaluation


def weights_of(model):
    return Weights(dict(model.named_parameters()))


def counts_of(evaluation, model):
    cases = evaluation.predict(weights_of(model)).values["cases"]
    return {name: case["counts"] for name, case in cases.items()}
