"""Evaluation of 3D U-Net: Dice coefficients of kidney and tumour over the evaluation volumes.

Rules: average the logits of sliding windows by importance, take the class of the largest, compute Dice per volume and
foreground class, and weight all volumes equally (MLPerf training_rules, benchmark table; the reference's evaluation).

Legend: N windows of a forward pass, K classes, D H W voxels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from benchmarks.unet3d.evaluation_sums import VolumeSums
from benchmarks.unet3d.evaluation_volumes import (
    CachedVolume,
    Read,
    cache_volumes,
    choose_share,
    shares_of_rank,
    shares_to_try,
    synthetic_cases,
    synthetic_voxels,
)
from benchmarks.unet3d.sliding_window import INTERSECTION, LABELLED, PREDICTED, SlidingWindow
from benchmarks.unet3d.volumes import VolumeEntry, open_volumes
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.evaluation.counts import check_whole_set
from common.evaluation.forward import ForwardPass

CLASSES = ("background", "kidney", "tumour")


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of the evaluation.

    Attributes:
        window: size and overlap of the windows.
        batch: windows per forward pass.
        dice_smooth: added to numerator and denominator of the Dice coefficient.
    """

    window: SlidingWindow
    batch: int
    dice_smooth: float


class DiceOfCounts(Scorer):
    """Scorer that computes Dice coefficients from the counts of all cases."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``kidney_dice`` and ``tumour_dice``, means over cases, their mean ``mean_dice``, and ``eval_samples``.

        If a class is neither predicted nor labelled in a case, its Dice coefficient is 1 there.

        Raises:
            DataError: a label is outside the classes.
            RuntimeError: not every voxel of a case was evaluated exactly once.
        """
        smooth, cases = predictions.values["dice_smooth"], predictions.values["cases"]
        totals = dict.fromkeys(CLASSES, 0.0)
        for name, case in cases.items():
            _check(name, case["counts"], case["voxels"])
            for label, counts in zip(CLASSES, case["counts"], strict=True):
                both, either = counts[INTERSECTION], counts[PREDICTED] + counts[LABELLED]
                totals[label] += (2 * both + smooth) / (either + smooth)
        kidney, tumour = (totals[label] / len(cases) for label in CLASSES[1:])
        return {
            "mean_dice": (kidney + tumour) / 2,
            "kidney_dice": kidney,
            "tumour_dice": tumour,
            "eval_samples": len(cases),
        }


class MeanDice(Evaluation):
    """Evaluation that counts the voxels of each class per volume, and sums the counts over ranks at the end.

    Cropped and padded volumes stay on the device, and windows are cut from them there. A forward pass takes the next
    windows of this rank, possibly from several volumes. With several ``cp`` ranks, each window is split into slabs
    along D. The host does not wait for the device until all counts are complete.

    It can evaluate the network that is being trained, without a second copy of its weights, and leaves it unchanged.

    Args:
        model: maps an image (N, 1, D, H, W) to logits (N, K, D, H, W), or slabs of them with several cp ranks.
        layout: the ranks that share the evaluation set.
        dtype: dtype of the network's input.
        capture: replay the forward pass as a CUDA graph.

    Raises:
        ConfigError: a window has no equal slabs for the cp ranks.
    """

    def __init__(
        self, model: nn.Module, settings: EvaluationSettings, layout: Layout, dtype: torch.dtype, capture: bool
    ) -> None:
        self.scorer = DiceOfCounts()
        self._settings = settings
        self._layout = layout
        self._dtype = dtype
        self._shares = shares_to_try(layout.size("dp"))
        self._sums = VolumeSums(settings.window, len(CLASSES), self._shares, layout, dtype)
        shape = (settings.batch, 1, *self._sums.slab_shape)
        # With one channel, convolutions recognise the memory format only by the strides.
        memory_format = torch.channels_last_3d if layout.device.type == "cuda" else torch.contiguous_format
        empty_NCDHW = torch.empty(shape, dtype=dtype, device=layout.device, memory_format=memory_format)
        inputs = {"image": empty_NCDHW.zero_()}
        self._forward: ForwardPass[Tensor] = ForwardPass(model, lambda batch: model(batch["image"]), inputs, capture)
        self._cases: Sequence[VolumeEntry] = ()
        self._volumes: list[CachedVolume] = []
        self._synthetic: Sequence[VolumeEntry] = ()

    def warm_up(self) -> None:
        """Run forward passes on zeros, and the operations that follow."""
        logits_NKDHW = self._forward.warm_up()
        expected = (self._settings.batch, len(CLASSES), *self._sums.slab_shape)
        if logits_NKDHW.shape != expected:
            found = tuple(logits_NKDHW.shape)
            raise ConfigError(f"the network's logits have shape {found}, expected {expected}")
        self._sums.warm_up(logits_NKDHW[0])

    def open_data(self, root: Path) -> None:
        """Read this rank's volumes of the evaluation set.

        Raises:
            DataError: the folder is incomplete or damaged, or a volume is smaller than a window.
        """
        if self._synthetic:
            self.cache(self._synthetic, synthetic_voxels)
            return
        volumes = open_volumes(root, self._settings.window.shape)
        self.cache(volumes.eval, volumes.read)

    def with_noise(self, volumes: int) -> Self:
        """Replace the data by ``volumes`` volumes of noise, and return this evaluation."""
        self._synthetic = synthetic_cases(volumes, self._settings.window.shape)
        return self

    def cache(self, cases: Sequence[VolumeEntry], read: Read) -> None:
        """Make ``cases`` the evaluation set, and read the volumes that this rank needs.

        Args:
            cases: the same on all ranks.
            read: returns image and label of a case, (D, H, W).
        """
        windows = [self._windows_of(case) for case in cases]
        dp, rank = self._layout.size("dp"), self._layout.index("dp")
        share = choose_share(windows, dp, self._settings.batch, self._shares)
        shares = shares_of_rank(windows, dp, rank, share)
        self._cases = cases
        self._volumes = cache_volumes(cases, read, shares, self._settings.window, self._layout.device, self._dtype)
        self._sums.open(self._volumes, len(cases), share)

    def predict(self, weights: Weights) -> Predictions:
        """Return ``dice_smooth``, and ``cases`` by name: ``voxels``, and ``counts`` as in ``VolumeSums.all_counts``."""
        assert self._cases, "predict requires open_data"
        with self._forward.evaluating(weights):
            self._sums.clear_counts()
            logits = self._logits()
            for volume in self._volumes:
                self._sums.begin(volume)
                for origin in volume.origins:
                    self._sums.add(origin, next(logits))
                self._sums.count(volume)
        cases = {}
        for case, counts in zip(self._cases, self._sums.all_counts(), strict=True):
            cases[case.name] = {"counts": counts, "voxels": self._settings.window.geometry(case.shape).voxels}
        return Predictions({"cases": cases, "dice_smooth": self._settings.dice_smooth})

    def close(self) -> None:
        """Free the CUDA graph and drop the volumes."""
        self._forward.close()
        self._cases, self._volumes = (), []
        self._sums.close()

    def _logits(self) -> Iterator[Tensor]:
        """Yield logits (K, D, H, W) of every window of this rank, in order; each is valid until the next request."""
        windows = [(volume.image, origin) for volume in self._volumes for origin in volume.origins]
        batch, image_NCDHW = self._settings.batch, self._forward.inputs["image"]
        for first in range(0, len(windows), batch):
            filled = windows[first : first + batch]
            for slot, (image_DHW, origin) in enumerate(filled):
                image_NCDHW[slot, 0].copy_(image_DHW[self._sums.slices(origin)])
            yield from self._forward()[: len(filled)]

    def _windows_of(self, case: VolumeEntry) -> int:
        return len(self._settings.window.geometry(case.shape).origins)


def _check(name: str, counts: Sequence[Sequence[int]], voxels: int) -> None:
    """Check that every voxel has one prediction and one valid label."""
    predicted, labelled = (sum(row[column] for row in counts) for column in (PREDICTED, LABELLED))
    check_whole_set(predicted, voxels, f"voxels of {name}")
    if labelled != voxels:
        raise DataError(
            f"{name}: {voxels - labelled} of {voxels} voxels have a label above {len(CLASSES) - 1}; run "
            "'mlperf-suite verify benchmark=unet3d'"
        )
