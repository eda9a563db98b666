"""The loss over the vocabulary."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from common.ops import cross_entropy
from common.ops.bench import cases
from common.ops.bench import transformer as size
from common.ops.bench.cases import Entry, Pass, both_ways, each
from common.ops.bench.sweep import Sweep
from common.ops.cross_entropy.reference import NO_LABEL


def case(function: Callable[..., tuple[Tensor, Tensor]], packs: int, dtype: torch.dtype) -> list[Pass]:
    """The gradient in place of the logits."""
    logits = size.leaf(dtype, packs * size.MASKED, size.PADDED_VOCABULARY)
    labels = torch.randint(size.VOCABULARY, (packs * size.MASKED,), device=cases.DEVICE, dtype=torch.int32)
    labels[packs * size.LABELLED :] = NO_LABEL
    weights = torch.rand(packs * size.MASKED, device=cases.DEVICE)
    unit = size.size_of(logits)
    return both_ways(
        lambda: function(logits, labels, size.VOCABULARY, inplace=True)[0],
        [logits],
        [weights],
        moved=(unit, 2 * unit),
    )


def entries() -> list[Entry]:
    """Every implementation; a step has one."""
    return each("cross_entropy", cross_entropy.CROSS_ENTROPY, "triton", {"columns": size.PADDED_VOCABULARY}, case)


def sweeps() -> dict[str, Sweep]:
    """Columns and warps of both kernels."""
    from common.ops.cross_entropy import triton

    choices = {"forward": (4, 8, 16), "backward": (4, 8)}
    build = functools.partial(case, cross_entropy.CROSS_ENTROPY.function("triton"), size.PACKS)
    return {
        f"cross_entropy {key}": Sweep(
            triton.TILES, key, list(itertools.product((2048, 4096, 8192), warps)), build, key == "backward"
        )
        for key, warps in choices.items()
    }
