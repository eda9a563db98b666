"""Evaluation schedules: for every benchmark, a function from the global batch to its evaluation points.

Source: training rules, table of evaluation frequency, and HPC rules v3.0. Points are counted in epochs (from 1), in
training samples over all ranks, or in generations of self-play (from 1). A point in samples that is not a multiple of
the global batch is reached with the batch that contains it. ``last_epoch``, ``last_samples`` and ``last_generation``
limit the points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from common.data.batches import Block

Unit = Literal["epoch", "samples", "generation"]

CRITEO_SAMPLES = 4_195_197_692
IGBH_SEEDS = 94_605_581
KITS19_VOLUMES = 168


@dataclass(frozen=True)
class Schedule:
    """Evaluation points of a run.

    Attributes:
        first: first evaluation point, in ``unit``.
        interval: distance between two points.
        last: upper limit of the points; None for no limit.
        unit: epochs from 1, samples over all ranks, or generations of self-play from 1, which are logged as epochs.
        start: points before ``first`` that are not on the grid, ascending.
        period: samples after which the grid restarts, if the rules count within each epoch; None for no restart.
        epoch_samples: samples that the rules count per epoch if the last batch is padded; None for the size of the
            training set.
    """

    first: int
    interval: int
    last: int | None
    unit: Unit
    start: tuple[int, ...] = ()
    period: int | None = None
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1 or self.interval < 1:
            raise ValueError(f"evaluations need a positive first point and interval: {self.first}, {self.interval}")
        if self.last is not None and self.last < min((self.first, *self.start)):
            raise ValueError(f"no evaluation falls before the end: first {self.first}, last {self.last}")

    def points(self) -> Iterator[int]:
        """Yield the evaluation points in order; endless if ``last`` is None."""
        for point in self.start:
            if self.last is None or point <= self.last:
                yield point
        begin, point = 0, self.first
        while self.last is None or point <= self.last:
            yield point
            point += self.interval
            if self.period is not None and point > begin + self.period:
                begin += self.period
                point = begin + self.first

    def blocks(self, train_samples: int, global_batch: int) -> Iterator[Block]:
        """Yield the blocks of training. Each block ends at an evaluation point, and no block follows the last point.

        If the schedule counts samples, blocks are whole batches; a point within a batch ends the block after that
        batch. If it counts generations, the samples of the blocks are unknown.

        Raises:
            ValueError: if an argument is not positive, or two points are in one batch.
        """
        if train_samples < 1 or global_batch < 1:
            raise ValueError(f"train_samples and global_batch must be positive: {train_samples}, {global_batch}")
        before = 0
        for index, point in enumerate(self.points()):
            if self.unit == "generation":
                yield Block(index, before + 1, point - before, 0, 0)
                before = point
                continue
            if self.unit == "epoch":
                size = self.epoch_samples or train_samples
                yield Block(index, before + 1, point - before, before * size, (point - before) * size)
                before = point
                continue
            end = math.ceil(point / global_batch) * global_batch
            if end == before:
                raise ValueError(f"evaluation points of {self.interval} samples are closer than a batch {global_batch}")
            yield Block(index, before // train_samples + 1, 0, before, end - before)
            before = end


def _whole_batches(samples: int, global_batch: int) -> int:
    """Round ``samples`` up to whole batches."""
    return math.ceil(samples / global_batch) * global_batch


def resnet(global_batch: int, first_epoch: int = 3, last_epoch: int | None = None, interval: int = 4) -> Schedule:
    """Return a schedule of every 4 epochs; the first evaluation follows epoch 1, 2, 3 or 4.

    A demo on synthetic data may pass another ``interval``; the first evaluation then follows any epoch up to it.
    """
    if not 1 <= first_epoch <= interval:
        raise ValueError(f"resnet's first evaluation follows one of the epochs 1..{interval}, got {first_epoch}")
    return Schedule(first_epoch, interval, last_epoch, "epoch")


def every_epoch(global_batch: int, last_epoch: int | None = None) -> Schedule:
    """Return a schedule of every epoch, at any batch."""
    return Schedule(1, 1, last_epoch, "epoch")


def every_generation(global_batch: int, last_generation: int | None = None) -> Schedule:
    """Return a schedule of every generation of self-play, at any batch."""
    return Schedule(1, 1, last_generation, "generation")


def ssd300(global_batch: int, last_epoch: int | None = None, ruleset: str = "1.1.0") -> Schedule:
    """Return a schedule of every 5 epochs, at any batch. In v0.7: epochs 40, 50, 55, 60, 65, 70, 75 and 80 only."""
    if ruleset == "0.7.0":
        return Schedule(50, 5, 80 if last_epoch is None else min(80, last_epoch), "epoch", start=(40,))
    return Schedule(5, 5, last_epoch, "epoch")


def unet3d(
    global_batch: int,
    train_samples: int = KITS19_VOLUMES,
    first_epoch: int | None = None,
    interval: int | None = None,
    last_epoch: int | None = None,
) -> Schedule:
    """Return a schedule from epoch ceil(1000*168/S) on, every ceil(20*168/S), S = samples per epoch of whole batches.

    A run that has not converged after ceil(10000*168/S) epochs has failed. A demo on synthetic data has another size
    of the training set and may pass its own points.
    """
    padded = _whole_batches(train_samples, global_batch)

    def epochs(nominal: int) -> int:
        return math.ceil(nominal * train_samples / padded)

    first = epochs(1000) if first_epoch is None else first_epoch
    every = epochs(20) if interval is None else interval
    last = epochs(10_000) if last_epoch is None else last_epoch
    return Schedule(first, every, last, "epoch", epoch_samples=padded)


def bert(
    global_batch: int, last_samples: int | None = None, ruleset: str = "5.0.0", interval: int | None = None
) -> Schedule:
    """Return a schedule of every 0.05 * (230.23 * GBS + 3,000,000) samples, rounded down to a multiple of 25,000.

    v0.7: every 500,000 samples, from 3,000,000 on. With synthetic data, ``interval`` (samples) replaces the formula.
    """
    if interval is not None:
        return Schedule(interval, interval, last_samples, "samples")
    if ruleset == "0.7.0":
        return Schedule(3_000_000, 500_000, last_samples, "samples")
    hundredths = 23_023 * global_batch + 300_000_000  # in integers: 0.05 * (...) = hundredths / 2000
    every = hundredths // (2000 * 25_000) * 25_000
    return Schedule(every, every, last_samples, "samples")


def dlrm(global_batch: int, train_samples: int = CRITEO_SAMPLES, last_samples: int | None = None) -> Schedule:
    """Return a schedule of 20 points in the only epoch: every floor(4,195,197,692 / (GBS * 20)) iterations.

    The rules of the first DLRM state the interval of the reference, 102,400 iterations of 2,048 samples, which is
    also a twentieth of the epoch. No evaluation comes after ``last_samples``.

    Raises:
        ValueError: an epoch has fewer than 20 batches.
    """
    iterations = train_samples // (global_batch * 20)
    if not iterations:
        raise ValueError(f"{train_samples} samples are fewer than 20 batches of {global_batch}: one an evaluation")
    interval = iterations * global_batch
    last = 20 * interval
    return Schedule(interval, interval, last if last_samples is None else min(last, last_samples), "samples")


def gpt3(global_batch: int, last_samples: int | None = None, interval: int | None = None) -> Schedule:
    """Return a schedule of every ceil(24,576 / GBS) steps, in sequences. Logs report tokens, 2,048 per sequence.

    With synthetic data, ``interval`` (sequences) replaces 24,576.
    """
    interval = _whole_batches(24_576 if interval is None else interval, global_batch)
    return Schedule(interval, interval, last_samples, "samples")


def llama2_70b_lora(global_batch: int, last_samples: int | None = None, interval: int | None = None) -> Schedule:
    """Return a schedule of every 384 sequences, in whole batches, without the first floor(0.125 * GBS + 2) evaluations.

    With small data, ``interval`` (sequences) replaces both the distance and the first point.
    """
    if interval is not None:
        return Schedule(interval, interval, last_samples, "samples")
    interval = _whole_batches(384, global_batch)
    skipped = global_batch // 8 + 2
    return Schedule((skipped + 1) * interval, interval, last_samples, "samples")


def llama31_405b(global_batch: int, last_samples: int | None = None, ruleset: str = "6.0.0") -> Schedule:
    """Return a schedule of every 18,432 sequences, in whole batches; v5.0: every 46,080.

    Except in v5.0, the first floor(0.0026 * GBS + 12) points are skipped.
    """
    if ruleset == "5.0.0":
        interval = _whole_batches(46_080, global_batch)
        return Schedule(interval, interval, last_samples, "samples")
    interval = _whole_batches(18_432, global_batch)
    skipped = (26 * global_batch + 120_000) // 10_000
    return Schedule((skipped + 1) * interval, interval, last_samples, "samples")


def every_12288(global_batch: int, last_samples: int | None = None, interval: int | None = None) -> Schedule:
    """Return a schedule of every 12,288 sequences, in whole batches.

    With synthetic data, ``interval`` (sequences) replaces 12,288.
    """
    interval = _whole_batches(12_288 if interval is None else interval, global_batch)
    return Schedule(interval, interval, last_samples, "samples")


def stable_diffusion(global_batch: int, last_samples: int | None = None, interval: int | None = None) -> Schedule:
    """Return a schedule of one checkpoint every 512,000 images, in whole batches; they are evaluated offline.

    With synthetic data, ``interval`` (images) replaces 512,000.
    """
    interval = _whole_batches(512_000 if interval is None else interval, global_batch)
    return Schedule(interval, interval, last_samples, "samples")


def deepseekv3(global_batch: int, last_samples: int | None = None, ruleset: str = "6.1.0") -> Schedule:
    """Return a schedule of every step; since v6.1 from step floor(42 + 24,576 / GBS) on, as the checker requires."""
    first = 1 if ruleset == "6.0.0" else 42 + 24_576 // global_batch
    return Schedule(first * global_batch, global_batch, last_samples, "samples")


def rgat(
    global_batch: int,
    train_samples: int = IGBH_SEEDS,
    last_epoch: int = 3,
    ranks: int = 1,
    last_samples: int | None = None,
) -> Schedule:
    """Return a schedule of 20 points per epoch, every int(0.05 * batches per epoch) iterations, restarted each epoch.

    As in the reference, each rank has floor(seeds / ranks) seeds and batches of GBS / ranks, so the number of batches
    can depend on the number of ranks. No evaluation comes after ``last_epoch`` epochs or ``last_samples``.

    Raises:
        ValueError: if the global batch is not divisible by the ranks, or an epoch has fewer than 20 batches.
    """
    if global_batch % ranks:
        raise ValueError(f"global batch {global_batch} does not divide by {ranks} ranks")
    batches = math.ceil((train_samples // ranks) / (global_batch // ranks))
    if batches < 20:
        raise ValueError(f"{train_samples} samples are {batches} batches of {global_batch}: too few for 20 evaluations")
    interval = batches // 20 * global_batch
    epoch = batches * global_batch
    last = last_epoch * epoch
    return Schedule(
        interval, interval, last if last_samples is None else min(last, last_samples), "samples", period=epoch
    )


FLUX1_INTERVAL = 262_144
"""Samples between two evaluations of FLUX.1, before the interval is rounded up to whole batches."""


def flux1(global_batch: int, last_samples: int | None = None, interval: int | None = None) -> Schedule:
    """Return a schedule of every 262,144 samples, in whole batches.

    With synthetic data, ``interval`` (samples) replaces 262,144.
    """
    interval = _whole_batches(FLUX1_INTERVAL if interval is None else interval, global_batch)
    return Schedule(interval, interval, last_samples, "samples")


def openfold(global_batch: int, last_samples: int | None = None) -> Schedule:
    """Return a schedule with an evaluation after every 40 iterations, counted in samples."""
    return Schedule(40 * global_batch, 40 * global_batch, last_samples, "samples")


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "resnet": resnet,
    "ssd300": ssd300,
    "retinanet": every_epoch,
    "maskrcnn": every_epoch,
    "unet3d": unet3d,
    "rnnt": every_epoch,
    "bert": bert,
    "dlrm": dlrm,
    "dlrm_dcnv2": dlrm,
    "gpt3": gpt3,
    "llama2_70b_lora": llama2_70b_lora,
    "llama31_405b": llama31_405b,
    "llama31_8b": every_12288,
    "gpt_oss_20b": every_12288,
    "stable_diffusion": stable_diffusion,
    "deepseekv3_671b": deepseekv3,
    "rgat": rgat,
    "flux1": flux1,
    "minigo": every_generation,
    "cosmoflow": every_epoch,
    "deepcam": every_epoch,
    "oc20": every_epoch,
    "openfold": openfold,
}
"""Benchmark -> function from the global batch, and the free options of the benchmark, to the schedule."""
