"""NCCL options of a communicator: number of thread blocks (CTAs) and cluster size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from common.config.schema import Ctas

NCCLS_OWN = Ctas()

MOST_OF_LINKS = 2
"""Maximum number of thread blocks of a pipeline link. A waiting receiver would withhold more from matrix products."""


def of_axes(ctas: Mapping[str, Ctas], axes: tuple[str, ...]) -> Ctas:
    """Return the options of a communicator: those of ``dp`` if included (it moves most data), else of the first axis.

    Args:
        ctas: options by axis; a missing axis uses NCCL's defaults.
        axes: axes that the communicator spans, outermost first.
    """
    leading = "dp" if "dp" in axes else next(iter(axes), "")
    return ctas.get(leading, NCCLS_OWN)


def of_links(ctas: Mapping[str, Ctas], axis: str) -> Ctas:
    """Return the options of a link between two neighbours on ``axis``: at most ``MOST_OF_LINKS`` unless configured."""
    asked = ctas.get(axis, NCCLS_OWN)
    few = asked.max is None and (asked.min or 0) <= MOST_OF_LINKS
    return replace(asked, max=MOST_OF_LINKS) if few else asked


def options(ctas: Ctas) -> Any:
    """Return the options for a new process group. None for NCCL's defaults, and on Gloo, which has no thread blocks."""
    given = {"min_ctas": ctas.min, "max_ctas": ctas.max, "cga_cluster_size": ctas.cluster}
    given = {name: value for name, value in given.items() if value is not None}
    if ctas == NCCLS_OWN or dist.get_backend() != "nccl":
        return None
    made: Any = dist.ProcessGroupNCCL.Options()
    for name, value in given.items():
        setattr(made.config, name, value)
    return made


def in_words(ctas: Ctas) -> str:
    """Return the options as readable text; empty if all are NCCL's defaults."""
    parts = (("at least", ctas.min), ("at most", ctas.max), ("in clusters of", ctas.cluster))
    return ", ".join(f"{words} {value}" for words, value in parts if value is not None)
