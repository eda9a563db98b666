"""Pictures per second of an evaluation on one device: ``python -m benchmarks.stable_diffusion.evaluate_bench``.

All networks have their real sizes and random weights, and captions are random tokens: what is timed is the sampler,
captured as in a run, the decoder, both judges, and the Frechet distance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.diffusion import abar, sampling_times
from benchmarks.stable_diffusion.evaluate import DECODE_BATCH, PicturesOfCaptions
from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes, TextSizes, VaeSizes, VisionSizes
from benchmarks.stable_diffusion.generation import GenerationSettings
from benchmarks.stable_diffusion.model import UNet
from benchmarks.stable_diffusion.scoring_networks import random_networks
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.ops.bench.stopwatch import require_gpu
from common.optim.precision import DTYPES

RULES_PICTURES = 30_000
ZERO_STD = 0.02
"""In place of the U-Net's zeros, with which products would be faster than they are in a run."""


def random_tokens(captions: Sequence[str], sizes: TextSizes) -> Tensor:
    """Rows whose text fills half of the context: (N, T) int64."""
    generator, end = torch.Generator().manual_seed(0), sizes.context // 2
    tokens_NT = torch.randint(sizes.vocabulary - 2, (len(captions), sizes.context), generator=generator)
    tokens_NT[:, 0], tokens_NT[:, end], tokens_NT[:, end + 1 :] = sizes.vocabulary - 2, sizes.vocabulary - 1, 0
    return tokens_NT


def measure(
    facts: Facts,
    vae: VaeSizes,
    text: TextSizes,
    vision: VisionSizes,
    inception: InceptionSizes,
    pictures: int,
    batches: Sequence[int],
    repeats: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[str]:
    """Lines on an evaluation of ``pictures``, one for each size of batch, and one on the Frechet distance.

    Args:
        facts: of the U-Net and its sampler.
        vae, text, vision, inception: sizes of the frozen networks.
        pictures: in an evaluation; the rules' many are reckoned from them.
        batches: pictures made together.
        repeats: evaluations, of which the median counts, after a first one.
        device, dtype: of the U-Net.
    """
    model = UNet(facts, None, torch.Generator(device).manual_seed(0), device, dtype, ZERO_STD)
    networks = random_networks(
        lambda captions: random_tokens(captions, text), vae, text, vision, inception, device, dtype
    )
    features = networks.inception.out
    reference = FeatureStatistics(np.zeros(features), np.eye(features))
    times = sampling_times(abar(facts.times, facts.first_beta, facts.last_beta), facts.sampling_steps)
    layout, weights = Layout(device=device), Weights(dict(model.named_parameters()))
    for batch in batches:
        settings = GenerationSettings(times, facts.guidance, batch, DECODE_BATCH)
        evaluation = PicturesOfCaptions(
            model,
            networks,
            settings,
            pictures,
            lambda root: [""] * pictures,
            lambda root: reference,
            layout,
            capture=True,
            score_on_device=True,
        )
        evaluation.warm_up()
        evaluation.caption([""] * pictures)
        walls, stages = [], []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            predictions = evaluation.predict(weights)  # ends with the sums on the host
            walls.append(time.perf_counter() - began)
            stages.append(evaluation.stage_seconds)
        each = {stage: statistics.median(found[stage] for found in stages[1:]) / pictures for stage in stages[0]}
        made, judged = each["latents"] + each["decoding"], each["FID"] + each["CLIP"]
        yield (
            f"batch {batch}: {pictures / statistics.median(walls[1:]):.2f} pictures/s; generation {1 / made:.2f}/s "
            f"({', '.join(f'{stage} {1e3 * seconds:.2f} ms' for stage, seconds in each.items())}); "
            f"FID and CLIP of {RULES_PICTURES:,} in {RULES_PICTURES * judged:.1f} s"
        )
        evaluation.close()
    scorer = evaluation.scorer
    scorer.open_data(Path())
    assert predictions is not None
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        scorer.score(predictions)
        seconds.append(time.perf_counter() - began)
    yield f"Frechet distance of {features:,} features: {1e3 * statistics.median(seconds[1:]):.0f} ms"


def main(words: Sequence[str] | None = None) -> None:
    """Command line; ``words`` instead of its arguments.

    Raises:
        SystemExit: PyTorch sees no GPU, and ``--device cpu`` is not among the arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stable_diffusion.evaluate_bench", description=__doc__)
    parser.add_argument("--pictures", type=int, default=128, help="of an evaluation")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32], help="pictures made together")
    parser.add_argument("--repeats", type=int, default=3, help="evaluations, of which the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        require_gpu("benchmarks.stable_diffusion.evaluate_bench", "--device cpu measures a CPU")
    torch.backends.cudnn.benchmark = True
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"{name}, PyTorch {torch.__version__}, {arguments.precision}", flush=True)
    facts, dtype = fixed_facts(Facts, "stable_diffusion"), DTYPES[arguments.precision]
    sizes = VaeSizes(), TextSizes(), VisionSizes(), InceptionSizes()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        for line in measure(facts, *sizes, arguments.pictures, arguments.batches, arguments.repeats, device, dtype):
            print(line, flush=True)
    if stream is not None:
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
