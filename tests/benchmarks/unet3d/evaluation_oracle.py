"""Sliding-window evaluation according to the rules, in float64, and a network and small volumes to evaluate.

Windows have 16 voxels and a stride of 8, instead of the benchmark's 128 and 64. Axes: D H W voxels, K classes.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.unet3d.evaluate import EvaluationSettings, MeanDice
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import VolumeEntry
from common.contract.evaluation import Weights
from common.distributed.layout import Layout

SIZE, STRIDE, PADDING_VALUE = 16, 8, -2.2
SHAPES = [(16, 18, 19), (20, 21, 24), (23, 16, 27), (32, 17, 20), (28, 31, 16)]
"""Remainders on both sides of half the stride, even and odd, on every axis."""


class Pattern(nn.Module):
    """Compute logits from intensity, position in the window, and the window's mean; they are wrong in training mode.

    Args:
        factor: a weight.
        first: first plane of the window that the network is given, where windows are cut into slabs.
        mean: whether logits depend on the whole window, which a slab does not know.
    """

    def __init__(self, factor: float = 1.0, first: int = 0, mean: bool = True) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.first, self.mean = first, mean
        self.batches = 0
        self.with_gradients = False

    def forward(self, image_NCDHW: Tensor) -> Tensor:
        self.batches += 1
        self.with_gradients |= torch.is_grad_enabled()
        depth, height, width = image_NCDHW.shape[2:]
        d = torch.arange(self.first, self.first + depth).view(-1, 1, 1)
        h, w = torch.arange(height).view(-1, 1), torch.arange(width)
        position = (0.37 * d + 0.73 * h + 1.3 * w).to(image_NCDHW.dtype)
        whole = image_NCDHW.mean((2, 3, 4), keepdim=True) if self.mean else 0.0
        background = torch.sin(position) + 3 * whole
        kidney = self.factor * image_NCDHW + torch.cos(2.1 * position)
        tumour = -image_NCDHW * torch.sin(0.5 * position) + 0.3 - 5 * whole
        logits = torch.cat([background.expand_as(kidney), kidney, tumour], 1)
        return logits - 1000 * logits.detach() if self.training else logits


def volume(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noise, and random labels of all classes."""
    generator = np.random.default_rng(seed)
    image = generator.standard_normal(shape).astype(np.float32)
    label = generator.choice(3, shape, p=(0.5, 0.3, 0.2)).astype(np.uint8)
    return image, label


def importance() -> np.ndarray:
    """Return the cube root of the outer product of three Gaussian windows, over its maximum."""
    gaussian = np.array([np.exp(-0.5 * ((i - 7.5) / 2.0) ** 2) for i in range(SIZE)])
    cube = np.cbrt(gaussian[:, None, None] * gaussian[None, :, None] * gaussian[None, None, :])
    return cube / cube.max()


def crop_and_pad(size: int) -> tuple[int, int, int, int]:
    """Return the voxels cropped at the start and end of an axis, then added at the start and end."""
    cropped = size % STRIDE if size % STRIDE < STRIDE / 2 else 0
    rest = size - cropped
    added = (STRIDE - rest % STRIDE) % STRIDE
    if rest + added < SIZE:
        added += STRIDE
    return cropped // 2, cropped - cropped // 2, added // 2, added - added // 2


def average_logits(image: np.ndarray, network: nn.Module) -> tuple[np.ndarray, list[slice]]:
    """Return normalised logits (K, D, H, W) of the cropped volume, and the crop."""
    ends = [crop_and_pad(size) for size in image.shape]
    crop = [slice(low, size - high) for size, (low, high, _, _) in zip(image.shape, ends, strict=True)]
    widths = [(low, high) for _, _, low, high in ends]
    padded = np.pad(image[tuple(crop)].astype(np.float64), widths, constant_values=PADDING_VALUE)
    result, norm = np.zeros((3, *padded.shape)), np.zeros(padded.shape)
    weight = importance()
    for d, h, w in itertools.product(*(range(0, size - SIZE + 1, STRIDE) for size in padded.shape)):
        window = torch.from_numpy(padded[d : d + SIZE, h : h + SIZE, w : w + SIZE].copy())[None, None]
        with torch.no_grad():
            logits = network(window)[0].numpy()
        result[:, d : d + SIZE, h : h + SIZE, w : w + SIZE] += logits * weight
        norm[d : d + SIZE, h : h + SIZE, w : w + SIZE] += weight
    result /= norm
    (d, _), (h, _), (w, _) = widths
    inside = [slice(start, start + part.stop - part.start) for start, part in zip((d, h, w), crop, strict=True)]
    return result[(slice(None), *inside)], crop


def counts(image: np.ndarray, label: np.ndarray, network: nn.Module) -> list[list[int]]:
    """Return for each class the numbers of voxels that are both, predicted, and labelled."""
    logits, crop = average_logits(image, network)
    predicted, scored = logits.argmax(0), label[tuple(crop)]
    return [
        [int(((predicted == k) & (scored == k)).sum()), int((predicted == k).sum()), int((scored == k).sum())]
        for k in range(3)
    ]


EVAL_CASES = [VolumeEntry(f"case_{number:05d}", shape, "eval") for number, shape in enumerate(SHAPES)]
SMALL = SlidingWindow((16, 16, 16), 0.5, PADDING_VALUE)


def read(case):
    return volume(case.shape, seed=int(case.name[-5:]))


def expected_counts(**options):
    network = Pattern(**options).eval()
    return {case.name: counts(*read(case), network) for case in EVAL_CASES}


def evaluation_of(model, layout=None, batch=3, window=SMALL, cases=EVAL_CASES, dtype=torch.float32):
    settings = EvaluationSettings(window, batch, dice_smooth=1e-6)
    evaluation = MeanDice(model, settings, layout or Layout(), dtype, capture=True)
    evaluation.warm_up()
    evaluation.cache(cases, read)
    return evaluation


def weights_of(model):
    return Weights(dict(model.named_parameters()))


def counts_of(evaluation, model):
    cases = evaluation.predict(weights_of(model)).values["cases"]
    return {name: case["counts"] for name, case in cases.items()}
