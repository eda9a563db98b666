"""3D U-Net's evaluation: the Dice coefficient of kidney and tumour over exactly the evaluation volumes.

Rules: sliding windows, the importance-weighted average of their logits, the class of the largest, Dice per volume and
class without the background, each volume alike (MLPerf training_rules, benchmark table; the reference's evaluation).

Legend: N windows of a forward pass, K classes, D H W voxels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from benchmarks.unet3d.evaluation_shares import choose_share, shares_to_try
from benchmarks.unet3d.evaluation_sums import VolumeSums
from benchmarks.unet3d.evaluation_volumes import (
    CachedVolume,
    Read,
    cache_volumes,
    shares_of_rank,
    synthetic_cases,
    synthetic_voxels,
)
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import Case, open_volumes
from benchmarks.unet3d.window_sums import INTERSECTION, LABELLED, PREDICTED
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from common.evaluation.counts import check_whole_set
from common.evaluation.forward import ForwardPass

CLASSES = ("background", "kidney", "tumour")


@dataclass(frozen=True)
class EvaluationSettings:
    """How volumes are evaluated.

    Attributes:
        window: size and overlap of the windows.
        batch: windows of one forward pass.
        share: neighbouring data-parallel ranks that share the windows of each volume; None for what balances the
            ranks best once the volumes are known.
        dice_smooth: added to numerator and denominator of the Dice coefficient.
    """

    window: SlidingWindow
    batch: int
    share: int | None
    dice_smooth: float


class DiceOfCounts(Scorer):
    """Dice coefficients of the counts of all cases."""

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Dice of kidney and tumour, each averaged over the cases, and the mean of both.

        A class that is neither predicted nor labelled in a case has a Dice coefficient of 1 there.

        Raises:
            DataError: a label is of none of the classes.
            RuntimeError: not every voxel of a case was evaluated once.
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
    """Counts the voxels of each class per volume, summed over the ranks once an evaluation.

    Volumes stay on the device, cropped and padded, and windows are cut out of them there. A forward pass takes the next
    windows of this rank's volumes, also across the border between two. With ``cp`` ranks each window is cut into slabs
    along D, and a rank passes its slab through the network. Nothing waits for the device before the counts of all
    volumes are there.

    The network that trains can be the one that is evaluated: there is no second copy of its weights, and afterwards it
    is as it was.

    Args:
        model: image (N, 1, D, H, W) to logits (N, K, D, H, W); of slabs where ``layout`` has several cp ranks.
        settings: windows, and how they are dealt.
        layout: the ranks that share the evaluation set.
        dtype: of the images that the network takes.
        capture: replay the forward pass as a CUDA graph.

    Raises:
        ConfigError, UnsupportedImplementation: as :class:`benchmarks.unet3d.evaluation_sums.VolumeSums`.
    """

    def __init__(
        self, model: nn.Module, settings: EvaluationSettings, layout: Layout, dtype: torch.dtype, capture: bool
    ) -> None:
        self.scorer = DiceOfCounts()
        self._settings = settings
        self._layout = layout
        self._dtype = dtype
        self._shares = shares_to_try(layout.size("dp"), settings.share)
        self._sums = VolumeSums(settings.window, len(CLASSES), self._shares, layout, dtype)
        shape = (settings.batch, 1, *self._sums.slab_shape)
        # With one channel only the strides tell the convolutions which of the two formats it is.
        memory_format = torch.channels_last_3d if layout.device.type == "cuda" else torch.contiguous_format
        empty_NCDHW = torch.empty(shape, dtype=dtype, device=layout.device, memory_format=memory_format)
        inputs = {"image": empty_NCDHW.zero_()}
        self._forward: ForwardPass[Tensor] = ForwardPass(model, lambda batch: model(batch["image"]), inputs, capture)
        self._cases: Sequence[Case] = ()
        self._volumes: list[CachedVolume] = []
        self._synthetic: Sequence[Case] = ()

    def warm_up(self) -> None:
        """Forward passes on zeros, and what comes after them."""
        logits_NKDHW = self._forward.warm_up()
        expected = (self._settings.batch, len(CLASSES), *self._sums.slab_shape)
        if logits_NKDHW.shape != expected:
            found = tuple(logits_NKDHW.shape)
            raise ConfigError(f"the network's logits have shape {found}, an evaluation needs {expected}")
        self._sums.warm_up(logits_NKDHW[0])

    def open_data(self, root: Path) -> None:
        """Read this rank's volumes of the evaluation set.

        Raises:
            DataError: as :func:`benchmarks.unet3d.volumes.open_volumes`, which finds a set without evaluation cases.
        """
        if self._synthetic:
            self.cache(self._synthetic, synthetic_voxels)
            return
        volumes = open_volumes(root, self._settings.window.shape)
        self.cache(volumes.eval, volumes.read)

    def with_noise(self, volumes: int) -> Self:
        """Replace the data by ``volumes`` volumes of noise."""
        self._synthetic = synthetic_cases(volumes, self._settings.window.shape)
        return self

    def cache(self, cases: Sequence[Case], read: Read) -> None:
        """Make ``cases`` the evaluation set, and read those that this rank needs.

        Args:
            cases: the same on all ranks.
            read: image and label of a case, (D, H, W).
        """
        windows = [self._windows_of(case) for case in cases]
        dp, rank = self._layout.size("dp"), self._layout.index("dp")
        share = choose_share(windows, dp, self._settings.batch, self._shares)
        shares = shares_of_rank(windows, dp, rank, share)
        self._cases = cases
        self._volumes = cache_volumes(cases, read, shares, self._settings.window, self._layout.device, self._dtype)
        self._sums.open(self._volumes, len(cases), share)

    def predict(self, weights: Weights) -> Predictions:
        """Count, for each case and class, the voxels that are predicted, labelled, and both."""
        assert self._cases, "open_data comes first"
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
        """Free the graph and forget the volumes."""
        self._forward.close()
        self._cases, self._volumes = (), []
        self._sums.close()

    def _logits(self) -> Iterator[Tensor]:
        """Logits (K, D, H, W) of every window of this rank, in order; each is valid until the next is asked for."""
        windows = [(volume.image, origin) for volume in self._volumes for origin in volume.origins]
        batch, image_NCDHW = self._settings.batch, self._forward.inputs["image"]
        for first in range(0, len(windows), batch):
            filled = windows[first : first + batch]
            for slot, (image_DHW, origin) in enumerate(filled):
                image_NCDHW[slot, 0].copy_(image_DHW[self._sums.place(origin)])
            yield from self._forward()[: len(filled)]

    def _windows_of(self, case: Case) -> int:
        return len(self._settings.window.geometry(case.shape).origins)


def _check(name: str, counts: Sequence[Sequence[int]], voxels: int) -> None:
    """Every voxel has one prediction and one label."""
    predicted, labelled = (sum(row[column] for row in counts) for column in (PREDICTED, LABELLED))
    check_whole_set(predicted, voxels, f"voxels of {name}")
    if labelled != voxels:
        raise DataError(
            f"{name}: {voxels - labelled} of {voxels} voxels have a label above {len(CLASSES) - 1}; run "
            "'mlperf-suite verify benchmark=unet3d'"
        )
