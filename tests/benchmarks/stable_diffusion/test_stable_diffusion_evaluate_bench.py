"""The measurement of an evaluation runs where there is no GPU, too."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.stable_diffusion import evaluate_bench
from tests.benchmarks.stable_diffusion.small_evaluation import INCEPTION, TEXT, VAE, VISION, small_config


def test_an_evaluation_is_timed():
    sizes = VAE, TEXT, VISION, INCEPTION
    lines = list(evaluate_bench.measure(small_config().facts, *sizes, 5, [2, 3], 1, torch.device("cpu"), torch.float32))
    number = r"[\d.]+"
    for batch, line in zip([2, 3], lines, strict=False):
        assert re.fullmatch(
            rf"batch {batch}: {number} pictures/s; generation {number}/s \(latents {number} ms, decoding {number} ms, "
            rf"FID {number} ms, CLIP {number} ms\); FID and CLIP of 30,000 in {number} s",
            line,
        ), line
    assert re.fullmatch(rf"Frechet distance of {number} features: {number} ms", lines[2])


def test_a_gpu_is_asked_for_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        evaluate_bench.main([])


def test_made_up_captions_have_one_end():
    tokens = evaluate_bench.random_tokens(["", ""], TEXT)
    assert (tokens == TEXT.vocabulary - 1).sum(1).tolist() == [1, 1]
    assert not torch.equal(tokens[0], tokens[1])
