"""Names of SSD300's initialised tensors in the logs of round v1.1, which are those of NVIDIA's MXNet network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BACKBONE = "ssd0_resnetmlperf0"


def initialised_tensors(layers: Sequence[int], levels: int) -> list[str]:
    """Return the names of weights, biases and batch-norm parameters; a level has one predictor for classes and offsets.

    Args:
        layers: basic blocks in each stage of the backbone.
        levels: number of feature maps in which boxes are predicted.
    """
    names = [f"{BACKBONE}_conv0_weight", *_norm(f"{BACKBONE}_batchnorm0")]
    for stage, blocks in enumerate(layers, 1):
        convolutions = 2 * blocks + (stage > 1)  # plus the shortcut of the first block
        for number in range(convolutions):
            names += [f"{BACKBONE}_stage{stage}_conv{number}_weight"]
            names += _norm(f"{BACKBONE}_stage{stage}_batchnorm{number}")
    for number in range(levels - 1):
        names += [*_biased(f"ssd0_expand_trans_conv{number}"), *_biased(f"ssd0_expand_conv{number}")]
    for number in range(levels):
        names += _biased(f"ssd0_convpredictor{number}_conv0")
    return names


def _norm(name: str) -> Iterator[str]:
    yield from (f"{name}_gamma", f"{name}_beta")


def _biased(name: str) -> Iterator[str]:
    yield from (f"{name}_weight", f"{name}_bias")
