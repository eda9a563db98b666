"""Evaluation of Stable Diffusion: FID and CLIP score of one picture per caption of the rules.

Rules: 30,000 captions of COCO 2014, 50 steps of DDIM with guidance 8, both metrics on the same checkpoint (MLPerf
training_rules, benchmark table; the reference). FID uses the decoded pictures in [0, 1]; the CLIP score uses 8-bit
pictures. Every caption counts exactly once, for any number of ranks.

Legend: N pictures of this rank, B pictures of a batch, T tokens, E features of an embedding, F features of Inception.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.stable_diffusion.clip_score import ClipTransform, cosines, to_bytes
from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.fid import FeatureStatistics, FeatureSums, FrechetDistance, statistics_of_sums
from benchmarks.stable_diffusion.generation import STAGES, GenerationSettings, PictureGenerator
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import ScoringNetworks
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation.counts import Counts, check_whole_set
from common.evaluation.stage_times import StageTimes
from common.nn.tf32 import tf32_products

ALL_STAGES = (*STAGES, "FID", "CLIP")
DECODE_BATCH = 8
"""Pictures decoded together. At 512 x 512, the largest activation of one picture has 134 MB in 16 bit."""


class FidAndClip(Scorer):
    """Scorer that computes both metrics from sums over all pictures.

    Args:
        read_reference: reads the statistics of the real pictures from the data folder; must be a module-level function.
        features: F, which the reference must have too.
        device: device of the eigenvalue computation.
    """

    def __init__(
        self,
        read_reference: Callable[[Path], FeatureStatistics],
        features: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._read_reference, self._features, self._device = read_reference, features, torch.device(device)
        self._distance: FrechetDistance | None = None

    def warm_up(self) -> None:
        """Load the eigenvalue solver."""
        torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=self._device))

    def open_data(self, root: Path) -> None:
        """Read the statistics of the real pictures.

        Raises:
            DataError: the statistics are missing or damaged, or have another number of features.
        """
        reference = self._read_reference(root)
        if reference.features != self._features:
            raise DataError(
                f"statistics of {reference.features} features in {root}, but the Inception network has "
                f"{self._features}: they were made with another network"
            )
        self._distance = FrechetDistance(reference, self._device)

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``FID`` (lower is better), ``CLIP``, the mean cosine, and ``eval_samples``, the number of pictures.

        Raises:
            RuntimeError: the number of pictures differs from the number of captions.
            DataError: features or cosines are not finite.
        """
        assert self._distance is not None, "open_data comes first"
        values = predictions.values
        check_whole_set(values["pictures"], values["expected"], "captions")
        clip = values["cosine"] / values["pictures"]
        if not math.isfinite(clip):
            raise DataError(f"the CLIP score of generated pictures is {clip}: have the weights diverged?")
        generated = statistics_of_sums(values["feature_sums"], values["product_sums"], values["pictures"])
        return {"FID": self._distance(generated), "CLIP": clip, "eval_samples": values["pictures"]}


class PicturesOfCaptions(Evaluation):
    """Evaluation that generates a picture per caption, and sums over ranks what FID and CLIP score need.

    It can evaluate the network that is being trained. The host does not wait for the device until all pictures are
    generated; only the sums are copied to the host.

    Args:
        eval_samples: expected number of captions.
        read_prompts: reads all captions from the data folder, in order.
        read_reference: reads the statistics of the real pictures from the data folder; must be a module-level function.
        layout: the ranks that share the captions. Its seed determines the noise, for any number of ranks.
        capture: replay the sampler's step and the decoding as CUDA graphs.
        score_on_device: compute eigenvalues on the device instead of the CPU; for use when the device is otherwise
            idle.

    Attributes:
        stage_seconds: seconds of the last evaluation in each of :data:`ALL_STAGES`, summed over ranks.
    """

    stage_seconds: Mapping[str, float]

    def __init__(
        self,
        model: UNet,
        networks: ScoringNetworks,
        settings: GenerationSettings,
        eval_samples: int,
        read_prompts: Callable[[Path], Sequence[str]],
        read_reference: Callable[[Path], FeatureStatistics],
        layout: Layout,
        capture: bool,
        score_on_device: bool = False,
    ) -> None:
        device, features = layout.device, networks.inception.out
        self.scorer = FidAndClip(read_reference, features, device if score_on_device else "cpu")
        self._networks, self._eval_samples, self._read_prompts = networks, eval_samples, read_prompts
        self._layout, self._group = layout, layout.group("dp")
        self._stages = StageTimes(ALL_STAGES, device)
        self._generator = PictureGenerator(model, networks, settings, _seed(layout), device, capture, self._stages)
        vision = networks.vision
        self._transform = ClipTransform(vision.sizes.resolution, vision.proj.dtype, device)
        self._sums = FeatureSums(features, device)
        self._counts = Counts(layout, ("pictures",), ("cosine",))
        self._seconds = Counts(layout, (), ALL_STAGES)
        self._prompts_N: Tensor | None = None
        self._tokens_NT = self._embeddings_NE = torch.empty(0, device=device)

    def warm_up(self) -> None:
        """Run a batch of empty captions through all networks, and sum over ranks. All ranks must call this."""
        with torch.no_grad():
            self._generator.warm_up()
        prompts_N = torch.arange(self._generator.batch, device=self._layout.device)
        tokens_NT = self._networks.tokenize([""] * len(prompts_N)).to(self._layout.device)
        with torch.no_grad():
            self._add(prompts_N, tokens_NT, self._embedded(tokens_NT), len(prompts_N))
        self._sum_over_ranks()
        self._counts.warm_up()
        self._seconds.warm_up()
        self._clear()

    def open_data(self, root: Path) -> None:
        """Read the captions, and compute the text embeddings of this rank's captions for the CLIP score.

        Raises:
            DataError: the number of captions is wrong.
        """
        self.caption(self._read_prompts(root))

    def caption(self, prompts: Sequence[str]) -> None:
        """Make ``prompts``, the same on all ranks, the evaluation set.

        Raises:
            DataError: the number of captions is wrong.
        """
        if len(prompts) != self._eval_samples:
            raise DataError(f"{len(prompts):,} captions to evaluate, expected {self._eval_samples:,}")
        dp, index, device = self._layout.size("dp"), self._layout.index("dp"), self._layout.device
        mine = list(prompts[index::dp])
        self._tokens_NT = self._networks.tokenize(mine).to(device)
        with torch.no_grad():
            parts = [self._embedded(part_BT) for part_BT in self._tokens_NT.split(self._generator.batch)]
        self._embeddings_NE = torch.cat(parts)
        self._prompts_N = torch.arange(index, len(prompts), dp, device=device)

    def predict(self, weights: Weights) -> Predictions | None:
        """Generate all pictures with ``weights``. Return the sums on rank 0, else None. All ranks must call this."""
        assert self._prompts_N is not None, "open_data comes first"
        self._clear()
        batch, count = self._generator.batch, len(self._prompts_N)
        with self._generator.sampler.evaluating(weights):
            self._generator.begin()
            for first in range(0, count, batch):
                # The last batch is padded with its last caption, so that shapes stay as warmed up.
                rows_B = torch.arange(first, first + batch, device=self._layout.device).clamp_(max=count - 1)
                prompts_B, tokens_BT, embeddings_BE = (
                    rows.index_select(0, rows_B) for rows in (self._prompts_N, self._tokens_NT, self._embeddings_NE)
                )
                self._add(prompts_B, tokens_BT, embeddings_BE, min(batch, count - first))
        self._sum_over_ranks()
        self._seconds.add(*self._stages.seconds().unbind())
        totals, self.stage_seconds = self._counts.totals(), self._seconds.totals()
        if self._layout.rank:
            return None
        line = rates(round(totals["pictures"]), self.stage_seconds, self._layout.size("dp"))
        print(line, file=sys.stderr, flush=True)
        feature_sums, product_sums = self._sums.arrays()
        return Predictions(
            {
                "pictures": totals["pictures"],
                "expected": self._eval_samples,
                "cosine": totals["cosine"],
                "feature_sums": feature_sums,
                "product_sums": product_sums,
            }
        )

    def close(self) -> None:
        """Free the CUDA graphs and drop the captions."""
        self._generator.close()
        self._prompts_N = None
        self._tokens_NT = self._embeddings_NE = torch.empty(0, device=self._layout.device)

    def _add(self, prompts_B: Tensor, tokens_BT: Tensor, embeddings_BE: Tensor, count: int) -> None:
        """Generate a batch of pictures and add the first ``count`` of them to the sums."""
        images_B3HW = self._generator.pictures(prompts_B, tokens_BT)
        with self._stages("FID"), tf32_products():
            self._sums.add(self._networks.inception.features(images_B3HW)[:count])
        with self._stages("CLIP"), tf32_products():
            pixels_B3RR = self._transform(to_bytes(images_B3HW))
            cosines_N = cosines(self._networks.vision.project(pixels_B3RR), embeddings_BE)[:count]
        pictures = torch.full((), float(count), dtype=torch.float64, device=images_B3HW.device)
        self._counts.add(pictures, cosines_N.double().sum())

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        with tf32_products():
            return self._networks.text.project(tokens_BT)

    def _clear(self) -> None:
        for sums in (self._sums, self._counts, self._seconds, self._stages):
            sums.clear()

    def _sum_over_ranks(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._sums.flat, group=self._group)


def rates(pictures: int, seconds: Mapping[str, float], ranks: int) -> str:
    """Format pictures per second and rank for every stage, as one line; ``seconds`` are summed over ``ranks``."""
    each = ", ".join(f"{stage} {pictures / max(spent, 1e-9):,.1f}" for stage, spent in seconds.items())
    return f"{pictures:,} pictures on {ranks} rank{'s'[: ranks > 1]}; pictures/s of one: {each}"


def generation_settings(own: StableDiffusionConfig) -> GenerationSettings:
    """Return the sampler settings of a configuration."""
    facts = own.facts
    times = sampling_times(abar(facts.times, facts.first_beta, facts.last_beta), facts.sampling_steps)
    return GenerationSettings(times, facts.guidance, own.reader.eval_batch, DECODE_BATCH)


def _seed(layout: Layout) -> int:
    """Return a seed that is the same on all ranks and differs from that of the training noise."""
    return int(torch.randint(2**62, (), generator=layout.shared_generator("pictures")))
